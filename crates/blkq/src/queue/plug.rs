//! The plug: requests wait until a batch of them, or the end of the turn, so
//! that neighbours merge, tags are taken in one go, the clock is read once, and the
//! driver sees a batch (`struct blk_plug` in the kernel).

use std::ops::Range;

use crate::bio::{Operation, Outline};
use crate::request::Request;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::stats::StatsWriter;
use crate::tags::Tag;

/// Requests in a plug before it is flushed (BLK_MAX_REQUEST_COUNT).
pub const PLUG_REQUESTS: usize = 32;
/// The same for a thread with several queues.
pub const PLUG_REQUESTS_SEVERAL_QUEUES: usize = 64;
/// A request of at least this many bytes flushes the plug (BLK_PLUG_FLUSH_SIZE).
pub const PLUG_FLUSH_BYTES: u64 = 128 << 10;

/// The tail of an empty plug: no device is large enough to have anything that touches it.
const NOWHERE: Range<Sector> = Sector(u64::MAX)..Sector(u64::MAX);

/// The plug of one queue.
pub(crate) struct Plug {
    /// Waiting requests, oldest first.
    requests: Vec<Tag>,
    /// Requests before a flush: see the constants.
    limit: usize,
    /// Where the youngest request begins and ends: what touches it may merge with it.
    tail: Range<Sector>,
    /// The youngest request has become large by merging.
    grown: bool,
    /// How many of the requests are of each operation.
    operations: [u32; Operation::COUNT],
}

impl Plug {
    pub fn new() -> Plug {
        Plug {
            requests: Vec::with_capacity(PLUG_REQUESTS_SEVERAL_QUEUES),
            limit: PLUG_REQUESTS,
            tail: NOWHERE,
            grown: false,
            operations: [0; Operation::COUNT],
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether so many sectors, which are within the device, touch the youngest request.
    #[inline]
    pub fn is_touched(&self, sector: Sector, sectors: u64) -> bool {
        sector == self.tail.end || sector + sectors == self.tail.start
    }

    /// The youngest request was merged with what touched it.
    pub fn merged(&mut self, request: &Request) {
        self.tail = request.sector..request.end();
        self.grown = request.bytes() >= PLUG_FLUSH_BYTES;
    }

    /// The thread has several queues.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// The youngest request.
    #[inline]
    pub fn last(&self) -> Option<Tag> {
        self.requests.last().copied()
    }

    pub fn contains(&self, tag: Tag) -> bool {
        self.requests.contains(&tag)
    }

    /// Whether the youngest request has become large by merging: it goes before a new one comes.
    #[inline]
    pub fn has_grown(&self) -> bool {
        self.grown
    }

    /// Takes a request. True if the plug is to be flushed: it is full, or the request is as large
    /// as one becomes by merging, if it may.
    #[inline(always)]
    pub fn push(&mut self, tag: Tag, outline: &Outline, merge: bool) -> bool {
        self.requests.push(tag);
        self.operations[outline.operation as usize] += 1;
        self.tail = outline.sector..outline.sector + outline.sectors;
        self.requests.len() >= self.limit || (outline.sectors >= PLUG_FLUSH_BYTES >> SECTOR_SHIFT && merge)
    }

    /// Takes the requests out, after `stats`, if any, has counted them.
    #[inline]
    pub fn take(&mut self, requests: &[Request], stats: Option<&mut StatsWriter>) -> Vec<Tag> {
        let operations = std::mem::take(&mut self.operations);
        if let (Some(stats), Some(first)) = (stats, self.requests.first()) {
            let first_ns = requests[first.index()].start_ns;
            for (operation, count) in Operation::ALL.into_iter().zip(operations) {
                if count > 0 {
                    stats.start(operation.into(), u64::from(count), first_ns);
                }
            }
        }
        (self.tail, self.grown) = (NOWHERE, false);
        std::mem::take(&mut self.requests)
    }

    /// Keeps the room of the requests that were taken out and dispatched.
    #[inline]
    pub fn put_back(&mut self, mut batch: Vec<Tag>) {
        batch.clear();
        self.requests = batch;
    }
}
