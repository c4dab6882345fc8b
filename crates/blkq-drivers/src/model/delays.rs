//! How a model device is slow on purpose, and its counters.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::RangeInclusive;
use std::time::Duration;

use blkq::clock::monotonic_ns;
use blkq::random::Random;
use blkq::sync::atomic::AtomicU64;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{DriverContext, Operation, Tag};

/// When a request completes.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum ModelCompletion {
    /// Before [`DriverQueue::queue_requests`](blkq::DriverQueue::queue_requests) returns.
    #[default]
    Immediate,
    /// That many nanoseconds after it was taken.
    Timer(u64),
    /// After a random number of nanoseconds out of a range, the same series for the same seed.
    Random(RangeInclusive<u64>, u64),
    /// When a disk with one arm has done it, one request after the other.
    Disk(SeekModel),
    /// When a disk with a limited rate has done it, which it begins in order.
    RateLimited(RateModel),
}

/// The cost of taking a request, for the engine thread: a bad driver, on purpose
/// (what BLK_MQ_F_BLOCKING announces in the kernel).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum ModelBlocking {
    /// Nothing.
    #[default]
    Never,
    /// That many nanoseconds of CPU per request.
    Spin(u64),
    /// That many nanoseconds of sleep per request.
    Sleep(u64),
}

impl ModelBlocking {
    #[inline]
    pub(super) fn hold_up(self) {
        match self {
            ModelBlocking::Never => {}
            ModelBlocking::Spin(ns) => {
                let end = monotonic_ns() + ns;
                while monotonic_ns() < end {
                    std::hint::spin_loop();
                }
            }
            ModelBlocking::Sleep(ns) => std::thread::sleep(Duration::from_nanos(ns)),
        }
    }
}

/// A disk with one arm, which does one request at a time: a seek that grows with the
/// distance (none where the last request ended), half a rotation after each seek, then
/// the transfer. Enough to make merging and the order of requests matter as they do on
/// such a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SeekModel {
    /// Seek to the neighbouring track, in nanoseconds.
    pub seek_min_ns: u64,
    /// Seek over the whole disk, in nanoseconds; between the two it grows with the distance.
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
    /// Nanoseconds of a request of `bytes` at `offset` after one that ended at `head`, on
    /// a disk of `capacity` bytes.
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

/// A disk whose rate its provider limits, as those of clouds are: requests take tokens from a bucket, in order, and
/// wait for the next refill when there are none. At the ceiling most of that is done right after a refill, and the
/// rest waits for the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateModel {
    /// Requests per second; 0 for no limit of them.
    pub iops: u64,
    /// Bytes per second; 0 for no limit of them.
    pub bytes_per_second: u64,
    /// The bucket is refilled this often, in nanoseconds, from 1.
    pub refill_ns: u64,
    /// It takes so many nanoseconds of its rate, and at least a refill: the burst after an idle time.
    pub burst_ns: u64,
    /// The time of a request that has its tokens, in nanoseconds; any number of them at once.
    pub service_ns: u64,
}

impl Default for RateModel {
    /// A disk of 10,000 I/Os per second and 200 us, whose bucket is refilled every 50 ms.
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

/// The bucket of such a disk.
#[derive(Clone, Debug)]
pub struct RateBucket {
    model: RateModel,
    /// I/Os and bytes; less than none after a request that took more than there was.
    tokens: [f64; 2],
    refilled_ns: Option<u64>,
    /// When the last request began.
    begun_ns: u64,
}

impl RateBucket {
    /// A bucket that is full.
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

    /// Changes the rates, from the next refill on.
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

    /// One token is enough for a request of any size: the next waits for what it took too much.
    fn lacks_tokens(&self) -> bool {
        let rates = [self.model.iops, self.model.bytes_per_second];
        self.tokens.iter().zip(rates).any(|(tokens, rate)| rate > 0 && *tokens <= 0.0)
    }

    /// When a request of `bytes` that comes at `now_ns` completes, in nanoseconds of the same clock. Requests come
    /// in order.
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

enum Rule {
    Immediate,
    Timer(u64),
    Random { first: u64, span: u64, random: Random },
    Disk { model: SeekModel, capacity: u64, head: u64, busy_until_ns: u64 },
    RateLimited(RateBucket),
}

/// The requests that wait for their time.
pub(super) struct Delays {
    rule: Rule,
    waiting: BinaryHeap<Reverse<(u64, Tag)>>,
}

impl Delays {
    pub fn new(completion: &ModelCompletion, tags: usize, capacity: u64) -> Delays {
        let rule = match completion {
            ModelCompletion::Immediate => Rule::Immediate,
            ModelCompletion::Timer(delay_ns) => Rule::Timer(*delay_ns),
            ModelCompletion::Random(range, seed) => {
                let span = range.end().saturating_sub(*range.start()).saturating_add(1);
                Rule::Random { first: *range.start(), span, random: Random::new(*seed) }
            }
            ModelCompletion::RateLimited(model) => Rule::RateLimited(RateBucket::new(*model)),
            ModelCompletion::Disk(model) => Rule::Disk { model: *model, capacity, head: 0, busy_until_ns: 0 },
        };
        Delays { rule, waiting: BinaryHeap::with_capacity(tags) }
    }

    #[inline]
    pub fn is_immediate(&self) -> bool {
        matches!(self.rule, Rule::Immediate)
    }

    /// Puts `tag` aside until its time. Whether the arm of a modelled disk had to move.
    pub fn start(&mut self, cx: &mut DriverContext<'_>, tag: Tag) -> bool {
        let now = cx.now_ns();
        let mut seeks = false;
        let due = match &mut self.rule {
            Rule::Immediate => now,
            Rule::Timer(delay_ns) => now + *delay_ns,
            Rule::Random { first, span, random } => now + *first + random.below(*span),
            Rule::RateLimited(bucket) => bucket.due_ns(now, cx.request(tag).bytes()),
            Rule::Disk { model, capacity, head, busy_until_ns } => {
                let request = cx.request(tag);
                let begin = now.max(*busy_until_ns);
                let cost = match request.operation() {
                    // The arm stays where it is.
                    Operation::Flush | Operation::Discard => model.command_ns,
                    _ => {
                        let (offset, bytes) = (request.offset(), request.bytes());
                        let cost = model.cost_ns(*head, offset, bytes, *capacity);
                        seeks = *head != offset;
                        *head = offset + bytes;
                        cost
                    }
                };
                *busy_until_ns = begin + cost;
                *busy_until_ns
            }
        };
        self.waiting.push(Reverse((due, tag)));
        seeks
    }

    /// When the next request is due.
    #[inline]
    pub fn earliest_ns(&self) -> Option<u64> {
        self.waiting.peek().map(|Reverse((due, _))| *due)
    }

    /// Takes a request that is due.
    pub fn take_due(&mut self, now: u64) -> Option<Tag> {
        match self.waiting.peek() {
            Some(Reverse((due, _))) if *due <= now => self.waiting.pop().map(|Reverse((_, tag))| tag),
            _ => None,
        }
    }
}

/// The counters of the queues of a model device. Each queue's thread alone writes its own.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct ModelCounters {
    /// Calls of `queue_requests`.
    pub batches: AtomicU64,
    /// Requests taken.
    pub requests: AtomicU64,
    /// Most requests taken by one call.
    pub batch_max: AtomicU64,
    /// Flushes among the requests.
    pub flushes: AtomicU64,
    /// Bytes of all requests.
    pub bytes: AtomicU64,
    /// Requests not taken for the time being.
    pub busy: AtomicU64,
    /// Requests for which the arm of a modelled disk had to move.
    pub seeks: AtomicU64,
}

impl ModelCounters {
    /// Adds to a counter that nobody else writes: no locked instruction.
    #[inline]
    pub(super) fn raise(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Relaxed) + by, Relaxed);
    }

    #[inline]
    pub(super) fn count_batch(&self, requests: u64, bytes: u64, flushes: u64) {
        Self::raise(&self.batches, 1);
        Self::raise(&self.requests, requests);
        Self::raise(&self.flushes, flushes);
        Self::raise(&self.bytes, bytes);
        self.batch_max.store(self.batch_max.load(Relaxed).max(requests), Relaxed);
    }

    pub(super) fn add(&self, other: &ModelCounters) {
        let pairs = [
            (&self.batches, &other.batches),
            (&self.requests, &other.requests),
            (&self.flushes, &other.flushes),
            (&self.bytes, &other.bytes),
            (&self.busy, &other.busy),
            (&self.seeks, &other.seeks),
        ];
        pairs.into_iter().for_each(|(mine, theirs)| Self::raise(mine, theirs.load(Relaxed)));
        let most = self.batch_max.load(Relaxed).max(other.batch_max.load(Relaxed));
        self.batch_max.store(most, Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn continuing_the_last_request_costs_no_seek() {
        let model = SeekModel::default();
        let follow = model.cost_ns(4096, 4096, 4096, 1 << 30);
        assert_eq!(follow, model.command_ns + 4096 * 1_000_000_000 / model.bytes_per_second);
        let near = model.cost_ns(4096, 12288, 4096, 1 << 30);
        let far = model.cost_ns(4096, 1 << 29, 4096, 1 << 30);
        assert!(follow < near && near < far, "{follow} {near} {far}");
    }

    #[test]
    fn one_merged_write_beats_its_parts_on_the_model() {
        let model = SeekModel::default();
        let merged = model.cost_ns(0, 1 << 20, 128 << 10, 1 << 30);
        let scattered: u64 = (0..32).map(|i| model.cost_ns(0, (1 << 20) + i * 4096, 4096, 1 << 30)).sum();
        assert!(scattered > 10 * merged);
    }
}
