//! The flush machine (block/blk-flush.c): turns flushes, and writes that ask for one
//! before (PREFLUSH) or for durability of their own (FUA, where the driver cannot), into
//! as few flushes of the driver as the promises allow.
//!
//! Bios that need a flush gather on one of two lists. When a flush is issued the lists
//! change places: those on the running list are served by it, those that come later wait
//! for the next, because only what had completed before a flush began is covered by it.

use std::collections::VecDeque;

use crate::bio::{BioFlags, Operation};
use crate::clock::monotonic_ns;
use crate::error::IoResult;
use crate::queue::Queue;
use crate::request::{Request, RequestState};
use crate::ring::Ring;
use crate::slab::FlushStep;
use crate::stats::{Counter, StatGroup};
use crate::tags::Tag;

/// How long data of other sequences in flight may delay a flush (FLUSH_PENDING_TIMEOUT).
const PENDING_NS_MAX: u64 = 5_000_000_000;

/// The state of one queue's flush machine.
pub(crate) struct FlushMachine {
    tag: Tag,
    /// Bios that wait for the next flush, and bios that the running one serves.
    pending: VecDeque<u32>,
    running: VecDeque<u32>,
    in_flight: bool,
    /// Bios of flush sequences whose data is on its way.
    data_in_flight: u32,
    /// When the oldest pending bio came; kept only while data delays the flush.
    pending_since_ns: Option<u64>,
}

impl FlushMachine {
    pub fn new(tag: Tag) -> FlushMachine {
        FlushMachine {
            tag,
            pending: VecDeque::new(),
            running: VecDeque::new(),
            in_flight: false,
            data_in_flight: 0,
            pending_since_ns: None,
        }
    }

    /// The tag of the queue's own flush, one beyond those of its tag set.
    pub fn tag(&self) -> Tag {
        self.tag
    }

    /// Whether the driver, or what leads to it, has the flush.
    #[inline]
    pub fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// Bios that wait for the next flush, oldest first.
    pub fn pending(&self) -> &VecDeque<u32> {
        &self.pending
    }

    /// Bios that the flush in flight serves.
    pub fn running(&self) -> &VecDeque<u32> {
        &self.running
    }

    /// Whether a flush is to be issued that nothing delays: data of other sequences does until
    /// its completion, or until [`FlushMachine::deadline_ns`].
    pub fn is_due(&self) -> bool {
        !self.pending.is_empty() && !self.in_flight && self.data_in_flight == 0
    }

    /// When a delayed flush must go out at the latest.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.pending_since_ns.filter(|_| !self.in_flight).map(|since| since + PENDING_NS_MAX)
    }
}

impl Queue {
    /// A flush without data.
    pub(crate) fn begin_flush(&mut self, index: u32) {
        if !self.limits.write_cache {
            return self.end_bio(index, Ok(()));
        }
        self.await_flush(index, FlushStep::Postflush);
    }

    /// A write-direction bio with PREFLUSH or FUA on a device with a write cache.
    pub(crate) fn begin_flush_sequence(&mut self, index: u32) {
        if self.bios[index].flags.contains(BioFlags::PREFLUSH) {
            self.await_flush(index, FlushStep::Preflush);
        } else if self.limits.fua && self.bios[index].operation == Operation::Write {
            // The driver does it all: no flush need wait for such a write.
            self.begin_data(index);
        } else {
            self.begin_sequence_data(index);
        }
    }

    /// The data step: with FUA of the driver's, or with a flush to follow.
    fn begin_sequence_data(&mut self, index: u32) {
        let slot = &mut self.bios[index];
        slot.flags.remove(BioFlags::PREFLUSH);
        let fua = slot.flags.contains(BioFlags::FUA);
        if fua && !(self.limits.fua && slot.operation == Operation::Write) {
            slot.flags.remove(BioFlags::FUA);
            slot.step = FlushStep::DataThenFlush;
        } else {
            slot.step = FlushStep::Data;
        }
        self.flush.data_in_flight += 1;
        // The flush took its time, and the device may have changed meanwhile.
        match self.check(index) {
            Ok(()) => self.begin_data(index),
            Err(status) => self.refuse(index, status),
        }
    }

    fn await_flush(&mut self, index: u32, step: FlushStep) {
        self.stats.count(Counter::FlushesAsked, 1);
        self.bios[index].step = step;
        self.flush.pending.push_back(index);
    }

    /// The data of a flush sequence ended. True if the bio goes on to the next step.
    pub(crate) fn end_sequence_data(&mut self, index: u32, result: IoResult) -> bool {
        let step = std::mem::take(&mut self.bios[index].step);
        if !matches!(step, FlushStep::Data | FlushStep::DataThenFlush) {
            return false;
        }
        self.flush.data_in_flight -= 1;
        if step == FlushStep::Data || result.is_err() {
            return false;
        }
        self.await_flush(index, FlushStep::Postflush);
        true
    }

    /// Issues a flush if somebody waits for one, none is in flight, and no data of other
    /// sequences is about to ask for another (for at most five seconds).
    #[inline]
    pub(crate) fn kick_flush(&mut self, ring: Option<&mut Ring>) {
        if !self.flush.pending.is_empty() && !self.flush.in_flight {
            self.issue_flush(ring);
        }
    }

    #[cold]
    fn issue_flush(&mut self, ring: Option<&mut Ring>) {
        let now_ns = monotonic_ns();
        if self.flush.data_in_flight > 0 {
            let since_ns = *self.flush.pending_since_ns.get_or_insert(now_ns);
            if now_ns < since_ns + PENDING_NS_MAX {
                return;
            }
        }
        if self.disk.control.is_frozen() || !(self.entered || self.enter(ring)) {
            return;
        }
        self.flush.pending_since_ns = None;
        self.flush.in_flight = true;
        std::mem::swap(&mut self.flush.pending, &mut self.flush.running);
        self.stats.count(Counter::FlushesSent, 1);
        self.stats.count(Counter::FlushesCoalesced, self.flush.running.len() as u64 - 1);
        self.in_use += 1;
        let start_ns = if self.settings.iostats { self.clock.now_ns() } else { 0 };
        if self.settings.iostats {
            self.stats.start(StatGroup::Flush, 1, start_ns);
        }
        self.requests[self.flush.tag.index()] =
            Request { operation: Operation::Flush, state: RequestState::Busy, start_ns, ..Request::idle() };
        self.dispatch.push_front(self.flush.tag);
    }

    /// Ends those that wait for the next flush, which will not come.
    pub(crate) fn end_pending_flushes(&mut self, result: IoResult) {
        while let Some(index) = self.flush.pending.pop_front() {
            self.end_bio(index, result);
        }
    }

    /// The driver's flush ended: every bio it served takes its next step.
    pub(crate) fn end_flush(&mut self, result: IoResult) {
        self.flush.in_flight = false;
        while let Some(index) = self.flush.running.pop_front() {
            if self.bios[index].step == FlushStep::Preflush && result.is_ok() {
                self.begin_sequence_data(index);
            } else {
                self.end_bio(index, result);
            }
        }
    }
}
