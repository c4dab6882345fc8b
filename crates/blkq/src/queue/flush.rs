//! The flush machine (block/blk-flush.c): turns flushes, and writes that ask for one
//! before (PREFLUSH) or for durability of their own (FUA, where the driver cannot), into
//! as few flushes of the driver as the promises allow.
//!
//! Bios that need a flush gather on one of two lists. When a flush is issued the lists
//! change places: those on the running list are served by it, those that come later wait
//! for the next, because only what had completed before a flush began is covered by it.
//! Which steps a bio takes is in `sequence`.

use std::collections::VecDeque;

use crate::tags::Tag;

/// How long data of other sequences in flight may delay a flush (FLUSH_PENDING_TIMEOUT).
const PENDING_NS_MAX: u64 = 5_000_000_000;

/// The state of one queue's flush machine.
pub(super) struct FlushMachine {
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
        self.is_wanted() && self.data_in_flight == 0
    }

    /// Whether bios wait for a flush and none is in flight.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        !self.pending.is_empty() && !self.in_flight
    }

    /// When a delayed flush must go out at the latest.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.pending_since_ns.filter(|_| !self.in_flight).map(|since| since + PENDING_NS_MAX)
    }

    /// Whether data of other sequences, which are about to ask for a flush too, delays the one that
    /// is wanted: for at most five seconds.
    pub fn is_delayed(&mut self, now_ns: u64) -> bool {
        self.data_in_flight > 0 && now_ns < *self.pending_since_ns.get_or_insert(now_ns) + PENDING_NS_MAX
    }

    /// Bio `index` waits for the next flush.
    pub fn wait(&mut self, index: u32) {
        self.pending.push_back(index);
    }

    /// The data of a sequence is on its way.
    pub fn begin_data(&mut self) {
        self.data_in_flight += 1;
    }

    /// The data of a sequence has completed.
    pub fn complete_data(&mut self) {
        self.data_in_flight -= 1;
    }

    /// A flush is issued. Returns how many bios it serves.
    pub fn begin(&mut self) -> usize {
        self.pending_since_ns = None;
        self.in_flight = true;
        std::mem::swap(&mut self.pending, &mut self.running);
        self.running.len()
    }

    /// The flush has completed: [`FlushMachine::next_served`] has what it served.
    pub fn complete(&mut self) {
        self.in_flight = false;
    }

    /// The next bio that the flush served.
    pub fn next_served(&mut self) -> Option<u32> {
        self.running.pop_front()
    }

    /// The next bio whose flush will not come.
    pub fn next_abandoned(&mut self) -> Option<u32> {
        self.pending.pop_front()
    }
}
