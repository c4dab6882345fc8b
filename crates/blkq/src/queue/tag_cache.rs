//! The tags of a queue: a stack of its own, or a set that it shares fairly with other queues, where
//! it waits for a tag if it finds none.

use std::sync::Arc;

use crate::disk::HardwareQueue;
use crate::error::{Error, ErrorKind};
use crate::tags::{Tag, TagHint, TagSet, WaiterId};

/// One queue's tags.
pub(super) struct TagCache {
    /// Free tags that no other queue can take; of a shared set, none but those just freed. The last one
    /// returned is the next one taken: its request is the likeliest to be in the processor's cache.
    free: Vec<Tag>,
    shared: Option<SharedTags>,
}

/// A queue's part in tags that other queues use too.
struct SharedTags {
    set: Arc<TagSet>,
    hint: TagHint,
    waiter: WaiterId,
}

impl TagCache {
    /// The tags of `queue`: `depth` of its own now and at most `capacity` later, or those of the set
    /// that it shares.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if too many queues share the set.
    pub fn new(queue: &HardwareQueue, depth: u16, capacity: u16) -> Result<TagCache, Error> {
        let too_many = || Error::new(ErrorKind::Busy, "too many queues share the tags");
        let shared = match &queue.tags {
            Some(set) => {
                let waiter = set.register(queue.kick.clone()).ok_or_else(too_many)?;
                Some(SharedTags { hint: set.hint(), set: set.clone(), waiter })
            }
            None => None,
        };
        let mut tags = TagCache { free: Vec::with_capacity(usize::from(capacity)), shared };
        tags.set_depth(depth);
        Ok(tags)
    }

    /// Takes over a changed depth, while no tag is in use.
    pub fn set_depth(&mut self, depth: u16) {
        if self.shared.is_none() {
            self.free.clear();
            self.free.extend((0..depth).rev().map(Tag));
        }
    }

    /// The queue begins to use its share.
    #[inline]
    pub fn join(&self) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.join();
        }
    }

    /// The queue leaves its share to the others.
    #[inline]
    pub fn leave(&self) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.leave();
        }
    }

    /// A free tag that is the queue's own.
    #[inline]
    pub fn next(&mut self) -> Option<Tag> {
        self.free.pop()
    }

    /// Whether other queues use the tags too.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// How many free tags are the queue's own.
    #[inline]
    pub fn own(&self) -> usize {
        self.free.len()
    }

    /// Takes `count` free tags of the queue's own, or all if there are fewer.
    #[inline]
    pub fn take_own(&mut self, count: usize, take: impl FnOnce(&[Tag])) {
        let left = self.free.len().saturating_sub(count);
        take(&self.free[left..]);
        self.free.truncate(left);
    }

    /// Returns tags that were taken at once and not used.
    #[inline]
    pub fn put_own(&mut self, tags: &[Tag]) {
        self.free.extend_from_slice(tags);
    }

    /// A tag of the shared set for a queue with `in_use` requests, of which some are `held` after errors: never more than
    /// the fair share. A queue that finds none is woken when another returns some. One that has its
    /// share tries again at its next completion; if no completion is to come, it is woken when the share grows.
    #[cold]
    pub fn next_shared(&mut self, in_use: u32, held: u32) -> Option<Tag> {
        let SharedTags { set, hint, waiter } = self.shared.as_mut()?;
        if !set.may_get(in_use) {
            if in_use > held {
                return None;
            }
            set.await_share();
            if !set.may_get(in_use) {
                return None;
            }
        }
        let mut tag = set.get_batch(hint, 1).next();
        if tag.is_none() {
            set.prepare_wait(waiter);
            tag = set.get_batch(hint, 1).next();
        }
        if tag.is_some() {
            set.finish_wait(waiter);
        }
        tag
    }

    /// The queue needs no tag: a wake-up is for another.
    #[inline]
    pub fn cancel_wait(&mut self) {
        if self.shared.is_some() {
            self.cancel_shared_wait();
        }
    }

    #[inline(never)]
    fn cancel_shared_wait(&mut self) {
        if let Some(SharedTags { set, waiter, .. }) = &mut self.shared {
            set.cancel_wait(waiter);
        }
    }

    /// So many requests of the queue are held after errors: their tags do not come back for now.
    pub fn hold(&self, count: usize) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.hold(count as u32);
        }
    }

    /// So many of them are no longer held.
    pub fn resume(&self, count: usize) {
        if let Some(SharedTags { set, .. }) = &self.shared {
            set.resume(count as u32);
        }
    }

    /// Whether a queue with `in_use` requests can get a tag of a shared set and no wake-up is to
    /// come: a queue that was woken while it ran must try again, as nothing wakes it twice. None
    /// if the set is not shared.
    pub fn may_get_shared(&self, in_use: u32) -> Option<bool> {
        let SharedTags { set, waiter, .. } = self.shared.as_ref()?;
        Some(set.may_get(in_use) && !set.is_waiting(waiter))
    }

    /// Where tags are put that no request has any more, before [`TagCache::share_freed`].
    #[inline]
    pub fn freed(&mut self) -> &mut Vec<Tag> {
        &mut self.free
    }

    /// Returns what was freed to a set that is shared.
    #[inline]
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

    /// The queue uses the tags no more; unless requests were leaked it returned all `depth` of them.
    pub fn close(&mut self, depth: u16, leaked: bool) {
        self.share_freed();
        if let Some(SharedTags { set, waiter, .. }) = self.shared.take() {
            set.unregister(waiter);
        } else {
            let whole = self.free.len() == usize::from(depth);
            debug_assert!(whole || leaked || std::thread::panicking(), "a tag was lost");
        }
    }
}
