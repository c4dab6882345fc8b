//! The plug (`struct blk_plug`): requests are collected until there is a batch, or the turn ends. Meanwhile
//! neighbours merge, tags are taken together, the clock is read once, and the driver gets a batch.
//!
//! The plug also has the fast path of submission, for plain bios of the owner that follow each other.
//! `Queue::open_fast_path` checks the conditions that are common to all bios until the plug is flushed, and
//! takes their tags together. While the path is open, each bio needs only the checks of `Queue::submit`.
//! Everything that would change the outcome of these checks must close the path first.

use std::ops::Range;

use crate::bio::{Operation, Outline};
use crate::request::Request;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::stats::{StatGroup, StatsWriter};
use crate::tags::Tag;

/// Requests in a plug before it is flushed (BLK_MAX_REQUEST_COUNT; the kernel had 16 until 5.16).
pub const PLUG_REQUESTS: usize = 32;
/// As [`PLUG_REQUESTS`], for a thread with several queues, as in the kernel.
pub const PLUG_REQUESTS_SEVERAL_QUEUES: usize = 64;
/// A request of at least this size flushes the plug (BLK_PLUG_FLUSH_SIZE).
pub const PLUG_FLUSH_BYTES: u64 = 128 << 10;

/// A bit that is set in the sum of a plug's sectors if the sum is unknown. It is larger than any sum of a
/// plug, and far from an overflow, also if the sum is converted to bytes.
pub const UNKNOWN_SECTORS: u64 = 1 << 53;

/// The tail of an empty plug. No device is large enough to contain a sector that touches it.
const NOWHERE: Range<Sector> = Sector(u64::MAX)..Sector(u64::MAX);

pub(crate) struct Plug {
    /// The waiting requests, oldest first, followed by the unused tags of the open fast path.
    tags: [Tag; PLUG_REQUESTS_SEVERAL_QUEUES],
    len: usize,
    /// Where the tags of the fast path end. The path is closed if this equals `len`.
    ready: usize,
    /// The number of requests that are not reads.
    others: usize,
    data_sectors: u64,
    /// The time stamp of all bios on the open fast path. 0 without iostats.
    start_ns: u64,
    /// Begin and end of the youngest request. A bio that touches it may be merged.
    tail: Range<Sector>,
    /// Number of requests at which the plug is flushed: one of the constants above.
    limit: usize,
    /// Merging has made the youngest request as large as [`PLUG_FLUSH_BYTES`].
    grown: bool,
    /// Number of requests of the previous plug. The fast path takes that number of tags in advance.
    last_len: usize,
}

impl Plug {
    pub fn new() -> Plug {
        Plug {
            tags: [Tag(0); PLUG_REQUESTS_SEVERAL_QUEUES],
            len: 0,
            ready: 0,
            others: 0,
            data_sectors: 0,
            start_ns: 0,
            tail: NOWHERE,
            limit: PLUG_REQUESTS,
            grown: false,
            last_len: 0,
        }
    }

    #[inline]
    pub fn requests(&self) -> &[Tag] {
        &self.tags[..self.len]
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the range, which must be within the device, touches the youngest request.
    #[inline(always)]
    pub fn is_touched(&self, sector: Sector, sectors: u64) -> bool {
        sector == self.tail.end || sector + sectors == self.tail.start
    }

    pub fn merged(&mut self, request: &Request) {
        self.data_sectors |= UNKNOWN_SECTORS;
        self.tail = request.sector..request.end();
        self.grown = request.sectors >= PLUG_FLUSH_BYTES >> SECTOR_SHIFT;
    }

    pub fn set_several_queues(&mut self) {
        self.limit = PLUG_REQUESTS_SEVERAL_QUEUES;
    }

    #[inline]
    pub fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    #[inline]
    pub fn last(&self) -> Option<Tag> {
        self.requests().last().copied()
    }

    #[inline]
    pub fn has_large_request(&self) -> bool {
        self.grown
    }

    /// Adds a request. Returns true if the plug must be flushed: it is full, or the request has reached
    /// [`PLUG_FLUSH_BYTES`] and merging is on. The fast path must be closed.
    #[inline]
    pub fn push(&mut self, tag: Tag, outline: &Outline, merge: bool) -> bool {
        debug_assert!(!self.is_open());
        self.tags[self.len] = tag;
        self.note_pushed(outline, if outline.operation.has_data() { outline.sectors } else { 0 });
        self.ready = self.len;
        self.is_full() || (outline.sectors >= PLUG_FLUSH_BYTES >> SECTOR_SHIFT && merge)
    }

    #[inline(always)]
    fn note_pushed(&mut self, outline: &Outline, data_sectors: u64) {
        self.len += 1;
        self.tail = outline.sector..outline.sector + outline.sectors;
        self.others += usize::from(outline.operation != Operation::Read);
        self.data_sectors += data_sectors;
    }

    /// Sum of the sectors that the requests read or write. If it is at least [`UNKNOWN_SECTORS`], requests
    /// were merged, and the caller must add up their sectors.
    #[inline]
    pub fn data_sectors(&self) -> u64 {
        self.data_sectors
    }

    /// Counts the requests as started, because they are about to be dispatched.
    #[inline]
    pub fn count(&self, requests: &[Request], stats: &mut StatsWriter) {
        let Some(first) = self.requests().first() else { return };
        let first_ns = requests[first.index()].start_ns;
        // The counters of started requests distinguish only the direction.
        let directions = [(StatGroup::Read, self.len - self.others), (StatGroup::Write, self.others)];
        for (group, count) in directions {
            if count > 0 {
                stats.start(group, count as u64, first_ns);
            }
        }
    }

    /// Removes and returns the requests, oldest first. Must be called before they are dispatched: a driver
    /// that panics may have taken some of them.
    #[inline]
    pub fn take_requests(&mut self) -> &[Tag] {
        self.last_len = self.len;
        (self.len, self.ready, self.others, self.data_sectors) = (0, 0, 0, 0);
        (self.tail, self.grown) = (NOWHERE, false);
        &self.tags[..self.last_len]
    }
}

impl Plug {
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        self.len != self.ready
    }

    /// The number of bios for which to open the fast path: the larger size of the previous plug and this one.
    pub fn fast_path_len(&self) -> usize {
        self.last_len.max(self.len).min(self.limit - self.len).max(1)
    }

    pub fn open(&mut self, tags: &[Tag], start_ns: u64) {
        self.ready = self.len + tags.len();
        if let [tag] = *tags {
            self.tags[self.len] = tag;
        } else {
            self.tags[self.len..self.ready].copy_from_slice(tags);
        }
        self.start_ns = start_ns;
    }

    #[inline(always)]
    pub fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Adds the read or write `outline` on the open fast path. Returns its tag.
    #[inline(always)]
    pub fn take(&mut self, outline: &Outline) -> Tag {
        // The index is masked, which saves a bounds check; `len` is always smaller.
        let tag = self.tags[self.len % PLUG_REQUESTS_SEVERAL_QUEUES];
        self.note_pushed(outline, outline.sectors);
        tag
    }

    /// Closes the fast path. Returns the unused tags.
    pub fn close(&mut self) -> &[Tag] {
        let rest = self.len..self.ready;
        self.ready = self.len;
        &self.tags[rest]
    }
}
