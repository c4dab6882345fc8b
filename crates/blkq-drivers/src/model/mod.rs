//! The model driver: a device that stores nothing and is slow or busy as configured, to measure and test the
//! block layer. It models fixed and random delays, a disk with one arm, and a disk with a limited rate.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::RangeInclusive;
use std::sync::Arc;
// Not `blkq::sync`: there is no protocol between the counters that a model checker could check.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkq::clock::monotonic_ns;
use blkq::random::Random;
use blkq::stats::add;
use blkq::sync::{Mutex, lock};
use blkq::{
    Busy, Driver, DriverContext, DriverQueue, Error, OpenContext, Operation, QueueLimits, Request, Tag, Taken,
};

use blkq::drivers::null::NullOptions;

use crate::errors::invalid;

/// The options of a model device.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// The limits of the device, which the driver declares unchanged.
    pub limits: QueueLimits,
    /// When the device completes requests.
    pub completion: ModelCompletion,
    /// N, if every Nth request is not taken ([`Busy::Resource`]) and so requeued; 0: all are taken.
    pub busy_resource_every: u32,
    /// Whether reads fill their memory with zeroes, as [`NullOptions::zero_reads`].
    pub zero_reads: bool,
}

impl ModelOptions {
    /// A device of `capacity_bytes` bytes that supports every operation and completes requests immediately.
    pub fn new(capacity_bytes: u64) -> ModelOptions {
        // The limits of the null device, which supports every operation.
        let NullOptions { limits, zero_reads } = NullOptions::new(capacity_bytes);
        ModelOptions { limits, completion: ModelCompletion::Immediate, busy_resource_every: 0, zero_reads }
    }
}

/// A device that stores nothing and has the configured timing.
pub struct Model {
    options: ModelOptions,
    counters: Mutex<Vec<Arc<Counters>>>,
}

/// The counters of a queue. Only the thread of the queue writes them, and all accesses are relaxed.
#[derive(Default)]
struct Counters {
    /// The requests that the driver has taken.
    requests: AtomicU64,
    flushes: AtomicU64,
    /// The requests for which the arm of a modelled disk had to move.
    seeks: AtomicU64,
}

impl Model {
    /// Makes a model device. Fails with [`blkq::ErrorKind::Invalid`] if the limits contradict each other.
    pub fn new(options: ModelOptions) -> Result<Model, Error> {
        options.limits.validate()?;
        Ok(Model { options, counters: Mutex::new(Vec::new()) })
    }
}

impl Driver for Model {
    fn name(&self) -> &'static str {
        "model"
    }

    fn limits(&self) -> QueueLimits {
        self.options.limits.clone()
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        let mut queues = lock(&self.counters);
        if matches!(self.options.completion, ModelCompletion::Disk(_) | ModelCompletion::RateLimited(_))
            && queues.iter().any(|queue| Arc::strong_count(queue) > 1)
        {
            let message = "a modelled disk has one arm or one token bucket, so only one queue can be open";
            return Err(invalid(message));
        }
        let counters = Arc::new(Counters::default());
        queues.push(Arc::clone(&counters));
        let options = self.options.clone();
        let timing = timing(options.completion.clone(), options.limits.capacity_bytes);
        let waiting = BinaryHeap::with_capacity(cx.tags);
        Ok(Box::new(ModelQueue { options, timing, waiting, counters, seen: 0 }))
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let queues = lock(&self.counters);
        let sum = |of: fn(&Counters) -> &AtomicU64| {
            queues.iter().map(|queue| of(queue).load(Relaxed)).sum::<u64>().to_string()
        };
        vec![
            ("requests", sum(|queue| &queue.requests)),
            ("flushes", sum(|queue| &queue.flushes)),
            ("seeks", sum(|queue| &queue.seeks)),
        ]
    }
}

struct ModelQueue {
    options: ModelOptions,
    timing: Option<Timing>,
    /// The requests in flight, with the time in nanoseconds at which each completes.
    waiting: BinaryHeap<Reverse<(u64, Tag)>>,
    counters: Arc<Counters>,
    /// The number of requests that were offered, for [`ModelOptions::busy_resource_every`].
    seen: u64,
}

// SAFETY: only this thread uses the memory of a request, and only before the request completes.
unsafe impl DriverQueue for ModelQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        let (mut taken, mut count, mut flushes) = (Taken::All, tags.len(), 0);
        for (index, &tag) in tags.iter().enumerate() {
            let request = cx.request(tag);
            self.seen += 1;
            let every = u64::from(self.options.busy_resource_every);
            if every != 0 && self.seen.is_multiple_of(every) {
                (taken, count) = (Taken::First(index, Busy::Resource), index);
                break;
            }
            if request.operation() == Operation::Read && self.options.zero_reads {
                cx.for_each_segment(tag, |segment| {
                    // SAFETY: the memory of a read in flight is valid, and only the driver may write to it.
                    unsafe { segment.ptr.write_bytes(0, segment.len as usize) }
                });
            }
            flushes += u64::from(request.operation() == Operation::Flush);
            let Some(timing) = &mut self.timing else {
                cx.complete(tag, Ok(()));
                continue;
            };
            let (due, seeks) = timing(cx.now_ns(), cx.request(tag));
            self.waiting.push(Reverse((due, tag)));
            add(&self.counters.seeks, u64::from(seeks));
        }
        add(&self.counters.requests, count as u64);
        add(&self.counters.flushes, flushes);
        taken
    }

    // Called once per turn, and at the deadline at the latest. Completes the requests that are due.
    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if self.waiting.is_empty() {
            return;
        }
        // The queue's cached time may be too old: requests that are due now would wait for the next turn.
        let now = monotonic_ns();
        while let Some(&Reverse((due, tag))) = self.waiting.peek()
            && due <= now
        {
            self.waiting.pop();
            cx.complete(tag, Ok(()));
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.waiting.peek().map(|Reverse((due, _))| *due)
    }
}

/// When a request of a model device completes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum ModelCompletion {
    /// Before the call of [`DriverQueue::queue_requests`] returns.
    #[default]
    Immediate,
    /// This number of nanoseconds after the driver has taken the request.
    Timer(u64),
    /// After a random time from a range in nanoseconds. The second value is the seed of these times.
    Random(RangeInclusive<u64>, u64),
    /// When a disk with one arm would complete it. Such a disk executes one request after the other.
    Disk(SeekModel),
    /// When a disk with a limited rate would complete it. Such a disk begins requests in order.
    RateLimited(RateModel),
}

/// A disk with one arm, which executes one request at a time. A request costs a seek that grows with the
/// distance, half a rotation, and the transfer; a request that continues the last one needs no seek.
/// Therefore merging and the order of requests matter as on a real disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeekModel {
    /// The shortest seek, to the neighbouring track, in nanoseconds.
    pub seek_min_ns: u64,
    /// The longest seek, over the whole disk, in nanoseconds. The time grows linearly with the distance.
    pub seek_max_ns: u64,
    /// Half a rotation, in nanoseconds.
    pub rotation_half_ns: u64,
    /// Transfer rate in bytes per second.
    pub bytes_per_second: u64,
    /// Fixed cost of each request, in nanoseconds.
    pub command_ns: u64,
}

impl Default for SeekModel {
    /// A disk of 7200 rotations a minute and 150 MB/s.
    fn default() -> SeekModel {
        SeekModel {
            seek_min_ns: 500_000,
            seek_max_ns: 15_000_000,
            rotation_half_ns: 4_166_667,
            bytes_per_second: 150_000_000,
            command_ns: 20_000,
        }
    }
}

impl SeekModel {
    /// The time in nanoseconds of a request of `bytes` bytes at `offset`, after one that completed at `head`, on a disk of
    /// `capacity` bytes.
    pub fn cost_ns(&self, head: u64, offset: u64, bytes: u64, capacity: u64) -> u64 {
        let ratio = |count: u64, whole: u64, of: u64| {
            (u128::from(count) * u128::from(of) / u128::from(whole.max(1))) as u64
        };
        let mut cost = self.command_ns + ratio(bytes, self.bytes_per_second, 1_000_000_000);
        if offset != head {
            let span = self.seek_max_ns.saturating_sub(self.seek_min_ns);
            cost += self.seek_min_ns + ratio(head.abs_diff(offset), capacity, span) + self.rotation_half_ns;
        }
        cost
    }
}

/// A disk whose rate the provider limits, as cloud disks are. Requests take tokens from a bucket in order, and wait for the next
/// refill if the bucket is empty. When more requests arrive than the rate allows, most of them complete in a burst right after
/// a refill, and the rest waits for the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateModel {
    /// Requests per second; 0: no limit.
    pub iops: u64,
    /// Bytes per second; 0: no limit.
    pub bytes_per_second: u64,
    /// The interval between refills, in nanoseconds; at least 1.
    pub refill_ns: u64,
    /// The capacity of the bucket, as the time in nanoseconds in which the rates fill it; at least one refill. It bounds the
    /// burst after an idle time.
    pub burst_ns: u64,
    /// The time of a request after it has got its tokens, in nanoseconds. Requests are served concurrently.
    pub service_ns: u64,
}

impl Default for RateModel {
    fn default() -> RateModel {
        RateModel {
            iops: 10_000,
            bytes_per_second: 0,
            refill_ns: 50_000_000,
            burst_ns: 0,
            service_ns: 200_000,
        }
    }
}

/// The token bucket of a [`RateModel`].
#[derive(Clone, Debug)]
pub struct RateBucket {
    model: RateModel,
    /// Tokens for I/Os and for bytes. They are negative after a request that took more than there were.
    tokens: [f64; 2],
    refilled_ns: Option<u64>,
    /// The time at which the last request began.
    begun_ns: u64,
}

impl RateBucket {
    /// A full bucket with the rates of `model`.
    pub fn new(model: RateModel) -> RateBucket {
        let refill_ns = model.refill_ns.max(1);
        let mut bucket = RateBucket {
            model: RateModel { refill_ns, ..model },
            tokens: [0.0; 2],
            refilled_ns: None,
            begun_ns: 0,
        };
        bucket.tokens = bucket.capacity();
        bucket
    }

    /// Changes the rates, in I/Os and bytes per second. The new rates apply from the next refill.
    pub fn set_rates(&mut self, iops: u64, bytes_per_second: u64) {
        (self.model.iops, self.model.bytes_per_second) = (iops, bytes_per_second);
    }

    fn accrued(&self, ns: u64) -> [f64; 2] {
        [self.model.iops, self.model.bytes_per_second].map(|rate| rate as f64 * ns as f64 / 1e9)
    }

    fn capacity(&self) -> [f64; 2] {
        self.accrued(self.model.burst_ns.max(self.model.refill_ns))
    }

    fn refill(&mut self, until_ns: u64) {
        let refilled_ns = self.refilled_ns.get_or_insert(until_ns);
        let times = until_ns.saturating_sub(*refilled_ns) / self.model.refill_ns;
        *refilled_ns += times * self.model.refill_ns;
        let (more, most) = (self.accrued(times * self.model.refill_ns), self.capacity());
        for (tokens, (more, most)) in self.tokens.iter_mut().zip(more.into_iter().zip(most)) {
            *tokens = (*tokens + more).min(most);
        }
    }

    /// Whether a request must wait for a refill. One token is enough for a request of any size; the next request waits until
    /// the debt is paid.
    fn lacks_tokens(&self) -> bool {
        let rates = [self.model.iops, self.model.bytes_per_second];
        self.tokens.iter().zip(rates).any(|(tokens, rate)| rate > 0 && *tokens <= 0.0)
    }

    /// The time at which a request of `bytes` bytes that arrives at `now_ns` completes, in nanoseconds of the same clock. The
    /// calls must be in the order of arrival.
    pub fn due_ns(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let mut begin_ns = now_ns.max(self.begun_ns);
        self.refill(begin_ns);
        while self.lacks_tokens() {
            begin_ns = self.refilled_ns.unwrap_or(begin_ns) + self.model.refill_ns;
            self.refill(begin_ns);
        }
        self.tokens[0] -= 1.0;
        self.tokens[1] -= bytes as f64;
        self.begun_ns = begin_ns;
        begin_ns + self.model.service_ns
    }
}

/// The time at which a request that arrives at a time completes, in nanoseconds of the same clock, and whether the arm of
/// a modelled disk must move.
type Timing = Box<dyn FnMut(u64, &Request) -> (u64, bool)>;

/// The timing of a device of `capacity` bytes; `None` if requests complete immediately.
fn timing(completion: ModelCompletion, capacity: u64) -> Option<Timing> {
    Some(match completion {
        ModelCompletion::Immediate => return None,
        ModelCompletion::Timer(delay_ns) => Box::new(move |now, _| (now + delay_ns, false)),
        ModelCompletion::Random(range, seed) => {
            let (first, span) =
                (*range.start(), range.end().saturating_sub(*range.start()).saturating_add(1));
            let mut random = Random::new(seed);
            Box::new(move |now, _| (now + first + random.below(span), false))
        }
        ModelCompletion::RateLimited(model) => {
            let mut bucket = RateBucket::new(model);
            Box::new(move |now, request| (bucket.due_ns(now, request.bytes()), false))
        }
        ModelCompletion::Disk(model) => {
            let (mut head, mut busy_until_ns) = (0, 0);
            Box::new(move |now, request| {
                let (offset, bytes) = (request.offset(), request.bytes());
                // These operations do not move the arm.
                let moves = !matches!(request.operation(), Operation::Flush | Operation::Discard);
                let cost =
                    if moves { model.cost_ns(head, offset, bytes, capacity) } else { model.command_ns };
                let seeks = moves && head != offset;
                head = if moves { offset + bytes } else { head };
                busy_until_ns = now.max(busy_until_ns) + cost;
                (busy_until_ns, seeks)
            })
        }
    })
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests;
