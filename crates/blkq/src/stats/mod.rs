//! Statistics of a queue, written only by the thread that owns the queue, and read by any thread.
//!
//! The counters have the meaning of /sys/block/X/stat (Documentation/block/stat.rst). An I/O is a request,
//! and is counted when it completes. A bio that joined a request is a merge. A request is in flight from the
//! time when it was built, so its latency includes queueing. Write zeroes are counted as writes. While
//! statistics are off, the owner reports no I/O and needs no clock.

use std::sync::Arc;
// Not checked by a model checker: the counters are independent of each other, and readers accept values of
// slightly different times. So all accesses are relaxed.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::bio::Operation;
use crate::clock::monotonic_ns;
use crate::enumeration::enumeration;
use crate::error::Status;
use crate::layout::CachePadded;

mod histogram;
mod snapshot;

pub(crate) use histogram::LatencyCounters;
pub use histogram::{Histogram, LATENCY_BUCKETS};
pub use snapshot::{GroupSnapshot, StatsSnapshot};

enumeration! {
    /// The groups of operations that are counted separately (the kernel's `stat_group`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum StatGroup {
        /// Reads, which transfer data from the device.
        #[default]
        Read = 0 => "read",
        /// Writes and write zeroes, counted together.
        Write = 1 => "write",
        /// Discards, which may deallocate sectors.
        Discard = 2 => "discard",
        /// Flushes of the write cache.
        Flush = 3 => "flush",
    }

    /// The name of the group in tables.
    pub const fn name(self) -> &'static str;
}

impl StatGroup {
    /// The index of the group's in-flight counter: 0 for reads, 1 for all others.
    const fn direction(self) -> usize {
        !matches!(self, StatGroup::Read) as usize
    }
}

impl From<Operation> for StatGroup {
    #[inline]
    fn from(operation: Operation) -> StatGroup {
        match operation {
            Operation::Read => StatGroup::Read,
            Operation::Write | Operation::WriteZeroes => StatGroup::Write,
            Operation::Discard => StatGroup::Discard,
            Operation::Flush => StatGroup::Flush,
        }
    }
}

enumeration! {
    /// Events in the block layer that are counted.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[repr(u8)]
    #[non_exhaustive]
    pub enum Counter {
        /// A plug with at least one request was flushed.
        PlugFlushes => "plug-flushes",
        /// A batch of requests was handed to the driver.
        DispatchBatches => "dispatch-batches",
        /// The driver could not take a request, which was requeued.
        Requeues => "requeues",
        /// A bio was split because it exceeded the limits.
        Splits => "splits",
        /// The clock was read for a time stamp.
        ClockReads => "clock-reads",
        /// A bio had to wait for a tag.
        TagWaits => "tag-waits",
        /// A request completed before it started, according to its time stamps. Its latency is counted as 0.
        NegativeLatencies => "negative-latencies",
        /// A bio required a flush: a flush itself, a bio with PREFLUSH, or a bio with FUA that the driver does
        /// not support. Counted only for devices with a write cache.
        FlushesAsked => "flushes-asked",
        /// A flush was sent to the driver.
        FlushesSent => "flushes-sent",
        /// A required flush was served by a flush that also served others.
        FlushesCoalesced => "flushes-coalesced",
        /// A request, or a bio without a request, was found to be in flight for too long: see
        /// [`hang`](crate::queue::hang).
        Hangs => "hangs",
        /// The owner of a queue called io_uring_enter(2). Counted only for engines.
        Enters => "enters",
        /// A call of io_uring_enter(2) submitted a part of a batch early, so that the device could start with it.
        EarlySubmissions => "early-submissions",
        /// A request had to wait for a limit: see [`throttle`](crate::throttle).
        ThrottledRequests => "throttled-requests",
        /// The time in which requests of a queue waited for a limit, in nanoseconds; the sum for several queues.
        ThrottledNs => "throttled-ns",
        /// A request was held after an error: see [`ErrorPolicy`](crate::ErrorPolicy).
        HeldRequests => "held-requests",
    }

    /// The name of the counter in tables.
    pub const fn name(self) -> &'static str;
}

/// Adds to a counter that only this thread writes. A plain load and store is enough.
pub fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(n), Relaxed);
}

/// Raises a maximum that only this thread writes.
pub fn raise(maximum: &AtomicU64, value: u64) {
    if value > maximum.load(Relaxed) {
        maximum.store(value, Relaxed);
    }
}

/// The words that each completion of a group changes, in one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct GroupCounters {
    ios: AtomicU64,
    merges: AtomicU64,
    sectors: AtomicU64,
    nanoseconds: AtomicU64,
    latency_max_ns: AtomicU64,
}

/// The statistics of one queue, as other threads read them.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct QueueStats {
    in_flight: [AtomicU64; 2],
    in_flight_max: [AtomicU64; 2],
    /// The time in which requests were in flight, in one word so that a reader never sees half a change.
    /// While the queue is idle, the word is twice the accumulated nanoseconds. While it is busy, the word is
    /// twice the difference of the accumulated nanoseconds and the time at which the queue became busy, plus
    /// 1.
    busy: AtomicU64,
    groups: [GroupCounters; StatGroup::COUNT],
    counters: [AtomicU64; Counter::COUNT],
    clock_age_max_ns: AtomicU64,
    latencies: [LatencyCounters; StatGroup::COUNT],
    errors: [[AtomicU64; Status::ALL.len()]; StatGroup::COUNT],
    refused: [[AtomicU64; Status::ALL.len()]; StatGroup::COUNT],
    hung: AtomicU64,
    throttled: AtomicU64,
    held: AtomicU64,
}

fn zeroes<const N: usize>() -> [AtomicU64; N] {
    [const { AtomicU64::new(0) }; N]
}

impl QueueStats {
    /// Not `Arc::default()`, which needs three times the stack: the models have only 32 KiB.
    pub(crate) fn shared() -> Arc<CachePadded<QueueStats>> {
        Arc::new(CachePadded::new(QueueStats {
            in_flight: zeroes(),
            in_flight_max: zeroes(),
            busy: AtomicU64::new(0),
            groups: Default::default(),
            counters: zeroes(),
            clock_age_max_ns: AtomicU64::new(0),
            latencies: std::array::from_fn(|_| LatencyCounters::default()),
            errors: std::array::from_fn(|_| zeroes()),
            refused: std::array::from_fn(|_| zeroes()),
            hung: AtomicU64::new(0),
            throttled: AtomicU64::new(0),
            held: AtomicU64::new(0),
        }))
    }

    /// The current values: exact without I/O, and off by at most a batch of completions during I/O.
    pub fn snapshot(&self) -> StatsSnapshot {
        // The clock is read second, so that it is never earlier than the time in the word.
        let busy = self.busy.load(Relaxed);
        self.snapshot_at(busy, monotonic_ns())
    }

    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    #[cfg(simulation)]
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Relaxed)
    }

    #[cfg(simulation)]
    pub fn throttled(&self) -> u64 {
        self.throttled.load(Relaxed)
    }

    /// Number of requests that completed with an error or were held after an error.
    pub fn failed_requests(&self) -> u64 {
        let failed: u64 = self.errors.iter().flatten().map(|count| count.load(Relaxed)).sum();
        failed + self.counters[Counter::HeldRequests as usize].load(Relaxed)
    }

    fn snapshot_at(&self, busy: u64, now_ns: u64) -> StatsSnapshot {
        let load = |counters: &[AtomicU64], values: &mut [u64]| {
            for (counter, value) in counters.iter().zip(values) {
                *value = counter.load(Relaxed);
            }
        };
        let mut snapshot = StatsSnapshot::default();
        load(&self.in_flight, &mut snapshot.in_flight);
        load(&self.in_flight_max, &mut snapshot.in_flight_max);
        load(&self.counters, &mut snapshot.counters);
        snapshot.clock_age_max_ns = self.clock_age_max_ns.load(Relaxed);
        snapshot.hung = self.hung.load(Relaxed);
        snapshot.throttled = self.throttled.load(Relaxed);
        snapshot.held = self.held();
        snapshot.busy_ns = busy_ns(busy, now_ns);
        for (i, group) in snapshot.groups.iter_mut().enumerate() {
            let counters = &self.groups[i];
            group.ios = counters.ios.load(Relaxed);
            group.merges = counters.merges.load(Relaxed);
            group.sectors = counters.sectors.load(Relaxed);
            group.nanoseconds = counters.nanoseconds.load(Relaxed);
            group.latency.max_ns = counters.latency_max_ns.load(Relaxed);
            self.latencies[i].add_to(&mut group.latency.buckets);
            load(&self.errors[i], &mut group.errors);
            load(&self.refused[i], &mut group.refused);
        }
        snapshot
    }
}

/// The busy time in nanoseconds at `now_ns` according to a value of [`QueueStats::busy`].
fn busy_ns(word: u64, now_ns: u64) -> u64 {
    let value = word as i64 >> 1;
    if word & 1 == 0 { value as u64 } else { value.wrapping_add_unsigned(now_ns).max(0) as u64 }
}

/// The writing side of [`QueueStats`], which the owner of the queue has. There is only one writer, so no
/// locked instruction is needed.
#[derive(Debug)]
pub(crate) struct StatsWriter(Arc<CachePadded<QueueStats>>);

impl StatsWriter {
    /// The writer of existing statistics, which must have no other writer.
    pub(crate) fn over(stats: Arc<CachePadded<QueueStats>>) -> StatsWriter {
        StatsWriter(stats)
    }

    /// Records that `requests` requests (more than 0) of `group` were built at `now_ns`.
    #[inline]
    pub fn start(&mut self, group: StatGroup, requests: u64, now_ns: u64) {
        let stats = &**self.0;
        let direction = group.direction();
        let in_flight = stats.in_flight[direction].load(Relaxed) + requests;
        stats.in_flight[direction].store(in_flight, Relaxed);
        raise(&stats.in_flight_max[direction], in_flight);
        let busy = stats.busy.load(Relaxed);
        if busy & 1 == 0 {
            stats.busy.store(busy.wrapping_sub(now_ns << 1) | 1, Relaxed);
        }
    }

    pub fn merged(&mut self, group: StatGroup) {
        add(&self.0.groups[group as usize].merges, 1);
    }

    /// Records that a request of `group` joined another request. It is no longer in flight, and will not
    /// complete as a separate I/O.
    pub fn joined(&mut self, group: StatGroup) {
        self.merged(group);
        add(&self.0.in_flight[group.direction()], u64::MAX);
    }

    /// Records that a request of `group` completed with an error. It is also counted as an I/O.
    #[cold]
    pub fn failed(&mut self, group: StatGroup, status: Status) {
        add(&self.0.errors[group as usize][error_index(status)], 1);
    }

    /// Records that a bio of `group` completed with an error without becoming a request.
    #[cold]
    pub fn rejected(&mut self, group: StatGroup, status: Status) {
        add(&self.0.refused[group as usize][error_index(status)], 1);
    }

    pub fn hung(&mut self, count: u64) {
        self.0.hung.store(count, Relaxed);
    }

    pub fn throttled(&mut self, count: u64) {
        self.0.throttled.store(count, Relaxed);
    }

    pub fn held(&mut self, count: u64) {
        self.0.held.store(count, Relaxed);
    }

    pub fn count(&mut self, counter: Counter, n: u64) {
        add(&self.0.counters[counter as usize], n);
    }

    /// Adds 1 to `counter`. Returns true when it reaches a multiple of `every`, a power of two.
    #[inline]
    pub fn count_to(&mut self, counter: Counter, every: u64) -> bool {
        let counter = &self.0.counters[counter as usize];
        let count = counter.load(Relaxed) + 1;
        counter.store(count, Relaxed);
        count & (every - 1) == 0
    }

    pub fn clock_age(&mut self, age_ns: u64) {
        raise(&self.0.clock_age_max_ns, age_ns);
    }

    /// Records that `requests` requests (1 or more) of `group`, built at `start_ns`, completed at `now_ns`
    /// with `sectors` sectors in total.
    #[inline]
    pub fn done(&mut self, group: StatGroup, (requests, sectors): (u64, u64), start_ns: u64, now_ns: u64) {
        let stats = &**self.0;
        let latency_ns = now_ns.saturating_sub(start_ns);
        if now_ns < start_ns {
            add(&stats.counters[Counter::NegativeLatencies as usize], requests);
        }
        let counters = &stats.groups[group as usize];
        stats.latencies[group as usize].count(latency_ns, requests);
        raise(&counters.latency_max_ns, latency_ns);
        add(&counters.ios, requests);
        add(&counters.sectors, sectors);
        add(&counters.nanoseconds, latency_ns.wrapping_mul(requests));
        add(&stats.in_flight[group.direction()], requests.wrapping_neg());
        if stats.in_flight[0].load(Relaxed) | stats.in_flight[1].load(Relaxed) == 0 {
            stats.busy.store(busy_ns(stats.busy.load(Relaxed), now_ns) << 1, Relaxed);
        }
    }
}

const fn error_index(status: Status) -> usize {
    status as usize - 1
}

#[cfg(test)]
mod tests;
