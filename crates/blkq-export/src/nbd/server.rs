//! The server as its owner uses it: start, observe, stop.

use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use blkq::sync::{Mutex, lock};
use blkq::{EngineHandle, Error, ErrorKind, SourceId, StoppingSource};

use super::handshake::TlsPolicy;
use super::options::NbdOptions;
use super::shared::Message;
use super::source::NbdSource;
use super::status::{ConnectionInfo, NbdCounters, Paused, Registry, Rejection};
use crate::listener::{Listen, ListenAddress, Listener, SocketFile};

/// A running server. Stop it before its engines stop. If it is dropped instead, it keeps running until its
/// engines exit, but its unix socket is removed.
pub struct NbdServer {
    uri: String,
    /// Removes the unix socket when it is dropped. The server keeps it, as engines must not access the file
    /// system. `None` once the server has stopped.
    listen_address: Mutex<Option<ListenAddress>>,
    registry: Arc<Registry>,
    /// The accepting source first. Empty after a stop: the engines may give the IDs to other sources.
    sources: Mutex<Vec<(EngineHandle, SourceId)>>,
}

impl NbdServer {
    /// Starts a server that accepts clients of `listen` on the first of `engines` and gives each client to
    /// the engine that has the fewest. Clients can connect when this returns.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Invalid`] for options out of range; [`ErrorKind::Busy`] if another server is
    /// listening; [`ErrorKind::Exposed`] if other machines could connect without TLS and
    /// [`NbdOptions::insecure`] is not set; or the error of the system.
    ///
    /// # Panics
    /// If `engines` is empty.
    pub fn start(listen: Listen, options: NbdOptions, engines: &[EngineHandle]) -> Result<NbdServer, Error> {
        options.validate()?;
        let Listener { socket, listen_address } = listen.open(options.access, options.address_wait)?;
        check_reach(&options, &listen_address)?;
        let name = options.exports.first().filter(|_| options.named_in_uri).map_or("", |export| &export.name);
        let uri = uri(&listen_address, options.tls_policy() == TlsPolicy::Required, name);
        // A single connection is served by one engine.
        let engines = if listen_address.is_connected { &engines[..1] } else { engines };
        let registry = Arc::new(Registry::new(options, engines.len()));
        let mut sources: Vec<(EngineHandle, SourceId)> = Vec::new();
        for (engine, handle) in engines.iter().enumerate() {
            let registry = registry.clone();
            let source = handle.add_source(move || Box::new(NbdSource::new(registry, engine)));
            let id = source
                .inspect_err(|_| sources.iter().for_each(|(handle, id)| handle.stop_source(*id, true)))?;
            sources.push((handle.clone(), id));
        }
        let message = if listen_address.is_connected {
            registry.admit(String::new);
            Message::Client(socket)
        } else {
            Message::Listen(socket, sources[1..].to_vec())
        };
        let (handle, id) = &sources[0];
        handle.send(*id, Box::new(message));
        let listen_address = Mutex::new(Some(listen_address));
        Ok(NbdServer { uri, listen_address, registry, sources: Mutex::new(sources) })
    }

    /// The URI for clients, such as `nbd+unix:///?socket=/run/blkq/disk.nbd`; `nbds` if they must use TLS.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The address of the server, if other machines can connect to it.
    pub fn beyond_this_machine(&self) -> Option<SocketAddr> {
        lock(&self.listen_address).as_ref()?.beyond_this_machine()
    }

    /// The address of the server, if it is a loopback address: every user of this machine can connect to it.
    pub fn on_loopback(&self) -> Option<SocketAddr> {
        lock(&self.listen_address).as_ref()?.on_loopback()
    }

    /// The path of the unix socket, if every user of this machine could connect to it when the server opened it.
    pub fn open_to_all_users(&self) -> Option<String> {
        lock(&self.listen_address).as_ref()?.open_to_all.clone()
    }

    /// The number of clients that are connected now.
    pub fn connection_count(&self) -> usize {
        self.registry.open()
    }

    /// The current connections, oldest first.
    pub fn connections(&self) -> Vec<ConnectionInfo> {
        self.registry.list()
    }

    /// Takes the clients that were rejected or disconnected since the last call, with the reasons: at most
    /// eight a minute for each kind of reason. Empty unless [`NbdOptions::rejection_event`] is set.
    pub fn take_rejections(&self) -> Vec<Rejection> {
        self.registry.rejections.take()
    }

    /// Counters since the server started, over all connections.
    pub fn counters(&self) -> NbdCounters {
        self.registry.counters()
    }

    /// Rejects new clients until the guard is dropped. Returns `None` if clients are connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.registry.pause_if_empty()
    }

    /// Stops the server: its socket is removed when this returns. With `force`, clients are disconnected:
    /// requests in flight complete, except block status requests that have not started, and a client that does
    /// not take a reply within a second does not get it.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if clients are connected and `force` is not set; the server keeps running.
    pub fn stop(&self, force: bool) -> Result<(), Error> {
        self.begin_stop(force)?.wait();
        Ok(())
    }

    /// Begins to stop as [`NbdServer::stop`] does, with its errors, so that several servers can stop
    /// together.
    pub fn begin_stop(&self, force: bool) -> Result<StoppingServer<'_>, Error> {
        if let Err(clients) = self.registry.close(force) {
            let message = match clients {
                1 => "1 client is connected".to_owned(),
                count => format!("{count} clients are connected"),
            };
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let sources = std::mem::take(&mut *lock(&self.sources));
        let sources = sources.into_iter().map(|(handle, id)| handle.begin_stop(id, force)).collect();
        Ok(StoppingServer { server: self, sources })
    }
}

/// A server that is stopping on its engines: see [`NbdServer::begin_stop`].
#[must_use = "the server has stopped once this was waited for"]
pub struct StoppingServer<'a> {
    server: &'a NbdServer,
    sources: Vec<StoppingSource>,
}

impl StoppingServer<'_> {
    /// Waits until all clients are disconnected, then removes the socket.
    pub fn wait(self) {
        self.sources.into_iter().for_each(StoppingSource::wait);
        drop(lock(&self.server.listen_address).take());
    }
}

fn check_reach(options: &NbdOptions, listen_address: &ListenAddress) -> Result<(), Error> {
    let Some(address) = listen_address.beyond_this_machine() else { return Ok(()) };
    if options.insecure || options.tls_policy() == TlsPolicy::Required {
        return Ok(());
    }
    let message =
        format!("other machines can connect to {address} and could read and change the device without TLS");
    Err(Error::new(ErrorKind::Exposed, message))
}

/// The URI of the export with this name, or of the server if the name is empty. `tls`: clients must use TLS.
fn uri(address: &ListenAddress, tls: bool, export: &str) -> String {
    let scheme = if tls { "nbds" } else { "nbd" };
    let export = escaped(export.as_bytes());
    match (&address.file, address.tcp) {
        _ if address.is_connected => format!("{scheme} on an inherited connection"),
        (Some(SocketFile { path, .. }), _) => {
            format!("{scheme}+unix:///{export}?socket={}", escaped(path.as_os_str().as_bytes()))
        }
        (None, Some(tcp)) if !address.is_inherited && export.is_empty() => format!("{scheme}://{tcp}"),
        (None, Some(tcp)) if !address.is_inherited => format!("{scheme}://{tcp}/{export}"),
        (None, _) => format!("{scheme} on an inherited socket"),
    }
}

/// Percent-encodes `text` for a URI.
fn escaped(text: &[u8]) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let escaped = text.iter().map(|byte| match plain(*byte) {
        true => char::from(*byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    escaped.collect()
}
