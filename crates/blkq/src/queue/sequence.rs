//! The steps of bios that need a flush: before their data, after it, or alone.

use crate::bio::{BioFlags, Operation};
use crate::clock::monotonic_ns;
use crate::error::IoResult;
use crate::ring::Ring;
use crate::slab::FlushStep;
use crate::stats::{Counter, StatGroup};

use super::Queue;

impl Queue {
    /// A flush without data.
    pub(super) fn begin_flush(&mut self, index: u32) {
        if !self.disk.limits().write_cache {
            return self.complete_at_once(index, Ok(()));
        }
        self.await_flush(index, FlushStep::Postflush);
    }

    /// A write-direction bio with PREFLUSH or FUA on a device with a write cache.
    pub(super) fn begin_flush_sequence(&mut self, index: u32) {
        let slot = &self.in_flight[index];
        if slot.flags.contains(BioFlags::PREFLUSH) {
            self.await_flush(index, FlushStep::Preflush);
        } else if self.disk.limits().fua && slot.operation == Operation::Write {
            // The driver does it all: no flush need wait for such a write.
            self.begin_data(index);
        } else {
            self.begin_sequence_data(index);
        }
    }

    /// The data step: with FUA of the driver's, or with a flush to follow.
    fn begin_sequence_data(&mut self, index: u32) {
        let slot = &mut self.in_flight[index];
        slot.flags.remove(BioFlags::PREFLUSH);
        let fua = slot.flags.contains(BioFlags::FUA);
        if fua && !(self.disk.limits().fua && slot.operation == Operation::Write) {
            slot.flags.remove(BioFlags::FUA);
            slot.step = FlushStep::DataThenFlush;
        } else {
            slot.step = FlushStep::Data;
        }
        self.flush.begin_data();
        // The flush took its time, and the device may have changed meanwhile.
        match self.check(index) {
            Ok(()) => self.begin_data(index),
            Err(status) => self.reject(index, status),
        }
    }

    fn await_flush(&mut self, index: u32, step: FlushStep) {
        self.stats.count(Counter::FlushesAsked, 1);
        self.in_flight[index].step = step;
        self.flush.wait(index);
    }

    /// The data of a flush sequence completed. True if the bio proceeds to the next step.
    pub(super) fn complete_sequence_data(&mut self, index: u32, result: IoResult) -> bool {
        let step = std::mem::take(&mut self.in_flight[index].step);
        if !matches!(step, FlushStep::Data | FlushStep::DataThenFlush) {
            return false;
        }
        self.flush.complete_data();
        if step == FlushStep::Data || result.is_err() {
            return false;
        }
        self.await_flush(index, FlushStep::Postflush);
        true
    }

    /// Issues a flush if bios wait for one, none is in flight, and nothing delays it.
    #[inline]
    pub(super) fn kick_flush(&mut self, ring: Option<&mut Ring>) {
        if self.flush.is_wanted() {
            self.issue_flush(ring);
        }
    }

    #[cold]
    fn issue_flush(&mut self, ring: Option<&mut Ring>) {
        if self.flush.is_delayed(monotonic_ns()) || self.disk.is_frozen() || self.disk.has_held_writes() {
            return;
        }
        if !(self.disk.is_entered() || self.enter(ring)) {
            return;
        }
        let served = self.flush.begin();
        self.stats.count(Counter::FlushesSent, 1);
        self.stats.count(Counter::FlushesCoalesced, served as u64 - 1);
        let mut start_ns = 0;
        if self.disk.settings().iostats {
            start_ns = self.clock.now_ns();
            self.stats.start(StatGroup::Flush, 1, start_ns);
        }
        self.in_flight.begin_flush(self.flush.tag(), start_ns);
        self.trace_lane();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.flush_begun(self.flush.tag(), served, &mut self.clock);
        }
        self.dispatch.push_first(self.flush.tag());
    }

    /// Completes those that wait for the next flush, which will not come.
    pub(super) fn abandon_flushes(&mut self, result: IoResult) {
        while let Some(index) = self.flush.next_abandoned() {
            self.complete_bio(index, result);
        }
    }

    /// The driver's flush completed: every bio that it served takes its next step.
    pub(super) fn complete_flush(&mut self, result: IoResult) {
        self.flush.complete();
        while let Some(index) = self.flush.next_served() {
            if self.in_flight[index].step == FlushStep::Preflush && result.is_ok() {
                self.begin_sequence_data(index);
            } else {
                self.complete_bio(index, result);
            }
        }
    }
}
