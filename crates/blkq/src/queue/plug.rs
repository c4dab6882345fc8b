//! The plug (`struct blk_plug`): requests are collected until there is a batch, or the turn ends. Meanwhile
//! neighbours merge, tags are taken together, the clock is read once, and the driver gets a batch.
//!
//! The plug also has the fast path of submission, for plain bios of the owner that follow each other.
//! `Queue::open_fast_path` checks the conditions that are common to all bios until the plug is flushed, and
//! takes their tags together. While the path is open, each bio needs only the checks of `Queue::submit`.
//! Everything that would change the outcome of these checks must close the path first.

use std::ops::Range;

use crate::bio::{BioFlags, Operation, Outline};
use crate::buffer::{Data, Segment};
use crate::limits::QueueLimits;
use crate::request::Request;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::split::check_memory;
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
    /// Sum of the sectors that the requests read or write. If it is at least [`UNKNOWN_SECTORS`], requests were merged,
    /// and their sectors must be added up.
    pub data_sectors: u64,
    /// The time stamp of all bios on the open fast path. 0 without iostats.
    pub start_ns: u64,
    /// Begin and end of the youngest request. A bio that touches it may be merged.
    tail: Range<Sector>,
    /// Number of requests at which the plug is flushed: one of the constants above.
    limit: usize,
    /// Merging has made the youngest request as large as [`PLUG_FLUSH_BYTES`].
    pub has_large_request: bool,
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
            has_large_request: false,
            last_len: 0,
        }
    }

    pub fn requests(&self) -> &[Tag] {
        &self.tags[..self.len]
    }

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
        self.has_large_request = request.sectors >= PLUG_FLUSH_BYTES >> SECTOR_SHIFT;
    }

    pub fn set_several_queues(&mut self) {
        self.limit = PLUG_REQUESTS_SEVERAL_QUEUES;
    }

    pub fn is_full(&self) -> bool {
        self.len >= self.limit
    }

    pub fn last(&self) -> Option<Tag> {
        self.requests().last().copied()
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
        (self.tail, self.has_large_request) = (NOWHERE, false);
        &self.tags[..self.last_len]
    }

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

/// Limits in sectors, so that the fast path needs only a few comparisons.
#[derive(Clone, Copy)]
pub(super) struct FastLimits {
    capacity_sectors: u64,
    /// Bits of sector and length that must be zero.
    block_mask: u64,
    /// Largest read and largest write that certainly need no split. 0: all go through the slow path.
    whole_sectors: [u64; 2],
    /// As `whole_sectors`, but too small to flush the plug.
    small_sectors: [u64; 2],
    max_segments: u32,
}

impl FastLimits {
    pub fn new(limits: &QueueLimits) -> FastLimits {
        let whole = limits.max_request_bytes.min(limits.max_segment_bytes);
        let whole = if limits.chunk_bytes == 0 { u64::from(whole >> SECTOR_SHIFT) } else { 0 };
        let small = whole.min((PLUG_FLUSH_BYTES >> SECTOR_SHIFT) - 1);
        FastLimits {
            capacity_sectors: limits.capacity_bytes >> SECTOR_SHIFT,
            block_mask: u64::from(limits.logical_block_bytes >> SECTOR_SHIFT) - 1,
            whole_sectors: [whole, if limits.read_only { 0 } else { whole }],
            small_sectors: [small, if limits.read_only { 0 } else { small }],
            max_segments: u32::from(limits.max_segments),
        }
    }

    /// Whether this is a legal read or write of one buffer that needs no split and no flush.
    pub fn fits(&self, outline: &Outline, data: &Data) -> bool {
        let Data::Buffer(buffer) = data else { return false };
        self.fits_memory(outline, buffer.len() as u64)
    }

    /// As [`FastLimits::fits`], for a bio that is also too small to flush the plug.
    #[inline(always)]
    pub fn fits_small(&self, outline: &Outline, data: &Data) -> bool {
        let Data::Buffer(buffer) = data else { return false };
        self.fits_bytes(outline, buffer.len() as u64, self.small_sectors)
    }

    /// As [`FastLimits::fits`], for memory of `bytes`.
    pub fn fits_memory(&self, outline: &Outline, bytes: u64) -> bool {
        self.fits_bytes(outline, bytes, self.whole_sectors)
    }

    /// The check for memory of `bytes`, and lengths up to `most` for reads and writes.
    #[inline(always)]
    fn fits_bytes(&self, outline: &Outline, bytes: u64, most: [u64; 2]) -> bool {
        let &Outline { operation, flags, sector, sectors, .. } = outline;
        // Read is operation 0 and Write is 1. A length of 0 wraps around and is too long.
        let Some(&most) = most.get(operation as usize) else { return false };
        (sector.0 | sectors) & self.block_mask == 0
            && sectors.wrapping_sub(1) < most
            && sectors <= bytes >> SECTOR_SHIFT
            && sector.0.checked_add(sectors).is_some_and(|end| end <= self.capacity_sectors)
            && !flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH | BioFlags::NO_UNMAP)
    }

    /// Whether one read or write certainly may have that many sectors and memory segments.
    pub fn allows(&self, operation: Operation, sectors: u64, segments: u32) -> bool {
        let most = self.whole_sectors.get(operation as usize);
        most.is_some_and(|&most| sectors <= most) && segments <= self.max_segments
    }

    /// Whether this is a legal read or write of `segments` that needs no split and no flush.
    pub fn fits_segments(&self, outline: &Outline, segments: &[Segment], limits: &QueueLimits) -> bool {
        segments.len() <= usize::from(limits.max_segments)
            && self.fits_memory(outline, u32::MAX.into())
            && check_memory(limits, segments, outline.sectors << SECTOR_SHIFT).is_ok()
    }
}
