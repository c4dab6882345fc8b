//! The tag set: a bitmap of free tags that many threads share without a lock
//! (the kernel's sbitmap and `blk-mq-tag.c`).
//!
//! Tags are freed a word at a time, with one atomic operation for each word of a completion
//! batch. A thread that finds no tag waits as in `tags/wait.rs`.

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

#[cfg(all(test, not(model_check)))]
use wait::WAITERS_MAX;
pub use wait::WaiterId;

/// The number of a request within its tag set: 0 to one below the set's size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Tag(pub u16);

impl Tag {
    /// The tag as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A user of shared tags may always have this many, whatever its share is
/// (the kernel's `hctx_may_queue`).
pub const SHARE_MIN: u32 = 4;

/// Words that a set of at least as many tags is spread over, so that submitters on
/// different words do not meet on one cache line.
const WORDS_MIN: u32 = 4;

/// The tags of one or several queues: numbers from 0 to one below the depth, each of
/// them free or in use.
#[derive(Debug)]
pub struct TagSet {
    /// A set bit is a free tag.
    words: Box<[CachePadded<AtomicU64>]>,
    /// A word has two to the power of this many tags.
    shift: u32,
    depth_max: u16,
    depth: AtomicU32,
    hints: AtomicU32,
    /// Active queues: written each time that one becomes idle, and read by all for each tag.
    users: CachePadded<AtomicU32>,
    /// Tags in use whose requests are held after errors: they come back only when somebody resumes the disk.
    held: AtomicU32,
    /// A queue that has its share, and no request that will complete, waits for the share to grow.
    share_awaited: AtomicBool,
    waiters: wait::Waiters,
}

/// Where a submitter searches a free tag first. One per submitter.
#[derive(Debug)]
pub struct TagHint {
    word: usize,
}

/// Tags of one word of the set, taken together; iterating hands them out in ascending
/// order. They are in use, whether they were handed out or not.
#[derive(Debug, Default)]
#[must_use = "the tags stay in use until they are put back"]
pub struct TagBatch {
    base: u16,
    bits: u64,
}

impl TagBatch {
    /// Whether nothing is left.
    #[cfg(all(test, not(model_check)))]
    pub fn is_empty(&self) -> bool {
        self.bits == 0
    }
}

impl Iterator for TagBatch {
    type Item = Tag;

    #[inline]
    fn next(&mut self) -> Option<Tag> {
        if self.bits == 0 {
            return None;
        }
        let bit = self.bits.trailing_zeros() as u16;
        self.bits &= self.bits - 1;
        Some(Tag(self.base + bit))
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.bits.count_ones() as usize;
        (left, Some(left))
    }
}

impl ExactSizeIterator for TagBatch {}

/// The lowest `want` set bits of `free`, or all of them if there are fewer.
#[inline]
fn lowest_bits(free: u64, want: usize) -> u64 {
    if want >= 64 || free == 0 {
        return free;
    }
    // Free tags mostly lie in a row, and then no loop is needed.
    let row = ((1 << want) - 1) << free.trailing_zeros();
    if free & row == row {
        return row;
    }
    let mut rest = free;
    for _ in 0..want {
        rest &= rest.wrapping_sub(1);
    }
    free ^ rest
}

#[cold]
fn put_twice(tag: Tag) -> ! {
    panic!("{tag:?} was put twice");
}

impl TagSet {
    /// A set of `depth` tags, all free.
    ///
    /// # Panics
    /// If `depth` is 0.
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

    /// Makes the first `depth` tags the free ones.
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

    /// The fields that the owners of queues use, with their addresses. Those that they write have
    /// the numbers from `first` on.
    pub(crate) fn hot_fields(&self, first: usize, fields: &mut Vec<HotField>) {
        let TagSet { words, shift, depth_max, depth, hints, users, held, share_awaited, waiters } = self;
        fields.push(HotField::of("tag words", Writer::Nobody, words));
        fields.push(HotField::of("tag shift", Writer::Nobody, shift));
        fields.push(HotField::of("most tags", Writer::Nobody, depth_max));
        fields.push(HotField::of("tag depth", Writer::Nobody, depth));
        // Written when a queue opens.
        fields.push(HotField::of("tag hints", Writer::Nobody, hints));
        // Written when requests fail.
        fields.push(HotField::of("held tags", Writer::Nobody, held));
        fields.push(HotField::of("awaited share", Writer::Nobody, share_awaited));
        fields.push(HotField::of("tag users", Writer::Everybody(first), &**users));
        fields.push(HotField::of("tag waiters", Writer::Everybody(first + 1), waiters.waiting()));
        for (index, word) in words.iter().enumerate() {
            fields.push(HotField::of("tags", Writer::Everybody(first + 2 + index), &**word));
        }
    }

    /// How many tags there are.
    #[inline]
    pub fn depth(&self) -> u16 {
        self.depth.load(Ordering::Relaxed) as u16
    }

    /// How many tags are in use; while others take and put tags, about that many.
    pub fn in_use(&self) -> u32 {
        let free: u32 = self.words.iter().map(|word| word.load(Ordering::SeqCst).count_ones()).sum();
        self.depth.load(Ordering::SeqCst).saturating_sub(free)
    }

    /// Changes the number of tags, to between 1 and what the set was made with. Only while
    /// the queues are frozen: no tag may be in use. Waiters check again.
    ///
    /// # Panics
    /// If `depth` is out of range or a tag is in use.
    pub fn set_depth(&self, depth: u16) {
        assert!((1..=self.depth_max).contains(&depth), "depth {depth} is not in 1..={}", self.depth_max);
        assert_eq!(self.in_use(), 0, "the depth changes only while no tag is in use");
        self.free_first(depth);
        self.waiters.wake(u32::MAX);
    }

    /// A hint for one more submitter; each starts at another word.
    pub fn hint(&self) -> TagHint {
        let number = self.hints.fetch_add(1, Ordering::Relaxed) as usize;
        TagHint { word: number % self.words.len() }
    }

    /// Takes up to `want` free tags out of one word, with one atomic operation. Fewer does
    /// not mean that there are no more, unless it is none.
    #[inline]
    pub fn get_batch(&self, hint: &mut TagHint, want: usize) -> TagBatch {
        if want == 0 {
            return TagBatch::default();
        }
        for _ in 0..self.words.len() {
            // The hint may come from a set with more words.
            if hint.word >= self.words.len() {
                hint.word = 0;
            }
            let bits = self.take(hint.word, want);
            if bits != 0 {
                return TagBatch { base: (hint.word << self.shift) as u16, bits };
            }
            hint.word += 1;
        }
        TagBatch::default()
    }

    #[inline]
    fn take(&self, word: usize, want: usize) -> u64 {
        let word = &self.words[word];
        let mut free = word.load(Ordering::SeqCst);
        while free != 0 {
            let bits = lowest_bits(free, want);
            match word.compare_exchange_weak(free, free & !bits, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => return bits,
                Err(now) => free = now,
            }
        }
        0
    }

    /// Frees one tag.
    #[cfg(all(test, not(model_check)))]
    pub fn put(&self, tag: Tag) {
        self.put_batch([tag]);
    }

    /// Frees tags: one atomic operation for each run of tags of the same word.
    ///
    /// # Panics
    /// If a tag is not in use: it would be handed out twice.
    #[inline]
    pub fn put_batch(&self, tags: impl IntoIterator<Item = Tag>) {
        let (mut word, mut bits, mut count) = (0, 0u64, 0);
        let shift = self.shift;
        for tag in tags {
            let its_word = tag.index() >> shift;
            if its_word != word {
                if bits != 0 {
                    self.give(word, bits);
                }
                (word, bits) = (its_word, 0);
            }
            let bit = 1 << (tag.index() & ((1 << shift) - 1));
            if bits & bit != 0 {
                put_twice(tag);
            }
            bits |= bit;
            count += 1;
        }
        if count > 0 {
            self.give(word, bits);
            self.freed(count);
        }
    }

    #[inline]
    fn give(&self, word: usize, bits: u64) {
        let before = self.words[word].fetch_or(bits, Ordering::SeqCst);
        assert!(before & bits == 0, "tags {:#x} of word {word} were put twice", before & bits);
    }

    /// `count` tags were put: those that wait for them are notified. One load when nobody waits.
    #[inline]
    fn freed(&self, count: u32) {
        seq_cst_for_loom();
        if self.waiters.any() {
            self.freed_with_waiters(count);
        }
    }

    /// Waiters are woken a batch at a time, when as many tags came back. The rest of a batch
    /// is woken for when so little is in flight that it might never fill.
    #[cold]
    fn freed_with_waiters(&self, count: u32) {
        let batch = self.wake_batch();
        self.waiters
            .freed(count, batch, || self.in_use().saturating_sub(self.held.load(Ordering::SeqCst)) < batch);
    }

    /// The requests of `count` tags in use are held after errors: a batch of wake-ups does not wait for these tags.
    #[cold]
    pub fn hold(&self, count: u32) {
        self.held.fetch_add(count, Ordering::SeqCst);
        self.freed(0);
    }

    /// The requests of `count` tags are no longer held.
    #[cold]
    pub fn resume(&self, count: u32) {
        let before = self.held.fetch_sub(count, Ordering::SeqCst);
        debug_assert!(before >= count, "more tags resumed than held");
    }

    /// How many waiters are woken together: an eighth of a user's share, 1 to 8.
    fn wake_batch(&self) -> u32 {
        let users = self.users.load(Ordering::Relaxed).max(1);
        (u32::from(self.depth()) / users / 8).clamp(1, 8)
    }

    /// One more queue is active on the set: shares become smaller.
    pub fn join(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
    }

    /// A queue that joined went idle: shares become larger.
    pub fn leave(&self) {
        let before = self.users.fetch_sub(1, Ordering::SeqCst);
        debug_assert!(before > 0, "more users left than joined");
        seq_cst_for_loom();
        if self.share_awaited.load(Ordering::SeqCst) {
            self.announce_share();
        }
    }

    /// Queues that wait for their share to grow try again.
    #[cold]
    fn announce_share(&self) {
        if self.share_awaited.swap(false, Ordering::SeqCst) {
            self.waiters.wake_registered();
        }
    }

    /// Has all registered waiters woken when the next user leaves. Having its share, a user calls this, checks
    /// [`TagSet::may_get`] *once more*, and only then sleeps.
    #[cold]
    pub fn await_share(&self) {
        self.share_awaited.swap(true, Ordering::SeqCst);
        seq_cst_for_loom();
    }

    /// Whether a user with `active` tags may take another: less than its share, which
    /// is the depth divided by the users, rounded up, at least [`SHARE_MIN`]. A single user,
    /// and a single tag, are not divided. A user that gets none has tags itself, so it need not wait for others:
    /// it tries again at its next completion, or, if all its requests are held after errors, when its share grows
    /// ([`TagSet::await_share`]).
    #[inline]
    pub fn may_get(&self, active: u32) -> bool {
        let users = self.users.load(Ordering::SeqCst);
        let depth = u32::from(self.depth());
        users <= 1 || depth == 1 || active < depth.div_ceil(users).max(SHARE_MIN)
    }

    /// Makes room for a user that may wait for tags, to be woken through `wake`. `None` if
    /// [`wait::WAITERS_MAX`] are registered.
    pub fn register(&self, wake: Arc<dyn Wake>) -> Option<WaiterId> {
        self.waiters.register(wake)
    }

    /// Undoes [`TagSet::register`]. If it was waiting, another is woken in its place.
    pub fn unregister(&self, mut waiter: WaiterId) {
        self.cancel_wait(&mut waiter);
        self.waiters.unregister(waiter);
    }

    /// Puts `waiter` among those to be woken; no effect if it is. Having found no tag, call
    /// this, *try again*, and only then sleep; after a wake-up try, and begin anew if there
    /// was no tag.
    pub fn prepare_wait(&self, waiter: &mut WaiterId) {
        self.waiters.add(waiter);
        seq_cst_for_loom();
    }

    /// Whether it waits and has not been woken.
    pub fn is_waiting(&self, waiter: &WaiterId) -> bool {
        self.waiters.contains(waiter)
    }

    /// Stops the wait of one that took a tag.
    pub fn finish_wait(&self, waiter: &mut WaiterId) {
        self.waiters.remove(waiter);
    }

    /// Stops the wait of one that took no tag and wants none any more: a wake-up that was
    /// meant for it is passed to another.
    pub fn cancel_wait(&self, waiter: &mut WaiterId) {
        if self.waiters.remove(waiter) {
            seq_cst_for_loom();
            self.waiters.wake(1);
        }
    }
}
