//! Creates certificates for tests with openssl.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory of certificates: NAME-cert.pem and NAME-key.pem. It is removed when this is dropped.
pub struct Pki {
    directory: PathBuf,
}

impl Pki {
    /// Creates the authority `ca`, and certificates signed by it for a `server` (localhost) and a `client`.
    pub fn new() -> Pki {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("blkq-pki-{}-{number}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        let pki = Pki { directory };
        pki.authority("ca");
        pki.issue("ca", "server", "serverAuth");
        pki.issue("ca", "client", "clientAuth");
        pki
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn authority(&self, name: &str) {
        self.request(name, &["-addext", "keyUsage=critical,keyCertSign,cRLSign"]);
    }

    pub fn issue(&self, authority: &str, name: &str, usage: &str) {
        let [cert, key] = [format!("{authority}-cert.pem"), format!("{authority}-key.pem")];
        let usage = format!("extendedKeyUsage={usage}");
        let extensions = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", &usage];
        let name_of_host = ["-addext", "subjectAltName=DNS:localhost", "-CA", &cert, "-CAkey", &key];
        self.request(name, &[&extensions[..], &name_of_host].concat());
    }

    /// Creates a certificate with these extensions, signed by `authority` or self-signed.
    pub fn certificate(&self, authority: Option<&str>, name: &str, extensions: &[&str]) {
        let of = authority.map(|it| [format!("{it}-cert.pem"), format!("{it}-key.pem")]);
        let signed = of.iter().flat_map(|[cert, key]| ["-CA", cert, "-CAkey", key]);
        let words: Vec<&str> =
            extensions.iter().flat_map(|extension| ["-addext", extension]).chain(signed).collect();
        self.request(name, &words);
    }

    fn request(&self, name: &str, words: &[&str]) {
        let [cert, key] = [format!("{name}-cert.pem"), format!("{name}-key.pem")];
        let subject = format!("/CN={name}");
        let of_all = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let own = ["-days", "2", "-subj", &subject, "-out", &cert, "-keyout", &key];
        self.openssl(&[&of_all[..], &own, words].concat());
    }

    /// Creates AUTHORITY-crl.pem, a list on which `authority` revokes no certificate.
    pub fn revocations(&self, authority: &str) {
        let config = "[ca]\ndefault_ca = all\n[all]\ndatabase = index\ncrlnumber = number\ncrl_extensions = more\ndefault_md = sha256\ndefault_crl_days = 2\n[more]\nauthorityKeyIdentifier = keyid:always\n";
        for (name, content) in [("config", config), ("index", ""), ("number", "01\n")] {
            std::fs::write(self.file(name), content).unwrap();
        }
        let [cert, key] = [format!("{authority}-cert.pem"), format!("{authority}-key.pem")];
        let list = format!("{authority}-crl.pem");
        self.openssl(&[
            "ca", "-config", "config", "-gencrl", "-cert", &cert, "-keyfile", &key, "-out", &list,
        ]);
    }

    /// Creates a subdirectory `name` with copies of `files`: pairs of the name here and the name there.
    pub fn gather(&self, name: &str, files: &[(&str, &str)]) -> PathBuf {
        let directory = self.file(name);
        std::fs::create_dir(&directory).unwrap();
        for (from, to) in files {
            std::fs::copy(self.file(from), directory.join(to)).unwrap();
        }
        directory
    }

    pub fn openssl(&self, words: &[&str]) {
        let mut command = Command::new("openssl");
        let output = command.args(words).current_dir(Path::new(&self.directory)).output();
        let output = output.expect("openssl is installed");
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Pki {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
