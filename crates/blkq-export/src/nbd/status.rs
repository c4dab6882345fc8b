//! Connections as the control plane sees them.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::rejections::{Reason, Rejections};

/// One connection, as it is now.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// Counted up from 1.
    pub id: u64,
    /// Its peer: `pid 123, uid 0` (pid 0: not to be seen from this PID namespace), or an address and
    /// port.
    pub peer: String,
    /// The export it chose; `None` during the handshake.
    pub export: Option<String>,
    /// How long it has been there.
    pub age: Duration,
    /// Requests received.
    pub requests: u64,
    /// Of these, those answered with an error.
    pub errors: u64,
    /// Content sent, in bytes.
    pub read_bytes: u64,
    /// Content received and written, in bytes.
    pub written_bytes: u64,
    /// Requests received whose replies have not left.
    pub in_flight: u64,
}

/// Counters of a server since it started, over all connections that it had.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct NbdCounters {
    /// Connections that were let in.
    pub connections: u64,
    /// Connections turned away because there were too many, or no memory for one more, or the
    /// server was stopping.
    pub refused_connections: u64,
    /// Connections closed because the client broke the protocol.
    pub violations: u64,
    /// Connections closed because the client was late with its handshake, a payload, or taking
    /// its replies.
    pub timeouts: u64,
    /// Requests received.
    pub requests: u64,
    /// Of these, those answered with an error by any layer.
    pub errors: u64,
    /// Of those, the ones that never reached the block layer: malformed, outside of the device,
    /// not allowed.
    pub refused_requests: u64,
    /// Content sent, in bytes.
    pub read_bytes: u64,
    /// Content received and written, in bytes.
    pub written_bytes: u64,
    /// Reads that were done in parts.
    #[serde(default)]
    pub split_reads: u64,
    /// How often a connection received later, because its client was busy reading replies.
    #[serde(default)]
    pub receive_backoffs: u64,
    /// Receive operations on the sockets of clients that have chosen an export.
    #[serde(default)]
    pub receives: u64,
    /// Send operations on them.
    #[serde(default)]
    pub sends: u64,
}

impl NbdCounters {
    /// The difference to `earlier`, of the same servers.
    pub fn since(&self, earlier: &NbdCounters) -> NbdCounters {
        NbdCounters {
            connections: self.connections.saturating_sub(earlier.connections),
            refused_connections: self.refused_connections.saturating_sub(earlier.refused_connections),
            violations: self.violations.saturating_sub(earlier.violations),
            timeouts: self.timeouts.saturating_sub(earlier.timeouts),
            requests: self.requests.saturating_sub(earlier.requests),
            errors: self.errors.saturating_sub(earlier.errors),
            refused_requests: self.refused_requests.saturating_sub(earlier.refused_requests),
            read_bytes: self.read_bytes.saturating_sub(earlier.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(earlier.written_bytes),
            split_reads: self.split_reads.saturating_sub(earlier.split_reads),
            receive_backoffs: self.receive_backoffs.saturating_sub(earlier.receive_backoffs),
            receives: self.receives.saturating_sub(earlier.receives),
            sends: self.sends.saturating_sub(earlier.sends),
        }
    }

    fn add(&mut self, status: &ConnectionStatus) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.violations += get(&status.violations);
        self.timeouts += get(&status.timeouts);
        self.requests += get(&status.requests);
        self.errors += get(&status.errors);
        self.refused_requests += get(&status.refused_requests);
        self.read_bytes += get(&status.read_bytes);
        self.written_bytes += get(&status.written_bytes);
        self.split_reads += get(&status.split_reads);
        self.receives += get(&status.receives);
        self.sends += get(&status.sends);
    }
}

impl std::ops::AddAssign for NbdCounters {
    /// Adds those of another server.
    fn add_assign(&mut self, other: NbdCounters) {
        self.connections += other.connections;
        self.refused_connections += other.refused_connections;
        self.violations += other.violations;
        self.timeouts += other.timeouts;
        self.requests += other.requests;
        self.errors += other.errors;
        self.refused_requests += other.refused_requests;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.split_reads += other.split_reads;
        self.receive_backoffs += other.receive_backoffs;
        self.receives += other.receives;
        self.sends += other.sends;
    }
}

/// Counters of one connection, written by its engine once per turn.
pub(super) struct ConnectionStatus {
    id: u64,
    peer: String,
    export: OnceLock<String>,
    established: Arc<AtomicUsize>,
    since: Instant,
    requests: AtomicU64,
    errors: AtomicU64,
    refused_requests: AtomicU64,
    violations: AtomicU64,
    timeouts: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    split_reads: AtomicU64,
    receives: AtomicU64,
    sends: AtomicU64,
    in_flight: AtomicU64,
}

/// Counters of the requests of a connection, kept by it and published once per turn.
#[derive(Default)]
pub(super) struct RequestCounters {
    pub requests: u64,
    pub errors: u64,
    pub refused_requests: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub split_reads: u64,
    pub receives: u64,
    pub sends: u64,
}

impl ConnectionStatus {
    /// Shows `counters` to others, and that `in_flight` requests have no reply that left.
    pub fn publish(&self, counters: &RequestCounters, in_flight: usize) {
        self.requests.store(counters.requests, Ordering::Relaxed);
        self.errors.store(counters.errors, Ordering::Relaxed);
        self.refused_requests.store(counters.refused_requests, Ordering::Relaxed);
        self.read_bytes.store(counters.read_bytes, Ordering::Relaxed);
        self.written_bytes.store(counters.written_bytes, Ordering::Relaxed);
        self.split_reads.store(counters.split_reads, Ordering::Relaxed);
        self.receives.store(counters.receives, Ordering::Relaxed);
        self.sends.store(counters.sends, Ordering::Relaxed);
        self.in_flight.store(in_flight as u64, Ordering::Relaxed);
    }

    /// The client broke the protocol.
    pub fn count_violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed);
    }

    /// The client was late.
    pub fn count_timeout(&self) {
        self.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// Its number, and its peer's name.
    pub fn id_and_peer(&self) -> (u64, &str) {
        (self.id, &self.peer)
    }

    /// Its client chose an export, once.
    pub fn establish(&self, export: String) {
        if self.export.set(export).is_ok() {
            self.established.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// Connections that are there, and the sum of those that were.
#[derive(Default)]
struct Connections {
    open: Vec<Arc<ConnectionStatus>>,
    closed: NbdCounters,
}

/// The connections that all engines of a server and its control share.
pub(super) struct Registry {
    /// Held for a push, a removal or a copy of pointers, never across anything that waits;
    /// engines take it when a connection opens and closes, not on the data path.
    connections: Mutex<Connections>,
    /// Connections that were let in and have not closed.
    open: AtomicUsize,
    /// No more are let in.
    closed: AtomicBool,
    /// No more are let in while this is above 0.
    paused: AtomicUsize,
    accepted: AtomicU64,
    refused: AtomicU64,
    receive_backoffs: AtomicU64,
    /// A client chose an export and has disconnected.
    served: AtomicBool,
    /// Connections that have chosen an export.
    established: Arc<AtomicUsize>,
    pub rejections: Rejections,
    /// An eventfd to be written when the last client that was served disconnects.
    idle_event: Option<Arc<OwnedFd>>,
}

/// A server that has no clients and accepts none, until this is dropped.
pub struct Paused<'a>(&'a Registry);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.paused.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Registry {
    pub fn new(idle_event: Option<Arc<OwnedFd>>, rejection_event: Option<Arc<OwnedFd>>) -> Registry {
        Registry {
            connections: Mutex::default(),
            open: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            paused: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            receive_backoffs: AtomicU64::new(0),
            served: AtomicBool::new(false),
            established: Arc::default(),
            rejections: Rejections::new(rejection_event),
            idle_event,
        }
    }

    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether one more connection is let in; it then counts until [`Registry::unregister`]
    /// or [`Registry::turn_away`].
    pub fn admit(&self, connections_max: usize, peer: impl FnOnce() -> String) -> bool {
        let before = self.open.fetch_add(1, Ordering::SeqCst);
        let admitted = before < connections_max
            && !self.closed.load(Ordering::SeqCst)
            && self.paused.load(Ordering::SeqCst) == 0;
        if !admitted {
            self.open.fetch_sub(1, Ordering::SeqCst);
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        if before >= connections_max {
            self.rejections.push(Reason::TooMany(connections_max), peer);
        }
        admitted
    }

    /// A connection that was admitted is turned away all the same.
    pub fn turn_away(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.leave();
    }

    /// A connection that was admitted has closed.
    fn leave(&self) {
        let last = self.open.fetch_sub(1, Ordering::SeqCst) == 1;
        if last
            && let Some(event) = &self.idle_event
            && self.served.load(Ordering::SeqCst)
        {
            // Full, it has been written and not been read yet.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    pub fn register(&self, peer: String) -> Arc<ConnectionStatus> {
        let id = self.accepted.fetch_add(1, Ordering::Relaxed) + 1;
        let status = Arc::new(ConnectionStatus {
            id,
            peer,
            export: OnceLock::new(),
            established: self.established.clone(),
            since: Instant::now(),
            requests: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            refused_requests: AtomicU64::new(0),
            violations: AtomicU64::new(0),
            timeouts: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            split_reads: AtomicU64::new(0),
            receives: AtomicU64::new(0),
            sends: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
        });
        self.connections().open.push(status.clone());
        status
    }

    pub fn unregister(&self, status: &Arc<ConnectionStatus>) {
        let mut connections = self.connections();
        connections.open.retain(|other| !Arc::ptr_eq(other, status));
        connections.closed.add(status);
        drop(connections);
        if status.export.get().is_some() {
            self.established.fetch_sub(1, Ordering::SeqCst);
            self.served.store(true, Ordering::SeqCst);
        }
        self.leave();
    }

    /// Lets no more clients in; false, and nothing changes, if one is connected.
    pub fn close_if_empty(&self) -> bool {
        self.closed.store(true, Ordering::SeqCst);
        let empty = self.open() == 0;
        self.closed.store(empty, Ordering::SeqCst);
        empty
    }

    /// Lets no clients in until the returned guard is dropped; `None`, and nothing changes, if one is
    /// connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.paused.fetch_add(1, Ordering::SeqCst);
        // Its drop undoes it.
        let paused = Paused(self);
        (self.open() == 0).then_some(paused)
    }

    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    /// Adds the receive back-offs of a turn of an engine.
    pub fn count_backoffs(&self, count: u64) {
        if count > 0 {
            self.receive_backoffs.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Connections that have not chosen an export yet.
    pub fn handshaking(&self) -> usize {
        self.open().saturating_sub(self.established.load(Ordering::SeqCst))
    }

    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Counters of all connections so far: none ever decreases.
    pub fn counters(&self) -> NbdCounters {
        let connections = self.connections();
        let mut sum = connections.closed;
        connections.open.iter().for_each(|status| sum.add(status));
        drop(connections);
        sum.connections = self.accepted.load(Ordering::Relaxed);
        sum.refused_connections = self.refused();
        sum.receive_backoffs = self.receive_backoffs.load(Ordering::Relaxed);
        sum
    }

    pub fn list(&self) -> Vec<ConnectionInfo> {
        let connections = self.connections().open.clone();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let info = |status: &Arc<ConnectionStatus>| ConnectionInfo {
            id: status.id,
            peer: status.peer.clone(),
            export: status.export.get().cloned(),
            age: status.since.elapsed(),
            requests: get(&status.requests),
            errors: get(&status.errors),
            read_bytes: get(&status.read_bytes),
            written_bytes: get(&status.written_bytes),
            in_flight: get(&status.in_flight),
        };
        connections.iter().map(info).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paused_server_accepts_nobody_until_it_resumes() {
        let registry = Registry::new(None, None);
        let admit = || registry.admit(9, String::new);
        assert!(admit() && registry.pause_if_empty().is_none());
        assert!(admit(), "not paused, as a client was there");
        registry.turn_away();
        registry.turn_away();
        let paused = [(); 2].map(|()| registry.pause_if_empty().unwrap());
        for paused in paused {
            assert!(!admit());
            drop(paused);
        }
        assert!(admit());
        registry.turn_away();
        let paused = registry.pause_if_empty();
        registry.close();
        drop(paused);
        assert!(!admit(), "closed meanwhile");
    }
}
