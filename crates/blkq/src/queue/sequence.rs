//! The steps of bios that need a flush: before their data, after it, or alone.

use crate::bio::{BioFlags, Operation};
use crate::clock::monotonic_ns;
use crate::error::{IoResult, Status};
use crate::limits::QueueLimits;
use crate::request::{NIL, Request, RequestState};
use crate::ring::Ring;
use crate::slab::{FlushStep, SlotFlags};
use crate::stats::{Counter, StatGroup};
use crate::tags::Tag;

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

    /// Decides again how write `index`, which waits, becomes durable, because the limits have changed: a driver that does
    /// not declare FUA must not get the flag, and a flush has to follow the data. The decision is that of the bio which
    /// was submitted, whose flag its parts carry.
    pub(super) fn renew_durability(&mut self, index: u32) {
        let &QueueLimits { write_cache, fua, .. } = self.disk.limits();
        let root = self.in_flight.bios().root_of(index);
        let has_flag = self.in_flight[index].flags.contains(BioFlags::FUA);
        let is_uncached = self.in_flight[root].slot_flags.contains(SlotFlags::UNCACHED_FUA);
        if has_flag && write_cache && fua || !has_flag && !is_uncached {
            return;
        }
        let mut part = index;
        while part != NIL {
            let slot = &mut self.in_flight[part];
            slot.flags.remove(BioFlags::FUA);
            part = slot.parent;
        }
        let slot = &mut self.in_flight[root];
        slot.slot_flags.set(SlotFlags::UNCACHED_FUA, !write_cache);
        if write_cache && std::mem::replace(&mut slot.step, FlushStep::DataThenFlush) == FlushStep::None {
            self.flush.begin_data();
        }
    }

    /// Decides it again for the requests in flight. After a freeze there are none: only the driver itself, which has
    /// lost a capability, changes the limits under them.
    pub(super) fn renew_durability_of_requests(&mut self) {
        for index in 0..self.in_flight.requests().len() {
            let tag = Tag(index as u16);
            let Request { state, first_bio, .. } = self.in_flight[tag];
            // Neither a flush nor a plain bio has the flag, and a bio that has it is not merged with others.
            if state == RequestState::Busy && first_bio != NIL {
                self.renew_durability(first_bio);
                if !self.in_flight[first_bio].flags.contains(BioFlags::FUA) {
                    self.in_flight[tag].flags.remove(BioFlags::FUA);
                }
            }
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
        if self.flush.is_delayed(monotonic_ns()) || self.disk.is_frozen() {
            return;
        }
        if self.disk.has_held_writes() {
            if self.hold.is_closing() {
                // Of another queue, which may not be resumed before this one has stopped.
                self.abandon_flushes(Err(Status::Offline));
            }
            return;
        }
        if !(self.disk.is_entered() || self.enter(ring)) {
            return;
        }
        let served = self.flush.begin();
        if !self.disk.limits().write_cache {
            // The write cache was removed after the bios asked for the flush, and all that had completed is durable.
            return self.complete_flush(Ok(()));
        }
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
