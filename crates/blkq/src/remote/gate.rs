//! Request batching: how many requests a disk has in flight, and which submitter may add to them when
//! there are enough (Linux 2.5.74, drivers/block/ll_rw_blk.c; the cap is of 2005).
//!
//! One request per wake-up makes every submitter sleep once per request and interleaves
//! their streams. So one that was woken, or that fills the queue, is a *batcher*: it may take
//! [`BATCH_REQUESTS`] within [`BATCH_TIME_NS`] though the queue is full, up to half as many
//! again as the queue has. All others wait in the order of their coming.

#[cfg(all(test, model_check))]
mod model;
#[cfg(all(test, not(model_check)))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bio::Operation;
use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst, fence};
use crate::sync::{Mutex, WaitQueue, lock, try_lock};

/// Requests that a batcher may take (the kernel's `BLK_BATCH_REQ`).
pub const BATCH_REQUESTS: u32 = 32;

/// For how long it may, in nanoseconds (the kernel's `BLK_BATCH_TIME`); the first is
/// granted however late it comes.
pub const BATCH_TIME_NS: u64 = 20_000_000;

/// Reads and writes are counted apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Direction {
    /// From the device.
    Read,
    /// To the device: writes, discards and the like.
    Write,
}

impl Direction {
    pub(crate) fn of(operation: Operation) -> Direction {
        if operation.is_write() { Direction::Write } else { Direction::Read }
    }
}

/// The batch that one submitter may still take: one per thread that submits, for all gates.
#[derive(Debug, Default)]
pub(crate) struct Batcher {
    credit: u32,
    /// When it became a batcher, in nanoseconds.
    last_waited_ns: u64,
    node: Arc<GateWaiter>,
}

impl Batcher {
    /// A full credit counts whatever the time is: a woken submitter gets one request at least.
    fn is_batching(&self, now_ns: u64) -> bool {
        self.credit == BATCH_REQUESTS
            || (self.credit > 0 && now_ns < self.last_waited_ns.saturating_add(BATCH_TIME_NS))
    }

    /// Makes it a batcher, unless it is one. Whether it became one.
    fn set_batching(&mut self, now_ns: u64) -> bool {
        let becomes = !self.is_batching(now_ns);
        if becomes {
            self.credit = BATCH_REQUESTS;
            self.last_waited_ns = now_ns;
        }
        becomes
    }

    /// How many requests more than one it will probably take when it is woken: what is left
    /// of its batch, or as many as it took of its last one.
    fn promise(&self, now_ns: u64) -> u32 {
        let batch = if self.is_batching(now_ns) { self.credit } else { BATCH_REQUESTS - self.credit };
        batch.saturating_sub(1)
    }
}

/// A submitter in the queue of one direction.
#[derive(Debug, Default)]
struct GateWaiter {
    granted: AtomicBool,
    promise: AtomicU32,
    queue: WaitQueue,
}

/// The counters of a gate.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct GateCounters {
    /// How often a submitter became a batcher.
    pub grants: u64,
    /// The most requests that one grant gave.
    pub largest_grant: u32,
    /// How often a submitter had to wait.
    pub waits: u64,
    /// How often one was woken.
    pub wakeups: u64,
    /// The most requests in flight at a time: reads, writes.
    pub largest_in_flight: [u32; 2],
}

#[derive(Debug, Default)]
struct Counters {
    grants: AtomicU64,
    largest_grant: AtomicU32,
    waits: AtomicU64,
    wakeups: AtomicU64,
}

/// The limit of requests in flight of a disk, with batching or without.
#[derive(Debug)]
pub(crate) struct RequestGate {
    nr_requests: AtomicU32,
    batching: AtomicBool,
    counters: CachePadded<Counters>,
    sides: [CachePadded<Side>; 2],
}

/// One direction. Being full is not kept apart: it is having waiters, or as many requests
/// in flight as there may be.
#[derive(Debug, Default)]
struct Side {
    /// Requests in flight in the lower half, waiters in the upper: changed together, so that
    /// a thread that returns requests sees those that wait.
    load: AtomicU64,
    /// Requests that woken batchers will probably take and have not taken yet: for these no
    /// other is woken. A guess, void when half of the requests are back: so a thread is
    /// always woken before nothing is in flight any more.
    promised: AtomicU32,
    /// A thread could not have the lock: its holder checks again.
    again: AtomicBool,
    largest_in_flight: AtomicU32,
    waiters: Mutex<VecDeque<Arc<GateWaiter>>>,
}

const ONE_WAITER: u64 = 1 << 32;

fn in_flight(load: u64) -> u32 {
    load as u32
}

fn waiting(load: u64) -> u32 {
    (load >> 32) as u32
}

impl Side {
    fn note_in_flight(&self, count: u32) {
        if count > self.largest_in_flight.load(Relaxed) {
            self.largest_in_flight.fetch_max(count, Relaxed);
        }
    }
}

impl RequestGate {
    /// A gate for `nr_requests` in flight per direction, 1 or more (the kernel's default is
    /// 128). Without `batching` every wake-up is for one request.
    pub fn new(nr_requests: u32, batching: bool) -> RequestGate {
        RequestGate {
            nr_requests: AtomicU32::new(nr_requests.max(1)),
            batching: AtomicBool::new(batching),
            counters: CachePadded::default(),
            sides: Default::default(),
        }
    }

    /// Changes both settings. Requests in flight stay so, and submitters with room now are woken.
    pub fn set(&self, nr_requests: u32, batching: bool) {
        self.nr_requests.store(nr_requests.max(1), SeqCst);
        self.batching.store(batching, SeqCst);
        for side in &self.sides {
            side.promised.store(0, Relaxed);
            self.serve(side);
        }
    }

    /// The limit per direction.
    #[cfg(all(test, not(model_check)))]
    pub fn nr_requests(&self) -> u32 {
        self.nr_requests.load(Relaxed)
    }

    /// Whether the woken and the filling become batchers.
    #[cfg(all(test, not(model_check)))]
    pub fn batching(&self) -> bool {
        self.batching.load(Relaxed)
    }

    /// Requests in flight.
    #[cfg(test)]
    pub fn in_flight(&self, direction: Direction) -> u32 {
        in_flight(self.side(direction).load.load(SeqCst))
    }

    /// Submitters that wait.
    pub fn waiting(&self, direction: Direction) -> u32 {
        waiting(self.side(direction).load.load(SeqCst))
    }

    fn side(&self, direction: Direction) -> &Side {
        &self.sides[direction as usize]
    }

    /// One more request, if there may be: never waits and takes no lock. `now_ns` gives
    /// nanoseconds of a monotonic clock and is called only if they matter.
    pub fn try_enter(&self, direction: Direction, batcher: &mut Batcher, now_ns: impl Fn() -> u64) -> bool {
        let side = self.side(direction);
        self.allocate(side, batcher, &now_ns, side.load.load(SeqCst)).is_ok()
    }

    /// Counts one more request, or gives the load that forbids it.
    fn allocate(
        &self,
        side: &Side,
        batcher: &mut Batcher,
        now_ns: &impl Fn() -> u64,
        mut load: u64,
    ) -> Result<(), u64> {
        let nr = self.nr_requests.load(Relaxed);
        let batching = self.batching.load(Relaxed);
        let mut now = None;
        loop {
            let count = in_flight(load);
            let full = waiting(load) > 0 || count >= nr;
            let fills = batching && !full && count + 1 >= nr;
            if full {
                let below_cap = count < nr.saturating_add(nr / 2);
                let may = batching
                    && below_cap
                    && batcher.credit > 0
                    && batcher.is_batching(*now.get_or_insert_with(now_ns));
                if !may {
                    return Err(load);
                }
            }
            match side.load.compare_exchange_weak(load, load + 1, SeqCst, SeqCst) {
                Ok(_) => {
                    side.note_in_flight(count + 1);
                    if batching && (fills || batcher.credit > 0) {
                        self.take_credit(side, batcher, now.unwrap_or_else(now_ns), fills);
                    }
                    return Ok(());
                }
                Err(changed) => load = changed,
            }
        }
    }

    /// Counts a request of a batcher, which the submitter becomes if it `fills` the queue.
    fn take_credit(&self, side: &Side, batcher: &mut Batcher, now_ns: u64, fills: bool) {
        if fills && batcher.set_batching(now_ns) {
            self.counters.grants.fetch_add(1, Relaxed);
        } else if batcher.is_batching(now_ns) {
            // It was woken for this one, maybe; if not, the guess is off by one.
            let _ = side.promised.fetch_update(Relaxed, Relaxed, |promised| promised.checked_sub(1));
        } else {
            return;
        }
        self.use_credit(batcher);
    }

    fn use_credit(&self, batcher: &mut Batcher) {
        batcher.credit -= 1;
        let granted = BATCH_REQUESTS - batcher.credit;
        if granted > self.counters.largest_grant.load(Relaxed) {
            self.counters.largest_grant.fetch_max(granted, Relaxed);
        }
    }

    /// One more request; waits for its turn if it must. Not for an engine's thread.
    /// `before_sleep` is called before it sleeps: what the submitter has plugged must go out
    /// there, or it might wait for itself. `now_ns` as for [`RequestGate::try_enter`].
    pub fn enter(
        &self,
        direction: Direction,
        batcher: &mut Batcher,
        now_ns: impl Fn() -> u64,
        before_sleep: impl FnOnce(),
    ) {
        let side = self.side(direction);
        if self.allocate(side, batcher, &now_ns, side.load.load(SeqCst)).is_ok() {
            return;
        }
        if !self.queue_up(side, batcher, &now_ns) {
            return;
        }
        self.counters.waits.fetch_add(1, Relaxed);
        before_sleep();
        batcher.node.queue.wait_until(|| batcher.node.granted.load(SeqCst));
        // The request was counted by the thread that woke this one.
        if self.batching.load(Relaxed) {
            if batcher.set_batching(now_ns()) {
                self.counters.grants.fetch_add(1, Relaxed);
            }
            self.use_credit(batcher);
        }
    }

    /// Puts the submitter last in the queue, unless it may enter now. Whether it is queued.
    fn queue_up(&self, side: &Side, batcher: &mut Batcher, now_ns: &impl Fn() -> u64) -> bool {
        let mut waiters = lock(&side.waiters);
        let mut load = side.load.load(SeqCst);
        let queued = loop {
            match self.allocate(side, batcher, now_ns, load) {
                Ok(()) => break false,
                Err(full) => load = full,
            }
            match side.load.compare_exchange_weak(load, load + ONE_WAITER, SeqCst, SeqCst) {
                Ok(_) => break true,
                Err(changed) => load = changed,
            }
        };
        if queued {
            batcher.node.granted.store(false, SeqCst);
            batcher.node.promise.store(batcher.promise(now_ns()), Relaxed);
            waiters.push_back(batcher.node.clone());
        }
        drop(waiters);
        fence(SeqCst);
        if side.again.load(SeqCst) {
            self.serve(side);
        }
        queued
    }

    /// `count` requests of one direction are done. Never waits: if the lock of the waiters is
    /// taken, its holder wakes the submitters in its place.
    pub fn leave(&self, direction: Direction, count: u32) {
        let side = self.side(direction);
        let before = side.load.fetch_sub(u64::from(count), SeqCst);
        debug_assert!(in_flight(before) >= count, "more requests left than entered");
        if waiting(before) == 0 {
            return;
        }
        let load = before - u64::from(count);
        if in_flight(load) <= self.nr_requests.load(SeqCst) / 2 {
            side.promised.store(0, Relaxed);
        }
        if self.has_room(side, load) {
            self.serve(side);
        }
    }

    /// Whether the first waiter is to be woken: there is room beyond what was promised.
    fn has_room(&self, side: &Side, load: u64) -> bool {
        let promised = if self.batching.load(SeqCst) { side.promised.load(Relaxed) } else { 0 };
        waiting(load) > 0 && in_flight(load).saturating_add(promised) < self.nr_requests.load(SeqCst)
    }

    /// Wakes those whose turn it is, each with one request already counted for it, so that
    /// no other can take it.
    fn serve(&self, side: &Side) {
        side.again.swap(true, SeqCst);
        loop {
            fence(SeqCst);
            let Some(mut waiters) = try_lock(&side.waiters) else { return };
            side.again.swap(false, SeqCst);
            let next = self.admit_one(side).and_then(|()| waiters.pop_front());
            if let Some(waiter) = &next {
                side.promised.fetch_add(waiter.promise.load(Relaxed), Relaxed);
            }
            drop(waiters);
            match next {
                // Woken without the lock, which it may need soon.
                Some(waiter) => {
                    self.counters.wakeups.fetch_add(1, Relaxed);
                    waiter.granted.store(true, SeqCst);
                    waiter.queue.wake_all();
                    side.again.swap(true, SeqCst);
                }
                None => {
                    fence(SeqCst);
                    if !side.again.load(SeqCst) {
                        return;
                    }
                }
            }
        }
    }

    /// Counts one request for the first waiter, if it is to be woken.
    fn admit_one(&self, side: &Side) -> Option<()> {
        let mut load = side.load.load(SeqCst);
        while self.has_room(side, load) {
            match side.load.compare_exchange_weak(load, load + 1 - ONE_WAITER, SeqCst, SeqCst) {
                Ok(_) => {
                    side.note_in_flight(in_flight(load) + 1);
                    return Some(());
                }
                Err(changed) => load = changed,
            }
        }
        None
    }

    /// The words that submitters and owners use, with their addresses.
    pub(crate) fn hot_fields(&self, fields: &mut Vec<HotField>) {
        fields.push(HotField::of("limit", Writer::Nobody, &self.nr_requests));
        fields.push(HotField::of("batching", Writer::Nobody, &self.batching));
        for (direction, side) in self.sides.iter().enumerate() {
            fields.push(HotField::of("gate", Writer::Everybody(direction), &**side));
        }
    }

    /// The counters so far.
    pub fn counters(&self) -> GateCounters {
        GateCounters {
            grants: self.counters.grants.load(Relaxed),
            largest_grant: self.counters.largest_grant.load(Relaxed),
            waits: self.counters.waits.load(Relaxed),
            wakeups: self.counters.wakeups.load(Relaxed),
            largest_in_flight: [
                self.sides[0].largest_in_flight.load(Relaxed),
                self.sides[1].largest_in_flight.load(Relaxed),
            ],
        }
    }
}
