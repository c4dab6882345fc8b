//! Directories of certificates that are wrong in ways which would let in who is to be kept out.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod nbd;

use std::os::unix::fs::symlink;
use std::path::Path;

use blkq_export::nbd::TlsCertificates;
use nbd::pki::Pki;

const SERVER: [(&str, &str); 2] =
    [("server-cert.pem", "server-cert.pem"), ("server-key.pem", "server-key.pem")];
const AUTHORITY: (&str, &str) = ("ca-cert.pem", "ca-cert.pem");

fn refusal(directory: &Path) -> String {
    TlsCertificates::load(directory).expect_err("it is refused").to_string()
}

#[test]
fn an_authority_or_a_list_that_is_a_dangling_link_is_not_as_if_there_were_none() {
    let pki = Pki::new();
    let directory = pki.gather("dangling", &SERVER);
    assert!(!TlsCertificates::load(&directory).unwrap().verifies_clients());
    symlink("nowhere", directory.join("ca-cert.pem")).unwrap();
    assert!(refusal(&directory).contains("ca-cert.pem"), "{}", refusal(&directory));
    std::fs::remove_file(directory.join("ca-cert.pem")).unwrap();
    std::fs::copy(pki.file("ca-cert.pem"), directory.join("ca-cert.pem")).unwrap();
    assert!(TlsCertificates::load(&directory).unwrap().verifies_clients());
    symlink("nowhere", directory.join("ca-crl.pem")).unwrap();
    assert!(refusal(&directory).contains("ca-crl.pem"), "{}", refusal(&directory));
}

#[test]
fn a_list_of_revoked_certificates_of_another_authority_is_refused() {
    let pki = Pki::new();
    pki.authority("other");
    pki.revocations("ca");
    pki.revocations("other");
    let with = |name: &str, list: &str| {
        pki.gather(name, &[&SERVER[..], &[AUTHORITY, (list, "ca-crl.pem")]].concat())
    };
    assert!(TlsCertificates::load(&with("good", "ca-crl.pem")).unwrap().verifies_clients());
    let directory = with("foreign", "other-crl.pem");
    let why = refusal(&directory);
    assert!(why.contains("ca-crl.pem: it is of an authority that is not in ca-cert.pem"), "{why}");
    // One good list does not make up for the other.
    let read = |name: &str| std::fs::read_to_string(pki.file(name)).unwrap();
    std::fs::write(directory.join("ca-crl.pem"), read("ca-crl.pem") + &read("other-crl.pem")).unwrap();
    assert_eq!(refusal(&directory), why);
    // The cure that it names.
    std::fs::write(directory.join("ca-cert.pem"), read("ca-cert.pem") + &read("other-cert.pem")).unwrap();
    assert!(TlsCertificates::load(&directory).unwrap().verifies_clients());
}
