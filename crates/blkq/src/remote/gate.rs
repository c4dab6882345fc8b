//! The request gate limits the number of requests that a disk has in flight, and decides which submitter may
//! add one when the limit is reached. This is the request batching of Linux 2.5.74
//! (drivers/block/ll_rw_blk.c); the upper bound on batches was added in 2005.
//!
//! If each wake-up were for one request, every submitter would sleep once per request, and their streams
//! would interleave. Therefore a submitter that was woken, or that fills the queue, becomes a *batcher*: it
//! may add [`BATCH_REQUESTS`] requests within [`BATCH_TIME_NS`] although the queue is full, up to one and a
//! half times the limit. All other submitters wait in the order in which they arrived.

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

/// The number of requests that a batcher may take (the kernel's `BLK_BATCH_REQ`).
pub const BATCH_REQUESTS: u32 = 32;

/// The time in which a batcher may take its requests, in nanoseconds (the kernel's `BLK_BATCH_TIME`). The
/// first request is granted after any time.
pub const BATCH_TIME_NS: u64 = 20_000_000;

/// The direction of a request. Reads and writes have separate limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum Direction {
    /// Reads, which transfer data from the device.
    Read,
    /// Writes, discards and similar requests.
    Write,
}

impl Direction {
    pub(crate) fn of(operation: Operation) -> Direction {
        if operation.is_write() { Direction::Write } else { Direction::Read }
    }
}

/// The batch that a submitter may still take. Each submitting thread has one, which serves all gates.
#[derive(Debug, Default)]
pub(crate) struct Batcher {
    credit: u32,
    /// When the submitter became a batcher, in nanoseconds of the monotonic clock.
    last_waited_ns: u64,
    node: Arc<GateWaiter>,
}

impl Batcher {
    /// A full credit is valid at any time, so that a woken submitter gets at least one request.
    fn is_batching(&self, now_ns: u64) -> bool {
        self.credit == BATCH_REQUESTS
            || (self.credit > 0 && now_ns < self.last_waited_ns.saturating_add(BATCH_TIME_NS))
    }

    /// Makes the submitter a batcher. Returns false if it already is one.
    fn set_batching(&mut self, now_ns: u64) -> bool {
        let becomes = !self.is_batching(now_ns);
        if becomes {
            self.credit = BATCH_REQUESTS;
            self.last_waited_ns = now_ns;
        }
        becomes
    }

    /// An estimate of how many more requests than one the submitter will take when it is woken: the rest of
    /// its batch, or as many as it took of its last batch.
    fn promise(&self, now_ns: u64) -> u32 {
        let batch = if self.is_batching(now_ns) { self.credit } else { BATCH_REQUESTS - self.credit };
        batch.saturating_sub(1)
    }
}

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
    /// Batches admitted: how often a submitter became a batcher.
    pub grants: u64,
    /// The number of requests in the largest batch.
    pub largest_grant: u32,
    /// How often a submitter had to wait.
    pub waits: u64,
    /// How often a waiting submitter was woken.
    pub wakeups: u64,
    /// The largest number of requests in flight: reads, then writes.
    pub largest_in_flight: [u32; 2],
}

#[derive(Debug, Default)]
struct Counters {
    grants: AtomicU64,
    largest_grant: AtomicU32,
    waits: AtomicU64,
    wakeups: AtomicU64,
}

/// The limit on a disk's requests in flight, with or without batching.
#[derive(Debug)]
pub(crate) struct RequestGate {
    nr_requests: AtomicU32,
    batching: AtomicBool,
    counters: CachePadded<Counters>,
    sides: [CachePadded<Side>; 2],
}

/// One direction. There is no flag for "full": a side is full if it has waiters, or as many requests in
/// flight as the limit permits.
#[derive(Debug, Default)]
struct Side {
    /// Requests in flight in the lower half, and waiters in the upper half. Both are in one word, so that a
    /// thread that returns requests cannot miss a waiter.
    load: AtomicU64,
    /// The number of requests that woken batchers will probably take and have not taken yet. No other waiter
    /// is woken for these. The number is an estimate, and is reset when half of the requests have completed.
    /// So a waiter is always woken before the last request in flight completes.
    promised: AtomicU32,
    /// A thread could not take the lock. The thread that holds the lock must check for waiters again.
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

fn raise(maximum: &AtomicU32, value: u32) {
    if value > maximum.load(Relaxed) {
        maximum.fetch_max(value, Relaxed);
    }
}

impl RequestGate {
    /// A gate for `nr_requests` in flight per direction, at least 1 (the kernel's default is 128). Without
    /// `batching` each wake-up is for one request.
    pub fn new(nr_requests: u32, batching: bool) -> RequestGate {
        RequestGate {
            nr_requests: AtomicU32::new(nr_requests.max(1)),
            batching: AtomicBool::new(batching),
            counters: CachePadded::default(),
            sides: Default::default(),
        }
    }

    /// Changes both settings. Requests in flight are not affected, and waiters that have room now are woken.
    pub fn set(&self, nr_requests: u32, batching: bool) {
        self.nr_requests.store(nr_requests.max(1), SeqCst);
        self.batching.store(batching, SeqCst);
        for side in &self.sides {
            side.promised.store(0, Relaxed);
            self.serve(side);
        }
    }

    pub fn waiting(&self, direction: Direction) -> u32 {
        waiting(self.side(direction).load.load(SeqCst))
    }

    fn side(&self, direction: Direction) -> &Side {
        &self.sides[direction as usize]
    }

    /// Adds a request if the limit permits it. Never waits and takes no lock. `now_ns` returns nanoseconds of
    /// the monotonic clock, and is called only if the time matters.
    pub fn try_enter(&self, direction: Direction, batcher: &mut Batcher, now_ns: impl Fn() -> u64) -> bool {
        let side = self.side(direction);
        self.allocate(side, batcher, &now_ns, side.load.load(SeqCst)).is_ok()
    }

    /// Counts one more request. Fails with the load that does not permit it.
    fn allocate(
        &self,
        side: &Side,
        batcher: &mut Batcher,
        now_ns: &impl Fn() -> u64,
        mut load: u64,
    ) -> Result<(), u64> {
        // Relaxed here and for `batching`: a submitter may use the settings from just before a change.
        // `RequestGate::set` wakes the waiters for which the new settings have room.
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
                    raise(&side.largest_in_flight, count + 1);
                    if batching && (fills || batcher.credit > 0) {
                        self.take_credit(side, batcher, now.unwrap_or_else(now_ns), fills);
                    }
                    return Ok(());
                }
                Err(changed) => load = changed,
            }
        }
    }

    /// Counts a request of a batcher. A submitter that `fills` the queue becomes a batcher.
    fn take_credit(&self, side: &Side, batcher: &mut Batcher, now_ns: u64, fills: bool) {
        if fills && batcher.set_batching(now_ns) {
            self.counters.grants.fetch_add(1, Relaxed);
        } else if batcher.is_batching(now_ns) {
            // The submitter was probably woken for this request. If not, the estimate is off by one.
            let _ = side.promised.fetch_update(Relaxed, Relaxed, |promised| promised.checked_sub(1));
        } else {
            return;
        }
        self.use_credit(batcher);
    }

    fn use_credit(&self, batcher: &mut Batcher) {
        batcher.credit -= 1;
        raise(&self.counters.largest_grant, BATCH_REQUESTS - batcher.credit);
    }

    /// Adds a request, and waits if the limit does not permit it yet. Must not be called on an engine's
    /// thread. `before_sleep` is called before the sleep and must flush the submitter's plug: otherwise the
    /// submitter could wait for its own requests. For `now_ns` see [`RequestGate::try_enter`].
    pub fn enter(
        &self,
        direction: Direction,
        batcher: &mut Batcher,
        now_ns: impl Fn() -> u64,
        before_sleep: impl FnOnce(),
    ) {
        let side = self.side(direction);
        if self.try_enter(direction, batcher, &now_ns) || !self.queue_up(side, batcher, &now_ns) {
            return;
        }
        self.counters.waits.fetch_add(1, Relaxed);
        before_sleep();
        batcher.node.queue.wait_until(|| batcher.node.granted.load(SeqCst));
        // The thread that woke this one has already counted the request.
        if self.batching.load(Relaxed) {
            if batcher.set_batching(now_ns()) {
                self.counters.grants.fetch_add(1, Relaxed);
            }
            self.use_credit(batcher);
        }
    }

    /// Appends the submitter to the queue, unless it may enter now. Returns whether it was appended.
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

    /// Removes `count` completed requests of one direction. Never waits: if another thread holds the lock of
    /// the waiters, that thread wakes the submitters.
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

    /// Whether the first waiter should be woken: there is room in addition to what was promised.
    fn has_room(&self, side: &Side, load: u64) -> bool {
        let promised = if self.batching.load(SeqCst) { side.promised.load(Relaxed) } else { 0 };
        waiting(load) > 0 && in_flight(load).saturating_add(promised) < self.nr_requests.load(SeqCst)
    }

    /// Wakes waiters in order while there is room. Each request is counted before its waiter is woken, so
    /// that no other submitter can take its place.
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
                // Wakes without holding the lock, because the woken thread may need it soon.
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

    /// Counts one request for the first waiter, if there is room for it.
    fn admit_one(&self, side: &Side) -> Option<()> {
        let mut load = side.load.load(SeqCst);
        while self.has_room(side, load) {
            match side.load.compare_exchange_weak(load, load + 1 - ONE_WAITER, SeqCst, SeqCst) {
                Ok(_) => {
                    raise(&side.largest_in_flight, in_flight(load) + 1);
                    return Some(());
                }
                Err(changed) => load = changed,
            }
        }
        None
    }

    pub(crate) fn hot_fields(&self, fields: &mut Vec<HotField>) {
        fields.push(HotField::of("limit", Writer::Nobody, &self.nr_requests));
        fields.push(HotField::of("batching", Writer::Nobody, &self.batching));
        for (direction, side) in self.sides.iter().enumerate() {
            fields.push(HotField::of("gate", Writer::Everybody(direction), &**side));
        }
    }

    /// The counters so far. Relaxed loads: the counters are independent of each other.
    pub fn counters(&self) -> GateCounters {
        GateCounters {
            grants: self.counters.grants.load(Relaxed),
            largest_grant: self.counters.largest_grant.load(Relaxed),
            waits: self.counters.waits.load(Relaxed),
            wakeups: self.counters.wakeups.load(Relaxed),
            largest_in_flight: self.sides.each_ref().map(|side| side.largest_in_flight.load(Relaxed)),
        }
    }
}
