//! The certificate directory of a server, loaded when the server starts and again when the owner reloads it.

use std::fmt::{self, Display};
use std::fs::File;
use std::io::{ErrorKind as IoErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blkq::sync::{Mutex, lock};
use blkq::{Error, ErrorKind};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, InconsistentKeys, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
};
use webpki::{BorrowedCertRevocationList, CertRevocationList};

use super::x509::CertificateUse;

/// File names in a certificate directory, as QEMU, libvirt and nbdkit use them.
const CERTIFICATE: &str = "server-cert.pem";
const KEY: &str = "server-key.pem";
/// Optional. If it exists, each client needs a certificate signed by an authority in it and not revoked.
const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Maximum bytes of a file. All authorities of a Linux distribution take about a quarter of it.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The certificates of one directory. Clones share them, and a reload applies to all clones.
#[derive(Clone)]
pub struct TlsCertificates {
    directory: PathBuf,
    /// Locked only to read a field, to clone it, or to exchange the value on the control plane.
    loaded: Arc<Mutex<Loaded>>,
}

/// Certificates that were loaded again and are not in use yet: see [`TlsCertificates::prepare`].
pub struct PreparedCertificates {
    certificates: TlsCertificates,
    loaded: Loaded,
}

impl PreparedCertificates {
    /// Uses these certificates for all connections that start from now on, also with clones of the
    /// [`TlsCertificates`]. Established connections keep the old ones.
    pub fn install(self) {
        // The old certificates are freed after the lock was released.
        let _old = std::mem::replace(&mut *lock(&self.certificates.loaded), self.loaded);
    }
}

struct Loaded {
    config: Arc<ServerConfig>,
    verifies_clients: bool,
    warnings: Vec<String>,
}

impl fmt::Debug for TlsCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsCertificates").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl TlsCertificates {
    /// Loads `server-cert.pem`, `server-key.pem` and, if they exist, `ca-cert.pem` and `ca-crl.pem` of
    /// `directory`.
    ///
    /// # Errors
    /// Returns an error that names the file that is missing, cannot be used, or does not match the others.
    pub fn load(directory: &Path) -> Result<TlsCertificates, Error> {
        TlsCertificates::load_as(directory, false)
    }

    /// As [`TlsCertificates::load`]. `exclude_outdated` is for a server that continues a device in use, which must
    /// not hang because of an expired authority: authorities that are not valid now are left out, not an error.
    /// Their clients are refused, and [`TlsCertificates::warnings`] names them.
    ///
    /// # Errors
    /// The errors of [`TlsCertificates::load`].
    pub fn load_as(directory: &Path, exclude_outdated: bool) -> Result<TlsCertificates, Error> {
        let directory = std::path::absolute(directory)
            .map_err(|e| Error::system(format!("TLS: {}", directory.display()), e))?;
        let loaded = Arc::new(Mutex::new(Loaded::read(&directory, exclude_outdated)?));
        Ok(TlsCertificates { directory, loaded })
    }

    /// Loads the directory again without using it yet, for a caller that has other changes to check first.
    /// [`PreparedCertificates::install`] then cannot fail.
    ///
    /// # Errors
    /// As [`TlsCertificates::load`], and [`ErrorKind::Invalid`] if `ca-cert.pem` was removed, as clients
    /// would then need no certificate.
    pub fn prepare(&self) -> Result<PreparedCertificates, Error> {
        let loaded = Loaded::read(&self.directory, false)?;
        if self.verifies_clients() && !loaded.verifies_clients {
            let why = "the file was removed, and without it every client could connect without a certificate; \
                put it back";
            return Err(invalid(&self.directory.join(AUTHORITY), &why));
        }
        Ok(PreparedCertificates { certificates: self.clone(), loaded })
    }

    /// Whether clients must have certificates.
    pub fn verifies_clients(&self) -> bool {
        lock(&self.loaded).verifies_clients
    }

    /// Why clients may refuse the certificate of the server, and the authorities that were left out
    /// ([`TlsCertificates::load_as`]), one line each.
    pub fn warnings(&self) -> Vec<String> {
        lock(&self.loaded).warnings.clone()
    }

    /// The absolute path of the directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        lock(&self.loaded).config.clone()
    }
}

impl Loaded {
    /// Authorities that are not valid now are left out with `exclude_outdated`, else they are an error.
    fn read(directory: &Path, exclude_outdated: bool) -> Result<Loaded, Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let identity = identity(directory, &provider)?;
        let why = identity.cert.first().and_then(|leaf| server_flaw(leaf, UnixTime::now()));
        let named = |why| invalid(&directory.join(CERTIFICATE), &why);
        let warning = |why| format!("clients that verify the server may refuse it: {}", named(why));
        let mut warnings: Vec<String> = why.map(warning).into_iter().collect();
        let verifier = verifier(directory, &provider, exclude_outdated, &mut warnings)?;
        let verifies_clients = verifier.is_some();
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| invalid(&directory.join(CERTIFICATE), &e))?
            .with_client_cert_verifier(verifier.unwrap_or_else(WebPkiClientVerifier::no_client_auth))
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(identity)));
        // The server keeps no session state for clients that have disconnected, so sessions cannot be
        // resumed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Loaded { config: Arc::new(config), verifies_clients, warnings })
    }
}

fn identity(directory: &Path, provider: &CryptoProvider) -> Result<CertifiedKey, Error> {
    let (certificate, key) = (directory.join(CERTIFICATE), directory.join(KEY));
    let chain: Vec<CertificateDer<'static>> = read_all(&certificate, "certificate")?;
    let text = read_file(&key)?;
    if text.windows(9).any(|word| word == b"ENCRYPTED") {
        let why = "the key is encrypted with a passphrase; decrypt it with \
            `openssl pkey -in server-key.pem -out new.pem`, then rename new.pem to server-key.pem";
        return Err(invalid(&key, &why));
    }
    let private = PrivateKeyDer::from_pem_slice(&text).map_err(|e| match e {
        pem::Error::NoItemsFound => invalid(&key, &"the file contains no private key in PEM format"),
        error => malformed(&key, &error),
    })?;
    let private = provider.key_provider.load_private_key(private).map_err(|_| {
        let why = "this type or size of key is not supported; create an RSA key of 2048, 3072 or 4096 \
            bits, an EC key of prime256v1 or secp384r1, or an Ed25519 key";
        invalid(&key, &why)
    })?;
    let identity = CertifiedKey::new(chain, private);
    identity.keys_match().map_err(|error| match error {
        rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
            invalid(&key, &format_args!("the key does not match the first certificate in {CERTIFICATE}"))
        }
        error => invalid(&certificate, &unusable(&error)),
    })?;
    Ok(identity)
}

/// Why clients may refuse the certificate of a server, with a hint. `None` also for a malformed certificate.
fn server_flaw(certificate: &[u8], now: UnixTime) -> Option<&'static str> {
    let now = now.as_secs();
    let it = CertificateUse::parse(certificate)?;
    if it.not_after < now {
        Some("the certificate has expired; replace it")
    } else if it.not_before > now {
        Some("the certificate is not valid yet; check the clock of this machine")
    } else if !it.is_for_servers {
        Some("its extendedKeyUsage lacks serverAuth; replace it")
    } else if !it.may_sign() {
        Some("its keyUsage lacks digitalSignature; replace it")
    } else {
        None
    }
}

fn unusable(error: &rustls::Error) -> String {
    match error {
        rustls::Error::InvalidCertificate(CertificateError::Other(other))
            if other.to_string().contains("UnsupportedCertVersion") =>
        {
            "the certificate is not of X.509 version 3; create it with an extension, such as subjectAltName"
                .to_owned()
        }
        error => error.to_string(),
    }
}

fn verifier(
    directory: &Path,
    provider: &Arc<CryptoProvider>,
    exclude_outdated: bool,
    warnings: &mut Vec<String>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, Error> {
    let (authority, revoked) = (directory.join(AUTHORITY), directory.join(REVOKED));
    // A file that exists but cannot be read must be an error. If it counted as missing, clients would need no
    // certificate.
    let exists = |file: &Path| file.symlink_metadata().is_ok();
    if !exists(&authority) {
        let why = "a revocation list needs ca-cert.pem, which does not exist; add it, or remove the list";
        return if exists(&revoked) { Err(invalid(&revoked, &why)) } else { Ok(None) };
    }
    let authorities = authorities(read_all(&authority, "certificate")?, UnixTime::now())
        .map_err(|why| invalid(&authority, &why))?;
    for why in &authorities.outdated {
        let error = invalid(&authority, why);
        if !exclude_outdated {
            return Err(error);
        }
        warnings.push(format!("the clients of an authority are refused: {error}"));
    }
    // webpki accepts the clients of an expired authority, so only the valid ones are passed to it. It needs at
    // least one.
    let has_authority = !authorities.valid.is_empty();
    let roots = Arc::new(if has_authority { authorities.valid } else { authorities.all.clone() });
    let mut builder = WebPkiClientVerifier::builder_with_provider(roots, provider.clone());
    if exists(&revoked) {
        let lists: Vec<CertificateRevocationListDer<'static>> = read_all(&revoked, "revocation list")?;
        if lists.iter().any(|list| !is_of(list, &authorities.all)) {
            let why = "the revocation list was issued by an authority that is not in ca-cert.pem; \
                add that authority, or replace the list";
            return Err(invalid(&revoked, &why));
        }
        builder = builder.with_crls(lists).allow_unknown_revocation_status();
    }
    let verifier = builder.build().map_err(|e| match e {
        VerifierBuilderError::InvalidCrl(_) => invalid(&revoked, &e),
        _ => invalid(&authority, &e),
    })?;
    Ok(Some(Arc::new(UsageVerifier { inner: verifier, has_authority })))
}

/// The reason why a certificate that webpki accepts is rejected: its keyUsage does not allow the use.
pub(super) type UsageError = std::io::Error;

/// Verifies client certificates as `inner` does, and that keyUsage allows their use, which webpki does not check.
#[derive(Debug)]
struct UsageVerifier {
    inner: Arc<dyn ClientCertVerifier>,
    /// Whether an authority is valid. If not, all clients are refused; `inner` does not check this.
    has_authority: bool,
}

fn check_usage(own: &CertificateDer<'_>, chain: &[CertificateDer<'_>]) -> Result<(), CertificateError> {
    let parse = |der: &CertificateDer<'_>| CertificateUse::parse(der).ok_or(CertificateError::BadEncoding);
    let refuse = |why: &str| Err(CertificateError::Other(OtherError(Arc::new(UsageError::other(why)))));
    // The client's own certificate must be allowed to sign the handshake (RFC 8446, 4.4.2.2).
    if !parse(own)?.may_sign() {
        return refuse("the keyUsage of the client's certificate lacks digitalSignature");
    }
    for intermediate in chain {
        let usage = parse(intermediate)?;
        // An intermediate authority must be allowed to sign certificates (RFC 5280, 6.1.4). A certificate that
        // is not an authority cannot be part of the chain, so its keyUsage does not matter.
        if usage.is_authority && !usage.may_sign_certificates() {
            return refuse("the keyUsage of an intermediate certificate lacks keyCertSign");
        }
    }
    Ok(())
}

impl ClientCertVerifier for UsageVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        own: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        if !self.has_authority {
            return Err(CertificateError::UnknownIssuer.into());
        }
        let verified = self.inner.verify_client_cert(own, intermediates, now)?;
        check_usage(own, intermediates)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// The authorities that may sign client certificates.
pub struct Authorities {
    pub all: RootCertStore,
    /// Those that are well-formed and valid now.
    pub valid: RootCertStore,
    /// The others, as text for a message: the number of the certificate and the reason.
    pub outdated: Vec<String>,
}

/// Checks the certificates of the file. webpki accepts any of them as an authority; a client's certificate
/// there would let the client sign others. An error is text for a message, with the number of the first
/// unusable certificate and the reason.
pub fn authorities(certificates: Vec<CertificateDer<'static>>, now: UnixTime) -> Result<Authorities, String> {
    let now = now.as_secs();
    let mut found =
        Authorities { all: RootCertStore::empty(), valid: RootCertStore::empty(), outdated: Vec::new() };
    for (number, certificate) in (1..).zip(certificates) {
        let named = |why: &str| format!("certificate {number} in the file {why}");
        let parsed = CertificateUse::parse(&certificate);
        found.all.add(certificate).map_err(|e| named(&format!("cannot be used: {}", unusable(&e))))?;
        let Some(it) = parsed else {
            found.outdated.push(named("is malformed"));
            continue;
        };
        if !it.is_authority {
            return Err(named("is not an authority: its basicConstraints extension lacks CA:TRUE"));
        }
        if !it.may_sign_certificates() {
            return Err(named("must not sign certificates: its keyUsage lacks keyCertSign"));
        }
        if it.not_after < now {
            found.outdated.push(named("has expired; remove or replace it"));
        } else if it.not_before > now {
            found.outdated.push(named("is not valid yet; check the clock of this machine"));
        } else {
            found.valid.extend(found.all.roots.last().cloned());
        }
    }
    Ok(found)
}

/// Whether `list` names one of `roots` as its issuer. True for a malformed list, which webpki rejects later.
fn is_of(list: &[u8], roots: &RootCertStore) -> bool {
    let Ok(list) = BorrowedCertRevocationList::from_der(list) else { return true };
    let list = CertRevocationList::from(list);
    roots.roots.iter().any(|root| &*root.subject == list.issuer())
}

/// Reads all PEM sections of the type `T`; `item` is the name of such a section in messages.
fn read_all<T: PemObject>(path: &Path, item: &str) -> Result<Vec<T>, Error> {
    let text = read_file(path)?;
    let items: Vec<T> =
        T::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|e| malformed(path, &e))?;
    if items.is_empty() {
        return Err(invalid(path, &format_args!("the file contains no {item} in PEM format")));
    }
    Ok(items)
}

fn read_file(path: &Path) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    match File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text)) {
        Ok(_) if text.len() as u64 > FILE_BYTES_MAX => Err(invalid(path, &"the file is larger than 1 MiB")),
        Ok(_) => Ok(text),
        Err(error) => {
            let missing = matches!(error.kind(), IoErrorKind::NotFound | IoErrorKind::NotADirectory);
            let hint = format!(" (the directory must contain {CERTIFICATE} and {KEY})");
            let hint = if missing { &hint } else { "" };
            Err(Error::system(format!("TLS: cannot read {}{hint}", path.display()), error))
        }
    }
}

fn malformed(path: &Path, error: &pem::Error) -> Error {
    invalid(path, &format_args!("the PEM file is malformed: {error}"))
}

fn invalid(path: &Path, why: &dyn Display) -> Error {
    Error::new(ErrorKind::Invalid, format!("TLS: {}: {why}", path.display()))
}
