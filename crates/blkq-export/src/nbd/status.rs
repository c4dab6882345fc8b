//! The connections and counters of a server, as its owner reads them.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use blkq::sync::{Mutex, MutexGuard, lock};

use crate::counters::counters;
use crate::reports::{Reports, signal};

use super::options::NbdOptions;

/// The state of one connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// Number of the connection, counted from 1 since the server started.
    pub id: u64,
    /// `pid 123, uid 0` for a unix socket (pid 0 if its PID namespace is not visible), or address and port.
    pub peer: String,
    /// The export that the client chose; `None` during the handshake.
    pub export: Option<String>,
    /// Time since the client connected.
    pub age: Duration,
    /// Counters of this connection.
    pub counters: NbdCounters,
    /// Requests that were received and whose replies were not sent.
    pub in_flight: u64,
}

/// The reason why the server rejected or disconnected a client.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// The given maximum number of connections was reached.
    TooMany(usize),
    /// There was no memory for another connection.
    NoMemory,
    /// The server requires TLS and the client did not ask for it.
    WithoutTls,
    /// TLS failed; the text says how.
    Tls(String),
    /// The client broke the protocol in the handshake.
    Handshake,
    /// The client broke the protocol in the transmission phase.
    Request,
    /// The client did not finish its handshake, send a payload or take its replies in time.
    Late,
}

/// A client that the server rejected or disconnected.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Rejection {
    /// The client: `pid 123, uid 0` for a unix socket, or its address and port.
    pub peer: String,
    /// The reason of the rejection.
    pub reason: Reason,
    /// The number of earlier rejections of this kind that were counted only.
    pub unreported: u64,
    /// Whether further rejections of this kind are counted only, until a minute has passed.
    pub last: bool,
}

counters! {
    /// Counters since the server started, over all its connections, open and closed.
    pub struct NbdCounters, published as PublishedCounters {
        /// Connections that were accepted, including those that are closed.
        connections: "NBD connections accepted.", row 0 "connections";
        /// Connections that were rejected, because there were too many, there was no memory for another one, or
        /// the server was stopping.
        refused_connections: "NBD connections refused.", row 0 "rejected";
        /// Connections that were closed because the client broke the protocol.
        violations: "NBD connections closed after a protocol violation.", row 0 "protocol errors";
        /// Connections that were closed because the client did not finish its handshake, send a payload or take
        /// its replies in time.
        timeouts: "NBD connections closed after a timeout.", row 0 "timeouts";
        /// Requests received in the transmission phase.
        requests: "NBD requests received.", row 1 "requests";
        /// Requests that were answered with an error, from the server, the block layer or the device.
        errors: "NBD requests answered with an error.", row 1 "errors";
        /// Requests that the server rejected before they reached the block layer, because they were malformed,
        /// not allowed, or outside of the device. They are also counted as errors.
        refused_requests: "NBD requests rejected before they became I/Os.", row 1 "invalid requests";
        /// Data of successful reads, in bytes.
        read_bytes: "Bytes read by NBD clients.";
        /// Data of successful writes, in bytes.
        written_bytes: "Bytes written by NBD clients.";
        /// Reads that were split into parts.
        split_reads: "NBD reads served in parts.", row 2 "split reads";
        /// Receives that were delayed because the client was busy reading replies.
        receive_backoffs: "Receives delayed while the client read replies.", row 2 "receive back-offs";
        /// Receive operations in the transmission phase.
        receives: "Receive operations on the sockets of NBD clients.", row 2 "receives";
        /// Send operations in the transmission phase.
        sends: "Send operations on the sockets of NBD clients.", row 2 "sends";
    }
}

/// The state of one connection, which other threads read. Relaxed accesses to the counters suffice, as each is
/// read on its own.
pub(super) struct ConnectionStatus {
    pub id: u64,
    pub peer: String,
    /// The export that the client chose.
    pub export: OnceLock<String>,
    since: Instant,
    /// The counters, which the engine stores once per turn.
    published: PublishedCounters,
    in_flight: AtomicU64,
}

impl ConnectionStatus {
    /// Publishes the counters and the number of requests in flight.
    pub fn publish(&self, counters: &NbdCounters, in_flight: usize) {
        self.published.store(counters);
        self.in_flight.store(in_flight as u64, Relaxed);
    }
}

#[derive(Default)]
struct Connections {
    open: Vec<Arc<ConnectionStatus>>,
    /// The number of admitted connections of each engine, including those that are not in `open` yet.
    admitted: Vec<usize>,
    /// The number of open connections whose client has chosen an export.
    established: usize,
    /// The number of [`Paused`] guards. While one exists, no connections are admitted.
    paused: usize,
    /// The server is stopping: connections are no longer admitted.
    stopping: bool,
    /// At least one client has chosen an export and disconnected.
    served: bool,
    /// Counters of closed connections, and of events that belong to no connection.
    sum: NbdCounters,
}

/// The state of a server that its engines share.
pub(super) struct Registry {
    pub options: NbdOptions,
    /// The number of engines.
    pub engines: usize,
    /// Held only to change, copy or count, never while waiting. Engines lock it when they accept and when a
    /// connection opens or closes.
    connections: Mutex<Connections>,
    pub rejections: Reports<Rejection, Reason>,
}

/// Keeps a server without clients from accepting any, until this guard is dropped.
pub struct Paused<'a>(&'a Registry);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        lock(&self.0.connections).paused -= 1;
    }
}

impl Connections {
    fn count(&self) -> usize {
        self.admitted.iter().sum()
    }
}

impl Registry {
    pub fn new(options: NbdOptions, engines: usize) -> Registry {
        let rejections = Reports::new(options.rejection_event.clone());
        let connections = Connections { admitted: vec![0; engines], ..Connections::default() };
        Registry { options, engines, connections: Mutex::new(connections), rejections }
    }

    /// Decides whether one more connection is accepted. If so, returns the engine that has the fewest, and counts the
    /// connection as open until [`Registry::unregister`] or [`Registry::reject_admitted`] is called.
    pub fn admit(&self, peer: impl FnOnce() -> String) -> Option<usize> {
        let connections_max = self.options.connections_max;
        let mut connections = lock(&self.connections);
        let is_full = connections.count() >= connections_max;
        if !is_full && !connections.stopping && connections.paused == 0 {
            let engine = (0..self.engines).min_by_key(|engine| connections.admitted[*engine])?;
            connections.admitted[engine] += 1;
            return Some(engine);
        }
        connections.sum.refused_connections += 1;
        drop(connections);
        if is_full {
            self.report(Reason::TooMany(connections_max), peer);
        }
        None
    }

    pub fn reject_admitted(&self, engine: usize) {
        let mut connections = lock(&self.connections);
        connections.sum.refused_connections += 1;
        self.leave(connections, engine);
    }

    /// Reports that `peer` was rejected or disconnected, unless there were too many.
    pub fn report(&self, reason: Reason, peer: impl FnOnce() -> String) {
        let kind = std::mem::discriminant(&reason);
        let rejection = |unreported, last| Rejection { peer: peer(), reason, unreported, last };
        self.rejections.push(kind, rejection);
    }

    /// Counts one admitted connection less, and signals the idle event if it was the last one.
    fn leave(&self, mut connections: MutexGuard<'_, Connections>, engine: usize) {
        // Clients of a simulation are not admitted.
        connections.admitted[engine] = connections.admitted[engine].saturating_sub(1);
        let is_idle = connections.count() == 0 && connections.served;
        drop(connections);
        if let Some(event) = self.options.idle_event.as_ref().filter(|_| is_idle) {
            signal(event);
        }
    }

    pub fn register(&self, peer: String) -> Arc<ConnectionStatus> {
        let mut connections = lock(&self.connections);
        connections.sum.connections += 1;
        let status = Arc::new(ConnectionStatus {
            id: connections.sum.connections,
            peer,
            export: OnceLock::new(),
            since: Instant::now(),
            published: PublishedCounters::default(),
            in_flight: AtomicU64::new(0),
        });
        connections.open.push(status.clone());
        status
    }

    /// Records that the client of a connection has chosen the export of this name.
    pub fn establish(&self, status: &ConnectionStatus, export: &str) {
        let mut connections = lock(&self.connections);
        connections.established += usize::from(status.export.set(export.to_owned()).is_ok());
    }

    pub fn unregister(&self, status: &Arc<ConnectionStatus>, engine: usize) {
        let mut connections = lock(&self.connections);
        connections.open.retain(|other| !Arc::ptr_eq(other, status));
        connections.sum += status.published.load();
        if status.export.get().is_some() {
            connections.served = true;
            connections.established -= 1;
        }
        self.leave(connections, engine);
    }

    /// Stops admitting clients. If there are clients, without `force`, returns their number and changes nothing.
    pub fn close(&self, force: bool) -> Result<(), usize> {
        let mut connections = lock(&self.connections);
        if connections.count() > 0 && !force {
            return Err(connections.count());
        }
        connections.stopping = true;
        Ok(())
    }

    /// Stops admitting clients until the guard is dropped. `None` if a client is connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        let mut connections = lock(&self.connections);
        if connections.count() > 0 {
            return None;
        }
        connections.paused += 1;
        Some(Paused(self))
    }

    pub fn open(&self) -> usize {
        lock(&self.connections).count()
    }

    /// Whether a quarter of the connections belongs to clients that have not chosen an export yet. The server then
    /// stops accepting, so that clients that never choose one leave most connections to others.
    pub fn is_crowded(&self) -> bool {
        let connections = lock(&self.connections);
        let handshaking = connections.count().saturating_sub(connections.established);
        handshaking >= self.options.connections_max.div_ceil(4)
    }

    /// Counters of all open and closed connections. No counter ever decreases.
    pub fn counters(&self) -> NbdCounters {
        let connections = lock(&self.connections);
        let mut sum = connections.sum;
        connections.open.iter().for_each(|status| sum += status.published.load());
        sum
    }

    pub fn list(&self) -> Vec<ConnectionInfo> {
        let connections = lock(&self.connections).open.clone();
        let info = |status: &Arc<ConnectionStatus>| ConnectionInfo {
            id: status.id,
            peer: status.peer.clone(),
            export: status.export.get().cloned(),
            age: status.since.elapsed(),
            counters: status.published.load(),
            in_flight: status.in_flight.load(Relaxed),
        };
        connections.iter().map(info).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paused_server_admits_no_client_until_it_resumes() {
        let registry = Registry::new(NbdOptions::default(), 1);
        let admit = || registry.admit(String::new).is_some();
        assert!(admit() && registry.pause_if_empty().is_none());
        assert!(admit(), "not paused, because a client was connected");
        registry.reject_admitted(0);
        registry.reject_admitted(0);
        let paused = [(); 2].map(|()| registry.pause_if_empty().unwrap());
        for paused in paused {
            assert!(!admit());
            drop(paused);
        }
        assert!(admit());
        registry.reject_admitted(0);
        let paused = registry.pause_if_empty();
        registry.close(true).unwrap();
        drop(paused);
        assert!(!admit(), "the server was closed meanwhile");
    }

    #[test]
    fn a_stop_that_fails_because_of_clients_changes_nothing() {
        let registry = Registry::new(NbdOptions::default(), 1);
        let admit = || registry.admit(String::new).is_some();
        assert!(admit() && registry.close(false) == Err(1));
        assert!(admit(), "the server was not closed");
        registry.close(true).unwrap();
        assert_eq!(registry.close(false), Err(2));
        assert!(!admit(), "the forced stop continues");
        registry.reject_admitted(0);
        registry.reject_admitted(0);
        assert!(registry.close(false) == Ok(()) && !admit());
        assert_eq!(registry.open(), 0);
    }
}
