//! Options of a server: its exports, and the limits of its clients.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blkq::{Error, ErrorKind};

use super::handshake::TlsPolicy;
use super::listener::SocketAccess;
use super::proto::{PAYLOAD_MAX_BYTES, STRING_MAX_BYTES};
use super::ranges::RangeLock;
use super::tls::TlsOptions;

/// Most requests in flight per connection: two iovecs each, of the 1024 that one send takes.
const REQUESTS_MAX: usize = 500;

/// A disk under a name.
#[derive(Clone, Debug)]
pub struct NbdExport {
    /// The name that clients ask for, at most 4096 bytes. The empty name also means the first export.
    pub name: String,
    /// A line for people, at most 4096 bytes.
    pub description: String,
    /// The disk's queue among the queues of the engine, the same number on every engine.
    pub queue: usize,
}

/// Exports of a server, and limits of its clients.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// At least one.
    pub exports: Vec<NbdExport>,
    /// Connections at once; more are closed at once, and so are those for which there is no memory.
    /// A quarter of them may be in the handshake; then others wait to be accepted, and a handshake
    /// may take one second.
    pub connections_max: usize,
    /// Requests in flight per connection, 1 to 500; more wait in the socket.
    pub requests_max: usize,
    /// Bytes in buffers per connection; what would go beyond waits. One request always fits.
    pub buffered_bytes_max: usize,
    /// Bytes in buffers of all connections together, beyond 256 KiB each; divided among the
    /// engines, but at least one largest request, of 32 MiB and its edges, for each of them. A connection
    /// that finds none left waits its turn, and its requests stay in the socket.
    pub buffered_bytes_total: usize,
    /// Whether the URI names the first export; clients that name none get it too.
    pub named_in_uri: bool,
    /// The users that may connect to the unix sockets that are made.
    pub access: SocketAccess,
    /// Time for the handshake, in seconds.
    pub handshake_timeout_s: u64,
    /// Time in which a client must take replies, or send the whole payload of a write that it
    /// began, in seconds, plus one for each MiB. Then it is dropped.
    pub transfer_timeout_s: u64,
    /// Serves every byte: clients may begin and end anywhere, also in the middle of a block, and are shown a size
    /// that is no multiple of one. All servers of a disk need the same lock, and nothing but these servers may write
    /// to the disk, which is resized by [`RangeLock::resize`]. `None`: requests are whole logical blocks, and so is
    /// the size.
    pub unaligned: Option<Arc<RangeLock>>,
    /// TLS, if it is offered.
    pub tls: Option<TlsOptions>,
    /// Whether clients of other machines may come without TLS.
    pub insecure: bool,
    /// An eventfd that does not block, written whenever the last client has disconnected, once one
    /// has chosen an export: one that only listed exports does not count.
    pub idle_event: Option<Arc<OwnedFd>>,
    /// An eventfd that does not block, written whenever
    /// [`NbdServer::take_rejections`](super::NbdServer::take_rejections) has some to report; without one there are
    /// none.
    pub rejection_event: Option<Arc<OwnedFd>>,
    /// Mechanisms that can be turned off, also while clients are served.
    pub switches: Arc<NbdSwitches>,
}

/// Mechanisms of a server that can be turned off and on while it runs. Clones of options share
/// them.
#[derive(Debug)]
pub struct NbdSwitches {
    /// Requests of a client that is busy reading replies are left to gather for a moment
    /// ([`NbdCounters::receive_backoffs`](super::NbdCounters::receive_backoffs)).
    pub receive_backoff: AtomicBool,
    /// Large reads are done in parts, for clients that understand that
    /// ([`NbdCounters::split_reads`](super::NbdCounters::split_reads)). Connections keep
    /// what it was when they opened.
    pub split_reads: AtomicBool,
}

impl Default for NbdSwitches {
    /// All on.
    fn default() -> NbdSwitches {
        let on = || AtomicBool::new(true);
        NbdSwitches { receive_backoff: on(), split_reads: on() }
    }
}

impl Default for NbdOptions {
    /// No export; 64 connections of 256 requests and 64 MiB, 256 MiB for all of them, 10 s to begin, 30 s to take a
    /// reply or send a payload; whole blocks only; unix sockets for their owner; no TLS; other machines are not let
    /// in without TLS; no event when clients have disconnected.
    fn default() -> NbdOptions {
        NbdOptions {
            exports: Vec::new(),
            connections_max: 64,
            requests_max: 256,
            buffered_bytes_max: 2 * PAYLOAD_MAX_BYTES as usize,
            buffered_bytes_total: 256 << 20,
            named_in_uri: false,
            access: SocketAccess::default(),
            handshake_timeout_s: 10,
            transfer_timeout_s: 30,
            unaligned: None,
            tls: None,
            insecure: false,
            idle_event: None,
            rejection_event: None,
            switches: Arc::default(),
        }
    }
}

impl NbdOptions {
    pub(super) fn validate(&self) -> Result<(), Error> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("nbd: {what}")));
        if self.exports.is_empty() {
            return invalid("a server needs at least one export");
        }
        let long = |text: &str| text.len() > STRING_MAX_BYTES;
        if self.exports.iter().any(|export| long(&export.name) || long(&export.description)) {
            return invalid("the name and the description of an export must be at most 4096 bytes long");
        }
        if !(1..=REQUESTS_MAX).contains(&self.requests_max) {
            return invalid("the requests per connection must be 1 to 500");
        }
        if self.connections_max == 0 || self.handshake_timeout_s == 0 || self.transfer_timeout_s == 0 {
            return invalid("the limit of connections and the timeouts must be at least 1");
        }
        Ok(())
    }

    /// Connections that may be in their handshake at once: so many strangers leave most of them to
    /// others.
    pub(super) fn handshakes_max(&self) -> usize {
        self.connections_max.div_ceil(4)
    }

    /// The export that the URI names, or nothing.
    pub(super) fn name_in_uri(&self) -> &str {
        self.exports.first().filter(|_| self.named_in_uri).map_or("", |export| &export.name)
    }

    pub(super) fn tls_policy(&self) -> TlsPolicy {
        match &self.tls {
            None => TlsPolicy::Off,
            Some(TlsOptions { required: false, .. }) => TlsPolicy::Optional,
            Some(TlsOptions { required: true, .. }) => TlsPolicy::Required,
        }
    }
}
