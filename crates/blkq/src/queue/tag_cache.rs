//! The tags of a queue: a stack of its own, or a part of a [`TagSet`] that several queues share. If a shared
//! set has no free tag, the queue waits for one.

use std::sync::Arc;

use crate::disk::HardwareQueue;
use crate::error::{Error, ErrorKind};
use crate::tags::{Tag, TagHint, TagSet, WaiterId};

pub(super) struct TagCache {
    /// Free tags that no other queue can take. With a shared set, only tags that were just freed. The last
    /// tag freed is the first one reused, because its request is most likely cached by the processor. After
    /// tags of completed requests are added here, [`TagCache::share_freed`] must be called.
    pub free: Vec<Tag>,
    shared: Option<SharedTags>,
}

struct SharedTags {
    set: Arc<TagSet>,
    hint: TagHint,
    waiter: WaiterId,
    /// Whether the queue is counted as a user of the set.
    joined: bool,
}

impl TagCache {
    /// The tags of `queue`: `depth` of its own, which can become `capacity` later, or those of the set that
    /// it shares. Fails with [`ErrorKind::Busy`] if too many queues share the set.
    pub fn new(queue: &HardwareQueue, depth: u16, capacity: u16) -> Result<TagCache, Error> {
        let too_many = || Error::new(ErrorKind::Busy, "too many queues share one tag set");
        let mut tags = TagCache { free: Vec::with_capacity(usize::from(capacity)), shared: None };
        if let Some(set) = &queue.tags {
            let waiter = set.register(queue.kick.clone()).ok_or_else(too_many)?;
            tags.shared = Some(SharedTags { hint: set.hint(), set: set.clone(), waiter, joined: false });
        }
        tags.set_depth(depth);
        Ok(tags)
    }

    /// Applies a changed depth. No tag may be in use.
    pub fn set_depth(&mut self, depth: u16) {
        if self.shared.is_none() {
            self.free.clear();
            self.free.extend((0..depth).rev().map(Tag));
        }
    }

    /// Counts the queue as a user of the shared set, which divides the tags between its users: from its first request
    /// or wait for a tag to [`TagCache::leave`].
    #[inline]
    pub fn join(&mut self) {
        if let Some(SharedTags { set, joined, .. }) = &mut self.shared
            && !std::mem::replace(joined, true)
        {
            set.join();
        }
    }

    /// The queue has no requests, and no bio waits for a tag.
    #[inline]
    pub fn leave(&mut self) {
        if let Some(SharedTags { set, joined, .. }) = &mut self.shared
            && std::mem::take(joined)
        {
            set.leave();
        }
    }

    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Takes a tag from the shared set for a queue with `in_use` requests, of which some are `held` after
    /// errors. The queue never gets more than its fair share. If the set has no free tag, the queue is woken
    /// when other queues return some. If the queue has its share, it tries again at its next completion; if
    /// none of its requests will complete, it is woken when the share grows.
    #[cold]
    pub fn next_shared(&mut self, in_use: u32, held: u32) -> Option<Tag> {
        let SharedTags { set, hint, waiter, .. } = self.shared.as_mut()?;
        if !set.may_get(in_use) {
            if in_use > held {
                return None;
            }
            set.await_share();
            if !set.may_get(in_use) {
                return None;
            }
        }
        let mut tag = set.get(hint);
        if tag.is_none() {
            set.prepare_wait(waiter);
            tag = set.get(hint);
        }
        if tag.is_some() {
            set.finish_wait(waiter);
        }
        tag
    }

    /// Stops waiting for a tag. A wake-up that was meant for this queue is passed to another one.
    pub fn cancel_wait(&mut self) {
        if let Some(SharedTags { set, waiter, .. }) = &mut self.shared {
            set.cancel_wait(waiter);
        }
    }

    /// Counts `count` requests as held after errors, so that no queue waits for their tags.
    pub fn hold(&self, count: usize) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.hold(count as u32);
        }
    }

    pub fn resume(&self, count: usize) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.resume(count as u32);
        }
    }

    /// Whether a tag is free for a queue with `in_use` requests, or may be free in a shared set. False while the queue
    /// waits, because a wake-up will follow. A queue that was woken while it ran must try again, because it
    /// is not woken twice.
    pub fn may_get(&self, in_use: u32) -> bool {
        let Some(SharedTags { set, waiter, .. }) = &self.shared else { return !self.free.is_empty() };
        set.may_get(in_use) && !set.is_waiting(waiter)
    }

    /// Whether a queue with `in_use` requests may get more than `count` tags now.
    pub fn may_get_more_than(&self, count: u32, in_use: u32) -> bool {
        let mut free = self.free.len() as u32;
        if let Some(SharedTags { set, .. }) = &self.shared {
            // Tags of completed requests that are not shared yet count as in use.
            free += u32::from(set.depth()).saturating_sub(set.in_use());
        }
        free > count && self.may_get(in_use + count)
    }

    #[cfg(simulation)]
    pub fn waits_for_batch(&self) -> bool {
        self.shared
            .as_ref()
            .is_some_and(|shared| shared.set.is_waiting(&shared.waiter) && shared.set.will_wake())
    }

    pub fn share_freed(&mut self) {
        if self.shared.is_some() {
            self.put_shared();
        }
    }

    #[inline(never)]
    fn put_shared(&mut self) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.put_batch(self.free.drain(..));
        }
    }

    /// Stops using the tags. All `depth` tags of an unshared set must be free, unless requests were leaked.
    pub fn close(&mut self, depth: u16, leaked: bool) {
        self.share_freed();
        self.leave();
        if let Some(SharedTags { set, waiter, .. }) = self.shared.take() {
            set.unregister(waiter);
        } else {
            let whole = self.free.len() == usize::from(depth);
            debug_assert!(whole || leaked || std::thread::panicking(), "a tag was lost");
        }
    }
}
