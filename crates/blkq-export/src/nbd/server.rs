//! The server as its owner sees it: start, look, stop.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};

use blkq::{EngineHandle, Error, ErrorKind, SourceId};

use super::handshake::TlsPolicy;
use super::listener::{Listen, Opened, Place, Socket, SocketAccess};
use super::proto::{PAYLOAD_MAX_BYTES, STRING_MAX_BYTES};
use super::ranges::RangeLock;
use super::rejections::Rejection;
use super::source::{Arrivals, Loads, NbdSource};
use super::status::{ConnectionInfo, NbdCounters, Paused, Registry};
use super::tls::TlsOptions;

/// Most requests in flight per connection: two iovecs each, of the 1024 that one send takes.
const REQUESTS_MAX: usize = 500;

/// A disk under a name.
#[derive(Clone, Debug)]
pub struct NbdExport {
    /// What clients ask for, at most 4096 bytes. The first export also goes by the empty name.
    pub name: String,
    /// A line for people, at most 4096 bytes.
    pub description: String,
    /// The disk's queue among the queues of the engine, the same number on every engine.
    pub queue: usize,
}

/// What is served, and how much of it one may have.
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
    /// engines, but at least one largest request, of 32 MiB and its edges, for each of them. Who finds none
    /// left waits in line, and its requests in the socket.
    pub buffered_bytes_total: usize,
    /// Whether the URI names the first export; clients that name none get it too.
    pub named_in_uri: bool,
    /// Who may connect to the unix sockets that are made.
    pub access: SocketAccess,
    /// Time for the handshake, in seconds.
    pub handshake_timeout_s: u64,
    /// Time in which a client must take replies, or send the whole payload of a write that it
    /// began, in seconds, plus one for each MiB. Then it is dropped.
    pub transfer_timeout_s: u64,
    /// Serves every byte: clients may begin and end anywhere, also in the middle of a block, and
    /// are shown a size that is no multiple of one. All servers of a disk need the same lock, and
    /// nothing but these servers may write to the disk, which is resized by [`RangeLock::resize`]. `None`: requests are whole logical blocks,
    /// and so is the size.
    pub unaligned: Option<Arc<RangeLock>>,
    /// TLS, if it is offered.
    pub tls: Option<TlsOptions>,
    /// Whether clients of other machines may come without TLS.
    pub insecure: bool,
    /// An eventfd that does not block, written whenever the last client has gone, once one
    /// has chosen an export: who only asked what there is was no client.
    pub idle_event: Option<Arc<OwnedFd>>,
    /// An eventfd that does not block, written whenever [`NbdServer::take_rejections`] has some to
    /// report; without one there are none.
    pub rejection_event: Option<Arc<OwnedFd>>,
    /// Mechanisms that can be turned off, also while clients are served.
    pub switches: Arc<NbdSwitches>,
}

/// Mechanisms of a server that can be turned off and on while it runs. Clones of options share
/// them.
#[derive(Debug)]
pub struct NbdSwitches {
    /// A device that completes its work in bursts is given half of it at a time
    /// ([`NbdCounters::paced_requests`]).
    pub pacing: AtomicBool,
    /// Requests of a client that is busy reading replies are left to gather for a moment
    /// ([`NbdCounters::receive_backoffs`]).
    pub receive_backoff: AtomicBool,
}

impl Default for NbdSwitches {
    /// All on.
    fn default() -> NbdSwitches {
        NbdSwitches { pacing: AtomicBool::new(true), receive_backoff: AtomicBool::new(true) }
    }
}

impl Default for NbdOptions {
    /// No export; 64 connections of 256 requests and 64 MiB, 256 MiB for all of them, 10 s to
    /// begin, 30 s to take a reply or send a payload; whole blocks only; unix sockets for their owner; no TLS; other machines are not let in without TLS;
    /// nobody is told when clients are gone.
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
    fn validate(&self) -> Result<(), Error> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("nbd: {what}")));
        if self.exports.is_empty() {
            return invalid("there is nothing to export");
        }
        let long = |text: &str| text.len() > STRING_MAX_BYTES;
        if self.exports.iter().any(|export| long(&export.name) || long(&export.description)) {
            return invalid("names and descriptions of exports have at most 4096 bytes");
        }
        if !(1..=REQUESTS_MAX).contains(&self.requests_max) {
            return invalid("give 1 to 500 requests per connection");
        }
        if self.connections_max == 0 || self.handshake_timeout_s == 0 || self.transfer_timeout_s == 0 {
            return invalid("limits of connections and times are at least 1");
        }
        Ok(())
    }

    /// Connections that may be in their handshake at once: so many strangers leave most of them to
    /// others.
    pub(super) fn handshakes_max(&self) -> usize {
        self.connections_max.div_ceil(4)
    }

    /// The export that the URI names, or nothing.
    fn name_in_uri(&self) -> &str {
        self.exports.first().filter(|_| self.named_in_uri).map_or("", |export| &export.name)
    }

    pub(super) fn tls_policy(&self) -> TlsPolicy {
        match &self.tls {
            None => TlsPolicy::Off,
            Some(TlsOptions { required: false, .. }) => TlsPolicy::Optional,
            Some(TlsOptions { required: true, .. }) => TlsPolicy::Required,
        }
    }

    /// Refuses a place that strangers reach, unless they are kept out or let in on purpose.
    fn check_reach(&self, place: &Place) -> Result<(), Error> {
        let Some(address) = place.beyond_this_machine() else { return Ok(()) };
        if self.insecure || self.tls_policy() == TlsPolicy::Required {
            return Ok(());
        }
        let message = format!(
            "other machines reach {address}, where anybody could read and change the device: demand TLS (--tls require --tls-certificates DIR), listen on 127.0.0.1 or a unix socket, or allow it with --insecure"
        );
        Err(Error::new(ErrorKind::Denied, message))
    }
}

/// The server's part on a simulated engine, and a client for it as a message to it.
#[cfg(simulation)]
pub mod simulated {
    use std::any::Any;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::nbd::source::Message;

    /// A server without a socket to listen on.
    pub fn source(options: NbdOptions) -> Box<dyn blkq::Source> {
        let loads: Loads = Box::new([AtomicUsize::new(0)]);
        let registry = Arc::new(Registry::new(None, None));
        Box::new(NbdSource::new(Arc::new(options), registry, Arc::new(loads), 0, Arrivals::Elsewhere))
    }

    /// Brings it a client.
    pub fn client(socket: OwnedFd) -> Box<dyn Any + Send> {
        Box::new(Message::Client(socket))
    }
}

/// A running server. Stop it before its engines; dropped, it goes on until they end, but its
/// unix socket is removed.
pub struct NbdServer {
    address: String,
    /// Kept here, as no engine shall touch the file system. Gone once stopped.
    place: Mutex<Option<Place>>,
    registry: Arc<Registry>,
    /// The source that accepts is the first. Empty once stopped: its numbers may then be
    /// those of others.
    sources: Mutex<Vec<(EngineHandle, SourceId)>>,
}

impl NbdServer {
    /// Serves clients of `listen` on `engines`, the first of which accepts them and gives
    /// each to the one with the fewest. Clients can connect when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for options out of range, [`ErrorKind::Busy`] if somebody
    /// listens there already, and what the system says.
    ///
    /// # Panics
    /// If there is no engine.
    pub fn start(listen: Listen, options: NbdOptions, engines: &[EngineHandle]) -> Result<NbdServer, Error> {
        options.validate()?;
        let Opened { socket, place } = listen.open(options.access)?;
        options.check_reach(&place)?;
        let address = place.uri(options.tls_policy() == TlsPolicy::Required, options.name_in_uri());
        let registry = Arc::new(Registry::new(options.idle_event.clone(), options.rejection_event.clone()));
        let options = Arc::new(options);
        // A single client needs no more than one engine.
        let engines = if matches!(socket, Socket::Connected(_)) { &engines[..1] } else { engines };
        let loads: Arc<Loads> = Arc::new(engines.iter().map(|_| AtomicUsize::new(0)).collect());
        let add = |engine: usize, arrivals: Arrivals| {
            let (options, registry, loads) = (options.clone(), registry.clone(), loads.clone());
            let make = move || Box::new(NbdSource::new(options, registry, loads, engine, arrivals)) as _;
            let handle = engines[engine].clone();
            handle.add_source(make).map(|id| (handle, id))
        };
        let mut others = Vec::new();
        let first = (1..engines.len())
            .try_for_each(|engine| add(engine, Arrivals::Elsewhere).map(|source| others.push(source)))
            .and_then(|()| {
                let arrivals = match socket {
                    Socket::Listening(listener) => Arrivals::Listener(listener, others.clone()),
                    Socket::Connected(client) => Arrivals::Client(Some(client)),
                };
                add(0, arrivals)
            });
        match first {
            Ok(first) => {
                others.insert(0, first);
                let place = Mutex::new(Some(place));
                Ok(NbdServer { address, place, registry, sources: Mutex::new(others) })
            }
            Err(error) => {
                others.iter().for_each(|(handle, id)| handle.stop_source(*id, true));
                Err(error)
            }
        }
    }

    /// Where clients connect: `nbd+unix:///?socket=/run/blkq/disk.nbd`, `nbd://127.0.0.1:10809`; with
    /// `nbds` if they must use TLS.
    pub fn uri(&self) -> &str {
        &self.address
    }

    /// The address, if other machines may reach it.
    pub fn beyond_this_machine(&self) -> Option<SocketAddr> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.beyond_this_machine()
    }

    /// The address, if it is one of loopback: all users of this machine may connect to it.
    pub fn on_loopback(&self) -> Option<SocketAddr> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.on_loopback()
    }

    /// A unix socket, if all users of this machine may connect to it.
    pub fn open_to_all_users(&self) -> Option<String> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.open_to_all_users()
    }

    /// Connections that are there now.
    pub fn connection_count(&self) -> usize {
        self.registry.open()
    }

    /// The connections, oldest first.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.registry.list()
    }

    /// Connections turned away because there were too many, or no memory for one more, or the
    /// server was going down.
    pub fn refused_connections(&self) -> u64 {
        self.registry.refused()
    }

    /// The clients turned away or dropped since the last call, and why: a few a minute for each
    /// reason, if [`NbdOptions::rejection_event`] is set.
    pub fn take_rejections(&self) -> Vec<Rejection> {
        self.registry.rejections.take()
    }

    /// What was counted of all connections since the server started.
    pub fn counters(&self) -> NbdCounters {
        self.registry.counters()
    }

    /// Turns clients away that connect, until what this returns is dropped; `None`, and nothing has
    /// changed, if clients are connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.registry.pause_if_empty()
    }

    /// Ends the server: nobody new is let in, and its socket is gone when this returns.
    /// With `force` clients are dropped when their I/O in flight has ended.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if clients are connected and `force` is not set; the server goes on.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        if force {
            self.registry.close();
        } else if !self.registry.close_if_empty() {
            let message =
                format!("{} clients are connected: disconnect them or use --force", self.connection_count());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let sources = std::mem::take(&mut *self.sources.lock().unwrap_or_else(PoisonError::into_inner));
        for (handle, id) in sources {
            handle.stop_source(id, force);
        }
        drop(self.place.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
    }
}
