//! The tags of a queue: taken out of its tag set in batches, and returned in batches. A set that
//! other queues use too is shared fairly, and a queue that finds no tag in it waits for one.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::kick::Kick;
use crate::tags::{Tag, TagBatch, TagHint, TagSet, WaiterId};

/// One queue's tags.
pub(super) struct TagCache {
    set: Arc<TagSet>,
    hint: TagHint,
    /// Tags taken ahead, not used yet.
    batch: TagBatch,
    /// The place among the set's waiters, if other queues use the set too.
    waiter: Option<WaiterId>,
}

impl TagCache {
    /// The tags of `set`. If it is `shared`, `kick` wakes the queue when there are some again.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if too many queues share the set.
    pub fn new(set: Arc<TagSet>, shared: bool, kick: &Arc<Kick>) -> Result<TagCache, Error> {
        let too_many = || Error::new(ErrorKind::Busy, "too many queues share the tags");
        let waiter = match shared {
            true => Some(set.register(kick.clone()).ok_or_else(too_many)?),
            false => None,
        };
        Ok(TagCache { hint: set.hint(), set, batch: TagBatch::default(), waiter })
    }

    /// The queue begins to use its share.
    pub fn join(&self) {
        if self.waiter.is_some() {
            self.set.join();
        }
    }

    /// The queue leaves its share to the others.
    #[inline]
    pub fn leave(&self) {
        if self.waiter.is_some() {
            self.set.leave();
        }
    }

    /// A tag out of those taken ahead.
    #[inline]
    pub fn next(&mut self) -> Option<Tag> {
        self.batch.next()
    }

    /// Takes up to `want` tags out of the set, for a queue with `in_use` requests. The first of
    /// them, if there is one.
    pub fn refill(&mut self, want: usize, in_use: u32) -> Option<Tag> {
        self.batch = match &self.waiter {
            None => self.set.get_batch(&mut self.hint, want),
            Some(_) => self.get_shared(in_use),
        };
        self.batch.next()
    }

    /// A tag of a set that other queues use too: never more than the fair share, and a
    /// queue that finds none is woken when another returns some.
    fn get_shared(&mut self, in_use: u32) -> TagBatch {
        let Some(waiter) = &mut self.waiter else { return TagBatch::default() };
        if !self.set.may_get(in_use) {
            return TagBatch::default();
        }
        let mut batch = self.set.get_batch(&mut self.hint, 1);
        if batch.is_empty() {
            self.set.prepare_wait(waiter);
            batch = self.set.get_batch(&mut self.hint, 1);
        }
        if !batch.is_empty() {
            self.set.finish_wait(waiter);
        }
        batch
    }

    /// The queue needs no tag: a wake-up is for another.
    #[inline]
    pub fn cancel_wait(&mut self) {
        if let Some(waiter) = &mut self.waiter {
            self.set.cancel_wait(waiter);
        }
    }

    /// Whether a queue with `in_use` requests can get a tag of a shared set and no wake-up is to
    /// come: a queue that was woken while it ran must try again, as nothing wakes it twice. None
    /// if the set is not shared.
    pub fn may_get_shared(&self, in_use: u32) -> Option<bool> {
        let waiter = self.waiter.as_ref()?;
        Some(self.set.may_get(in_use) && !self.set.is_waiting(waiter))
    }

    /// Returns a tag to the set.
    pub fn put(&self, tag: Tag) {
        self.set.put(tag);
    }

    #[inline]
    pub fn put_batch(&self, tags: impl IntoIterator<Item = Tag>) {
        self.set.put_batch(tags);
    }

    /// Returns what was taken ahead and not used, so that others can have it.
    #[inline]
    pub fn return_rest(&mut self) {
        self.set.put_rest(std::mem::take(&mut self.batch));
    }

    /// The queue uses the set no more.
    pub fn close(&mut self) {
        if let Some(waiter) = self.waiter.take() {
            self.set.unregister(waiter);
        }
    }
}
