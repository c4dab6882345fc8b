//! TLS as a user sets it up: the commands that docs/nbd.md shows, certificates that change, and the log.
// Contract: bounded-input

use blkq::testing::wait_until;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::place::*;
use rustix::process::Signal;

/// The commands under "Quick start" in docs/nbd.md, with `port` as the port.
fn quick_start(port: u16) -> String {
    let text = include_str!("../../../docs/nbd.md");
    let (_, text) = text.split_once("### Quick start").unwrap();
    let (_, text) = text.split_once("```console\n").unwrap();
    let (text, _) = text.split_once("```").unwrap();
    let mut commands = String::new();
    let mut continued = false;
    for line in text.lines() {
        if let Some(command) = line.strip_prefix("$ ").or(continued.then_some(line)) {
            commands += &(command.to_owned() + "\n");
            continued = line.ends_with('\\');
        }
    }
    commands.replace("10809", &port.to_string())
}

/// A client that prints the subject of the server's certificate. Its argument is the server's port.
const SUBJECT: &str = r#"
import socket, ssl, struct, sys
plain = socket.create_connection(("localhost", int(sys.argv[1])))
plain.recv(18, socket.MSG_WAITALL)
plain.sendall(struct.pack(">I8sII", 3, b"IHAVEOPT", 5, 0))
assert plain.recv(20, socket.MSG_WAITALL)[12:16] == struct.pack(">I", 1)
context = ssl.create_default_context(cafile="ca/ca-cert.pem")
context.load_cert_chain("client/client-cert.pem", "client/client-key.pem")
server = context.wrap_socket(plain, server_hostname="localhost")
print(server.getpeercert()["subject"][0][0][1])
"#;

/// A port outside of the range from which the kernel chooses free ports, and of those of other test
/// processes.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 20_000) as u16;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

impl Place {
    /// Runs shell commands in the directory, `blkq` among them.
    fn shell(&self, commands: &str) -> Output {
        let program = std::path::Path::new(env!("CARGO_BIN_EXE_blkq"));
        let path = format!("{}:{}", program.parent().unwrap().display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-ec", commands]).current_dir(&self.dir).env("PATH", path);
        shell.env("BLKQ_STATE_DIR", self.state()).output().unwrap()
    }

    /// Runs the commands, which must succeed, and returns what they printed.
    fn shell_done(&self, commands: &str) -> String {
        let output = self.shell(commands);
        let [printed, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{commands}{printed}{errors}");
        printed + &errors
    }

    /// Attaches a device over TLS as in the quick start. Returns its URI and its port.
    fn quick_start(&self) -> (String, u16) {
        self.image("disk.img", 1 << 20);
        let port = free_port();
        (self.shell_done(&quick_start(port)), port)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.state().join("disk.img.log")).unwrap()
    }
}

#[test]
fn the_quick_start_works_as_printed() {
    let place = Place::new("quick");
    let (printed, port) = place.quick_start();
    assert!(printed.contains(&format!("nbds://127.0.0.1:{port}\n")), "{printed}");
    assert!(printed.contains("protocol: newstyle-fixed with TLS"), "{printed}");
    assert!(printed.contains("virtual size: 1 MiB"), "{printed}");
    assert!(!printed.contains("warning"), "{printed}");
    // A client without a certificate is kept out.
    let without = format!(
        "mkdir none; cp client/ca-cert.pem none; nbdinfo 'nbds://localhost:{port}/?tls-certificates=none'"
    );
    assert!(!place.shell(&without).status.success());
}

#[test]
fn an_expired_authority_does_not_keep_a_device_waiting() {
    let place = Place::new("expired-authority");
    place.quick_start();
    place.done(&["detach", "disk.img"]);
    let [image, server] =
        ["disk.img", "server"].map(|name| place.dir.join(name).to_str().unwrap().to_owned());
    let listen = format!("tcp:127.0.0.1:{}", free_port());
    let attach = ["attach", &image, "--name", "d", "--export", "vhost-user-blk", "--export", "nbd"];
    let attach = [&attach[..], &["--listen", &listen, "--tls-certificates", &server]].concat();
    place.done(&attach);
    place.shell_done(
        "openssl x509 -in ca/ca-cert.pem -signkey ca/ca-key.pem -days -1 -out server/ca-cert.pem",
    );
    let taken_over = |words: &[&str]| {
        let output = place.run(words);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.success() && errors.contains("warning: the clients of an authority"),
            "{errors}"
        );
    };
    taken_over(&["upgrade", "d"]);
    kill(place.pid("d"));
    taken_over(&["recover", "d"]);
    place.done(&["detach", "d"]);
    let line = place.refused(&attach);
    assert!(line.contains("server/ca-cert.pem: certificate 1 in the file has expired"), "{line}");
}

#[test]
fn a_certificate_that_clients_refuse_is_reported() {
    let place = Place::new("refused-certificate");
    place.quick_start();
    place.done(&["detach", "disk.img"]);
    let [image, server] =
        ["disk.img", "server"].map(|name| place.dir.join(name).to_str().unwrap().to_owned());
    let listen = format!("tcp:127.0.0.1:{}", free_port());
    let attach = ["attach", &image, "--listen", &listen, "--tls-certificates", &server];
    let doctor = ["doctor", "--tls-certificates", &server, "--json"];
    let reported = |why: &str| {
        let output = place.run(&attach);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && errors.contains(why), "{errors}");
        let found: serde_json::Value = serde_json::from_slice(&place.run(&doctor).stdout).unwrap();
        let text = found.to_string();
        assert!(text.contains(why) && !text.contains("certificates are usable"), "{text}");
        place.done(&["detach", "disk.img"]);
    };
    let sign = "openssl x509 -in server/server-cert.pem -signkey server/server-key.pem -out new.pem";
    place.shell_done(&format!("{sign} -days -1; mv new.pem server/server-cert.pem"));
    reported("clients that verify the server may refuse it: TLS: ");
    reported("server-cert.pem: the certificate has expired; replace it");
    for (extension, why) in [
        ("extendedKeyUsage=clientAuth", "its extendedKeyUsage lacks serverAuth"),
        ("keyUsage=keyCertSign", "its keyUsage lacks digitalSignature"),
    ] {
        let extended = format!("echo {extension} >new.cnf; {sign} -clrext -extfile new.cnf -days 2");
        place.shell_done(&format!("{extended}; mv new.pem server/server-cert.pem"));
        reported(why);
    }
}

#[test]
fn sighup_reloads_the_certificates_or_keeps_the_old_ones() {
    let place = Place::new("reload");
    let (_, port) = place.quick_start();
    let pid = place.pid("disk.img");
    let served = || place.shell_done(&format!("python3 -c '{SUBJECT}' {port}"));
    assert_eq!(served(), "server\n");
    let hangup = |expected: &str| {
        let before = place.log().len();
        signal(pid, Signal::HUP);
        wait_until(&format!("the log has {expected}"), || place.log()[before..].contains(expected));
    };
    // A key that does not match the certificate changes nothing.
    place.shell_done("cp server/server-key.pem keep; cp client/client-key.pem server/server-key.pem");
    hangup("SIGHUP: the old certificates stay in use: TLS: ");
    assert!(
        place.log().contains("server-key.pem: the key does not match the first certificate"),
        "{}",
        place.log()
    );
    assert_eq!(served(), "server\n");
    // `config apply` then changes neither certificates nor settings.
    let config =
        format!("image = \"{}\"\ndepth = 9\nname = \"disk.img\"\n", place.dir.join("disk.img").display());
    fs::write(place.dir.join("disk.toml"), config).unwrap();
    let apply = "blkq config apply disk.toml";
    let refused = place.shell(apply);
    let line = String::from_utf8(refused.stderr).unwrap();
    assert_eq!((refused.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.starts_with("blkq: disk.img: the old certificates stay in use: TLS: "), "{line}");
    let depth = || place.shell_done("blkq show disk.img | awk '$1 == \"depth\" { print $2 }'");
    assert_eq!((served().as_str(), depth().as_str()), ("server\n", "128\n"));
    // New ones, put in place by renaming them.
    place.shell_done(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=renewed \
         -CA ca/ca-cert.pem -CAkey ca/ca-key.pem -addext basicConstraints=critical,CA:FALSE \
         -addext extendedKeyUsage=serverAuth -addext subjectAltName=DNS:localhost \
         -keyout new-key.pem -out new-cert.pem
         mv new-key.pem server/server-key.pem; mv new-cert.pem server/server-cert.pem",
    );
    assert_eq!(place.shell_done(apply), "");
    assert_eq!((served().as_str(), depth().as_str()), ("renewed\n", "9\n"));
    hangup("SIGHUP: reloaded the certificates in ");
    assert_eq!(served(), "renewed\n");
    place.shell_done(&format!("nbdinfo 'nbds://localhost:{port}/?tls-certificates=client'"));
    assert_eq!(place.pid("disk.img"), pid);
}

#[test]
fn loopback_is_open_to_all_users_and_attach_warns_of_it() {
    let place = Place::new("loopback-nbd");
    let warning = |words: &[&str]| {
        let output = place.run(&[&["attach", "ram:1M", "--name", "d", "--listen"], words].concat());
        assert!(output.status.success());
        place.done(&["detach", "d"]);
        String::from_utf8(output.stderr).unwrap()
    };
    for address in ["tcp:127.0.0.1:0", "tcp:[::1]:0"] {
        assert!(warning(&[address]).contains("warning: any local user can connect"), "{address}");
        assert_eq!(warning(&[address, "--insecure"]), "");
    }
    assert_eq!(warning(&[&format!("unix:{}", place.dir.join("u").display())]), "");
}

#[test]
fn the_log_says_why_a_client_was_turned_away() {
    let place = Place::new("away");
    let (_, port) = place.quick_start();
    let logged = |commands: &str, expected: &str| {
        let before = place.log().len();
        place.shell(commands);
        wait_until(&format!("the log has {expected}: {}", place.log()), || {
            place.log()[before..].contains(expected)
        });
    };
    let client = |directory: &str| format!("nbdinfo 'nbds://localhost:{port}/?tls-certificates={directory}'");
    place.shell_done("mkdir none; cp client/ca-cert.pem none");
    logged(&client("none"), "TLS: the client sent no certificate");
    // A stranger's certificate, of an authority by the same name.
    place.shell_done(
        "mkdir other; cp client/ca-cert.pem other; cd other
         EC='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
         openssl req -x509 $EC -subj '/CN=strangers' -keyout k -out c
         openssl req -x509 $EC -subj /CN=stranger -CA c -CAkey k -addext basicConstraints=critical,CA:FALSE \\
             -addext extendedKeyUsage=clientAuth -keyout client-key.pem -out client-cert.pem",
    );
    // GnuTLS does not send a certificate that the server would reject; Python's ssl does.
    let stranger = SUBJECT.replace("client/client", "other/client") + "server.recv(1)\n";
    logged(
        &format!("python3 -c '{stranger}' {port}"),
        "the client's certificate is not signed by an authority in ca-cert.pem",
    );
    // A client that does not trust the server.
    let wary = SUBJECT.replace("ca/ca-cert.pem", "other/c");
    logged(&format!("python3 -c '{wary}' {port}"), "the client sent the alert UnknownCA");
    logged(&format!("nbdinfo nbd://localhost:{port}"), "the client did not request TLS");
    let garbage = "import socket, sys
plain = socket.create_connection((\"localhost\", int(sys.argv[1])))
plain.sendall(bytes(3) + b\"\\3garbage instead of an option\")
plain.recv(99, socket.MSG_WAITALL)";
    logged(&format!("python3 -c '{garbage}' {port}"), "protocol violation in the handshake");
}

#[test]
fn the_log_names_clients_over_the_limit_and_protocol_errors() {
    let place = Place::new("limit");
    let uri = place.done(&["attach", "ram:1M", "--name", "disk.img", "--max-connections", "1"]);
    let mut first = session(&uri, "disk.img");
    for _ in 0..20 {
        let mut more =
            std::os::unix::net::UnixStream::connect(uri.trim().strip_prefix("nbd+unix:///?socket=").unwrap())
                .unwrap();
        assert_eq!(more.read(&mut [0; 8]).unwrap_or(0), 0, "one is the limit");
    }
    wait_until("the log names the limit", || {
        place.log().contains("the limit --max-connections 1 is reached")
    });
    let limited = || place.log().matches("--max-connections").count();
    wait_until("a few of them are reported", || {
        place.log().contains("further events of this kind within a minute are not logged")
    });
    assert_eq!(limited(), 8);
    assert!(
        place.log().contains(&format!("NBD client (pid {}, uid ", std::process::id())),
        "{}",
        place.log()
    );
    first.write_all(b"garbage instead of a request").unwrap();
    assert_eq!(first.read(&mut [0; 8]).unwrap_or(0), 0);
    wait_until("the log has it", || place.log().contains("protocol violation in a request"));
}

#[test]
fn the_handshake_of_tls_is_no_work_of_an_engine() {
    let place = Place::new("worker");
    let (_, port) = place.quick_start();
    let pid = place.pid("disk.img");
    place.done(&["detach", "disk.img"]);
    assert!(has_exited(pid));
    let listen = format!("tcp:127.0.0.1:{port}");
    let certificates = place.dir.join("server");
    let words = ["attach", "ram:1M", "--name", "d", "--listen", &listen, "--tls-certificates"];
    place.done(&[&words[..], &[certificates.to_str().unwrap()]].concat());
    let pid = place.pid("d");
    let worker = || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let names =
            tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default());
        names.into_iter().any(|name| name.starts_with("blkq-worker"))
    };
    // The engine's worker starts when it is first needed.
    assert!(!worker());
    assert_eq!(place.shell_done(&format!("python3 -c '{SUBJECT}' {port}")), "server\n");
    assert!(worker());
}
