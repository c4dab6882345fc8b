use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use blkq::clock::monotonic_ns;
use blkq::random::Random;
use blkq::sync::atomic::Ordering::{Acquire, Relaxed};
use blkq::{
    Cqe, DriverContext, DriverQueue, IoBuffer, IoResult, Operation, QueueLimits, Request, SECTOR_SHIFT,
    Sector, Segment, Status, Tag, Taken, WrappedQueue,
};

use super::rules::{Injection, RuleState, Rules, Shared, report};
use super::spec::{Effect, Rule};

/// Delay before requests that the wrapped queue was too busy to take are reissued (BLK_MQ_RESOURCE_DELAY).
const AGAIN_NS: u64 = 3_000_000;
/// The 99th percentile of the standard normal distribution.
const Z99: f64 = 2.326_347_874_040_841;

/// A request is planned, waits if its plan requires that, and is then completed or submitted to the wrapped
/// queue. When it completes there, effects on the data of a read are applied.
pub(super) struct FaultQueue {
    /// The queue of the wrapped driver. Each of its requests has one bio.
    inner: WrappedQueue,
    shared: Arc<Shared>,
    rules: Arc<Rules>,
    generation: u64,
    index: u16,
    random: Random,
    limits: QueueLimits,
    plans: Box<[Plan]>,
    /// Delayed and stuck requests, with the time in nanoseconds at which they begin or complete.
    timers: BinaryHeap<Reverse<(u64, Tag)>>,
    prepared: Vec<Tag>,
    again_ns: u64,
}

#[derive(Default)]
struct Plan {
    effect: Option<Effect>,
    /// The number of bytes, from the beginning of the request, that the wrapped queue transfers.
    bytes: u64,
    /// The corrupted copy of the data to write.
    altered: Option<IoBuffer>,
}

impl FaultQueue {
    pub fn new(inner: Box<dyn DriverQueue>, shared: Arc<Shared>, index: u16, tags: usize) -> FaultQueue {
        let generation = shared.generation.load(Acquire);
        let rules = shared.rules();
        FaultQueue {
            inner: WrappedQueue::new(inner, tags),
            random: Random::new(seed_of(&rules, index)),
            rules,
            limits: shared.inner.limits(),
            shared,
            generation,
            index,
            plans: (0..tags).map(|_| Plan::default()).collect(),
            timers: BinaryHeap::with_capacity(tags),
            prepared: Vec::with_capacity(tags),
            again_ns: 0,
        }
    }

    /// Applies changed rules. Returns the delayed and stuck requests, which must continue without a fault.
    fn reload_rules(&mut self) -> Vec<Tag> {
        // Acquire: pairs with the release store after the rules were replaced.
        let generation = self.shared.generation.load(Acquire);
        if generation == self.generation {
            return Vec::new();
        }
        self.generation = generation;
        self.rules = self.shared.rules();
        self.random = Random::new(seed_of(&self.rules, self.index));
        let waiting: Vec<Tag> = self.timers.drain().map(|Reverse((_, tag))| tag).collect();
        for tag in &waiting {
            self.plans[tag.index()].effect = None;
        }
        waiting
    }

    /// Decides what happens to a request. Returns the time in nanoseconds for which it must wait first.
    fn plan(&mut self, cx: &DriverContext<'_>, tag: Tag) -> u64 {
        let request = cx.request(tag);
        let (mut effect, mut wait_ns) = (None, 0u64);
        let rules = self.rules.clone();
        #[cfg(simulation)]
        rules.poll_files_when_due();
        for (rule, state) in rules.spec.rules.iter().zip(&rules.states) {
            if !self.hits(rule, state, request) {
                continue;
            }
            if let Some(file) = &rule.file {
                report(cx, Injection::Armed(file));
            }
            match rule.effect {
                Effect::Delay { mean_ns, p99_ns } => {
                    wait_ns += delay_ns(mean_ns, p99_ns, &mut self.random);
                }
                other if effect.is_none() => {
                    effect = Some(other);
                    if let Effect::Stuck(for_ns) = other {
                        wait_ns += for_ns;
                    }
                }
                _ => {}
            }
        }
        self.plans[tag.index()] = Plan { effect, bytes: request.bytes(), altered: None };
        wait_ns
    }

    /// Whether `rule` hits this request: it matches, and its `after`, `rate` and `count` allow a hit. The
    /// counters are relaxed: each is changed by atomic read-modify-write operations and protects no other
    /// memory.
    fn hits(&mut self, rule: &Rule, state: &RuleState, request: &Request) -> bool {
        let (from, to) = (request.offset(), request.offset() + request.bytes());
        let touches = from < rule.range.end && rule.range.start < to;
        let about = rule.operations[request.operation() as usize]
            && (touches || request.operation() == Operation::Flush)
            && state.armed.load(Relaxed);
        if !about || state.matched.fetch_add(1, Relaxed) < rule.after {
            return false;
        }
        if rule.rate < 1.0 && self.random.unit() >= rule.rate {
            return false;
        }
        state.hits.fetch_update(Relaxed, Relaxed, |hits| (hits < rule.count).then_some(hits + 1)).is_ok()
    }

    /// Begins requests: completes those that must not reach the wrapped queue, and submits the others to it.
    fn begin(&mut self, cx: &mut DriverContext<'_>, tags: impl IntoIterator<Item = Tag>) {
        for tag in tags {
            let effect = self.plans[tag.index()].effect;
            let immediate_result = match effect {
                Some(Effect::Error(status)) => Some(Err(status)),
                Some(Effect::Stuck(_)) => Some(Err(Status::Timeout)),
                Some(Effect::Lose) => Some(Ok(())),
                Some(Effect::Panic) => panic!("a fault rule injected this panic"),
                _ => None,
            };
            if let (Some(effect), Some(result)) = (effect, immediate_result) {
                report(cx, Injection::Hit(tag, effect, 0));
                cx.complete(tag, result);
            } else if self.build(cx, tag, effect) {
                self.prepared.push(tag);
            } else {
                // A short or torn transfer of 0 bytes: nothing reaches the wrapped queue.
                self.complete(cx, tag, Ok(()));
            }
        }
        self.offer(cx);
    }

    /// Prepares the request of the wrapped queue for `tag`. Returns false if that request would be empty.
    fn build(&mut self, cx: &DriverContext<'_>, tag: Tag, effect: Option<Effect>) -> bool {
        let request = cx.request(tag);
        let operation = request.operation();
        let (mut sector, mut bytes) = (request.sector(), request.bytes());
        match effect {
            Some(effect @ (Effect::Short(_) | Effect::Torn)) => {
                let block = u64::from(self.limits.logical_block_bytes);
                bytes = self.random.below(bytes / block) * block;
                self.plans[tag.index()].bytes = bytes;
                report(cx, Injection::Hit(tag, effect, bytes));
                if bytes == 0 {
                    return false;
                }
            }
            Some(Effect::Misdirect) => {
                sector = self.misdirected_sector(sector, bytes);
                report(cx, Injection::Hit(tag, Effect::Misdirect, sector.bytes()));
            }
            _ => {}
        }
        let mut segments = Vec::with_capacity(request.segment_count());
        cx.for_each_segment(tag, |segment| segments.push(segment));
        if effect == Some(Effect::Corrupt) && operation == Operation::Write {
            let bit = self.alter(tag, &mut segments);
            report(cx, Injection::Hit(tag, Effect::Corrupt, bit));
        }
        // SAFETY: the segments belong to this queue's request or to the copy in its plan. Both stay valid until the wrapped
        // queue has completed its request. The wrapped queue has no other request with this tag, because a request begins
        // only once.
        unsafe { self.inner.prepare(cx, tag, sector, bytes, &segments) };
        true
    }

    /// Another sector for a request of `bytes` bytes, at the same offset within a chunk, so that the request
    /// crosses no chunk boundary there.
    fn misdirected_sector(&mut self, sector: Sector, bytes: u64) -> Sector {
        let unit = u64::from(self.limits.chunk_bytes.max(self.limits.logical_block_bytes));
        let within = sector.bytes() % unit;
        let units = self.limits.capacity_bytes.saturating_sub(within + bytes) / unit + 1;
        let own = sector.bytes() / unit;
        let other = if units > 1 { (own + 1 + self.random.below(units - 1)) % units } else { own };
        Sector((other * unit + within) >> SECTOR_SHIFT)
    }

    /// Replaces the data to write by a copy in which one bit is flipped. Returns the number of that bit. The lengths of the
    /// segments stay the same.
    fn alter(&mut self, tag: Tag, segments: &mut [Segment]) -> u64 {
        let length: usize = segments.iter().map(|segment| segment.len as usize).sum();
        let mut copy = IoBuffer::zeroed(length);
        let base = copy.as_mut_ptr();
        let mut at = 0;
        for segment in segments.iter_mut() {
            // SAFETY: the memory of a write in flight is valid, and the copy is as long as all segments together.
            unsafe { base.add(at).copy_from_nonoverlapping(segment.ptr, segment.len as usize) };
            *segment = Segment::new(base.wrapping_add(at), segment.len);
            at += segment.len as usize;
        }
        let bit = self.random.below(length as u64 * 8);
        copy[(bit / 8) as usize] ^= 1 << (bit % 8);
        self.plans[tag.index()].altered = Some(copy);
        bit
    }

    fn offer(&mut self, cx: &mut DriverContext<'_>) {
        if self.prepared.is_empty() {
            return;
        }
        let tags = std::mem::take(&mut self.prepared);
        if let Taken::First(taken, _) = self.call(cx, |queue, cx| queue.queue_requests(cx, &tags)) {
            self.prepared.extend(&tags[taken..]);
            self.again_ns = monotonic_ns() + AGAIN_NS;
        }
    }

    /// Calls the wrapped queue, and completes the requests that it has completed.
    fn call<R>(
        &mut self,
        cx: &mut DriverContext<'_>,
        call: impl FnOnce(&mut dyn DriverQueue, &mut DriverContext<'_>) -> R,
    ) -> R {
        let returned = self.inner.call(cx, call);
        for (tag, result) in self.inner.take_completed() {
            self.complete(cx, tag, result);
        }
        returned
    }

    fn complete(&mut self, cx: &mut DriverContext<'_>, tag: Tag, result: IoResult) {
        let plan = std::mem::take(&mut self.plans[tag.index()]);
        if plan.effect.is_some() {
            report(cx, Injection::Completed(tag, result));
        }
        let request = cx.request(tag);
        let (read, bytes) = (request.operation() == Operation::Read, request.bytes());
        let result = match (result, plan.effect) {
            (Ok(()), Some(Effect::Short(status))) => Err(status),
            (Ok(()), Some(Effect::Torn)) if read => {
                // The rest is zeroed, because the old content of the memory may be data of another client.
                alter_read(cx, tag, plan.bytes, bytes, |byte| *byte = 0);
                Ok(())
            }
            (Ok(()), Some(Effect::Corrupt)) if read => {
                let bit = self.random.below(bytes * 8);
                report(cx, Injection::Hit(tag, Effect::Corrupt, bit));
                alter_read(cx, tag, bit / 8, bit / 8 + 1, |byte| *byte ^= 1 << (bit % 8));
                Ok(())
            }
            (result, _) => result,
        };
        cx.complete(tag, result);
    }
}

fn alter_read(cx: &DriverContext<'_>, tag: Tag, from: u64, to: u64, change: impl Fn(&mut u8)) {
    let mut at = 0;
    cx.for_each_segment(tag, |segment| {
        let length = u64::from(segment.len);
        for byte in from.max(at)..to.min(at + length) {
            // SAFETY: the byte is within the segment. The memory of a read in flight is valid, and only the driver may
            // write to it.
            change(unsafe { &mut *segment.ptr.add((byte - at) as usize) });
        }
        at += length;
    });
}

// SAFETY: a request completes after the wrapped queue has completed its part, or without a part in the wrapped
// queue. The wrapped queue receives each request, and each completion of its submissions, once.
unsafe impl DriverQueue for FaultQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        let released = self.reload_rules();
        self.begin(cx, released);
        let mut now = Vec::with_capacity(tags.len());
        for &tag in tags {
            match self.plan(cx, tag) {
                0 => now.push(tag),
                wait_ns => self.timers.push(Reverse((monotonic_ns() + wait_ns, tag))),
            }
        }
        self.begin(cx, now);
        Taken::All
    }

    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        self.call(cx, |queue, cx| queue.commit(cx));
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        self.call(cx, |queue, cx| queue.complete_cqe(cx, cqe));
        let offers = !self.prepared.is_empty();
        self.offer(cx);
        if offers {
            self.commit(cx);
        }
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        let mut begin = self.reload_rules();
        let now = monotonic_ns();
        while let Some(Reverse((due, tag))) = self.timers.peek().copied()
            && due <= now
        {
            self.timers.pop();
            begin.push(tag);
        }
        let begun = !begin.is_empty() || !self.prepared.is_empty();
        self.begin(cx, begin);
        if begun {
            self.commit(cx);
        }
        self.call(cx, |queue, cx| queue.poll(cx));
    }

    fn state(&self, tag: Tag, _request: &Request) -> Cow<'static, str> {
        if self.timers.iter().any(|Reverse((_, held))| *held == tag) {
            let is_stuck = matches!(self.plans[tag.index()].effect, Some(Effect::Stuck(_)));
            return format!("in the driver, {} by a fault rule", if is_stuck { "stuck" } else { "delayed" })
                .into();
        }
        if self.prepared.contains(&tag) {
            return "requeued: the driver below the fault rules was busy".into();
        }
        self.inner.state(tag)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let timer = self.timers.peek().map(|Reverse((due, _))| *due);
        let again = (!self.prepared.is_empty()).then_some(self.again_ns);
        [self.inner.deadline_ns(), timer, again].into_iter().flatten().min()
    }

    fn reload(&mut self, cx: &mut DriverContext<'_>) {
        self.limits = self.shared.inner.limits();
        self.call(cx, |queue, cx| queue.reload(cx));
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        self.call(cx, |queue, cx| queue.close(cx));
    }
}

impl Drop for FaultQueue {
    fn drop(&mut self) {
        if !self.inner.is_idle() {
            // Requests are still in flight because the thread panicked, and the kernel may still read the corrupted
            // copies.
            std::mem::forget(std::mem::take(&mut self.plans));
        }
    }
}

fn seed_of(rules: &Rules, index: u16) -> u64 {
    // Each queue of a device needs its own sequence of random numbers.
    rules.seed.wrapping_add(u64::from(index) << 32)
}

/// A delay in nanoseconds: the mean itself, or, with a 99th percentile, a random number of the log-normal distribution with
/// this mean and percentile.
pub(super) fn delay_ns(mean_ns: u64, p99_ns: Option<u64>, random: &mut Random) -> u64 {
    let Some(p99_ns) = p99_ns else { return mean_ns };
    // p99 = exp(mu + Z99 sigma) and mean = exp(mu + sigma^2 / 2), solved for sigma.
    let by_mean = (p99_ns as f64 / mean_ns as f64).ln();
    let sigma = Z99 - (Z99 * Z99 - 2.0 * by_mean).max(0.0).sqrt();
    let mu = (mean_ns as f64).ln() - sigma * sigma / 2.0;
    // The Box-Muller transform.
    let (radius, angle) = (random.unit(), random.unit());
    let normal = (-2.0 * (1.0 - radius).ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
    (mu + sigma * normal).exp() as u64
}
