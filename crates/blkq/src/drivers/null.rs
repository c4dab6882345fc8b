//! The null driver: a device that stores nothing, for measuring the block layer itself, and as
//! the example that a new driver begins from.
//!
//! A driver is two types. The *device* ([`Null`]) is shared by all threads: it declares what
//! it can do ([`Driver::limits`]) and opens queues. A *queue* belongs to one thread, so that
//! its fields need no lock. The block layer offers it requests in batches; each request that
//! it takes it completes exactly once. To write a driver of your own: copy this file, do your
//! I/O in [`DriverQueue::queue_requests`], and add the driver to the list in `spec.rs` of crate `blkq-drivers`.
//! One that completes later, or is busy, is the driver `model` of that crate.

use crate::bio::Operation;
use crate::driver::{Driver, DriverContext, DriverQueue, OpenContext, Taken};
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::tags::Tag;

/// The options of a null device.
#[derive(Clone, Debug)]
pub struct NullOptions {
    /// Size, logical block, largest request, and whether the device has a write cache,
    /// does FUA, discards and writes zeroes, is read-only: passed on as they are.
    pub limits: QueueLimits,
    /// Reads fill their memory with zeroes. Without it they leave the memory as it was,
    /// which is faster, and must not be exported: it would show old memory to clients.
    pub zero_reads: bool,
}

impl NullOptions {
    /// A device of `capacity_bytes` that does every operation and has no write cache.
    pub fn new(capacity_bytes: u64) -> NullOptions {
        let limits = QueueLimits {
            capacity_bytes,
            max_discard_bytes: 1 << 30,
            discard_granularity: 512,
            discard_zeroes: true,
            max_write_zeroes_bytes: 1 << 30,
            max_write_zeroes_no_unmap_bytes: 1 << 30,
            // Only counts for callers that set `write_cache` too.
            fua: true,
            ..QueueLimits::default()
        };
        NullOptions { limits, zero_reads: true }
    }
}

/// The device.
pub struct Null(NullOptions);

impl Null {
    /// A null device.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the limits contradict each other.
    pub fn new(options: NullOptions) -> Result<Null, Error> {
        options.limits.validate()?;
        Ok(Null(options))
    }
}

impl Driver for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    // Asked for when the disk is made and after each change, on any thread. The block layer
    // splits, emulates or rejects whatever the device cannot do: the queue need not check.
    fn limits(&self) -> QueueLimits {
        self.0.limits.clone()
    }

    // Runs on the thread that will use the queue. Everything the data path needs is
    // allocated here. A driver that does I/O would declare `uses_ring` and register its
    // files with the context's ring now.
    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(NullQueue { zero_reads: self.0.zero_reads }))
    }
}

/// One queue of it.
struct NullQueue {
    zero_reads: bool,
}

// SAFETY: only this thread uses the memory of a request, and before it completes.
unsafe impl DriverQueue for NullQueue {
    // The heart of a driver. Requests that are not taken are requeued, in order.
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        if self.zero_reads {
            zero_reads(cx, tags);
        }
        cx.complete_all(tags);
        Taken::All
    }
}

// A function of its own, so that a device without zeroed reads does not pay for what it needs.
#[inline(never)]
fn zero_reads(cx: &DriverContext<'_>, tags: &[Tag]) {
    for &tag in tags {
        if cx.request(tag).operation() == Operation::Read {
            cx.for_each_segment(tag, |segment| {
                // SAFETY: the memory of a read in flight is valid and the device's to fill.
                unsafe { segment.ptr.write_bytes(0, segment.len as usize) }
            });
        }
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;
    use crate::testing::harness::Harness;

    #[test]
    fn completes_at_once_and_reads_zeroes() {
        let mut h = Harness::open(&Null::new(NullOptions::new(1 << 30)).unwrap()).unwrap();
        let tag = h.read(0, &[4096]);
        h.start(&[tag]);
        assert!(h.has_completed(tag));
        assert_eq!(h.wait(tag), (Ok(()), vec![0; 4096]));
    }

    #[test]
    fn reads_may_leave_memory_alone() {
        let options = NullOptions { zero_reads: false, ..NullOptions::new(1 << 30) };
        let mut h = Harness::open(&Null::new(options).unwrap()).unwrap();
        assert_eq!(h.read_back(0, 512), vec![0xEE; 512]);
    }
}
