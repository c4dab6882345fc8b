//! The model driver: a device that stores nothing and is slow or busy as configured, to measure and test the
//! block layer. It models fixed and random delays, a disk with one arm, and a disk with a limited rate.

mod delays;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
// Not `blkq::sync`: there is no protocol between the counters that a model checker could check.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use blkq::clock::monotonic_ns;
use blkq::stats::add;
use blkq::sync::{Mutex, lock};
use blkq::{
    Busy, Driver, DriverContext, DriverQueue, Error, OpenContext, Operation, QueueLimits, Tag, Taken,
};

use blkq::drivers::null::NullOptions;

use crate::errors::invalid;
pub use delays::{ModelCompletion, RateBucket, RateModel, SeekModel};
use delays::{Timing, timing};

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
            let now = cx.now_ns();
            let (due, seeks) = timing(now, cx.request(tag));
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

#[cfg(all(test, not(model_check)))]
mod tests;
