//! The status of a device for the process that runs it: the front end, its rings, counters, and events for
//! the log.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sync::{Mutex, MutexGuard, OnceLock};

use super::event::signal;

/// Most reports of one kind within [`WINDOW`]. Further events are only counted.
const REPORTED_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(60);

/// Counters of a device since it was attached, over all of its front ends.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct VhostUserCounters {
    /// Front ends that were admitted.
    pub connections: u64,
    /// Front ends that were rejected because another one was connected or the device was stopping.
    pub refused_connections: u64,
    /// Front ends that were disconnected because they violated the protocol.
    pub violations: u64,
    /// Rings that were stopped, or never started, because of their content.
    pub rejected_rings: u64,
    /// Kicks that drivers have sent.
    pub kicks: u64,
    /// Calls that were sent to drivers.
    pub calls: u64,
    /// Requests that were taken from rings.
    pub requests: u64,
    /// Requests that completed with an error or are not supported.
    pub errors: u64,
    /// Bytes that guests have read.
    pub read_bytes: u64,
    /// Bytes that guests have written.
    pub written_bytes: u64,
    /// Requests whose data was copied because the disk does not accept the alignment of the guest's memory.
    pub bounced: u64,
    /// Requests whose data is in registered memory, so that the kernel did not pin its pages.
    #[serde(default)]
    pub registered: u64,
}

impl VhostUserCounters {
    /// The counters minus those at an earlier time.
    #[must_use]
    pub fn since(&self, earlier: &VhostUserCounters) -> VhostUserCounters {
        self.zip(earlier, u64::saturating_sub)
    }

    fn zip(&self, other: &VhostUserCounters, with: fn(u64, u64) -> u64) -> VhostUserCounters {
        VhostUserCounters {
            connections: with(self.connections, other.connections),
            refused_connections: with(self.refused_connections, other.refused_connections),
            violations: with(self.violations, other.violations),
            rejected_rings: with(self.rejected_rings, other.rejected_rings),
            kicks: with(self.kicks, other.kicks),
            calls: with(self.calls, other.calls),
            requests: with(self.requests, other.requests),
            errors: with(self.errors, other.errors),
            read_bytes: with(self.read_bytes, other.read_bytes),
            written_bytes: with(self.written_bytes, other.written_bytes),
            bounced: with(self.bounced, other.bounced),
            registered: with(self.registered, other.registered),
        }
    }
}

impl std::ops::AddAssign for VhostUserCounters {
    fn add_assign(&mut self, other: VhostUserCounters) {
        *self = self.zip(&other, |one, other| one + other);
    }
}

/// The current state of a ring that is or was served.
#[derive(Clone, Debug)]
pub struct RingInfo {
    /// The index of the ring.
    pub index: u32,
    /// The number of descriptors of the ring.
    pub size: u16,
    /// The number of requests in flight.
    pub in_flight: u64,
    /// Why the ring was rejected, if it was.
    pub rejected: Option<String>,
}

/// The current state of the connected front end.
#[derive(Clone, Debug)]
pub struct FrontEndInfo {
    /// Front ends are numbered from 1.
    pub id: u64,
    /// The process, such as `pid 123, uid 0`. The pid is 0 if the process is not in this PID namespace.
    pub peer: String,
    /// Time since the front end connected.
    pub age: Duration,
    /// The rings that were started, in the order of their indexes.
    pub rings: Vec<RingInfo>,
    /// The sum of the counters of all rings.
    pub counters: VhostUserCounters,
    /// The number of requests in flight.
    pub in_flight: u64,
    /// Whether the front end tracks its requests in flight, so that another daemon can continue with these.
    pub recorded: bool,
    /// The number of bytes of guest memory that are registered with the ring of each engine, or why none are
    /// registered. `None` if registration is off, or the front end has not shared its memory yet.
    pub registered_memory: Option<Result<u64, String>>,
}

/// An event of a front end or of one of its rings, for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The front end was rejected because another one is connected.
    Occupied,
    /// The front end was disconnected because it violated the protocol. Contains how.
    Violation(String),
    /// A request of the front end was refused. Contains why. The front end stays connected.
    Refused(String),
    /// A ring was stopped, or not started. Contains its index and the reason.
    RingRejected(u32, String),
    /// The memory of the front end is served, but not registered. Contains why.
    MemoryUnregistered(String),
}

impl Event {
    fn kind(&self) -> usize {
        match self {
            Event::Occupied => 0,
            Event::Violation(_) => 1,
            Event::Refused(_) => 2,
            Event::RingRejected(..) => 3,
            Event::MemoryUnregistered(_) => 4,
        }
    }
}

const KINDS: usize = 5;

/// An [`Event`] for the log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The process of the front end, such as `pid 123, uid 0`.
    pub peer: String,
    /// The event that is to be logged.
    pub event: Event,
    /// Number of earlier events of this kind that were not reported.
    pub unreported: u64,
}

/// The counters of a ring, which its engine stores once per turn, and the state that the engine and the
/// control thread share. Counters are relaxed: they are statistics, and no other data depends on them.
#[derive(Default)]
pub(super) struct RingStatus {
    pub index: u32,
    pub size: u16,
    pub kicks: AtomicU64,
    pub calls: AtomicU64,
    pub requests: AtomicU64,
    pub errors: AtomicU64,
    pub read_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    pub bounced: AtomicU64,
    pub registered: AtomicU64,
    pub in_flight: AtomicU64,
    /// The position at which the ring continues. Valid when its source has stopped.
    pub base: AtomicU32,
    /// Why the ring was rejected.
    pub rejected: OnceLock<String>,
}

/// The counters of a ring as its source counts them.
#[derive(Default)]
pub(super) struct RingCounters {
    pub kicks: u64,
    pub calls: u64,
    pub requests: u64,
    pub errors: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub bounced: u64,
    pub registered: u64,
}

impl RingStatus {
    pub fn new(index: u32, size: u16, base: u32) -> RingStatus {
        RingStatus { index, size, base: AtomicU32::new(base), ..RingStatus::default() }
    }

    /// Stores `counters` and the number of requests in flight for other threads.
    pub fn publish(&self, counters: &RingCounters, in_flight: usize) {
        self.kicks.store(counters.kicks, Relaxed);
        self.calls.store(counters.calls, Relaxed);
        self.requests.store(counters.requests, Relaxed);
        self.errors.store(counters.errors, Relaxed);
        self.read_bytes.store(counters.read_bytes, Relaxed);
        self.written_bytes.store(counters.written_bytes, Relaxed);
        self.bounced.store(counters.bounced, Relaxed);
        self.registered.store(counters.registered, Relaxed);
        self.in_flight.store(in_flight as u64, Relaxed);
    }

    fn counters(&self) -> VhostUserCounters {
        VhostUserCounters {
            kicks: self.kicks.load(Relaxed),
            calls: self.calls.load(Relaxed),
            requests: self.requests.load(Relaxed),
            errors: self.errors.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            bounced: self.bounced.load(Relaxed),
            registered: self.registered.load(Relaxed),
            ..VhostUserCounters::default()
        }
    }

    fn info(&self) -> RingInfo {
        RingInfo {
            index: self.index,
            size: self.size,
            in_flight: self.in_flight.load(Relaxed),
            rejected: self.rejected.get().cloned(),
        }
    }
}

pub(super) struct FrontEnd {
    id: u64,
    peer: String,
    since: Instant,
    /// The last status of each ring that was started.
    rings: Vec<Arc<RingStatus>>,
    /// The sum of the counters of rings that were replaced in `rings`.
    earlier: VhostUserCounters,
    recorded: bool,
    registered_memory: Option<Result<u64, String>>,
}

impl FrontEnd {
    /// Whether the front end tracks its requests in flight.
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }

    fn counters(&self) -> VhostUserCounters {
        let mut sum = self.earlier;
        self.rings.iter().for_each(|ring| sum += ring.counters());
        sum
    }
}

#[derive(Clone, Copy, Default)]
struct Limit {
    since: Option<Instant>,
    reported: u32,
    unreported: u64,
}

#[derive(Default)]
struct State {
    front_end: Option<FrontEnd>,
    /// The counters of earlier front ends, and of events that belong to no ring.
    sum: VhostUserCounters,
    /// Front ends are no longer admitted.
    closed: bool,
    /// Number of [`Paused`] values. While it is not 0, front ends are not admitted.
    paused: usize,
    limits: [Limit; KINDS],
    reports: Vec<Report>,
}

/// The state that the control thread shares with the owner of the device. Engines never take its lock.
pub(super) struct Registry {
    state: Mutex<State>,
    /// An eventfd that is written when the front end has disconnected.
    idle_event: Option<Arc<OwnedFd>>,
    /// An eventfd that is written when there is a report.
    report_event: Option<Arc<OwnedFd>>,
}

/// While this exists, the device has no front end and admits none.
pub struct Paused<'a>(&'a Registry);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.state().paused -= 1;
    }
}

impl Registry {
    pub fn new(idle_event: Option<Arc<OwnedFd>>, report_event: Option<Arc<OwnedFd>>) -> Registry {
        Registry { state: Mutex::default(), idle_event, report_event }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits the front end `peer`, unless another one is connected or the device does not admit any.
    pub fn admit(&self, peer: &str) -> bool {
        let mut state = self.state();
        if state.closed || state.paused > 0 || state.front_end.is_some() {
            state.sum.refused_connections += 1;
            let occupied = state.front_end.is_some();
            drop(state);
            if occupied {
                self.report(peer, Event::Occupied);
            }
            return false;
        }
        state.sum.connections += 1;
        let (id, peer) = (state.sum.connections, peer.to_owned());
        let earlier = VhostUserCounters::default();
        state.front_end = Some(FrontEnd {
            id,
            peer,
            since: Instant::now(),
            rings: Vec::new(),
            earlier,
            recorded: false,
            registered_memory: None,
        });
        true
    }

    /// Removes the front end, which has disconnected, and none of whose rings is served.
    pub fn leave(&self) {
        let mut state = self.state();
        if let Some(front_end) = state.front_end.take() {
            let counters = front_end.counters();
            state.sum += counters;
            drop(state);
            if let Some(event) = &self.idle_event {
                signal(event);
            }
        }
    }

    /// Sets whether the front end tracks its requests in flight.
    pub fn set_recorded(&self, recorded: bool) {
        if let Some(front_end) = &mut self.state().front_end {
            front_end.recorded = recorded;
        }
    }

    pub fn set_registered_memory(&self, registered: Option<Result<u64, String>>) {
        if let Some(front_end) = &mut self.state().front_end {
            front_end.registered_memory = registered;
        }
    }

    /// Adds a ring that is about to be served.
    pub fn add_ring(&self, ring: &Arc<RingStatus>) {
        let mut state = self.state();
        let Some(front_end) = &mut state.front_end else { return };
        if let Some(at) = front_end.rings.iter().position(|other| other.index == ring.index) {
            let before = front_end.rings.remove(at);
            front_end.earlier += before.counters();
        }
        front_end.rings.push(ring.clone());
        front_end.rings.sort_by_key(|ring| ring.index);
    }

    /// Counts `event` of `peer`, and reports it unless there were too many events of its kind.
    pub fn report(&self, peer: &str, event: Event) {
        let mut state = self.state();
        match &event {
            Event::Violation(_) => state.sum.violations += 1,
            Event::RingRejected(..) => state.sum.rejected_rings += 1,
            _ => {}
        }
        let Some(wake) = &self.report_event else { return };
        let full = state.reports.len() >= KINDS * REPORTED_MAX as usize;
        let limit = &mut state.limits[event.kind()];
        if limit.since.is_none_or(|since| since.elapsed() >= WINDOW) {
            (limit.since, limit.reported) = (Some(Instant::now()), 0);
        }
        if limit.reported == REPORTED_MAX || full {
            limit.unreported += 1;
            return;
        }
        limit.reported += 1;
        let unreported = std::mem::take(&mut limit.unreported);
        state.reports.push(Report { peer: peer.to_owned(), event, unreported });
        drop(state);
        signal(wake);
    }

    pub fn take_reports(&self) -> Vec<Report> {
        std::mem::take(&mut self.state().reports)
    }

    pub fn is_connected(&self) -> bool {
        self.state().front_end.is_some()
    }

    /// Stops admitting front ends if `may` returns true for the connected one. Otherwise returns false, and
    /// changes nothing.
    pub fn close_if(&self, may: impl FnOnce(Option<&FrontEnd>) -> bool) -> bool {
        let mut state = self.state();
        let closes = may(state.front_end.as_ref());
        state.closed |= closes;
        closes
    }

    pub fn close(&self) {
        self.state().closed = true;
    }

    /// Stops admitting front ends until the returned value is dropped. `None` if a front end is connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        let mut state = self.state();
        if state.front_end.is_some() {
            return None;
        }
        state.paused += 1;
        Some(Paused(self))
    }

    pub fn counters(&self) -> VhostUserCounters {
        let state = self.state();
        let mut sum = state.sum;
        sum += state.front_end.as_ref().map(FrontEnd::counters).unwrap_or_default();
        sum
    }

    pub fn front_end(&self) -> Option<FrontEndInfo> {
        let state = self.state();
        let front_end = state.front_end.as_ref()?;
        let rings: Vec<RingInfo> = front_end.rings.iter().map(|ring| ring.info()).collect();
        Some(FrontEndInfo {
            id: front_end.id,
            peer: front_end.peer.clone(),
            age: front_end.since.elapsed(),
            in_flight: rings.iter().map(|ring| ring.in_flight).sum(),
            rings,
            recorded: front_end.recorded,
            registered_memory: front_end.registered_memory.clone(),
            counters: front_end.counters(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_front_end_at_a_time() {
        let registry = Registry::new(None, None);
        assert!(registry.admit("a") && !registry.admit("b"));
        assert!(!registry.close_if(|front_end| front_end.is_none()) && registry.pause_if_empty().is_none());
        registry.leave();
        let paused = registry.pause_if_empty();
        assert!(paused.is_some() && !registry.admit("c"));
        drop(paused);
        assert!(registry.admit("d"));
        assert_eq!(registry.front_end().unwrap().id, 2);
        registry.leave();
        assert!(registry.close_if(|front_end| front_end.is_none()) && !registry.admit("e"));
        let counters = registry.counters();
        assert_eq!((counters.connections, counters.refused_connections), (2, 3));
    }

    #[test]
    fn only_a_front_end_that_tracks_requests_can_be_handed_over() {
        let registry = Registry::new(None, None);
        let close = || registry.close_if(|front_end| front_end.is_none_or(FrontEnd::is_recorded));
        assert!(registry.admit("a") && !close());
        registry.set_recorded(true);
        assert!(close() && registry.is_connected());
        registry.leave();
        assert!(!registry.admit("b"));
    }

    #[test]
    fn counters_never_decrease() {
        let registry = Registry::new(None, None);
        assert!(registry.admit("a"));
        for (index, requests) in [(0, 5), (1, 7), (0, 2)] {
            let ring = Arc::new(RingStatus::new(index, 4, 0));
            registry.add_ring(&ring);
            ring.publish(&RingCounters { requests, ..RingCounters::default() }, 1);
        }
        let front_end = registry.front_end().unwrap();
        assert_eq!((registry.counters().requests, front_end.counters.requests), (14, 14));
        assert_eq!((front_end.rings.len(), front_end.in_flight), (2, 2));
        registry.leave();
        assert_eq!(registry.counters().requests, 14);
    }

    #[test]
    fn a_flood_of_events_is_counted_and_not_reported() {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let registry = Registry::new(None, Some(Arc::new(event)));
        for _ in 0..100 {
            registry.report("a", Event::Violation("so".into()));
        }
        registry.report("a", Event::RingRejected(3, "loop".into()));
        assert_eq!(registry.take_reports().len(), 9);
        assert_eq!((registry.counters().violations, registry.counters().rejected_rings), (100, 1));
    }
}
