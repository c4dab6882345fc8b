//! A device as its owner sees it: the front end, its rings, counters, and what a log should say.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::atomic::{AtomicU32, AtomicU64};
use crate::sync::{Mutex, MutexGuard, OnceLock};

use super::event::signal;

/// Reports of one kind within [`WINDOW`]; more are only counted.
const REPORTED_MAX: u32 = 8;
const WINDOW: Duration = Duration::from_secs(60);

/// Counters of a device since it was attached, over all front ends that it had.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize, Deserialize)]
pub struct VhostUserCounters {
    /// Front ends that were let in.
    pub connections: u64,
    /// Front ends turned away because another one was connected, or the device was stopping.
    pub refused_connections: u64,
    /// Front ends dropped because they broke the protocol.
    pub violations: u64,
    /// Rings stopped, or never started, because of what the guest or its front end put into them.
    pub rejected_rings: u64,
    /// Kicks received.
    pub kicks: u64,
    /// Calls sent.
    pub calls: u64,
    /// Requests taken from rings.
    pub requests: u64,
    /// Of these, those that completed with an error, or are not supported.
    pub errors: u64,
    /// Bytes read for guests.
    pub read_bytes: u64,
    /// Bytes written for guests.
    pub written_bytes: u64,
    /// Requests whose data was copied, because the guest's memory is not aligned as the disk needs it.
    pub bounced: u64,
    /// Requests whose data is in registered memory of the guest: the kernel did not pin its pages.
    #[serde(default)]
    pub registered: u64,
}

impl VhostUserCounters {
    /// The difference to `earlier`, of the same device.
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

/// A ring that is, or was, served, as it is now.
#[derive(Clone, Debug)]
pub struct RingInfo {
    /// Its number.
    pub index: u32,
    /// Its descriptors.
    pub size: u16,
    /// Requests in flight.
    pub in_flight: u64,
    /// Why it was stopped, if it was because of what is in it.
    pub rejected: Option<String>,
}

/// The front end that is connected, as it is now.
#[derive(Clone, Debug)]
pub struct FrontEndInfo {
    /// Counted up from 1.
    pub id: u64,
    /// Its process: `pid 123, uid 0` (pid 0: not to be seen from this PID namespace).
    pub peer: String,
    /// How long it has been there.
    pub age: Duration,
    /// Its rings that were started, by number.
    pub rings: Vec<RingInfo>,
    /// The counters of all of its rings.
    pub counters: VhostUserCounters,
    /// Requests in flight.
    pub in_flight: u64,
    /// It keeps a record of its requests in flight: another daemon can go on with them.
    pub recorded: bool,
    /// Bytes of its memory that are registered with each engine's ring, or why none are; `None` if that
    /// is not asked for, or it has not shared its memory yet.
    pub registered_memory: Option<Result<u64, String>>,
}

/// Something happened to a front end, or a ring of it, that its owner may want to log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// It was turned away: another one is connected.
    Occupied,
    /// It was dropped: it broke the protocol, how.
    Violation(String),
    /// A request of it was refused: why. It stays.
    Refused(String),
    /// A ring was stopped, or not started: which, and why.
    RingRejected(u32, String),
    /// Its memory was not registered, and is served all the same: why.
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

/// An event of a front end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The front end: `pid 123, uid 0`.
    pub peer: String,
    /// That event.
    pub event: Event,
    /// Events of this kind before it that were only counted.
    pub unreported: u64,
}

/// Counters of a ring, written by its engine once per turn, and the state that its engine and the
/// control thread share.
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
    /// Where the ring goes on: good once its source has stopped.
    pub base: AtomicU32,
    /// Why it was rejected.
    pub rejected: OnceLock<String>,
}

/// Counters of a ring, kept by its source.
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

    /// Shows `counters` to others, and that so many requests are in flight.
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

/// The front end that is connected.
pub(super) struct FrontEnd {
    id: u64,
    peer: String,
    since: Instant,
    /// Of each ring the one that was started last.
    rings: Vec<Arc<RingStatus>>,
    /// Of those before them.
    earlier: VhostUserCounters,
    recorded: bool,
    registered_memory: Option<Result<u64, String>>,
}

impl FrontEnd {
    /// It keeps a record of its requests in flight.
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
    /// The counters of front ends that have disconnected, and of events that concern none.
    sum: VhostUserCounters,
    /// No more are let in.
    closed: bool,
    /// No more are let in while this is above 0.
    paused: usize,
    limits: [Limit; KINDS],
    reports: Vec<Report>,
}

/// The state of a device that its control thread and its owner share. Engines do not take it.
pub(super) struct Registry {
    state: Mutex<State>,
    /// An eventfd to be written when the front end has disconnected.
    idle_event: Option<Arc<OwnedFd>>,
    /// An eventfd to be written when there is a report.
    report_event: Option<Arc<OwnedFd>>,
}

/// A device that has no front end and accepts none, until this is dropped.
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

    /// Lets the front end `peer` in, unless there is one, or none is let in.
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

    /// The front end has disconnected, and none of its rings is served any more.
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

    /// The front end keeps a record of its requests in flight.
    pub fn set_recorded(&self, recorded: bool) {
        if let Some(front_end) = &mut self.state().front_end {
            front_end.recorded = recorded;
        }
    }

    /// So many bytes of the front end's memory are registered, or why none are; `None` if it has none.
    pub fn set_registered_memory(&self, registered: Option<Result<u64, String>>) {
        if let Some(front_end) = &mut self.state().front_end {
            front_end.registered_memory = registered;
        }
    }

    /// A ring is about to be served.
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

    /// Notes `event` of `peer` for the log, unless there were too many, and counts it.
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

    /// Turns all front ends away from now on, if `may` allows it by the one that is connected; false, and
    /// nothing has changed, if not.
    pub fn close_if(&self, may: impl FnOnce(Option<&FrontEnd>) -> bool) -> bool {
        let mut state = self.state();
        let closes = may(state.front_end.as_ref());
        state.closed |= closes;
        closes
    }

    pub fn close(&self) {
        self.state().closed = true;
    }

    /// Turns front ends away until what this returns is dropped; `None` if one is connected.
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
    fn only_a_front_end_with_a_record_is_left_to_another_daemon() {
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
