//! The plug: requests are held back until a batch of them, or the end of the turn, so
//! that neighbours merge, tags are taken in one go, the clock is read once, and the
//! driver sees a batch (`struct blk_plug` in the kernel).

use crate::bio::Operation;
use crate::queue::Queue;
use crate::request::{RequestState, Tag};
use crate::ring::Ring;
use crate::stats::{Counter, StatGroup, StatsWriter};
use crate::tags::{TagBatch, TagSet};

/// Requests in a plug before it is flushed (BLK_MAX_REQUEST_COUNT).
pub const PLUG_REQUESTS: usize = 32;
/// The same for a thread with several queues.
pub const PLUG_REQUESTS_SEVERAL_QUEUES: usize = 64;
/// A request of at least this many bytes flushes the plug (BLK_PLUG_FLUSH_SIZE).
pub const PLUG_FLUSH_BYTES: u64 = 128 << 10;

/// The plug of one queue.
pub(crate) struct Plug {
    /// Requests held back, oldest first.
    pub requests: Vec<Tag>,
    /// Tags taken ahead, not used yet.
    pub tags: TagBatch,
    /// Requests before a flush: see the constants.
    pub limit: usize,
    /// Requests built since the statistics were last told, by group, and when the first was.
    built: [u32; StatGroup::COUNT],
    first_ns: u64,
    /// How many requests the last plug had: so many tags the next one takes at once.
    last_len: usize,
}

impl Plug {
    pub fn new() -> Plug {
        Plug {
            requests: Vec::with_capacity(PLUG_REQUESTS_SEVERAL_QUEUES),
            tags: TagBatch::default(),
            limit: PLUG_REQUESTS,
            built: [0; StatGroup::COUNT],
            first_ns: 0,
            last_len: 1,
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Counts a request that was built.
    #[inline]
    pub fn count(&mut self, operation: Operation, start_ns: u64) {
        if self.built == [0; StatGroup::COUNT] {
            self.first_ns = start_ns;
        }
        self.built[StatGroup::from(operation) as usize] += 1;
    }

    /// Tells the statistics of the requests that were built.
    #[inline]
    pub fn publish(&mut self, stats: &mut StatsWriter) {
        for group in StatGroup::ALL {
            let built = std::mem::take(&mut self.built[group as usize]);
            if built > 0 {
                stats.start(group, u64::from(built), self.first_ns);
            }
        }
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
    pub(crate) fn plug_request(&mut self, tag: Tag, mut ring: Option<&mut Ring>) {
        // One that has grown large by merging goes before a new one comes.
        if self.plug.requests.last().is_some_and(|last| self.is_large(*last)) {
            self.flush_plug(ring.as_deref_mut());
        }
        self.plug.requests.push(tag);
        if self.plug.requests.len() >= self.plug.limit || self.is_large(tag) {
            self.flush_plug(ring);
        }
    }

    #[inline]
    fn is_large(&self, tag: Tag) -> bool {
        self.settings.merge && self.requests[tag.index()].bytes() >= PLUG_FLUSH_BYTES
    }

    /// Hands everything under the plug to the scheduler, or straight to the driver. The
    /// cached time ends with the plug.
    #[inline]
    pub(crate) fn flush_plug(&mut self, ring: Option<&mut Ring>) {
        self.clock.invalidate();
        if self.settings.iostats {
            self.plug.publish(&mut self.stats);
        }
        if !self.plug.is_empty() {
            self.plug.last_len = self.plug.requests.len();
            self.stats.count(Counter::PlugFlushes, 1);
            if self.scheduler.is_none() && self.dispatch.is_empty() {
                let mut batch = std::mem::take(&mut self.plug.requests);
                let taken = self.issue(&batch, ring);
                self.dispatch.extend(batch.drain(taken..));
                batch.clear();
                self.plug.requests = batch;
                return;
            }
            self.insert_plugged();
        }
        self.run_dispatch(ring);
    }

    /// Moves the plug's requests to the scheduler, or behind what the driver refused.
    fn insert_plugged(&mut self) {
        let now_ns = if self.scheduler.is_some() { self.clock.now_ns() } else { 0 };
        for &tag in &self.plug.requests {
            debug_assert!(self.requests[tag.index()].state == RequestState::Busy);
            match &mut self.scheduler {
                Some(scheduler) => scheduler.insert(tag, &self.requests, now_ns),
                None => self.dispatch.push_back(tag),
            }
        }
        self.plug.requests.clear();
    }
}
