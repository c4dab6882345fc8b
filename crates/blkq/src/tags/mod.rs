//! The tag set: a bitmap of free tags that several threads share without a lock (the kernel's sbitmap and
//! block/blk-mq-tag.c). Invariant: a set bit is a free tag, and a tag is given to at most one request at a
//! time. Tags are freed with one atomic operation per word of a batch. A queue that finds no free tag waits as
//! described in `tags/wait.rs`. Queues that share a set get fair shares of it (`hctx_may_queue`).

mod wait;

#[cfg(all(test, model_check))]
mod model;
#[cfg(all(test, not(model_check)))]
mod tests;

use std::sync::Arc;

use crate::kick::Wake;
use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::seq_cst_for_loom;

pub use wait::WaiterId;

/// The number of a request within its tag set: from 0 to one below the size of the set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Tag(pub u16);

impl Tag {
    /// The tag as an index into the queue's requests.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// The number of tags that each user of a shared set may have, even if its fair share is smaller
/// (`hctx_may_queue` in block/blk-mq.h).
pub const SHARE_MIN: u32 = 4;

/// The number of words over which at least that number of tags is spread, so that submitters that use
/// different words do not compete for a cache line.
const WORDS_MIN: u32 = 4;

/// The tags of one or several queues, numbered from 0 to one below the depth.
pub struct TagSet {
    words: Box<[CachePadded<AtomicU64>]>,
    /// Base-2 logarithm of the number of tags per word.
    shift: u32,
    depth_max: u16,
    /// The number of tags that are in use or can be.
    depth: AtomicU32,
    /// The number of hints given out, so that each one starts at another word.
    hints: AtomicU32,
    /// The number of active queues. Written when a queue becomes active or idle, and read for each tag.
    users: CachePadded<AtomicU32>,
    /// Tags whose requests are held after errors. They return only when the operator resumes the disk.
    held: AtomicU32,
    /// A queue waits for its fair share to grow: it has its share, and no request that will complete.
    share_awaited: AtomicBool,
    waiters: wait::Waiters,
}

/// The word in which a submitter searches for a free tag first. Each submitter has its own.
#[derive(Debug)]
pub struct TagHint(usize);

impl TagSet {
    /// A set of `depth` tags, all of them free. Panics if `depth` is 0.
    pub fn new(depth: u16) -> TagSet {
        assert!(depth > 0, "a tag set needs a tag");
        let mut shift = u64::BITS.trailing_zeros();
        if u32::from(depth) >= WORDS_MIN {
            while WORDS_MIN << shift > u32::from(depth) {
                shift -= 1;
            }
        }
        let words = usize::from(depth).div_ceil(1 << shift);
        let set = TagSet {
            words: (0..words).map(|_| CachePadded::new(AtomicU64::new(0))).collect(),
            shift,
            depth_max: depth,
            depth: AtomicU32::new(0),
            hints: AtomicU32::new(0),
            users: CachePadded::new(AtomicU32::new(0)),
            held: AtomicU32::new(0),
            share_awaited: AtomicBool::new(false),
            waiters: wait::Waiters::new(),
        };
        set.free_first(depth);
        set
    }

    /// Makes the first `depth` tags free, and all others unusable.
    fn free_first(&self, depth: u16) {
        let per_word = 1 << self.shift;
        let mut left = usize::from(depth);
        for word in &self.words {
            let here = left.min(per_word);
            left -= here;
            let bits = if here == 64 { u64::MAX } else { (1 << here) - 1 };
            word.store(bits, Ordering::SeqCst);
        }
        self.depth.store(u32::from(depth), Ordering::SeqCst);
    }

    /// The fields that owners of queues write are numbered from `first`.
    pub(crate) fn hot_fields(&self, first: usize, fields: &mut Vec<HotField>) {
        let TagSet { words, shift, depth_max, depth, hints, users, held, share_awaited, waiters } = self;
        fields.push(HotField::of("tag words", Writer::Nobody, words));
        fields.push(HotField::of("tag shift", Writer::Nobody, shift));
        fields.push(HotField::of("most tags", Writer::Nobody, depth_max));
        fields.push(HotField::of("tag depth", Writer::Nobody, depth));
        // Written when a queue is opened.
        fields.push(HotField::of("tag hints", Writer::Nobody, hints));
        // Written when requests fail.
        fields.push(HotField::of("held tags", Writer::Nobody, held));
        fields.push(HotField::of("awaited share", Writer::Nobody, share_awaited));
        fields.push(HotField::of("tag users", Writer::Everybody(first), &**users));
        fields.push(HotField::of("tag waiters", Writer::Everybody(first + 1), &*waiters.waiting));
        for (index, word) in words.iter().enumerate() {
            fields.push(HotField::of("tags", Writer::Everybody(first + 2 + index), &**word));
        }
    }

    pub fn depth(&self) -> u16 {
        // Relaxed: the depth changes only under a freeze.
        self.depth.load(Ordering::Relaxed) as u16
    }

    /// The number of tags in use. Approximate while other threads take and free tags.
    pub fn in_use(&self) -> u32 {
        let free: u32 = self.words.iter().map(|word| word.load(Ordering::SeqCst).count_ones()).sum();
        self.depth.load(Ordering::SeqCst).saturating_sub(free)
    }

    /// Changes the number of tags, from 1 to the number for which the set was built. The queues must be
    /// frozen, because no tag may be in use. Waiting queues are woken to try again. Panics if `depth` is out
    /// of range, or a tag is in use.
    pub fn set_depth(&self, depth: u16) {
        assert!((1..=self.depth_max).contains(&depth), "depth {depth} is not in 1..={}", self.depth_max);
        assert_eq!(self.in_use(), 0, "the depth changes only while no tag is in use");
        self.free_first(depth);
        self.waiters.wake(u32::MAX);
    }

    pub fn hint(&self) -> TagHint {
        // Relaxed: the number only spreads the hints over the words.
        let number = self.hints.fetch_add(1, Ordering::Relaxed) as usize;
        TagHint(number % self.words.len())
    }

    /// Takes a free tag with one atomic operation. `None` if no tag was free.
    pub fn get(&self, hint: &mut TagHint) -> Option<Tag> {
        for _ in 0..self.words.len() {
            // The hint may come from a set with more words.
            if hint.0 >= self.words.len() {
                hint.0 = 0;
            }
            let take_lowest = |free: u64| (free != 0).then(|| free & (free - 1));
            let word = &self.words[hint.0];
            if let Ok(free) = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take_lowest) {
                return Some(Tag(((hint.0 << self.shift) as u32 + free.trailing_zeros()) as u16));
            }
            hint.0 += 1;
        }
        None
    }

    /// Frees tags, with one atomic operation for each run of tags in the same word. Panics if a tag is not in
    /// use, because it would be handed out twice.
    pub fn put_batch(&self, tags: impl IntoIterator<Item = Tag>) {
        let (mut word, mut bits, mut count) = (0, 0u64, 0);
        let shift = self.shift;
        for tag in tags {
            let its_word = tag.index() >> shift;
            if its_word != word {
                if bits != 0 {
                    self.put_bits(word, bits);
                }
                (word, bits) = (its_word, 0);
            }
            let bit = 1 << (tag.index() & ((1 << shift) - 1));
            assert!(bits & bit == 0, "{tag:?} was put twice");
            bits |= bit;
            count += 1;
        }
        if count > 0 {
            self.put_bits(word, bits);
            self.freed(count);
        }
    }

    fn put_bits(&self, word: usize, bits: u64) {
        let before = self.words[word].fetch_or(bits, Ordering::SeqCst);
        assert!(before & bits == 0, "tags {:#x} of word {word} were put twice", before & bits);
    }

    /// Wakes waiters after `count` tags were freed. Without waiters it is a single load.
    fn freed(&self, count: u32) {
        seq_cst_for_loom();
        if self.waiters.any() {
            self.freed_with_waiters(count);
        }
    }

    /// Waiters are woken in batches, each when that number of tags has been freed. If fewer tags are in use
    /// than a batch has, the batch may never fill, and the rest is woken for immediately. Held tags do not
    /// count as in use here.
    #[cold]
    fn freed_with_waiters(&self, count: u32) {
        let batch = self.wake_batch();
        self.waiters
            .freed(count, batch, || self.in_use().saturating_sub(self.held.load(Ordering::SeqCst)) < batch);
    }

    /// Counts `count` tags in use as held after errors: a batch of wake-ups must not wait for these tags.
    #[cold]
    pub fn hold(&self, count: u32) {
        self.held.fetch_add(count, Ordering::SeqCst);
        self.freed(0);
    }

    #[cold]
    pub fn resume(&self, count: u32) {
        let before = self.held.fetch_sub(count, Ordering::SeqCst);
        debug_assert!(before >= count, "more tags resumed than held");
    }

    /// The number of waiters that are woken together: an eighth of a user's share, from 1 to 8.
    fn wake_batch(&self) -> u32 {
        // Relaxed: a slightly old number makes a batch only a little larger or smaller.
        let users = self.users.load(Ordering::Relaxed).max(1);
        (u32::from(self.depth()) / users / 8).clamp(1, 8)
    }

    pub fn join(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    pub fn leave(&self) {
        let before = self.users.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "more users left than joined");
        seq_cst_for_loom();
        if self.share_awaited.load(Ordering::SeqCst) && self.share_awaited.swap(false, Ordering::SeqCst) {
            self.waiters.wake_registered();
        }
    }

    /// Lets all registered waiters be woken when the next user leaves. A user that has its share calls this,
    /// checks [`TagSet::may_get`] *again*, and sleeps only if the answer is still no.
    #[cold]
    pub fn await_share(&self) {
        self.share_awaited.swap(true, Ordering::SeqCst);
        seq_cst_for_loom();
    }

    /// Whether a user with `active` tags may take another one. Its share is the depth divided by the number
    /// of users, rounded up, and at least [`SHARE_MIN`]. A single user, and a set of one tag, have no shares.
    /// A user with its full share has requests of its own, so it does not wait for other queues: it tries
    /// again at its next completion, or, if all its requests are held after errors, when its share grows
    /// ([`TagSet::await_share`]).
    pub fn may_get(&self, active: u32) -> bool {
        let users = self.users.load(Ordering::SeqCst);
        let depth = u32::from(self.depth());
        users <= 1 || depth == 1 || active < depth.div_ceil(users).max(SHARE_MIN)
    }

    /// Registers a user that may wait for tags, and is woken through `wake`. `None` if [`wait::WAITERS_MAX`]
    /// waiters are registered.
    pub fn register(&self, wake: Arc<dyn Wake>) -> Option<WaiterId> {
        self.waiters.register(wake)
    }

    /// Ends a registration. A wake-up that was meant for this waiter is passed to another.
    pub fn unregister(&self, mut waiter: WaiterId) {
        self.cancel_wait(&mut waiter);
        self.waiters.unregister(waiter);
    }

    /// Adds `waiter` to those that are woken; without effect if it was added before. A user that finds no tag
    /// calls this, *tries again*, and sleeps only if there is still no tag. After a wake-up it starts over.
    pub fn prepare_wait(&self, waiter: &mut WaiterId) {
        self.waiters.add(waiter);
        seq_cst_for_loom();
    }

    pub fn is_waiting(&self, waiter: &WaiterId) -> bool {
        self.waiters.contains(waiter)
    }

    /// Whether tags are in use that will be freed, enough of them for another batch of wake-ups.
    #[cfg(simulation)]
    pub fn will_wake(&self) -> bool {
        self.in_use().saturating_sub(self.held.load(Ordering::SeqCst)) >= self.wake_batch()
    }

    /// Ends the wait of a waiter that got a tag.
    pub fn finish_wait(&self, waiter: &mut WaiterId) {
        self.waiters.remove(waiter);
    }

    /// Ends the wait of a waiter that got no tag and no longer needs one. Passes its wake-up to another.
    #[inline(never)]
    pub fn cancel_wait(&self, waiter: &mut WaiterId) {
        if self.waiters.remove(waiter) {
            seq_cst_for_loom();
            self.waiters.wake(1);
        }
    }
}
