//! The plug: requests are held back until a batch of them, or the end of the turn, so
//! that neighbours merge, tags are taken in one go, the clock is read once, and the
//! driver sees a batch (`struct blk_plug` in the kernel).

use std::ops::Range;

use crate::bio::Operation;
use crate::bio::Outline;
use crate::queue::Queue;
use crate::request::{Request, RequestState};
use crate::ring::Ring;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::stats::{Counter, StatsWriter};
use crate::tags::Tag;
use crate::tags::{TagBatch, TagSet};

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
    /// Requests held back, oldest first.
    pub requests: Vec<Tag>,
    /// Tags taken ahead, not used yet.
    pub tags: TagBatch,
    /// Requests before a flush: see the constants.
    pub limit: usize,
    /// Where the youngest request begins and ends: what touches it may merge with it.
    tail: Range<Sector>,
    /// The youngest request has become large by merging.
    grown: bool,
    /// How many of the requests are of each operation.
    operations: [u32; Operation::COUNT],
    /// How many requests the last plug had: so many tags the next one takes at once.
    last_len: usize,
}

impl Plug {
    pub fn new() -> Plug {
        Plug {
            requests: Vec::with_capacity(PLUG_REQUESTS_SEVERAL_QUEUES),
            tags: TagBatch::default(),
            limit: PLUG_REQUESTS,
            tail: NOWHERE,
            grown: false,
            operations: [0; Operation::COUNT],
            last_len: 1,
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

    /// Takes the requests out, having told the statistics of them.
    #[inline]
    fn take(&mut self, requests: &[Request], stats: Option<&mut StatsWriter>) -> Vec<Tag> {
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

    /// How many tags to take at once: as many as the last plug used, or as bios wait.
    pub fn tags_wanted(&self, waiting: usize) -> usize {
        self.last_len.max(waiting).clamp(1, PLUG_REQUESTS)
    }

    /// Gives back tags that were taken ahead and not used, so that others can have them.
    #[inline]
    pub fn return_tags(&mut self, tags: &TagSet) {
        tags.put_rest(std::mem::take(&mut self.tags));
    }
}

impl Queue {
    /// Puts a request under the plug; flushes it when it is full or the request large.
    #[inline]
    pub(crate) fn plug_request(&mut self, tag: Tag, outline: &Outline, mut ring: Option<&mut Ring>) {
        // One that has grown large by merging goes before a new one comes.
        if self.plug.grown {
            self.flush_plug(ring.as_deref_mut());
        }
        self.plug.requests.push(tag);
        self.plug.operations[outline.operation as usize] += 1;
        self.plug.tail = outline.sector..outline.sector + outline.sectors;
        if self.plug.requests.len() >= self.plug.limit
            || (outline.sectors >= PLUG_FLUSH_BYTES >> SECTOR_SHIFT && self.settings.merge)
        {
            self.flush_plug(ring);
        }
    }

    /// Takes the requests out of the plug.
    #[inline]
    pub(crate) fn unplug(&mut self) -> Vec<Tag> {
        let stats = if self.settings.iostats { Some(&mut self.stats) } else { None };
        self.plug.take(&self.requests, stats)
    }

    /// Hands everything under the plug to the scheduler, or straight to the driver. The
    /// cached time ends with the plug.
    #[inline]
    pub(crate) fn flush_plug(&mut self, ring: Option<&mut Ring>) {
        self.clock.invalidate();
        if self.plug.is_empty() { self.run_dispatch(ring) } else { self.flush_requests(ring) }
    }

    fn flush_requests(&mut self, ring: Option<&mut Ring>) {
        let mut batch = self.unplug();
        self.plug.last_len = batch.len();
        self.stats.count(Counter::PlugFlushes, 1);
        if self.scheduler.is_none() && self.dispatch.is_empty() {
            let taken = self.issue(&batch, ring);
            if taken < batch.len() {
                self.dispatch.extend(&batch[taken..]);
            }
        } else {
            self.insert_plugged(&batch);
            self.run_dispatch(ring);
        }
        batch.clear();
        self.plug.requests = batch;
    }

    /// Moves the plug's requests to the scheduler, or behind what the driver refused.
    fn insert_plugged(&mut self, batch: &[Tag]) {
        let now_ns = if self.scheduler.is_some() { self.clock.now_ns() } else { 0 };
        for &tag in batch {
            debug_assert!(self.requests[tag.index()].state == RequestState::Busy);
            match &mut self.scheduler {
                Some(scheduler) => scheduler.insert(tag, &self.requests, now_ns),
                None => self.dispatch.push_back(tag),
            }
        }
    }
}
