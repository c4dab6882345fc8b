//! The options of a server: its exports, and the limits for its clients.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use blkq::{Error, ErrorKind};

use super::handshake::TlsPolicy;
use super::proto::{PAYLOAD_MAX_BYTES, STRING_MAX_BYTES};
use super::ranges::RangeLock;
use super::tls::TlsOptions;
use crate::listener::SocketAccess;

/// Limit of [`NbdOptions::requests_max`]: a reply takes up to two iovecs, and one send at most 1024.
const REQUESTS_MAX: usize = 500;

/// A disk that clients can choose by name.
#[derive(Clone, Debug)]
pub struct NbdExport {
    /// The export name, at most 4096 bytes. A client that asks for the empty name gets the first export.
    pub name: String,
    /// A description for users, at most 4096 bytes. It may be empty.
    pub description: String,
    /// Index of the disk's queue in the engine, the same on each engine of the server.
    pub queue: usize,
}

/// Exports of a server, and the limits for its clients.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// The exports, at least one. The first is the default export.
    pub exports: Vec<NbdExport>,
    /// Maximum number of connections, at least 1. Further ones are closed. At most a quarter, rounded up, may
    /// be in the handshake; then the server stops accepting, and limits a handshake to one second.
    pub connections_max: usize,
    /// Requests in flight per connection, 1 to 500. Further requests wait in the socket.
    pub requests_max: usize,
    /// I/O buffers per connection, in bytes. A request beyond the limit waits, unless it is the only one.
    pub buffered_bytes_max: usize,
    /// I/O buffers of all connections together, in bytes, in addition to 256 KiB per connection. Each engine
    /// gets an equal share, at least the largest request (32 MiB and the blocks at its ends). A connection
    /// beyond the share waits until others release memory, except for one read at a time.
    pub buffered_bytes_total: usize,
    /// Whether the URI names the first export, which clients also get if they ask for no name.
    pub named_in_uri: bool,
    /// Group and mode of the unix socket that the server creates.
    pub access: SocketAccess,
    /// How long to wait for the address of a server whose process was killed. The server waits for clients in its
    /// io_uring, which the kernel closes only some time after the process has exited. For a TCP address, which may
    /// belong to any server, the time applies while the address is in use.
    pub address_wait: Duration,
    /// Time limit of the handshake, in seconds, at least 1.
    pub handshake_timeout_s: u64,
    /// Time limit in seconds, at least 1, to take a reply or send a payload, plus one second for each MiB.
    pub transfer_timeout_s: u64,
    /// Serves unaligned requests: clients see a minimum block size of 1 and the exact device size. All
    /// servers of a disk must share one lock, nothing else may write to the disk, and [`RangeLock::resize`]
    /// must resize it. `None`: requests and the size are whole logical blocks.
    pub unaligned: Option<Arc<RangeLock>>,
    /// TLS for clients, `None` if the server does not offer it.
    pub tls: Option<TlsOptions>,
    /// Whether other machines may connect without TLS.
    pub insecure: bool,
    /// A non-blocking eventfd, written when the last client disconnects, once one has chosen an export.
    pub idle_event: Option<Arc<OwnedFd>>,
    /// A non-blocking eventfd, written when [`NbdServer::take_rejections`](super::NbdServer::take_rejections)
    /// has something to return. `None`: rejections are not recorded.
    pub rejection_event: Option<Arc<OwnedFd>>,
    /// Mechanisms that can be switched while clients are connected.
    pub switches: Arc<NbdSwitches>,
}

/// Mechanisms to switch at run time. Relaxed accesses suffice: no other data depends on a switch.
#[derive(Debug)]
pub struct NbdSwitches {
    /// Delays receives of a client that is busy reading replies, so that several requests arrive together.
    pub receive_backoff: AtomicBool,
    /// Splits large reads into parts, for clients that negotiated structured replies. A change applies to
    /// clients that connect afterwards.
    pub split_reads: AtomicBool,
}

impl Default for NbdSwitches {
    fn default() -> NbdSwitches {
        let on = || AtomicBool::new(true);
        NbdSwitches { receive_backoff: on(), split_reads: on() }
    }
}

impl Default for NbdOptions {
    /// No export; 64 connections with 256 requests and 64 MiB each, 256 MiB together; 10 s for the handshake,
    /// 30 s to take a reply or send a payload; aligned requests only; unix sockets for their owner only; an
    /// address that is free; no TLS, and no other machine may connect without it; no events.
    fn default() -> NbdOptions {
        NbdOptions {
            exports: Vec::new(),
            connections_max: 64,
            requests_max: 256,
            buffered_bytes_max: 2 * PAYLOAD_MAX_BYTES as usize,
            buffered_bytes_total: 256 << 20,
            named_in_uri: false,
            access: SocketAccess::default(),
            address_wait: Duration::ZERO,
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

    pub(super) fn tls_policy(&self) -> TlsPolicy {
        let offered = |tls: &TlsOptions| if tls.required { TlsPolicy::Required } else { TlsPolicy::Optional };
        self.tls.as_ref().map_or(TlsPolicy::Off, offered)
    }
}
