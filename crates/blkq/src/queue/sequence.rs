//! The steps of bios that need a flush (`blk_insert_flush` in block/blk-flush.c): before the data, after it,
//! or alone.

use crate::bio::{BioFlags, Operation};
use crate::error::IoResult;
use crate::limits::QueueLimits;
use crate::request::{NIL, Request, RequestState};
use crate::slab::{FlushStep, SlotFlags};
use crate::stats::{Counter, StatGroup};
use crate::tags::Tag;

use super::io::Io;

impl Io {
    /// Starts a flush without data. Without a write cache, it completes immediately.
    pub fn begin_flush(&mut self, index: u32) {
        if !self.disk.limits().write_cache {
            return self.complete_without_request(index, Ok(()));
        }
        self.await_flush(index, FlushStep::Postflush);
    }

    /// Starts a write, discard or write-zeroes with PREFLUSH or FUA on a device with a write cache.
    pub fn begin_flush_sequence(&mut self, index: u32) {
        let slot = &self.in_flight[index];
        if slot.flags.contains(BioFlags::PREFLUSH) {
            self.await_flush(index, FlushStep::Preflush);
        } else if self.disk.limits().fua && slot.operation == Operation::Write {
            // The driver makes the write durable itself, so it is no flush sequence, and no flush waits for
            // it.
            self.begin_data(index);
        } else {
            self.begin_sequence_data(index);
        }
    }

    /// Starts the data step, with the driver's FUA if it has it, else with a flush to follow.
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
        // The device may have changed while the flush was in flight.
        match self.check(index) {
            Ok(()) => self.begin_data(index),
            Err(status) => self.reject(index, status),
        }
    }

    /// Decides again how waiting write `index` becomes durable, because the limits have changed. A driver
    /// that does not declare FUA must not get the flag; a flush must follow the data instead. The decision is
    /// made for the submitted bio, whose flag its parts carry.
    pub fn renew_durability(&mut self, index: u32) {
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

    /// Renews the decision for the requests in flight. There are some only if the driver itself has lost a
    /// capability, because no request is in flight under a freeze.
    pub fn renew_durability_of_requests(&mut self) {
        for index in 0..self.in_flight.requests().len() {
            let tag = Tag(index as u16);
            let Request { state, first_bio, .. } = self.in_flight[tag];
            // Flushes and plain bios do not have the flag, and a bio with the flag is never merged with
            // others.
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

    /// Completes the data step of a flush sequence. Returns true if the bio continues with a flush.
    pub fn complete_sequence_data(&mut self, index: u32, result: IoResult) -> bool {
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

    /// Starts the driver's flush for all bios that wait for one. Returns false if they need none.
    pub fn start_flush(&mut self) -> bool {
        let served = self.flush.begin();
        if !self.disk.limits().write_cache {
            // The write cache was removed after the bios had asked for a flush. Everything that completed
            // before is durable (see `QueueLimits::write_cache`).
            self.complete_flush(Ok(()));
            return false;
        }
        self.stats.count(Counter::FlushesSent, 1);
        self.stats.count(Counter::FlushesCoalesced, served as u64 - 1);
        let mut start_ns = 0;
        if self.disk.settings().iostats {
            start_ns = self.clock.now_ns();
            self.stats.start(StatGroup::Flush, 1, start_ns);
        }
        let tag = self.flush.tag();
        self.in_flight.begin_flush(tag, start_ns);
        self.trace(|tracer, _, clock| tracer.flush_begun(tag, served, clock));
        true
    }

    /// Completes the bios that wait for the next flush, because none will be issued.
    pub fn abandon_flushes(&mut self, result: IoResult) {
        while let Some(index) = self.flush.next_abandoned() {
            self.complete_bio(index, result);
        }
    }

    /// Completes the driver's flush: each bio that it served takes its next step.
    pub fn complete_flush(&mut self, result: IoResult) {
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
