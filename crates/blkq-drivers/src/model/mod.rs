//! The model driver: a device that stores nothing and is slow or busy as configured, to measure and test the
//! block layer. It models fixed and random delays, a disk with one arm, and a disk with a limited rate.

mod delays;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use blkq::clock::monotonic_ns;
use blkq::stats::add;
use blkq::sync::{Mutex, lock};
use blkq::{
    Busy, Driver, DriverContext, DriverQueue, Error, OpenContext, Operation, QueueLimits, Tag, Taken,
};

use blkq::drivers::null::NullOptions;

use crate::errors::invalid;
use delays::Delays;
pub use delays::{ModelCompletion, ModelCounters, RateBucket, RateModel, SeekModel};

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
    counters: Mutex<Vec<Arc<ModelCounters>>>,
}

impl Model {
    /// Makes a model device. Fails with [`blkq::ErrorKind::Invalid`] if the limits contradict each other.
    pub fn new(options: ModelOptions) -> Result<Model, Error> {
        options.limits.validate()?;
        Ok(Model { options, counters: Mutex::new(Vec::new()) })
    }

    /// The counters of all queues, added up.
    pub fn counters(&self) -> ModelCounters {
        let total = ModelCounters::default();
        lock(&self.counters).iter().for_each(|queue| total.add_all(queue));
        total
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
        let counters = Arc::new(ModelCounters::default());
        queues.push(Arc::clone(&counters));
        let delays = Delays::new(&self.options.completion, cx.tags, self.options.limits.capacity_bytes);
        let options = self.options.clone();
        Ok(Box::new(ModelQueue { options, delays, counters, seen: 0 }))
    }

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

struct ModelQueue {
    options: ModelOptions,
    delays: Delays,
    counters: Arc<ModelCounters>,
    /// The number of requests that were offered, for [`ModelOptions::busy_resource_every`].
    seen: u64,
}

// SAFETY: only this thread uses the memory of a request, and only before the request completes.
unsafe impl DriverQueue for ModelQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        let (mut bytes, mut flushes) = (0, 0);
        let mut taken = Taken::All;
        let mut count = tags.len();
        for (index, &tag) in tags.iter().enumerate() {
            let request = cx.request(tag);
            self.seen += 1;
            let every = u64::from(self.options.busy_resource_every);
            if every != 0 && self.seen.is_multiple_of(every) {
                add(&self.counters.busy, 1);
                (taken, count) = (Taken::First(index, Busy::Resource), index);
                break;
            }
            if request.operation() == Operation::Read && self.options.zero_reads {
                cx.for_each_segment(tag, |segment| {
                    // SAFETY: the memory of a read in flight is valid, and only the driver may write to it.
                    unsafe { segment.ptr.write_bytes(0, segment.len as usize) }
                });
            }
            bytes += request.bytes();
            flushes += u64::from(request.operation() == Operation::Flush);
            if self.delays.is_immediate() {
                cx.complete(tag, Ok(()));
            } else if self.delays.start(cx, tag) {
                add(&self.counters.seeks, 1);
            }
        }
        self.counters.count_batch(count as u64, bytes, flushes);
        taken
    }

    // Called once per turn, and at the deadline at the latest. Completes the requests that are due.
    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if self.delays.earliest_ns().is_some() {
            // The queue's cached time may be too old: requests that are due now would wait for the next turn.
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

#[cfg(test)]
#[cfg(not(model_check))]
mod tests;
