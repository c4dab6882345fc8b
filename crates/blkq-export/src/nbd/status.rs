//! The connections and counters of a server, as its owner reads them.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::rejections::{Reason, Rejections};

/// The state of one connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectionInfo {
    /// Number of the connection, counted from 1 since the server started.
    pub id: u64,
    /// The client: `pid 123, uid 0` for a unix socket, or its address and port. The pid is 0 if the process
    /// is in a PID namespace that is not visible from here.
    pub peer: String,
    /// The export that the client chose; `None` during the handshake.
    pub export: Option<String>,
    /// Time since the client connected.
    pub age: Duration,
    /// Requests received from the client.
    pub requests: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// Data of successful reads, in bytes.
    pub read_bytes: u64,
    /// Data of successful writes, in bytes.
    pub written_bytes: u64,
    /// Requests that were received and whose replies were not sent.
    pub in_flight: u64,
}

/// Counters since the server started, over all its connections, open and closed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct NbdCounters {
    /// Connections that were accepted, including those that are closed.
    pub connections: u64,
    /// Connections that were rejected, because there were too many, there was no memory for another one, or
    /// the server was stopping.
    pub refused_connections: u64,
    /// Connections that were closed because the client broke the protocol.
    pub violations: u64,
    /// Connections that were closed because the client did not finish its handshake, send a payload or take
    /// its replies in time.
    pub timeouts: u64,
    /// Requests received in the transmission phase.
    pub requests: u64,
    /// Requests that were answered with an error, from the server, the block layer or the device.
    pub errors: u64,
    /// Requests that the server rejected before they reached the block layer, because they were malformed,
    /// not allowed, or outside of the device. They are also counted as errors.
    pub refused_requests: u64,
    /// Data of successful reads, in bytes.
    pub read_bytes: u64,
    /// Data of successful writes, in bytes.
    pub written_bytes: u64,
    /// Reads that were split into parts.
    #[serde(default)]
    pub split_reads: u64,
    /// Receives that were delayed because the client was busy reading replies.
    #[serde(default)]
    pub receive_backoffs: u64,
    /// Receive operations in the transmission phase.
    #[serde(default)]
    pub receives: u64,
    /// Send operations in the transmission phase.
    #[serde(default)]
    pub sends: u64,
}

impl NbdCounters {
    /// Returns the counters minus those of `earlier`, an earlier state of the same servers.
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
    /// Adds the counters of another server.
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

/// Counters of one connection. Its engine writes them once per turn, other threads only read them. Relaxed
/// accesses suffice, as each counter is read on its own.
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

/// Counters that the connection updates for each request, and publishes once per turn.
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
    /// Publishes `counters` and the number of requests in flight.
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

    /// Counts that the client broke the protocol.
    pub fn count_violation(&self) {
        self.violations.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts that the client missed a deadline.
    pub fn count_timeout(&self) {
        self.timeouts.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of the connection and the description of its client.
    pub fn id_and_peer(&self) -> (u64, &str) {
        (self.id, &self.peer)
    }

    /// Records the export that the client chose. Only the first call has an effect.
    pub fn establish(&self, export: String) {
        if self.export.set(export).is_ok() {
            self.established.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The open connections, and the counters of the closed ones.
#[derive(Default)]
struct Connections {
    open: Vec<Arc<ConnectionStatus>>,
    closed: NbdCounters,
}

/// Mask of the number of open connections in [`Registry::admission`].
const OPEN: u64 = u32::MAX as u64;
/// One [`Paused`] guard in [`Registry::admission`]. While one exists, no connections are admitted.
const PAUSE: u64 = 1 << 32;
/// Flag in [`Registry::admission`]: connections are no longer admitted, because the server is stopping.
const CLOSED: u64 = 1 << 63;

/// The number of open connections in a value of [`Registry::admission`].
fn open_in(admission: u64) -> usize {
    (admission & OPEN) as usize
}

/// The connections of a server, shared by its engines and its owner.
pub(super) struct Registry {
    /// Held to add or remove a connection and to copy the list, never while the thread waits for anything.
    /// Engines lock it only when a connection opens or closes.
    connections: Mutex<Connections>,
    /// The number of connections that were admitted and have not closed ([`OPEN`]), the number of [`Paused`]
    /// guards ([`PAUSE`]), and whether the server is stopping ([`CLOSED`]). They are one word, so that
    /// an attempt to stop or pause the server that fails, because clients are connected, rejects no client.
    admission: AtomicU64,
    /// Statistics, as are the two counters below: relaxed accesses suffice.
    accepted: AtomicU64,
    refused: AtomicU64,
    receive_backoffs: AtomicU64,
    /// At least one client has chosen an export and disconnected.
    served: AtomicBool,
    /// Open connections whose clients have chosen an export.
    established: Arc<AtomicUsize>,
    pub rejections: Rejections,
    /// An eventfd that is written when the last client disconnects, once `served` is set.
    idle_event: Option<Arc<OwnedFd>>,
}

/// Keeps a server without clients from accepting any, until this guard is dropped.
pub struct Paused<'a>(&'a Registry);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.admission.fetch_sub(PAUSE, Ordering::SeqCst);
    }
}

impl Registry {
    pub fn new(idle_event: Option<Arc<OwnedFd>>, rejection_event: Option<Arc<OwnedFd>>) -> Registry {
        Registry {
            connections: Mutex::default(),
            admission: AtomicU64::new(0),
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

    /// Decides whether one more connection is accepted. If so, it counts as open until
    /// [`Registry::unregister`] or [`Registry::reject_admitted`] is called.
    pub fn admit(&self, connections_max: usize, peer: impl FnOnce() -> String) -> bool {
        let admit = |admission: u64| {
            let is_accepting = admission & !OPEN == 0;
            (is_accepting && open_in(admission) < connections_max).then_some(admission + 1)
        };
        let admitted = self.admission.fetch_update(Ordering::SeqCst, Ordering::SeqCst, admit);
        if let Err(admission) = admitted {
            self.refused.fetch_add(1, Ordering::Relaxed);
            if open_in(admission) >= connections_max {
                self.rejections.push(Reason::TooMany(connections_max), peer);
            }
        }
        admitted.is_ok()
    }

    /// Rejects a connection that [`Registry::admit`] has counted.
    pub fn reject_admitted(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        self.leave();
    }

    /// Counts one open connection less, and signals the idle event if it was the last one.
    fn leave(&self) {
        let last = open_in(self.admission.fetch_sub(1, Ordering::SeqCst)) == 1;
        if last
            && let Some(event) = &self.idle_event
            && self.served.load(Ordering::SeqCst)
        {
            // If the write fails, the counter of the eventfd is at its maximum, so the reader will be woken
            // anyway.
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

    /// Changes `admission` as `change` says if no client is connected. Otherwise returns the number of
    /// clients, and changes nothing.
    fn change_if_empty(&self, change: impl Fn(u64) -> u64) -> Result<(), usize> {
        let change = |admission| (open_in(admission) == 0).then(|| change(admission));
        let changed = self.admission.fetch_update(Ordering::SeqCst, Ordering::SeqCst, change);
        changed.map(|_| ()).map_err(open_in)
    }

    /// Stops admitting clients.
    ///
    /// # Errors
    /// Returns the number of connected clients, and changes nothing, if a client is connected.
    pub fn close_if_empty(&self) -> Result<(), usize> {
        self.change_if_empty(|admission| admission | CLOSED)
    }

    /// Stops admitting clients until the returned guard is dropped. Returns `None`, and changes nothing, if a
    /// client is connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        self.change_if_empty(|admission| admission + PAUSE).ok().map(|()| Paused(self))
    }

    pub fn close(&self) {
        self.admission.fetch_or(CLOSED, Ordering::SeqCst);
    }

    pub fn open(&self) -> usize {
        open_in(self.admission.load(Ordering::SeqCst))
    }

    /// Adds the receive back-offs of one turn of an engine.
    pub fn count_backoffs(&self, count: u64) {
        if count > 0 {
            self.receive_backoffs.fetch_add(count, Ordering::Relaxed);
        }
    }

    /// The number of open connections that are in their handshake.
    pub fn handshaking(&self) -> usize {
        self.open().saturating_sub(self.established.load(Ordering::SeqCst))
    }

    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    /// Counters of all open and closed connections. No counter ever decreases.
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
    fn a_paused_server_admits_no_client_until_it_resumes() {
        let registry = Registry::new(None, None);
        let admit = || registry.admit(9, String::new);
        assert!(admit() && registry.pause_if_empty().is_none());
        assert!(admit(), "not paused, because a client was connected");
        registry.reject_admitted();
        registry.reject_admitted();
        let paused = [(); 2].map(|()| registry.pause_if_empty().unwrap());
        for paused in paused {
            assert!(!admit());
            drop(paused);
        }
        assert!(admit());
        registry.reject_admitted();
        let paused = registry.pause_if_empty();
        registry.close();
        drop(paused);
        assert!(!admit(), "the server was closed meanwhile");
    }

    #[test]
    fn a_stop_that_fails_because_of_clients_changes_nothing() {
        let registry = Registry::new(None, None);
        let admit = || registry.admit(9, String::new);
        assert!(admit() && registry.close_if_empty() == Err(1));
        assert!(admit(), "the server was not closed");
        registry.close();
        assert_eq!(registry.close_if_empty(), Err(2));
        assert!(!admit(), "the forced stop continues");
        registry.reject_admitted();
        registry.reject_admitted();
        assert!(registry.close_if_empty() == Ok(()) && !admit());
        assert_eq!(registry.open(), 0);
    }
}
