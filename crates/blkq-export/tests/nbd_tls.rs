//! Certificate directories that would let the wrong clients in, and handshakes while the worker is busy.
// Contract: bounded-input

use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use crate::nbd::pki::Pki;
use crate::nbd::{self, SlowExtents, option_bytes, options, ram, serve};
use blkq::testing::wait_until;
use blkq_export::nbd::reply::ReplyStyle;
use blkq_export::nbd::{NbdOptions, PreparedCertificates, Reason, TlsCertificates, TlsOptions};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

const SERVER: [(&str, &str); 2] =
    [("server-cert.pem", "server-cert.pem"), ("server-key.pem", "server-key.pem")];
const AUTHORITY: (&str, &str) = ("ca-cert.pem", "ca-cert.pem");

fn refusal(directory: &Path) -> String {
    TlsCertificates::load(directory).expect_err("the directory must be rejected").to_string()
}

#[test]
fn a_dangling_link_to_an_authority_or_a_list_is_an_error() {
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
fn a_revocation_list_of_another_authority_is_rejected() {
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
    assert!(
        why.contains("ca-crl.pem: the revocation list was issued by an authority that is not in ca-cert.pem"),
        "{why}"
    );
    // One valid list does not make up for another that is not.
    let read = |name: &str| std::fs::read_to_string(pki.file(name)).unwrap();
    std::fs::write(directory.join("ca-crl.pem"), read("ca-crl.pem") + &read("other-crl.pem")).unwrap();
    assert_eq!(refusal(&directory), why);
    // The hint of the message: add the authority.
    std::fs::write(directory.join("ca-cert.pem"), read("ca-cert.pem") + &read("other-cert.pem")).unwrap();
    assert!(TlsCertificates::load(&directory).unwrap().verifies_clients());
}

fn refusal_of_key(pki: &Pki, name: &str, key: &str) -> String {
    refusal(&pki.gather(name, &[SERVER[0], (key, "server-key.pem")]))
}

#[test]
fn each_unusable_key_is_named_with_the_reason() {
    let pki = Pki::new();
    let why = refusal_of_key(&pki, "mixed-up", "client-key.pem");
    assert!(
        why.contains("server-key.pem: the key does not match the first certificate in server-cert.pem"),
        "{why}"
    );
    let why = refusal_of_key(&pki, "no-key", "server-cert.pem");
    assert!(why.contains("server-key.pem: the file contains no private key"), "{why}");
    for (name, words) in [
        (
            "pkcs8",
            &["pkey", "-in", "server-key.pem", "-aes128", "-passout", "pass:secret", "-out", "pkcs8.pem"][..],
        ),
        ("sec1", &["ec", "-in", "server-key.pem", "-aes128", "-passout", "pass:secret", "-out", "sec1.pem"]),
    ] {
        pki.openssl(words);
        let why = refusal_of_key(&pki, name, &format!("{name}.pem"));
        assert!(
            why.contains("server-key.pem: the key is encrypted with a passphrase")
                && why.contains("openssl pkey"),
            "{why}"
        );
    }
    let empty = pki.gather("empty", &[]);
    let why = refusal(&empty);
    assert!(
        why.contains("cannot read") && why.contains("/empty/server-cert.pem (the directory must contain"),
        "{why}"
    );
    std::fs::copy(pki.file("server-cert.pem"), empty.join("server-cert.pem")).unwrap();
    assert!(
        refusal(&empty).contains("/empty/server-key.pem (the directory must contain"),
        "{}",
        refusal(&empty)
    );
}

#[test]
fn rsa_keys_of_other_sizes_than_three_are_rejected() {
    let pki = Pki::new();
    for (bits, taken) in [(2048, true), (2432, false), (2560, false), (3072, true)] {
        let (size, key, cert) =
            (format!("rsa:{bits}"), format!("{bits}-key.pem"), format!("{bits}-cert.pem"));
        let of_all = ["req", "-x509", "-newkey", &size, "-nodes", "-days", "2", "-subj", "/CN=server"];
        pki.openssl(&[&of_all[..], &["-keyout", &key, "-out", &cert]].concat());
        let files = [(&*cert, "server-cert.pem"), (&*key, "server-key.pem")];
        let directory = pki.gather(&format!("rsa{bits}"), &files);
        match TlsCertificates::load(&directory) {
            Ok(_) => assert!(taken, "{bits}"),
            Err(error) => {
                let why = error.to_string();
                assert!(!taken, "{bits}: {why}");
                assert!(
                    why.contains("server-key.pem: this type or size") && why.contains("2048, 3072 or 4096"),
                    "{why}"
                );
            }
        }
    }
}

#[test]
fn certificates_are_reloaded_as_a_whole_or_not_at_all() {
    let pki = Pki::new();
    let directory = pki.gather("live", &[&SERVER[..], &[AUTHORITY]].concat());
    let certificates = TlsCertificates::load(&directory).unwrap();
    let reload = || certificates.prepare().map(PreparedCertificates::install);
    reload().unwrap();
    std::fs::copy(pki.file("client-key.pem"), directory.join("server-key.pem")).unwrap();
    assert!(reload().unwrap_err().to_string().contains("server-key.pem"));
    std::fs::copy(pki.file("client-cert.pem"), directory.join("server-cert.pem")).unwrap();
    reload().unwrap();
    std::fs::remove_file(directory.join("ca-cert.pem")).unwrap();
    let why = reload().unwrap_err().to_string();
    assert!(why.contains("ca-cert.pem: the file was removed"), "{why}");
    assert!(certificates.verifies_clients());
}

#[test]
fn ca_cert_pem_must_contain_only_usable_authorities() {
    let pki = Pki::new();
    pki.certificate(None, "leaf", &["basicConstraints=critical,CA:FALSE"]);
    pki.certificate(None, "nosign", &["keyUsage=critical,digitalSignature"]);
    pki.openssl(&[
        "x509",
        "-in",
        "ca-cert.pem",
        "-signkey",
        "ca-key.pem",
        "-days",
        "-1",
        "-out",
        "old-cert.pem",
    ]);
    for (name, why) in [
        ("client", "is not an authority: its basicConstraints extension lacks CA:TRUE"),
        ("leaf", "is not an authority: its basicConstraints extension lacks CA:TRUE"),
        ("nosign", "must not sign certificates: its keyUsage lacks keyCertSign"),
        ("old", "has expired; remove or replace it"),
    ] {
        let file = format!("{name}-cert.pem");
        let directory = pki.gather(name, &[&SERVER[..], &[(&*file, "ca-cert.pem")]].concat());
        let refused = refusal(&directory);
        assert!(refused.contains(&format!("ca-cert.pem: certificate 1 in the file {why}")), "{refused}");
        // The file is also rejected if a valid certificate precedes this one.
        let read = |name: &str| std::fs::read_to_string(pki.file(name)).unwrap();
        std::fs::write(directory.join("ca-cert.pem"), read("ca-cert.pem") + &read(&file)).unwrap();
        assert!(refusal(&directory).contains("certificate 2"), "{}", refusal(&directory));
    }
}

/// Performs a handshake with the certificate `name` and the intermediates `chain`, or returns why it fails.
fn shake_hands(pki: &Pki, served: &nbd::Served, name: &str, chain: &[&str]) -> Result<(), String> {
    let mut stream = served.raw();
    let take = |bytes| std::io::Read::read_exact(&mut &stream, &mut vec![0; bytes]);
    take(18).unwrap();
    (&stream).write_all(&[&3u32.to_be_bytes()[..], &option_bytes(5, &[])].concat()).unwrap();
    take(20).unwrap();
    let read = |name: &&str| CertificateDer::from_pem_file(pki.file(&format!("{name}-cert.pem"))).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(read(&"ca")).unwrap();
    let key = PrivateKeyDer::from_pem_file(pki.file(&format!("{name}-key.pem"))).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(std::iter::once(&name).chain(chain).map(read).collect(), key)
        .unwrap();
    let mut tls = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut stream).map_err(|e| e.to_string())?;
    }
    // In TLS 1.3 the server checks the certificate of the client after the client has finished, so wait for a
    // reply.
    let mut secure = StreamOwned::new(tls, stream);
    secure.write_all(&option_bytes(3, &[])).map_err(|e| e.to_string())?;
    std::io::Read::read_exact(&mut secure, &mut [0; 20]).map_err(|e| e.to_string())
}

#[test]
fn clients_of_an_expired_or_odd_authority_are_refused() {
    let pki = Pki::new();
    pki.authority("other");
    pki.issue("other", "guest", "clientAuth");
    pki.revocations("ca");
    // RFC 5280 limits serial numbers to 20 bytes.
    let long = format!("0x01{}", "00".repeat(22));
    for (option, value, why) in [("-days", "-1", "has expired"), ("-set_serial", &long, "is malformed")] {
        let again =
            ["x509", "-in", "ca-cert.pem", "-signkey", "ca-key.pem", option, value, "-out", "old.pem"];
        pki.openssl(&again);
        let directory = pki.gather(
            &why.replace(' ', "-"),
            &[&SERVER[..], &[("old.pem", "ca-cert.pem"), ("ca-crl.pem", "ca-crl.pem")]].concat(),
        );
        let read = |name: &str| std::fs::read_to_string(pki.file(name)).unwrap();
        let both = read("old.pem") + &read("other-cert.pem");
        for (text, guest_is_served) in [(read("old.pem"), false), (both, true)] {
            std::fs::write(directory.join("ca-cert.pem"), text).unwrap();
            let refused = format!("certificate 1 in the file {why}");
            assert!(refusal(&directory).contains(&refused));
            let certificates = TlsCertificates::load_as(&directory, true).unwrap();
            assert!(certificates.verifies_clients() && certificates.prepare().is_err());
            let [warning] = &certificates.warnings()[..] else { panic!("{:?}", certificates.warnings()) };
            assert!(warning.contains(&format!("ca-cert.pem: {refused}")), "{warning}");
            let tls = Some(TlsOptions { certificates, required: true });
            let served = serve(ram(), 1, NbdOptions { tls, ..options() });
            assert!(shake_hands(&pki, &served, "client", &[]).is_err());
            assert_eq!(shake_hands(&pki, &served, "guest", &[]).is_ok(), guest_is_served);
        }
    }
}

#[test]
fn key_usage_limits_what_client_certificates_can_do() {
    let pki = Pki::new();
    let client = ["basicConstraints=critical,CA:FALSE", "extendedKeyUsage=clientAuth"];
    let with = |usage: &'static str| [&client[..], &[usage]].concat();
    pki.certificate(Some("ca"), "signs", &with("keyUsage=critical,digitalSignature"));
    pki.certificate(Some("ca"), "enciphers", &with("keyUsage=critical,keyEncipherment"));
    pki.certificate(Some("ca"), "between", &["keyUsage=critical,keyCertSign"]);
    pki.certificate(Some("between"), "below", &client);
    pki.certificate(Some("ca"), "nosign", &["keyUsage=critical,digitalSignature"]);
    pki.certificate(Some("nosign"), "issued", &client);
    let directory = pki.gather("usages", &[&SERVER[..], &[AUTHORITY]].concat());
    let certificates = TlsCertificates::load(&directory).unwrap();
    let tls = Some(TlsOptions { certificates, required: true });
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
    let served = serve(ram(), 1, NbdOptions { tls, rejection_event: Some(Arc::new(event)), ..options() });
    for (name, chain, refused) in [
        ("client", &[][..], None),
        ("signs", &[], None),
        ("below", &["between"], None),
        ("enciphers", &[], Some("the keyUsage of the client's certificate lacks digitalSignature")),
        ("issued", &["nosign"], Some("the keyUsage of an intermediate certificate lacks keyCertSign")),
    ] {
        let outcome = shake_hands(&pki, &served, name, chain);
        assert_eq!(outcome.is_err(), refused.is_some(), "{name}: {outcome:?}");
        wait_until("the client is disconnected", || served.server.connection_count() == 0);
        let reasons: Vec<_> = served.server.take_rejections().into_iter().map(|it| it.reason).collect();
        let expected: Vec<_> = refused.map(|why| Reason::Tls(why.to_owned())).into_iter().collect();
        assert_eq!(reasons, expected, "{name}");
    }
}

#[test]
fn a_slow_block_status_delays_no_handshake() {
    let pki = Pki::new();
    let certificates = TlsCertificates::load(&pki.gather("slow", &SERVER)).unwrap();
    let tls = Some(TlsOptions { certificates, required: false });
    let (driver, let_go, _) = SlowExtents::driver();
    let served = serve(driver, 1, NbdOptions { tls, ..options() });
    // This is dropped before the server if the test fails, so that the query ends.
    let let_go = let_go;
    let mut clear = served.client(ReplyStyle::Structured);
    clear.send(7, 0, 1, 0, 4096, &[]);
    wait_until("the block status request is in flight", || served.server.connections()[0].in_flight == 1);

    let mut stream = served.raw();
    let take = |bytes| std::io::Read::read_exact(&mut &stream, &mut vec![0; bytes]);
    take(18).unwrap();
    (&stream).write_all(&[&3u32.to_be_bytes()[..], &option_bytes(5, &[])].concat()).unwrap();
    take(20).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(pki.file("ca-cert.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut tls = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut stream).expect("the handshake continues");
    }
    let mut secure = StreamOwned::new(tls, stream);
    secure.write_all(&option_bytes(7, b"\0\0\0\0\0\0")).unwrap();
    std::io::Read::read_exact(&mut secure, &mut [0; 20]).expect("options are answered");

    let_go.send(()).unwrap();
    assert_eq!(clear.reply(|_| 0).error, 0);
}
