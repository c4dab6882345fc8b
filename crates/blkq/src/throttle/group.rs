//! A group: limits that several devices share. They may be in several processes that map the same memory.
//!
//! The memory consists of atomic words. Another process may write anything into it, and the worst result is a
//! wrong rate. The limits are in [`SequencedWords`]. Each member has a slot with its weight and with words of
//! its own: the times until which it has used up its shares. The words of slots and buckets are independent
//! of each other, so their accesses are relaxed.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use super::bucket::{Buckets, NEVER_NS, forgive_debt};
use super::limits::{LIMIT_WORDS, LimitKey, RateLimits};
use crate::clock::monotonic_ns;
use crate::error::{Error, ErrorKind};
use crate::sync::atomic::{
    AtomicI64, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// Largest number of devices in a group; smaller for the model checkers.
pub const MEMBERS_MAX: usize = if cfg!(model_check) { 3 } else { 120 };
/// Largest weight of a member. The smallest is 1.
pub const WEIGHT_MAX: u32 = 10_000;
/// The weight of a member for which none was set.
pub const WEIGHT_DEFAULT: u32 = 100;
/// How long after its last request a member counts as active, in nanoseconds. Active members share the limit.
pub(super) const ACTIVE_NS: u64 = 100_000_000;
/// `blkqgrp` and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"blkqgrp\x01");
/// Words for the name of a member.
const NAME_WORDS: usize = if cfg!(model_check) { 1 } else { 14 };
/// How often a reader that meets a change tries again immediately.
const READ_TRIES: usize = 4;

/// `N` words that change together, as a seqlock: the sequence number before them is odd during a change. Other
/// processes may write anything into the memory. The worst result is a set of words that does not belong to one change.
#[repr(C)]
pub(super) struct SequencedWords<const N: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Default for SequencedWords<N> {
    fn default() -> SequencedWords<N> {
        SequencedWords { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl<const N: usize> SequencedWords<N> {
    /// The number of the last change. Odd during a change, or if a change was interrupted.
    pub fn sequence(&self) -> u64 {
        self.sequence.load(Relaxed)
    }

    /// The words, and the number of their change. `None` while they change.
    pub fn read(&self) -> Option<(u64, [u64; N])> {
        for _ in 0..READ_TRIES {
            // This acquire pairs with the release at the end of `write`. The fence below keeps the second
            // load of the sequence after the loads of the words.
            let before = self.sequence.load(Acquire);
            let mut words = [0; N];
            words.iter_mut().zip(&self.words).for_each(|(word, shared)| *word = shared.load(Relaxed));
            fence(Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Relaxed) == before {
                return Some((before, words));
            }
        }
        None
    }

    /// Changes the words, also if an earlier change was interrupted. `also` runs before readers see the
    /// change. There must be one caller at a time.
    pub fn write(&self, words: &[u64; N], also: impl FnOnce()) {
        let odd = self.sequence.load(Relaxed) | 1;
        self.sequence.store(odd, Relaxed);
        // Keeps the stores of the words after the store of the odd number.
        fence(Release);
        self.words.iter().zip(words).for_each(|(shared, word)| shared.store(*word, Relaxed));
        also();
        self.sequence.store(odd.wrapping_add(1), Release);
    }

    /// Sets the words regardless of an unfinished change. The sequence becomes `number`, rounded up to an
    /// even value. For words that no reader uses yet.
    pub fn reset(&self, words: &[u64; N], number: u64) {
        self.words.iter().zip(words).for_each(|(shared, word)| shared.store(*word, Relaxed));
        self.sequence.store(number.wrapping_add(1) & !1, Release);
    }
}

#[derive(Default)]
#[repr(C, align(64))]
struct Header {
    magic: AtomicU64,
    /// Identifies the boot to which all times in the memory belong.
    boot: [AtomicU64; 2],
    limits: SequencedWords<LIMIT_WORDS>,
    /// The number of slots that were ever used.
    used: AtomicU64,
}

#[derive(Default)]
#[repr(C, align(64))]
struct Slot {
    weight: AtomicU64,
    spent_ns: [AtomicI64; LimitKey::COUNT],
    /// Until when the member counts as active, by limit.
    active_until_ns: [AtomicU64; LimitKey::COUNT],
    name: [AtomicU64; NAME_WORDS],
}

#[repr(C)]
struct Words {
    header: Header,
    buckets: Buckets,
    slots: [Slot; MEMBERS_MAX],
}

/// A group of devices with common limits.
pub struct Group {
    words: NonNull<Words>,
    /// Keeps the words mapped.
    _memory: Box<dyn Any + Send + Sync>,
}

// SAFETY: the memory consists of atomic words, and stays mapped as long as the group exists.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

/// The contents of the slot of a member, for reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberInfo {
    /// Index of the slot in the group.
    pub slot: usize,
    /// The name of the member, at most 112 bytes.
    pub name: String,
    /// The weight of the member.
    pub weight: u32,
}

impl Default for Group {
    /// A group in the memory of this process, without limits.
    fn default() -> Group {
        // `reset` sets the times of the slots.
        let slots = std::array::from_fn(|_| Slot::default());
        let words = Arc::new(Words { header: Header::default(), buckets: Buckets::default(), slots });
        let group = Group { words: NonNull::from(&*words), _memory: Box::new(words) };
        group.reset([0; 2], 0, &RateLimits::default());
        group
    }
}

impl Group {
    /// The size of a group in shared memory.
    pub const BYTES: usize = size_of::<Words>();

    /// A group in memory that is shared with other processes. `mapping` is dropped with the group.
    ///
    /// # Safety
    /// `start` must be aligned to 64 bytes. [`Group::BYTES`] bytes from there must stay readable and writable
    /// until `mapping` is dropped, and must be accessed only by atomic operations.
    pub unsafe fn over(start: NonNull<u8>, mapping: Box<dyn Any + Send + Sync>) -> Group {
        Group { words: start.cast(), _memory: mapping }
    }

    fn words(&self) -> &Words {
        // SAFETY: valid as long as the group, because `_memory` keeps the words: their Arc, or the mapping that `over`
        // demands. The memory consists of atomics, for which all bit patterns are valid.
        unsafe { self.words.as_ref() }
    }

    /// Initialises the group with `limits`, in memory that is zeroed or damaged. `boot` identifies the boot
    /// to which the monotonic clock belongs. Slots from `used` on must not belong to a present member. Other
    /// processes never see the group without its limits, even if the caller is killed in between.
    pub fn reset(&self, boot: [u64; 2], used: usize, limits: &RateLimits) {
        self.restart(boot, used);
        let Header { limits: words, magic, .. } = &self.words().header;
        // A new sequence number, so that members that have read the limits before notice the change.
        words.reset(&limits.to_words(), monotonic_ns());
        // Pairs with the acquire in `is_group`: who sees the magic number sees initialised words.
        magic.store(MAGIC, Release);
    }

    /// Whether the memory contains a group of this version.
    pub fn is_group(&self) -> bool {
        self.words().header.magic.load(Acquire) == MAGIC
    }

    /// Whether the times in the group belong to this boot.
    pub fn is_of(&self, boot: [u64; 2]) -> bool {
        self.words().header.boot.iter().zip(boot).all(|(word, boot)| word.load(Relaxed) == boot)
    }

    /// Discards all times in the group, because the machine was rebooted: `boot` identifies the new boot.
    /// Slots from `used` on must not belong to a present member. The limits stay.
    pub fn restart(&self, boot: [u64; 2], used: usize) {
        let Words { header, buckets, slots } = self.words();
        buckets.average.iter().chain(&buckets.peak).for_each(|word| word.store(NEVER_NS, Relaxed));
        slots.iter().for_each(Slot::forget_times);
        header.used.store(used as u64, Relaxed);
        header.boot.iter().zip(boot).for_each(|(word, boot)| word.store(boot, Relaxed));
    }

    /// Checks that the memory contains a group of this version, and returns its limits. Fails with
    /// [`ErrorKind::Format`] if it does not, or if a change of the limits was not completed. The caller must
    /// keep others from changing the limits meanwhile.
    pub fn check(&self) -> Result<RateLimits, Error> {
        let damaged = |what: &str| Err(Error::new(ErrorKind::Format, what.to_owned()));
        if !self.is_group() {
            return damaged("the memory is not a group of this version of blkq");
        }
        if !self.sequence().is_multiple_of(2) {
            return damaged("a change of the limits was interrupted");
        }
        self.limits().map_or_else(|| damaged("the limits are out of range"), |(_, limits)| Ok(limits))
    }

    /// The limits, and the number of their last change. `None` during a change, or if they are damaged.
    pub fn limits(&self) -> Option<(u64, RateLimits)> {
        if !self.is_group() {
            return None;
        }
        let (number, words) = self.words().header.limits.read()?;
        RateLimits::from_words(&words).map(|limits| (number, limits))
    }

    /// The number of the last change of the limits. It is different after each change.
    pub(crate) fn sequence(&self) -> u64 {
        self.words().header.limits.sequence()
    }

    /// Changes the limits, also if an earlier change was interrupted. There must be one caller at a time.
    /// Debts of requests that were admitted under the old limits are dropped.
    pub fn set_limits(&self, limits: &RateLimits) {
        self.set_limits_at(limits, monotonic_ns());
    }

    pub(super) fn set_limits_at(&self, limits: &RateLimits, now_ns: u64) {
        let Words { header, buckets, slots } = self.words();
        header.limits.write(&limits.to_words(), || {
            buckets.forgive_debt(now_ns);
            slots.iter().flat_map(|slot| &slot.spent_ns).for_each(|word| forgive_debt(word, now_ns));
        });
    }

    /// Takes a slot, which no other member may have, from 0 to one below [`MEMBERS_MAX`]. Fails with
    /// [`ErrorKind::Invalid`] if the slot does not exist, or the weight is not from 1 to [`WEIGHT_MAX`].
    pub fn join(self: Arc<Group>, slot: usize, name: &str, weight: u32) -> Result<Member, Error> {
        check_weight(weight)?;
        let words = self.words();
        let Some(own) = words.slots.get(slot) else {
            return Err(Error::new(ErrorKind::Invalid, format!("a group has at most {MEMBERS_MAX} members")));
        };
        own.forget_times();
        own.weight.store(weight.into(), Relaxed);
        let mut bytes = [0; NAME_WORDS * 8];
        let length = name.len().min(bytes.len());
        bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
        for (word, bytes) in own.name.iter().zip(bytes.chunks_exact(8)) {
            word.store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Relaxed);
        }
        let used = &words.header.used;
        let _ = used.fetch_update(Relaxed, Relaxed, |used| (used <= slot as u64).then_some(slot as u64 + 1));
        Ok(Member { group: self, slot })
    }

    /// The contents of the slot, even if its member has left. `None` if the slot was never used.
    pub fn member(&self, slot: usize) -> Option<MemberInfo> {
        if slot >= self.used() {
            return None;
        }
        let words = &self.words().slots[slot];
        let bytes: Vec<u8> = words.name.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let name = String::from_utf8_lossy(&bytes[..length]).into_owned();
        Some(MemberInfo { slot, name, weight: weight_of(words) })
    }

    fn used(&self) -> usize {
        (self.words().header.used.load(Relaxed) as usize).min(MEMBERS_MAX)
    }
}

impl Slot {
    fn forget_times(&self) {
        self.active_until_ns.iter().for_each(|word| word.store(0, Relaxed));
        self.spent_ns.iter().for_each(|word| word.store(NEVER_NS, Relaxed));
    }
}

fn weight_of(slot: &Slot) -> u32 {
    slot.weight.load(Relaxed).clamp(1, WEIGHT_MAX.into()) as u32
}

fn check_weight(weight: u32) -> Result<(), Error> {
    if (1..=WEIGHT_MAX).contains(&weight) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Invalid, format!("a weight must be 1 to {WEIGHT_MAX}, not {weight}")))
}

/// A device's membership in a group. Dropping this ends it.
pub struct Member {
    group: Arc<Group>,
    slot: usize,
}

impl Member {
    /// The group to which the device belongs.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// The weight of the member.
    pub fn weight(&self) -> u32 {
        weight_of(self.words())
    }

    /// Sets the member's weight. Fails with [`ErrorKind::Invalid`] if it is not from 1 to [`WEIGHT_MAX`].
    pub fn set_weight(&self, weight: u32) -> Result<(), Error> {
        check_weight(weight)?;
        self.words().weight.store(weight.into(), Relaxed);
        Ok(())
    }

    fn words(&self) -> &Slot {
        &self.group.words().slots[self.slot]
    }

    pub(crate) fn buckets(&self) -> &Buckets {
        &self.group.words().buckets
    }

    pub(crate) fn spent_ns(&self, key: LimitKey) -> &AtomicI64 {
        &self.words().spent_ns[key as usize]
    }

    /// The weight of this member, and the sum over all members that use the limit now, including this one.
    pub(crate) fn weights(&self, key: LimitKey, now_ns: u64) -> (u64, u64) {
        let slots = &self.group.words().slots[..self.group.used()];
        let is_active = |slot: &Slot| slot.active_until_ns[key as usize].load(Relaxed) > now_ns;
        let others = slots.iter().enumerate().filter(|(index, slot)| *index != self.slot && is_active(slot));
        let own = u64::from(self.weight());
        (own, own + others.map(|(_, slot)| u64::from(weight_of(slot))).sum::<u64>())
    }

    /// Marks the member as active on the limit, where it will start another request at `next_ns`.
    #[inline]
    pub(crate) fn note_active(&self, key: LimitKey, next_ns: u64) {
        let word = &self.words().active_until_ns[key as usize];
        let until_ns = next_ns.saturating_add(ACTIVE_NS);
        // Not stored for each request, because the other members read this cache line.
        if word.load(Relaxed) < until_ns - ACTIVE_NS / 8 {
            word.store(until_ns, Relaxed);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.words().active_until_ns.iter().for_each(|word| word.store(0, Relaxed));
    }
}
