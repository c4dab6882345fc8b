//! The state that a device's control thread shares with its sessions, its rings and the owner of the device: the
//! front end, its rings, counters, and events for the log.

use std::collections::BTreeMap;
use std::mem::discriminant;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blkq::sync::{Mutex, lock};
use blkq::{Disk, EngineHandle, Error};
use rustix::net::SocketAddrAny;

use super::notifier::Notifier;
use super::registration::RegistrationLimits;
use super::wakeup::Wakeup;
use crate::counters::counters;
use crate::reports::{Reports, signal};
use crate::sync::OnceLock;
use crate::sync::atomic::Ordering::{Relaxed, SeqCst};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

counters! {
    /// Counters of a device since it was attached, over all of its front ends.
    pub struct VhostUserCounters, published as PublishedCounters {
        /// Front ends that were admitted.
        connections: "Front ends accepted.", row 0 "connections";
        /// Front ends that were rejected because another one was connected or the device was stopping.
        refused_connections: "Front ends refused.", row 0 "rejected";
        /// Front ends that were disconnected because they violated the protocol.
        violations: "Front ends dropped after a protocol violation.", row 0 "protocol errors";
        /// Rings that were stopped, or never started, because of their content.
        rejected_rings: "Virtqueues stopped for invalid contents.", row 0 "invalid rings";
        /// Kicks that drivers have sent.
        kicks: "Kicks received from guests.", row 2 "kicks";
        /// Calls that were sent to drivers.
        calls: "Calls sent to guests.", row 2 "calls";
        /// Requests that were taken from rings.
        requests: "Requests received from guests.", row 1 "requests";
        /// Requests that completed with an error or are not supported.
        errors: "Requests that completed with an error.", row 1 "errors";
        /// Bytes that guests have read.
        read_bytes: "Bytes read by guests.";
        /// Bytes that guests have written.
        written_bytes: "Bytes written by guests.";
        /// Requests whose data was copied because the disk does not accept the alignment of the guest's memory.
        bounced: "Requests copied because of their alignment.", row 1 "copied";
        /// Requests whose data is in registered memory, so that the kernel did not pin its pages.
        registered: "Requests with data in registered memory.", row 1 "in registered memory";
    }
}

/// The current state of the connected front end.
#[derive(Clone, Default, Debug)]
pub struct FrontEndInfo {
    /// The process, such as `pid 123, uid 0`. The pid is 0 if the process is not in this PID namespace.
    pub peer: String,
    /// Time since the front end connected.
    pub age: Duration,
    /// The indexes of the rings that were started, in ascending order, and why each was rejected, if it was.
    pub rings: Vec<(u32, Option<String>)>,
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
    published: PublishedCounters,
    in_flight: AtomicU64,
    /// The position at which the ring continues. Valid when its source has stopped.
    pub base: AtomicU32,
    pub rejected: OnceLock<String>,
}

impl RingStatus {
    pub fn new(index: u32, base: u32) -> RingStatus {
        RingStatus { index, base: AtomicU32::new(base), ..RingStatus::default() }
    }

    /// Stores `counters` and the number of requests in flight for other threads.
    pub fn publish(&self, counters: &VhostUserCounters, in_flight: usize) {
        self.published.store(counters);
        self.in_flight.store(in_flight as u64, Relaxed);
    }
}

struct FrontEnd {
    /// The fields that the rings do not determine, and the counters of rings that were replaced in `rings`; the
    /// others have their default values.
    info: FrontEndInfo,
    since: Instant,
    /// The last status of each ring that was started, by the index of the ring.
    rings: BTreeMap<u32, Arc<RingStatus>>,
}

impl FrontEnd {
    fn counters(&self) -> VhostUserCounters {
        let mut sum = self.info.counters;
        self.rings.values().for_each(|ring| sum += ring.published.load());
        sum
    }
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
}

/// The state that the control thread shares with the owner of the device. Engines never take its lock.
pub(super) struct Registry {
    state: Mutex<State>,
    idle_event: Option<Arc<OwnedFd>>,
    reports: Reports<Report, Event>,
}

/// While this exists, the device has no front end and admits none.
pub struct Paused<'a>(&'a Registry);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).paused -= 1;
    }
}

impl Registry {
    pub fn new(idle_event: Option<Arc<OwnedFd>>, report_event: Option<Arc<OwnedFd>>) -> Registry {
        Registry { state: Mutex::default(), idle_event, reports: Reports::new(report_event) }
    }

    pub fn admit(&self, peer: &str) -> bool {
        let mut state = lock(&self.state);
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
        let info = FrontEndInfo { peer: peer.to_owned(), ..FrontEndInfo::default() };
        state.front_end = Some(FrontEnd { info, since: Instant::now(), rings: BTreeMap::new() });
        true
    }

    /// Removes the front end, which has disconnected, and none of whose rings is served.
    pub fn leave(&self) {
        let mut state = lock(&self.state);
        if let Some(front_end) = state.front_end.take() {
            state.sum += front_end.counters();
            drop(state);
            self.idle_event.iter().for_each(|event| signal(event));
        }
    }

    /// Changes the fields of the front end that its rings do not determine.
    pub fn update(&self, change: impl FnOnce(&mut FrontEndInfo)) {
        if let Some(front_end) = &mut lock(&self.state).front_end {
            change(&mut front_end.info);
        }
    }

    pub fn add_ring(&self, ring: &Arc<RingStatus>) {
        let mut state = lock(&self.state);
        let Some(front_end) = &mut state.front_end else { return };
        if let Some(before) = front_end.rings.insert(ring.index, ring.clone()) {
            front_end.info.counters += before.published.load();
        }
    }

    pub fn report(&self, peer: &str, event: Event) {
        match &event {
            Event::Violation(_) => lock(&self.state).sum.violations += 1,
            Event::RingRejected(..) => lock(&self.state).sum.rejected_rings += 1,
            _ => {}
        }
        let kind = discriminant(&event);
        self.reports.push(kind, |unreported, _| Report { peer: peer.to_owned(), event, unreported });
    }

    pub fn take_reports(&self) -> Vec<Report> {
        self.reports.take()
    }

    pub fn is_connected(&self) -> bool {
        lock(&self.state).front_end.is_some()
    }

    /// Stops admitting front ends if `may` returns true for the connected one. Returns whether it did.
    pub fn close_if(&self, may: impl FnOnce(Option<&FrontEndInfo>) -> bool) -> bool {
        let mut state = lock(&self.state);
        let closes = may(state.front_end.as_ref().map(|front_end| &front_end.info));
        state.closed |= closes;
        closes
    }

    /// Stops admitting front ends until the returned value is dropped. `None` if a front end is connected.
    pub fn pause_if_empty(&self) -> Option<Paused<'_>> {
        let mut state = lock(&self.state);
        if state.front_end.is_some() {
            return None;
        }
        state.paused += 1;
        Some(Paused(self))
    }

    pub fn counters(&self) -> VhostUserCounters {
        let state = lock(&self.state);
        let mut sum = state.sum;
        sum += state.front_end.as_ref().map(FrontEnd::counters).unwrap_or_default();
        sum
    }

    pub fn front_end(&self) -> Option<FrontEndInfo> {
        let state = lock(&self.state);
        let front_end = state.front_end.as_ref()?;
        let rings = front_end.rings.values();
        Some(FrontEndInfo {
            age: front_end.since.elapsed(),
            in_flight: rings.clone().map(|ring| ring.in_flight.load(Relaxed)).sum(),
            rings: rings.map(|ring| (ring.index, ring.rejected.get().cloned())).collect(),
            counters: front_end.counters(),
            ..front_end.info.clone()
        })
    }
}

/// Most rings of a device. Engine `i` modulo the number of engines serves ring `i`.
pub const VRINGS_MAX: usize = 64;

pub struct Shared {
    pub disk: Arc<Disk>,
    /// The engines that serve rings, at least one.
    pub engines: Vec<EngineHandle>,
    pub serial: Arc<str>,
    pub address: Option<SocketAddrAny>,
    pub registry: Registry,
    pub register_memory: Option<RegistrationLimits>,
    /// Wakes the control thread when a ring was rejected, or when one of the flags below was set.
    pub wake: Wakeup,
    pub stopping: AtomicBool,
    pub config_changed: AtomicBool,
    /// Notifiers that signal the drivers of the rings. While a ring is served, only its engine notifies.
    pub calls: [Notifier; VRINGS_MAX],
    /// Signals the front end that a ring was rejected.
    pub errors: Notifier,
}

impl Shared {
    /// The state of a device without a listening socket, report events and registered memory. Fails as
    /// eventfd(2) does.
    pub fn new(disk: &Arc<Disk>, engines: Vec<EngineHandle>, serial: &str) -> Result<Shared, Error> {
        Ok(Shared {
            disk: disk.clone(),
            engines,
            serial: serial.into(),
            address: None,
            registry: Registry::new(None, None),
            register_memory: None,
            wake: Wakeup::new()?,
            stopping: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            calls: std::array::from_fn(|_| Notifier::default()),
            errors: Notifier::default(),
        })
    }

    pub fn engine_of(&self, index: u32) -> usize {
        index as usize % self.engines.len()
    }

    pub fn change_config(&self) {
        // A swap instead of a store, because loom would let the swap that reads the flag return the older
        // value.
        self.config_changed.swap(true, SeqCst);
        self.wake.wake();
    }

    pub fn stop(&self) {
        self.stopping.store(true, SeqCst);
        self.wake.wake();
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
        assert_eq!(registry.front_end().unwrap().peer, "d");
        registry.leave();
        assert!(registry.close_if(|front_end| front_end.is_none()) && !registry.admit("e"));
        let counters = registry.counters();
        assert_eq!((counters.connections, counters.refused_connections), (2, 3));
    }

    #[test]
    fn only_a_front_end_that_tracks_requests_can_be_handed_over() {
        let registry = Registry::new(None, None);
        let close = || registry.close_if(|front_end| front_end.is_none_or(|it| it.recorded));
        assert!(registry.admit("a") && !close());
        registry.update(|front_end| front_end.recorded = true);
        assert!(close() && registry.is_connected());
        registry.leave();
        assert!(!registry.admit("b"));
    }

    #[test]
    fn counters_never_decrease() {
        let registry = Registry::new(None, None);
        assert!(registry.admit("a"));
        for (index, requests) in [(0, 5), (1, 7), (0, 2)] {
            let ring = Arc::new(RingStatus::new(index, 0));
            registry.add_ring(&ring);
            ring.publish(&VhostUserCounters { requests, ..VhostUserCounters::default() }, 1);
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
