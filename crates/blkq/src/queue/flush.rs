//! The flush machine (block/blk-flush.c). It merges flushes, and writes that need one before (PREFLUSH) or
//! after their data (FUA, if the driver does not support FUA), into as few flushes of the driver as
//! correctness allows.
//!
//! A flush makes durable only what had completed before the flush started. Therefore there are two lists.
//! Bios that need a flush join the pending list. When a flush is issued, the lists are swapped: the running
//! list contains the bios that this flush serves, and bios that arrive meanwhile wait for the next flush. At
//! most one flush is in flight. The steps of each bio are in `io`.

use std::collections::VecDeque;

use crate::tags::Tag;

/// How long data of flush sequences in flight may delay a flush, in nanoseconds (FLUSH_PENDING_TIMEOUT).
const PENDING_NS_MAX: u64 = 5_000_000_000;

#[derive(Default)]
pub(super) struct FlushMachine {
    /// The tag of the queue's own flush. It is one beyond those of the tag set, so a flush needs no free tag.
    pub tag: Tag,
    /// Bios that wait for the next flush.
    pub pending: VecDeque<u32>,
    /// Bios that the flush in flight serves.
    pub running: VecDeque<u32>,
    pub in_flight: bool,
    /// Flush sequences whose data step is in flight. They will need a flush, so the next flush waits.
    pub data_in_flight: u32,
    /// When the oldest pending bio arrived. Kept only while data delays the flush.
    pending_since_ns: Option<u64>,
}

impl FlushMachine {
    pub fn new(tag: Tag) -> FlushMachine {
        FlushMachine { tag, ..FlushMachine::default() }
    }

    pub fn is_wanted(&self) -> bool {
        !self.pending.is_empty() && !self.in_flight
    }

    /// The latest time at which a delayed flush must be issued.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.pending_since_ns.filter(|_| !self.in_flight).map(|since| since + PENDING_NS_MAX)
    }

    /// Whether data of flush sequences in flight delays the wanted flush: they will need a flush too, and one
    /// flush can serve them all. Starts the timeout of five seconds.
    pub fn is_delayed(&mut self, now_ns: u64) -> bool {
        self.data_in_flight > 0 && now_ns < *self.pending_since_ns.get_or_insert(now_ns) + PENDING_NS_MAX
    }

    /// Swaps the lists, because a flush is issued. Returns how many bios it serves.
    pub fn begin(&mut self) -> usize {
        self.pending_since_ns = None;
        self.in_flight = true;
        std::mem::swap(&mut self.pending, &mut self.running);
        self.running.len()
    }
}
