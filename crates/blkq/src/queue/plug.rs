//! The plug: requests wait until a batch of them, or the end of the turn, so
//! that neighbours merge, tags are taken in one go, the clock is read once, and the
//! driver sees a batch (`struct blk_plug` in the kernel).

use std::ops::Range;

use crate::bio::{Operation, Outline};
use crate::request::Request;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::stats::{StatGroup, StatsWriter};
use crate::tags::Tag;

/// Requests in a plug before it is flushed (BLK_MAX_REQUEST_COUNT).
pub const PLUG_REQUESTS: usize = 32;
/// The same for a thread with several queues.
pub const PLUG_REQUESTS_SEVERAL_QUEUES: usize = 64;
/// A request of at least this many bytes flushes the plug (BLK_PLUG_FLUSH_SIZE).
pub const PLUG_FLUSH_BYTES: u64 = 128 << 10;

/// More sectors than the requests of a plug have, and far from an overflow, in bytes too.
pub const UNKNOWN_SECTORS: u64 = 1 << 53;

/// The tail of an empty plug: no device is large enough to have anything that touches it.
const NOWHERE: Range<Sector> = Sector(u64::MAX)..Sector(u64::MAX);

/// The plug of one queue, and with it the fast lane: plain bios of the owner that follow each other
/// into the plug. `Queue::open_lane` checks once for all of them, until the plug is flushed, what they
/// have in common, and takes their tags together.
pub(crate) struct Plug {
    /// The waiting requests, oldest first, and behind them the tags of those that the lane still takes.
    tags: [Tag; PLUG_REQUESTS_SEVERAL_QUEUES],
    /// How many requests wait.
    len: usize,
    /// Where the tags of the lane end; it is closed if none is left.
    ready: usize,
    /// How many of the requests are no reads.
    others: usize,
    /// Sectors that its requests read or write; no less than [`UNKNOWN_SECTORS`] if that is not known.
    data_sectors: u64,
    /// The time stamp of all bios that the lane takes; 0 without iostats.
    start_ns: u64,
    /// Where the youngest request begins and ends: what touches it may merge with it.
    tail: Range<Sector>,
    /// Requests before a flush: see the constants.
    limit: usize,
    /// The youngest request has become large by merging.
    grown: bool,
    /// How many requests the last plug had: so many tags the lane takes at once.
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

    /// The waiting requests, oldest first.
    #[inline]
    pub fn requests(&self) -> &[Tag] {
        &self.tags[..self.len]
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether so many sectors, which are within the device, touch the youngest request.
    #[inline(always)]
    pub fn is_touched(&self, sector: Sector, sectors: u64) -> bool {
        sector == self.tail.end || sector + sectors == self.tail.start
    }

    /// The youngest request was merged with what touched it.
    pub fn merged(&mut self, request: &Request) {
        self.data_sectors |= UNKNOWN_SECTORS;
        self.tail = request.sector..request.end();
        self.grown = request.sectors >= PLUG_FLUSH_BYTES >> SECTOR_SHIFT;
    }

    /// The thread has several queues.
    pub fn set_several_queues(&mut self) {
        self.limit = PLUG_REQUESTS_SEVERAL_QUEUES;
    }

    /// Whether it is to be flushed before it takes another request.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    /// The youngest request.
    #[inline]
    pub fn last(&self) -> Option<Tag> {
        self.requests().last().copied()
    }

    /// Whether the youngest request has become large by merging: it goes before a new one comes.
    #[inline]
    pub fn has_grown(&self) -> bool {
        self.grown
    }

    /// Takes a request. True if the plug is to be flushed: it is full, or the request is as large
    /// as one becomes by merging, if it may. The lane is closed.
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

    /// Sectors that its requests read or write. One that is no less than [`UNKNOWN_SECTORS`] is no such number:
    /// requests were merged, and somebody has to add up theirs.
    #[inline]
    pub fn data_sectors(&self) -> u64 {
        self.data_sectors
    }

    /// Counts its requests, which are about to be dispatched.
    #[inline]
    pub fn count(&self, requests: &[Request], stats: &mut StatsWriter) {
        let Some(first) = self.requests().first() else { return };
        let first_ns = requests[first.index()].start_ns;
        // Only the direction counts.
        let directions = [(StatGroup::Read, self.len - self.others), (StatGroup::Write, self.others)];
        for (group, count) in directions {
            if count > 0 {
                stats.start(group, count as u64, first_ns);
            }
        }
    }

    /// Takes the requests out, oldest first: before they are dispatched, as a driver that panics has
    /// perhaps taken some.
    #[inline]
    pub fn take_requests(&mut self) -> &[Tag] {
        self.last_len = self.len;
        (self.len, self.ready, self.others, self.data_sectors) = (0, 0, 0, 0);
        (self.tail, self.grown) = (NOWHERE, false);
        &self.tags[..self.last_len]
    }
}

/// The fast lane.
impl Plug {
    /// Whether the lane takes another bio.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        self.len != self.ready
    }

    /// How many bios the lane is to be opened for: as many as the last plug had, or as this has.
    pub fn lane_len(&self) -> usize {
        self.last_len.max(self.len).min(self.limit - self.len).max(1)
    }

    /// Opens the lane for as many bios as there are `tags`, with this time stamp.
    pub fn open(&mut self, tags: &[Tag], start_ns: u64) {
        self.ready = self.len + tags.len();
        if let [tag] = *tags {
            self.tags[self.len] = tag;
        } else {
            self.tags[self.len..self.ready].copy_from_slice(tags);
        }
        self.start_ns = start_ns;
    }

    /// The time stamp of the bios that the lane takes.
    #[inline(always)]
    pub fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// The open lane takes the bio of `outline`, which reads or writes: returns its tag.
    #[inline(always)]
    pub fn take(&mut self, outline: &Outline) -> Tag {
        // Masked instead of checked: it is smaller anyway.
        let tag = self.tags[self.len % PLUG_REQUESTS_SEVERAL_QUEUES];
        self.note_pushed(outline, outline.sectors);
        tag
    }

    /// Closes the lane. Returns the tags that it did not use.
    pub fn close(&mut self) -> &[Tag] {
        let rest = self.len..self.ready;
        self.ready = self.len;
        &self.tags[rest]
    }
}
