//! TLS under NBD: a connection's records on their way in and out.
//!
//! Everything is done in memory, on the engine's thread: what was received is decrypted when its
//! turn comes, what is sent is encrypted a bounded piece at a time. Nothing waits here.

use std::io::{ErrorKind as IoErrorKind, Read, Write};

use rustls::{CertificateError, Error, ServerConnection};

use crate::buffers::try_zeroed;

use super::certificates::TlsCertificates;
use super::outgoing::Outgoing;
use super::verifier::UsageError;

/// Bytes received that are not decrypted yet: several records of 16 KiB.
const INCOMING_BYTES: usize = 128 << 10;
/// Bytes that are encrypted before they are sent.
const OUTGOING_BYTES: usize = 128 << 10;
/// Largest record, in bytes.
const RECORD_BYTES: usize = 16 << 10;
/// Most that a whole record takes, in bytes.
const RECORD_SEALED_MAX_BYTES: usize = 5 + RECORD_BYTES + 256;

/// TLS as a server offers it.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// The server's certificate, and the authority of clients' ones.
    pub certificates: TlsCertificates,
    /// Whether clients must use it.
    pub required: bool,
}

/// Why nothing more can be received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsEnd {
    /// The client sent close_notify.
    Closed,
    /// The client broke the protocol of TLS.
    Broken,
}

/// One connection's records.
pub struct Tls {
    connection: ServerConnection,
    incoming: Box<[u8]>,
    /// The part of it that was received and not decrypted.
    start: usize,
    end: usize,
    /// Steps of decryption that [`Tls::take_steps`] has not returned yet.
    steps: usize,
    /// Encrypted bytes, and how many of them have left.
    outgoing: Vec<u8>,
    sent: usize,
    closed: bool,
    broken: bool,
    failure: Option<rustls::Error>,
}

impl Tls {
    /// `None` if there is no memory for it. Allocations of rustls itself cannot fail in this way.
    pub fn new(certificates: &TlsCertificates) -> Option<Tls> {
        let incoming = try_zeroed(INCOMING_BYTES)?;
        let mut outgoing = Vec::new();
        outgoing.try_reserve_exact(OUTGOING_BYTES + RECORD_SEALED_MAX_BYTES).ok()?;
        let connection = ServerConnection::new(certificates.config()).ok()?;
        Some(Tls {
            connection,
            incoming,
            start: 0,
            end: 0,
            steps: 0,
            outgoing,
            sent: 0,
            closed: false,
            broken: false,
            failure: None,
        })
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
            if !self.process()? {
                return Ok(0);
            }
        }
    }

    /// The steps of decryption since the last call: rustls takes about 4 KiB in each, whether bytes come out or not.
    pub fn take_steps(&mut self) -> usize {
        std::mem::take(&mut self.steps)
    }

    /// Takes some of what was received. False if there is nothing.
    fn process(&mut self) -> Result<bool, TlsEnd> {
        let mut rest = &self.incoming[self.start..self.end];
        if rest.is_empty() || self.broken {
            return if self.broken { Err(TlsEnd::Broken) } else { Ok(false) };
        }
        self.steps += 1;
        let before = rest.len();
        let taken = self.connection.read_tls(&mut rest);
        self.start += before - rest.len();
        // An error of either leaves an alert for the client.
        self.broken = !matches!(taken, Ok(1..));
        if !self.broken
            && let Err(error) = self.connection.process_new_packets()
        {
            (self.broken, self.failure) = (true, Some(error));
        }
        if self.broken { Err(TlsEnd::Broken) } else { Ok(true) }
    }

    /// Whether something was received that [`Tls::shake_hands`] is to continue with: signatures take
    /// too long for an engine.
    pub fn wants_handshake(&self) -> bool {
        self.connection.is_handshaking() && self.start < self.end && !self.broken
    }

    /// Continues the handshake as far as the received records allow. [`Tls::read`] returns
    /// how it failed.
    pub fn shake_hands(&mut self) {
        while self.connection.is_handshaking() && self.process() == Ok(true) {}
    }

    /// Whether there is something to send that no reply is behind: handshake, alerts.
    pub fn wants_send(&self) -> bool {
        self.connection.wants_write() || !self.unsent().is_empty()
    }

    /// Encrypted bytes that have not left. They stay where they are until [`Tls::sent`].
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

    /// Why the client was dropped, in words.
    pub fn failure(&self) -> String {
        use CertificateError::{
            Expired, ExpiredContext, InvalidPurpose, InvalidPurposeContext, Revoked, UnknownIssuer,
        };
        let text = match &self.failure {
            Some(Error::NoCertificatesPresented) => "the client sent no certificate",
            Some(Error::InvalidCertificate(UnknownIssuer)) => {
                "the client's certificate is not signed by an authority in ca-cert.pem"
            }
            Some(Error::InvalidCertificate(Expired | ExpiredContext { .. })) => {
                "the client's certificate has expired"
            }
            Some(Error::InvalidCertificate(Revoked)) => "the client's certificate is revoked",
            Some(Error::InvalidCertificate(InvalidPurpose | InvalidPurposeContext { .. })) => {
                "the extendedKeyUsage of the client's certificate lacks clientAuth"
            }
            Some(Error::InvalidCertificate(CertificateError::Other(other))) if other.0.is::<UsageError>() => {
                return other.0.to_string();
            }
            Some(Error::AlertReceived(alert)) => {
                return format!(
                    "the client sent the alert {alert:?}; check that it trusts the authority that signed server-cert.pem and connects to a name in that certificate"
                );
            }
            Some(Error::InvalidMessage(_)) | None => "the client sent data that is not TLS",
            Some(error) => return error.to_string(),
        };
        text.to_owned()
    }

    /// Sends close_notify, once.
    pub fn close(&mut self) {
        if !std::mem::replace(&mut self.closed, true) {
            self.connection.send_close_notify();
        }
    }
}
