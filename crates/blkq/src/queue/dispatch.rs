//! Dispatch: requests reach the driver, in this order: what it refused before, then the
//! scheduler's (block/blk-mq-sched.c). A refusal is no error: the request stays.

use crate::clock::monotonic_ns;
use crate::driver::{Busy, DriverContext, Taken};
use crate::queue::plug::PLUG_REQUESTS;
use crate::queue::{Queue, driver_context};
use crate::ring::Ring;
use crate::stats::Counter;
use crate::tags::Tag;

/// When a driver that ran out of resources is asked again (BLK_MQ_RESOURCE_DELAY).
const RESOURCE_DELAY_NS: u64 = 3_000_000;

impl Queue {
    /// Hands what is ready to the driver until nothing is, or it refuses.
    #[inline]
    pub(crate) fn run_dispatch(&mut self, ring: Option<&mut Ring>) {
        if !self.dispatch.is_empty() || self.scheduler.as_ref().is_some_and(|s| s.len() > 0) {
            self.dispatch_all(ring);
        }
    }

    fn dispatch_all(&mut self, mut ring: Option<&mut Ring>) {
        if let Some(at_ns) = self.rerun_at_ns {
            if monotonic_ns() < at_ns {
                return;
            }
            self.rerun_at_ns = None;
        }
        let mut batch = [Tag(0); PLUG_REQUESTS];
        loop {
            let len = self.next_batch(&mut batch);
            let taken = self.issue(&batch[..len], ring.as_deref_mut());
            for &tag in batch[taken..len].iter().rev() {
                self.dispatch.push_front(tag);
            }
            if taken < len || len == 0 {
                return;
            }
        }
    }

    fn next_batch(&mut self, batch: &mut [Tag]) -> usize {
        let mut len = 0;
        while len < batch.len() {
            let Some(tag) = self.dispatch.pop_front() else { break };
            batch[len] = tag;
            len += 1;
        }
        if len > 0 {
            return len;
        }
        let Some(scheduler) = &mut self.scheduler else { return 0 };
        let room = u32::from(self.settings.depth).saturating_sub(self.started) as usize;
        let now_ns = self.clock.now_ns();
        while len < batch.len().min(room) {
            let Some(tag) = scheduler.dispatch(&self.requests, now_ns) else { break };
            batch[len] = tag;
            len += 1;
        }
        len
    }

    /// Offers `tags` to the driver. Returns how many it took.
    #[inline]
    pub(crate) fn issue(&mut self, tags: &[Tag], ring: Option<&mut Ring>) -> usize {
        // While quiesced nothing reaches the driver; whoever ends it kicks the queue.
        if tags.is_empty() {
            return 0;
        }
        self.held_back = !self.disk.control.begin_dispatch(self.index);
        if self.held_back {
            return 0;
        }
        let mut cx = driver_context!(self, ring);
        let taken = self.driver.queue_requests(&mut cx, tags);
        self.driver.commit(&mut cx);
        self.disk.control.end_dispatch(self.index);
        self.stats.count(Counter::DispatchBatches, 1);
        match taken {
            Taken::All => {
                self.started += tags.len() as u32;
                tags.len()
            }
            Taken::First(count, busy) => self.refused(tags.len(), count, busy),
        }
    }

    #[cold]
    fn refused(&mut self, offered: usize, count: usize, busy: Busy) -> usize {
        self.started += count as u32;
        self.stats.count(Counter::Requeues, (offered - count) as u64);
        // With nothing in the driver no completion will come to run the queue again.
        if busy == Busy::Resource || self.started == 0 {
            self.rerun_at_ns = Some(monotonic_ns() + RESOURCE_DELAY_NS);
        }
        count
    }
}
