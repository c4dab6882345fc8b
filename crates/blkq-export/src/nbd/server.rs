//! The server as its owner sees it: start, observe, stop.

use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use blkq::{EngineHandle, Error, ErrorKind, SourceId, StoppingSource};

use super::handshake::TlsPolicy;
use super::listener::{Listen, ListenAddress, Opened, Socket};
use super::options::NbdOptions;
use super::rejections::Rejection;
use super::source::{ClientOrigin, Loads, NbdSource};
use super::status::{ConnectionInfo, NbdCounters, Paused, Registry};

/// The server's part on a simulated engine, and a client for it as a message to it.
#[cfg(simulation)]
pub mod simulated {
    use std::any::Any;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::nbd::shared::Message;

    /// A server without a socket to listen on.
    pub fn source(options: NbdOptions) -> Box<dyn blkq::Source> {
        let loads: Loads = Box::new([AtomicUsize::new(0)]);
        let registry = Arc::new(Registry::new(None, None));
        Box::new(NbdSource::new(Arc::new(options), registry, Arc::new(loads), 0, ClientOrigin::Elsewhere))
    }

    /// Brings it a client.
    pub fn client(socket: OwnedFd) -> Box<dyn Any + Send> {
        Box::new(Message::Client(socket))
    }
}

/// A running server. Stop it before its engines; dropped, it keeps running until they exit, but its
/// unix socket is removed.
pub struct NbdServer {
    address: String,
    /// Kept here, as no engine shall touch the file system. `None` once stopped.
    place: Mutex<Option<ListenAddress>>,
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
    /// [`ErrorKind::Invalid`] for options out of range, [`ErrorKind::Busy`] if a server listens there
    /// already, [`ErrorKind::Exposed`] if other machines would be let in without
    /// [`NbdOptions::insecure`] or TLS, and the errors of the system.
    ///
    /// # Panics
    /// If there is no engine.
    pub fn start(listen: Listen, options: NbdOptions, engines: &[EngineHandle]) -> Result<NbdServer, Error> {
        options.validate()?;
        let Opened { socket, place } = listen.open(options.access)?;
        check_reach(&options, &place)?;
        let address = place.uri(options.tls_policy() == TlsPolicy::Required, options.name_in_uri());
        let registry = Arc::new(Registry::new(options.idle_event.clone(), options.rejection_event.clone()));
        let options = Arc::new(options);
        // A single client needs no more than one engine.
        let engines = if matches!(socket, Socket::Connected(_)) { &engines[..1] } else { engines };
        let loads: Arc<Loads> = Arc::new(engines.iter().map(|_| AtomicUsize::new(0)).collect());
        let add = |engine: usize, client_origin: ClientOrigin| {
            let (options, registry, loads) = (options.clone(), registry.clone(), loads.clone());
            let make = move || Box::new(NbdSource::new(options, registry, loads, engine, client_origin)) as _;
            let handle = engines[engine].clone();
            handle.add_source(make).map(|id| (handle, id))
        };
        let mut others = Vec::new();
        let first = (1..engines.len())
            .try_for_each(|engine| add(engine, ClientOrigin::Elsewhere).map(|source| others.push(source)))
            .and_then(|()| {
                let client_origin = match socket {
                    Socket::Listening(listener) => ClientOrigin::Listener(listener, others.clone()),
                    Socket::Connected(client) => ClientOrigin::Client(Some(client)),
                };
                add(0, client_origin)
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
    /// server was stopping.
    pub fn refused_connections(&self) -> u64 {
        self.registry.refused()
    }

    /// The clients turned away or dropped since the last call, and why: a few a minute for each
    /// reason, if [`NbdOptions::rejection_event`] is set.
    pub fn take_rejections(&self) -> Vec<Rejection> {
        self.registry.rejections.take()
    }

    /// Counters of all connections since the server started.
    pub fn counters(&self) -> NbdCounters {
        self.registry.counters()
    }

    /// Turns clients away that connect, until what this returns is dropped; `None`, and nothing has
    /// changed, if clients are connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.registry.pause_if_empty()
    }

    /// Stops the server: no more clients are let in, and its socket is removed when this returns.
    /// With `force` clients are dropped: no further request is read, those in flight complete, and a client that does
    /// not take a reply within a second gets none.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if clients are connected and `force` is not set; the server keeps running.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        self.begin_stop(force)?.wait();
        Ok(())
    }

    /// As [`NbdServer::stop`], but does not wait: so that several servers stop to serve together.
    ///
    /// # Errors
    /// As [`NbdServer::stop`].
    pub fn begin_stop(&self, force: bool) -> Result<StoppingServer<'_>, Error> {
        if force {
            self.registry.close();
        } else if !self.registry.close_if_empty() {
            let message = match self.connection_count() {
                1 => "1 client is connected".to_owned(),
                count => format!("{count} clients are connected"),
            };
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let sources = std::mem::take(&mut *self.sources.lock().unwrap_or_else(PoisonError::into_inner));
        let sources = sources.into_iter().map(|(handle, id)| handle.begin_stop(id, force)).collect();
        Ok(StoppingServer { server: self, sources })
    }
}

/// A server that is stopping on each of its engines ([`NbdServer::begin_stop`]).
#[must_use = "the server has stopped once this was waited for"]
pub struct StoppingServer<'a> {
    server: &'a NbdServer,
    sources: Vec<StoppingSource>,
}

impl StoppingServer<'_> {
    /// Waits until no client is connected any more, and removes the socket.
    pub fn wait(self) {
        self.sources.into_iter().for_each(StoppingSource::wait);
        drop(self.server.place.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// Rejects an address that strangers reach, unless they are kept out or let in on purpose.
fn check_reach(options: &NbdOptions, place: &ListenAddress) -> Result<(), Error> {
    let Some(address) = place.beyond_this_machine() else { return Ok(()) };
    if options.insecure || options.tls_policy() == TlsPolicy::Required {
        return Ok(());
    }
    let message =
        format!("other machines can connect to {address} and could read and change the device without TLS");
    Err(Error::new(ErrorKind::Exposed, message))
}
