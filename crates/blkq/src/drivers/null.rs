//! The null driver: a device that stores nothing. It measures the block layer itself, and is the template for a new
//! driver.
//!
//! A driver consists of two types. The *device* ([`Null`]) is shared by all threads: it declares what it supports
//! ([`Driver::limits`]) and opens queues. A *queue* belongs to one thread, so its fields need no lock. The block layer
//! offers requests to the queue in batches, and the queue must complete each request that it takes exactly once.
//!
//! To write a driver, copy this file, do the I/O in [`DriverQueue::queue_requests`], and add the driver to the list in
//! `spec.rs` of crate `blkq-drivers`. The driver `model` of that crate shows how to complete requests later and how to
//! be busy.

use crate::bio::Operation;
use crate::driver::{Driver, DriverContext, DriverQueue, OpenContext, Taken};
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::tags::Tag;

/// The options of a null device.
#[derive(Clone, Debug)]
pub struct NullOptions {
    /// The limits of the device, which the driver declares unchanged. They must not contradict each other.
    pub limits: QueueLimits,
    /// Whether reads fill their memory with zeroes. If not, they leave the memory unchanged, which is faster. Such a
    /// device must not be exported, because clients would read old memory of this process.
    pub zero_reads: bool,
}

impl NullOptions {
    /// A device of `capacity_bytes` bytes that supports every operation and has no write cache.
    pub fn new(capacity_bytes: u64) -> NullOptions {
        let limits = QueueLimits {
            capacity_bytes,
            max_discard_bytes: 1 << 30,
            discard_granularity: 512,
            discard_zeroes: true,
            max_write_zeroes_bytes: 1 << 30,
            max_write_zeroes_no_unmap_bytes: 1 << 30,
            // Has an effect only if the caller sets `write_cache` as well.
            fua: true,
            ..QueueLimits::default()
        };
        NullOptions { limits, zero_reads: true }
    }
}

/// A device that stores nothing.
pub struct Null(NullOptions);

impl Null {
    /// Makes a null device. Fails with [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the limits
    /// contradict each other.
    pub fn new(options: NullOptions) -> Result<Null, Error> {
        options.limits.validate()?;
        Ok(Null(options))
    }
}

impl Driver for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    // Called on any thread, when the disk is made and after each change. The block layer splits, emulates or rejects
    // whatever the device does not support, so the queue need not check requests.
    fn limits(&self) -> QueueLimits {
        self.0.limits.clone()
    }

    // Called on the thread that will use the queue. Allocate everything that the data path needs here. A driver that
    // does I/O declares `uses_ring` and registers its files with the ring of the context here.
    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(NullQueue { zero_reads: self.0.zero_reads }))
    }
}

struct NullQueue {
    zero_reads: bool,
}

// SAFETY: only this thread uses the memory of a request, and only before the request completes.
unsafe impl DriverQueue for NullQueue {
    // Called with each batch of requests. Requests that are not taken are requeued in order.
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        if self.zero_reads {
            zero_reads(cx, tags);
        }
        cx.complete_all(tags);
        Taken::All
    }
}

// Not inlined, so that a device without `zero_reads` does not pay for saving the registers that this loop needs.
#[inline(never)]
fn zero_reads(cx: &DriverContext<'_>, tags: &[Tag]) {
    for &tag in tags {
        if cx.request(tag).operation() == Operation::Read {
            cx.for_each_segment(tag, |segment| {
                // SAFETY: the memory of a read in flight is valid, and only the driver may write to it.
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
    fn requests_complete_immediately_and_reads_return_zeroes() {
        let mut h = Harness::open(&Null::new(NullOptions::new(1 << 30)).unwrap()).unwrap();
        let tag = h.read(0, &[4096]);
        h.start(&[tag]);
        assert!(h.has_completed(tag));
        assert_eq!(h.wait(tag), (Ok(()), vec![0; 4096]));
    }

    #[test]
    fn without_zero_reads_the_memory_stays_unchanged() {
        let options = NullOptions { zero_reads: false, ..NullOptions::new(1 << 30) };
        let mut h = Harness::open(&Null::new(options).unwrap()).unwrap();
        assert_eq!(h.read_back(0, 512), vec![0xEE; 512]);
    }
}
