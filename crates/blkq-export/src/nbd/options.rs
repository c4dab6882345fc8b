//! The options of a server: its exports, and the limits for its clients.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blkq::{Error, ErrorKind};

use super::handshake::TlsPolicy;
use super::listener::SocketAccess;
use super::proto::{PAYLOAD_MAX_BYTES, STRING_MAX_BYTES};
use super::ranges::RangeLock;
use super::tls::TlsOptions;

/// Upper limit of the requests in flight per connection. Each reply takes up to two iovecs, and one send
/// takes at most 1024.
const REQUESTS_MAX: usize = 500;

/// A disk that clients can choose by name.
#[derive(Clone, Debug)]
pub struct NbdExport {
    /// The export name, at most 4096 bytes. A client that asks for the empty name gets the first export.
    pub name: String,
    /// A description for users, at most 4096 bytes. It may be empty.
    pub description: String,
    /// The index of the disk's queue among the queues of the engine. It must be the same on each engine of
    /// the server.
    pub queue: usize,
}

/// Exports of a server, and the limits for its clients.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The exports, at least one. The first is the default export.
    pub exports: Vec<NbdExport>,
    /// The number of connections at the same time, at least 1. Further connections are closed immediately, as
    /// are those for which there is no memory. At most a quarter of the connections, rounded up, may be in
    /// the handshake: then the server does not accept more, and limits a handshake to one second.
    pub connections_max: usize,
    /// Requests in flight per connection, 1 to 500. Further requests wait in the socket.
    pub requests_max: usize,
    /// I/O buffers per connection, in bytes. A request that would exceed the limit waits, unless it is the
    /// only one.
    pub buffered_bytes_max: usize,
    /// I/O buffers of all connections together, in bytes, in addition to 256 KiB per connection. Each engine
    /// gets an equal share, but at least the size of the largest request: 32 MiB and the blocks at its ends.
    /// A connection that exceeds the share waits until others release memory; its requests stay in the
    /// socket.
    pub buffered_bytes_total: usize,
    /// Whether the URI contains the name of the first export. Clients that ask for no name get this export as
    /// well.
    pub named_in_uri: bool,
    /// Group and mode of the unix socket that the server creates.
    pub access: SocketAccess,
    /// Time limit of the handshake, in seconds, at least 1.
    pub handshake_timeout_s: u64,
    /// Time in seconds, at least 1, in which a client must take a reply or send the payload of a write, plus
    /// one second for each MiB. A client that takes longer is disconnected.
    pub transfer_timeout_s: u64,
    /// Serves requests that are not aligned to logical blocks: clients see a minimum block size of 1 and the
    /// exact size of the device. All servers of one disk must share the same lock, nothing else may write to
    /// the disk, and the disk must be resized with [`RangeLock::resize`]. `None`: requests and the size are
    /// whole logical blocks.
    pub unaligned: Option<Arc<RangeLock>>,
    /// TLS for clients, `None` if the server does not offer it.
    pub tls: Option<TlsOptions>,
    /// Whether other machines may connect without TLS.
    pub insecure: bool,
    /// A non-blocking eventfd that is written when the last client has disconnected, once a client had chosen
    /// an export. A client that only listed the exports does not count.
    pub idle_event: Option<Arc<OwnedFd>>,
    /// A non-blocking eventfd that is written when
    /// [`NbdServer::take_rejections`](super::NbdServer::take_rejections) has something to return. `None`:
    /// rejections are not recorded.
    pub rejection_event: Option<Arc<OwnedFd>>,
    /// Mechanisms that can be switched while clients are connected.
    pub switches: Arc<NbdSwitches>,
}

/// Mechanisms that can be switched off and on while the server is running. Clones of the options share them.
/// Relaxed accesses suffice, because no other data depends on a switch.
#[derive(Debug)]
pub struct NbdSwitches {
    /// Delays the next receive for a moment if the client is busy reading replies, so that several requests
    /// arrive together ([`NbdCounters::receive_backoffs`](super::NbdCounters::receive_backoffs)).
    pub receive_backoff: AtomicBool,
    /// Splits large reads into parts if the client negotiated structured replies
    /// ([`NbdCounters::split_reads`](super::NbdCounters::split_reads)). A change applies to clients that
    /// connect afterwards.
    pub split_reads: AtomicBool,
}

impl Default for NbdSwitches {
    /// All mechanisms are switched on.
    fn default() -> NbdSwitches {
        let on = || AtomicBool::new(true);
        NbdSwitches { receive_backoff: on(), split_reads: on() }
    }
}

impl Default for NbdOptions {
    /// No export; 64 connections with 256 requests and 64 MiB each, 256 MiB together; 10 s for the handshake,
    /// 30 s to take a reply or send a payload; aligned requests only; unix sockets for their owner only; no
    /// TLS, and no other machine may connect without it; no events.
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

    /// Connections that may be in their handshake at the same time. Clients that never finish it leave the
    /// other connections to those that do.
    pub(super) fn handshakes_max(&self) -> usize {
        self.connections_max.div_ceil(4)
    }

    /// The export name for the URI, empty if the URI contains none.
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
