//! The model driver: a device that stores nothing and is slow, or busy, on purpose:
//! timers, random delays, a disk with one arm, a disk of limited rate, blocking. For measuring and testing what the
//! block layer does above such a device.

mod delays;

use std::sync::Arc;

use blkq::clock::monotonic_ns;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::sync::{Mutex, lock};
use blkq::{
    Busy, Driver, DriverContext, DriverQueue, Error, ErrorKind, OpenContext, Operation, QueueLimits, Tag,
    Taken,
};

use blkq::drivers::null::NullOptions;
use delays::Delays;
pub use delays::{ModelBlocking, ModelCompletion, ModelCounters, RateBucket, RateModel, SeekModel};

/// The options of a model device.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    /// Size, logical block, largest request, and whether the device has a write cache,
    /// does FUA, discards and writes zeroes, is read-only: passed on as they are.
    pub limits: QueueLimits,
    /// When requests complete.
    pub completion: ModelCompletion,
    /// The cost of taking a request.
    pub blocking: ModelBlocking,
    /// Every so many requests, one is turned back with [`Busy::Resource`] and so requeued; 0: never.
    pub busy_resource_every: u32,
    /// The same with [`Busy::UntilCompletion`], if a completion is due; 0: never.
    pub busy_until_completion_every: u32,
    /// Reads fill their memory with zeroes. Without it they leave the memory as it was,
    /// which is faster, and must not be exported: it would show old memory to clients.
    pub zero_reads: bool,
}

impl ModelOptions {
    /// A device of `capacity_bytes` that completes at once, and can do everything.
    pub fn new(capacity_bytes: u64) -> ModelOptions {
        // It can do all that the null device can.
        let NullOptions { limits, zero_reads } = NullOptions::new(capacity_bytes);
        ModelOptions {
            limits,
            completion: ModelCompletion::Immediate,
            blocking: ModelBlocking::Never,
            busy_resource_every: 0,
            busy_until_completion_every: 0,
            zero_reads,
        }
    }
}

/// The device.
pub struct Model {
    options: ModelOptions,
    /// The counters of each queue: written by its thread alone, summed when they are read.
    counters: Mutex<Vec<Arc<ModelCounters>>>,
}

impl Model {
    /// A model device.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the limits contradict each other.
    pub fn new(options: ModelOptions) -> Result<Model, Error> {
        options.limits.validate()?;
        Ok(Model { options, counters: Mutex::new(Vec::new()) })
    }

    /// The counters of all queues, added up.
    pub fn counters(&self) -> ModelCounters {
        let total = ModelCounters::default();
        lock(&self.counters).iter().for_each(|queue| total.add(queue));
        total
    }
}

impl Driver for Model {
    fn name(&self) -> &'static str {
        "model"
    }

    // Asked for once; the block layer then splits, emulates or rejects whatever the
    // device cannot do, so that the queue below need not check anything.
    fn limits(&self) -> QueueLimits {
        self.options.limits.clone()
    }

    // Runs on the thread that will use the queue. Everything the data path needs is
    // allocated here. A driver that does I/O would declare `uses_ring` and register its
    // files with `ring` now.
    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        let mut queues = lock(&self.counters);
        if matches!(self.options.completion, ModelCompletion::Disk(_) | ModelCompletion::RateLimited(_))
            && queues.iter().any(|queue| Arc::strong_count(queue) > 1)
        {
            let message = "a modelled disk has one arm or one token bucket, so only one queue can be open";
            return Err(Error::new(ErrorKind::Invalid, message));
        }
        let counters = Arc::new(ModelCounters::default());
        queues.push(Arc::clone(&counters));
        let delays = Delays::new(&self.options.completion, cx.tags, self.options.limits.capacity_bytes);
        let options = self.options.clone();
        let plain = options.blocking == ModelBlocking::Never
            && !options.zero_reads
            && options.busy_resource_every == 0
            && options.busy_until_completion_every == 0;
        Ok(Box::new(ModelQueue { options, plain, delays, counters, seen: 0 }))
    }

    // The facts that `blkq show` prints.
    fn describe(&self) -> Vec<(&'static str, String)> {
        let counters = self.counters();
        vec![
            ("requests", counters.requests.load(Relaxed).to_string()),
            ("batches", counters.batches.load(Relaxed).to_string()),
            ("batch-max", counters.batch_max.load(Relaxed).to_string()),
            ("flushes", counters.flushes.load(Relaxed).to_string()),
            ("bytes", counters.bytes.load(Relaxed).to_string()),
            ("busy", counters.busy.load(Relaxed).to_string()),
            ("seeks", counters.seeks.load(Relaxed).to_string()),
        ]
    }
}

/// One queue of it.
struct ModelQueue {
    options: ModelOptions,
    /// None of the options that cost time for each request is in use.
    plain: bool,
    delays: Delays,
    counters: Arc<ModelCounters>,
    /// Requests offered, for the injections.
    seen: u64,
}

// SAFETY: only this thread uses the memory of a request, and before it completes.
unsafe impl DriverQueue for ModelQueue {
    // The heart of a driver. Requests that are not taken are requeued, in order.
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        if self.plain && self.delays.is_immediate() {
            let (mut bytes, mut flushes) = (0, 0);
            for &tag in tags {
                let request = cx.request(tag);
                bytes += request.bytes();
                flushes += u64::from(request.operation() == Operation::Flush);
            }
            cx.complete_all(tags);
            self.counters.count_batch(tags.len() as u64, bytes, flushes);
            return Taken::All;
        }
        let (mut bytes, mut flushes) = (0, 0);
        let mut taken = Taken::All;
        let mut count = tags.len();
        for (index, &tag) in tags.iter().enumerate() {
            let request = cx.request(tag);
            if !self.plain {
                if let Some(busy) = self.busy() {
                    (taken, count) = (Taken::First(index, busy), index);
                    break;
                }
                self.options.blocking.hold_up();
                if request.operation() == Operation::Read && self.options.zero_reads {
                    cx.for_each_segment(tag, |segment| {
                        // SAFETY: the memory of a read in flight is valid and the device's to fill.
                        unsafe { segment.ptr.write_bytes(0, segment.len as usize) }
                    });
                }
            }
            bytes += request.bytes();
            flushes += u64::from(request.operation() == Operation::Flush);
            if self.delays.is_immediate() {
                cx.complete(tag, Ok(()));
            } else if self.delays.start(cx, tag) {
                ModelCounters::raise(&self.counters.seeks, 1);
            }
        }
        self.counters.count_batch(count as u64, bytes, flushes);
        taken
    }

    // Called once per turn and at the deadline at the latest: here complete the requests that had to wait.
    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if self.delays.earliest_ns().is_some() {
            // Not the queue's clock: a cached reading would keep what is due waiting.
            let now = monotonic_ns();
            while let Some(tag) = self.delays.take_due(now) {
                cx.complete(tag, Ok(()));
            }
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.delays.earliest_ns()
    }
}

impl ModelQueue {
    /// Whether the device is busy for the next request.
    #[inline]
    fn busy(&mut self) -> Option<Busy> {
        let options = &self.options;
        self.seen += 1;
        let hits = |every: u32| every != 0 && self.seen.is_multiple_of(u64::from(every));
        // "Until a completion" is a promise, to be given only while one is to come.
        let busy = if hits(options.busy_until_completion_every) && self.delays.earliest_ns().is_some() {
            Busy::UntilCompletion
        } else if hits(options.busy_resource_every) {
            Busy::Resource
        } else {
            return None;
        };
        ModelCounters::raise(&self.counters.busy, 1);
        Some(busy)
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests;
