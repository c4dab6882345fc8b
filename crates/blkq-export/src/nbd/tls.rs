//! TLS under NBD: certificates, and a connection's records on their way in and out.
//!
//! Everything is done in memory, on the engine's thread: what was received is decrypted when its
//! turn comes, what is sent is encrypted a bounded piece at a time. Nothing waits here.

use std::fmt;
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;

use blkq::{Error, ErrorKind};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use webpki::{BorrowedCertRevocationList, CertRevocationList};

use crate::buffers::try_zeroed;

use super::outgoing::Outgoing;

/// What a directory of certificates holds, by the names that QEMU, libvirt and nbdkit use.
const CERTIFICATE: &str = "server-cert.pem";
const KEY: &str = "server-key.pem";
/// Optional: if it is there, clients must have certificates that it signed, and that are not on
/// the list of revoked ones.
const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Bytes received that are not decrypted yet: several records of 16 KiB.
const INCOMING_BYTES: usize = 128 << 10;
/// Bytes that are encrypted before they are sent.
const OUTGOING_BYTES: usize = 128 << 10;
/// Most that a record holds, in bytes.
const RECORD_BYTES: usize = 16 << 10;
/// Most that a whole record takes, in bytes.
const RECORD_SEALED_MAX_BYTES: usize = 5 + RECORD_BYTES + 256;

/// TLS as a server offers it.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// Who it says it is, and whom it lets in.
    pub certificates: TlsCertificates,
    /// Whether clients must use it.
    pub required: bool,
}

/// Certificates, read once.
#[derive(Clone)]
pub struct TlsCertificates {
    config: Arc<ServerConfig>,
    authority: bool,
}

impl fmt::Debug for TlsCertificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsCertificates").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl TlsCertificates {
    /// Reads `server-cert.pem`, `server-key.pem` and, if there, `ca-cert.pem` and `ca-crl.pem` of
    /// `directory`.
    ///
    /// # Errors
    /// Which file cannot be read, or does not fit the others.
    pub fn load(directory: &Path) -> Result<TlsCertificates, Error> {
        let file = |name: &str| directory.join(name);
        let chain: Vec<CertificateDer<'static>> = read_all(&file(CERTIFICATE))?;
        let key = PrivateKeyDer::from_pem_file(file(KEY)).map_err(|e| unreadable(&file(KEY), &e))?;
        let invalid = |name: &str, why: &dyn fmt::Display| {
            Error::new(ErrorKind::Invalid, format!("TLS: {}: {why}", file(name).display()))
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|e| invalid(CERTIFICATE, &e))?;
        // One that cannot be read is an error below, and not as if there were none.
        let is_there = |name: &str| file(name).symlink_metadata().is_ok();
        let authority = is_there(AUTHORITY);
        let builder = if authority {
            let mut roots = RootCertStore::empty();
            for certificate in read_all(&file(AUTHORITY))? {
                roots.add(certificate).map_err(|e| invalid(AUTHORITY, &e))?;
            }
            let roots = Arc::new(roots);
            let mut verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider);
            if is_there(REVOKED) {
                let lists: Vec<CertificateRevocationListDer<'static>> = read_all(&file(REVOKED))?;
                if lists.iter().any(|list| !is_of(list, &roots)) {
                    return Err(invalid(
                        REVOKED,
                        &format_args!(
                            "it is of an authority that is not in {AUTHORITY}, and may revoke nothing; add that authority there, or put the list of the right one here"
                        ),
                    ));
                }
                verifier = verifier.with_crls(lists).allow_unknown_revocation_status();
            }
            let of = |e: &VerifierBuilderError| match e {
                VerifierBuilderError::InvalidCrl(_) => REVOKED,
                _ => AUTHORITY,
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|e| invalid(of(&e), &e))?)
        } else if is_there(REVOKED) {
            return Err(invalid(
                REVOKED,
                &format_args!("there is no {AUTHORITY} whose certificates it could revoke"),
            ));
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|e| invalid(CERTIFICATE, &e))?;
        // Nothing is kept for a client that has gone.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(TlsCertificates { config: Arc::new(config), authority })
    }

    /// Whether clients must have certificates.
    pub fn verifies_clients(&self) -> bool {
        self.authority
    }
}

/// Whether `list` is of one of `roots`, by its name. One that cannot be read is refused elsewhere.
fn is_of(list: &[u8], roots: &RootCertStore) -> bool {
    let Ok(list) = BorrowedCertRevocationList::from_der(list) else { return true };
    let list = CertRevocationList::from(list);
    roots.roots.iter().any(|root| &*root.subject == list.issuer())
}

fn read_all<T: PemObject>(path: &Path) -> Result<Vec<T>, Error> {
    let items = T::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<T>, _>>);
    match items {
        Ok(items) if items.is_empty() => Err(unreadable(path, &pem::Error::NoItemsFound)),
        Ok(items) => Ok(items),
        Err(error) => Err(unreadable(path, &error)),
    }
}

fn unreadable(path: &Path, error: &pem::Error) -> Error {
    let path = path.display();
    match error {
        pem::Error::Io(e) => {
            let what = format!("TLS: cannot read {path} (docs/nbd.md says which files there are)");
            Error::system(what, std::io::Error::from(e.kind()))
        }
        pem::Error::NoItemsFound => {
            Error::new(ErrorKind::Invalid, format!("TLS: {path} does not hold in PEM what its name says"))
        }
        error => Error::new(ErrorKind::Invalid, format!("TLS: {path} is no whole PEM file: {error:?}")),
    }
}

/// Why nothing more can be received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsEnd {
    /// The client said that it is done.
    Closed,
    /// What it sent is not what was agreed on.
    Broken,
}

/// One connection's records.
pub struct Tls {
    connection: ServerConnection,
    incoming: Box<[u8]>,
    /// What of it was received and not decrypted.
    start: usize,
    end: usize,
    /// Encrypted; what of it has left.
    outgoing: Vec<u8>,
    sent: usize,
    closed: bool,
}

impl Tls {
    /// `None` if there is no memory for it. What rustls takes by itself cannot fail in this way.
    pub fn new(certificates: &TlsCertificates) -> Option<Tls> {
        let incoming = try_zeroed(INCOMING_BYTES)?;
        let mut outgoing = Vec::new();
        outgoing.try_reserve_exact(OUTGOING_BYTES + RECORD_SEALED_MAX_BYTES).ok()?;
        let connection = ServerConnection::new(certificates.config.clone()).ok()?;
        Some(Tls { connection, incoming, start: 0, end: 0, outgoing, sent: 0, closed: false })
    }

    /// Where to receive into.
    pub fn room(&mut self) -> &mut [u8] {
        self.incoming.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.incoming[self.end..]
    }

    /// `bytes` more were received. True if there was room for more.
    pub fn received(&mut self, bytes: usize) -> bool {
        self.end += bytes;
        self.end < self.incoming.len()
    }

    /// Decrypts into `plain`, which has room. 0: more must be received first.
    pub fn read(&mut self, plain: &mut [u8]) -> Result<usize, TlsEnd> {
        loop {
            match self.connection.reader().read(plain) {
                Ok(0) => return Err(TlsEnd::Closed),
                Ok(bytes) => return Ok(bytes),
                Err(e) if e.kind() == IoErrorKind::WouldBlock => {}
                Err(_) => return Err(TlsEnd::Broken),
            }
            let mut rest = &self.incoming[self.start..self.end];
            if rest.is_empty() {
                return Ok(0);
            }
            let before = rest.len();
            let taken = self.connection.read_tls(&mut rest);
            self.start += before - rest.len();
            // An error of either leaves an alert for the client.
            if !matches!(taken, Ok(1..)) || self.connection.process_new_packets().is_err() {
                return Err(TlsEnd::Broken);
            }
        }
    }

    /// Whether there is something to send that no reply is behind: handshake, alerts.
    pub fn wants_send(&self) -> bool {
        self.connection.wants_write() || !self.unsent().is_empty()
    }

    /// What is encrypted and has not left. Stays where it is until [`Tls::sent`].
    pub fn unsent(&self) -> &[u8] {
        &self.outgoing[self.sent..]
    }

    /// `bytes` of it have left.
    pub fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
        if self.sent == self.outgoing.len() {
            self.outgoing.clear();
            self.sent = 0;
        }
    }

    /// Encrypts as much of `plain` as is sent at a time. Nothing may be unsent.
    pub fn encrypt(&mut self, plain: &mut Outgoing) -> Result<(), TlsEnd> {
        self.flush()?;
        while self.outgoing.len() < OUTGOING_BYTES {
            let piece = plain.next(RECORD_BYTES);
            if piece.is_empty() {
                break;
            }
            let taken = self.connection.writer().write(piece).map_err(|_| TlsEnd::Broken)?;
            plain.advance(taken);
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TlsEnd> {
        while self.connection.wants_write() {
            self.connection.write_tls(&mut self.outgoing).map_err(|_| TlsEnd::Broken)?;
        }
        Ok(())
    }

    /// Says that nothing follows, once.
    pub fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) {
            self.connection.send_close_notify();
        }
    }
}
