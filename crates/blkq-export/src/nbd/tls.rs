//! TLS of one connection: decrypts the records that were received, and encrypts those to be sent.
//!
//! All work is done in memory on the engine's thread, in pieces of bounded size; nothing waits here.

use std::io::{ErrorKind as IoErrorKind, Read, Write};

use rustls::{CertificateError, Error, ServerConnection};

use crate::buffers::try_zeroed;

use super::certificates::{TlsCertificates, UsageError};
use super::reply::Outgoing;

/// Size in bytes of the buffer for received records that are not decrypted yet: several records of 16 KiB.
const INCOMING_BYTES: usize = 128 << 10;
/// Encryption stops at about this number of bytes, which one send then takes.
const OUTGOING_BYTES: usize = 128 << 10;
/// Maximum plaintext of a record, in bytes (RFC 8446, 5.1).
const RECORD_BYTES: usize = 16 << 10;
/// Maximum bytes of an encrypted record: header, plaintext, and the expansion of RFC 8446, 5.2.
const RECORD_SEALED_MAX_BYTES: usize = 5 + RECORD_BYTES + 256;

/// How a server offers TLS.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// The certificate of the server, and the authorities that sign those of clients.
    pub certificates: TlsCertificates,
    /// Whether clients must use TLS. If not, they may.
    pub required: bool,
}

/// The reason why no further data can be received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StreamEnd {
    /// The client closed the connection, or sent close_notify, the orderly end of TLS.
    Closed,
    /// The socket or TLS failed, or the client broke the TLS protocol.
    Broken,
}

/// The TLS state and the record buffers of one connection.
pub struct Tls {
    connection: ServerConnection,
    incoming: Box<[u8]>,
    /// `incoming[start..end]` was received and not decrypted.
    start: usize,
    end: usize,
    steps: usize,
    /// Encrypted bytes; the first `sent` of them have been sent.
    outgoing: Vec<u8>,
    sent: usize,
    broken: bool,
    failure: Option<rustls::Error>,
}

impl Tls {
    /// `None` if there is no memory for the buffers. If an allocation of rustls fails, the process aborts.
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
            broken: false,
            failure: None,
        })
    }

    /// The free part of the buffer, to receive records into.
    pub fn room(&mut self) -> &mut [u8] {
        self.incoming.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        &mut self.incoming[self.end..]
    }

    /// Returns whether room is left, which means that the socket is empty.
    pub fn received(&mut self, bytes: usize) -> bool {
        self.end += bytes;
        self.end < self.incoming.len()
    }

    /// Decrypts into `plain`, which must not be empty. Returns 0 bytes if more must be received first.
    pub fn read(&mut self, plain: &mut [u8]) -> Result<usize, StreamEnd> {
        loop {
            match self.connection.reader().read(plain) {
                Ok(0) => return Err(StreamEnd::Closed),
                Ok(bytes) => return Ok(bytes),
                Err(e) if e.kind() == IoErrorKind::WouldBlock => {}
                Err(_) => return Err(StreamEnd::Broken),
            }
            if !self.process()? {
                return Ok(0);
            }
        }
    }

    /// Steps since the last call. rustls takes about 4 KiB of input in each, whether it yields data or not.
    pub fn take_steps(&mut self) -> usize {
        std::mem::take(&mut self.steps)
    }

    fn process(&mut self) -> Result<bool, StreamEnd> {
        let mut rest = &self.incoming[self.start..self.end];
        if rest.is_empty() || self.broken {
            return if self.broken { Err(StreamEnd::Broken) } else { Ok(false) };
        }
        self.steps += 1;
        let before = rest.len();
        let taken = self.connection.read_tls(&mut rest);
        self.start += before - rest.len();
        // After an error of either call, rustls has an alert to send to the client.
        self.broken = !matches!(taken, Ok(1..));
        if !self.broken
            && let Err(error) = self.connection.process_new_packets()
        {
            (self.broken, self.failure) = (true, Some(error));
        }
        if self.broken { Err(StreamEnd::Broken) } else { Ok(true) }
    }

    /// Whether records wait for [`Tls::shake_hands`] on a worker: a signature takes too long for the engine.
    pub fn wants_handshake(&self) -> bool {
        self.connection.is_handshaking() && self.start < self.end && !self.broken
    }

    /// Continues as far as the records allow. After a failure, the next [`Tls::read`] returns the error.
    pub fn shake_hands(&mut self) {
        while self.connection.is_handshaking() && self.process() == Ok(true) {}
    }

    /// Whether TLS itself has something to send, such as handshake messages and alerts.
    pub fn wants_send(&self) -> bool {
        self.connection.wants_write() || !self.unsent().is_empty()
    }

    /// Encrypted bytes. The kernel reads them, so they stay at their address until [`Tls::sent`].
    pub fn unsent(&self) -> &[u8] {
        &self.outgoing[self.sent..]
    }

    /// Notes that `bytes` of [`Tls::unsent`] were sent.
    pub fn sent(&mut self, bytes: usize) {
        self.sent += bytes;
        if self.sent == self.outgoing.len() {
            self.outgoing.clear();
            self.sent = 0;
        }
    }

    /// Encrypts about [`OUTGOING_BYTES`] of `plain`. All earlier encrypted bytes must have been sent.
    pub fn encrypt(&mut self, plain: &mut Outgoing) -> Result<(), StreamEnd> {
        loop {
            while self.connection.wants_write() {
                self.connection.write_tls(&mut self.outgoing).map_err(|_| StreamEnd::Broken)?;
            }
            let piece = plain.next(RECORD_BYTES);
            if piece.is_empty() || self.outgoing.len() >= OUTGOING_BYTES {
                return Ok(());
            }
            let taken = self.connection.writer().write(piece).map_err(|_| StreamEnd::Broken)?;
            plain.advance(taken);
        }
    }

    /// The reason why TLS failed, as text for a log.
    pub fn failure(&self) -> String {
        use CertificateError::{
            Expired, ExpiredContext, InvalidPurpose, InvalidPurposeContext, Other, Revoked, UnknownIssuer,
        };
        let text = match &self.failure {
            Some(Error::NoCertificatesPresented) => "the client sent no certificate",
            Some(error @ Error::InvalidCertificate(reason)) => match reason {
                UnknownIssuer => "the client's certificate is not signed by an authority in ca-cert.pem",
                Expired | ExpiredContext { .. } => "the client's certificate has expired",
                Revoked => "the client's certificate is revoked",
                InvalidPurpose | InvalidPurposeContext { .. } => {
                    "the extendedKeyUsage of the client's certificate lacks clientAuth"
                }
                Other(why) if why.0.is::<UsageError>() => return why.0.to_string(),
                _ => return error.to_string(),
            },
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

    /// Queues close_notify, which rustls does only once.
    pub fn close(&mut self) {
        self.connection.send_close_notify();
    }
}
