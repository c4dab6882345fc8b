//! Software queues, in which threads that do not own a hardware queue stage their bios, so that adjacent bios
//! merge before the owner takes them (`struct blk_mq_ctx`).

#[cfg(all(test, model_check))]
mod model;

use std::collections::VecDeque;

use crate::bio::{Bio, Operation};
use crate::completer::Completer;
use crate::layout::{CachePadded, HotField, Writer};
use crate::limits::{self, MergeSide, QueueLimits};
use crate::sector::Sector;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use crate::sync::{Mutex, lock, try_lock};

/// The number of software queues of one hardware queue. Submitters are assigned to them round robin.
pub(crate) const SOFTWARE_QUEUES: usize = u64::BITS as usize;
/// The largest number of staged requests with which a bio is compared, youngest first (blk_bio_list_merge).
const MERGE_CANDIDATES: usize = 8;

pub(crate) type StagedBio = (Bio, Completer);

/// Adjacent bios of one submitter that will be one request, not yet taken by the queue's owner. Most have one
/// bio. Such a value is small to move, and has no list to be dropped.
pub(crate) struct Staged {
    /// The bio that begins first. All other bios have its operation.
    first: StagedBio,
    end: Sector,
    others: Option<Box<Others>>,
}

struct Others {
    bios: VecDeque<StagedBio>,
    /// The number of segments of all bios, the first one included.
    segments: u32,
}

impl Staged {
    #[inline]
    fn new(bio: Bio, completer: Completer) -> Staged {
        // The bio is not validated yet, so its end may overflow.
        let end = Sector(bio.sector.0.saturating_add(bio.sectors));
        Staged { first: (bio, completer), end, others: None }
    }

    pub fn operation(&self) -> Operation {
        self.first.0.operation
    }

    /// The first bio, and the others, each of which begins where the previous one ends.
    pub fn into_bios(self) -> (StagedBio, Option<VecDeque<StagedBio>>) {
        (self.first, self.others.map(|others| others.bios))
    }

    fn start(&self) -> Sector {
        self.first.0.sector
    }

    fn segments(&self) -> u32 {
        self.others.as_ref().map_or_else(|| segments(&self.first.0), |others| others.segments)
    }

    /// The side on which the bio can be merged, if it can.
    fn side(&self, bio: &Bio, limits: &QueueLimits) -> Option<MergeSide> {
        if !is_mergeable(&self.first.0) || self.operation() != bio.operation {
            return None;
        }
        let side = MergeSide::of(self.start(), self.end, bio.sector, bio.sectors)?;
        let start = if side == MergeSide::Back { self.start() } else { bio.sector };
        let sectors = (self.end - self.start()) + bio.sectors;
        limits.allow(bio.operation, start, sectors, self.segments() + segments(bio)).then_some(side)
    }

    fn join(&mut self, bio: Bio, completer: Completer, side: MergeSide) {
        let before = self.segments();
        let others =
            self.others.get_or_insert_with(|| Box::new(Others { bios: VecDeque::new(), segments: 0 }));
        others.segments = before + segments(&bio);
        match side {
            MergeSide::Back => {
                self.end = bio.sector + bio.sectors;
                others.bios.push_back((bio, completer));
            }
            MergeSide::Front => {
                let second = std::mem::replace(&mut self.first, (bio, completer));
                others.bios.push_front(second);
            }
        }
    }
}

/// Whether the bio may be merged with another, as far as operation and flags say. Limits are checked later.
fn is_mergeable(bio: &Bio) -> bool {
    limits::is_mergeable(bio.operation, bio.flags)
        && bio.sectors != 0
        && bio.sectors <= u64::from(u32::MAX)
        && bio.sector.0.checked_add(bio.sectors).is_some()
}

fn segments(bio: &Bio) -> u32 {
    bio.data.with_shape(|segments| segments.len() as u32)
}

pub(crate) enum Staging {
    /// The bio was merged with one that the owner has been notified of.
    Merged,
    /// The bio is in the software queue, and the caller must kick the owner.
    Pushed,
    /// No more requests may be added now.
    Full(Bio, Completer),
}

pub(crate) struct SoftwareQueues {
    queues: Box<[CachePadded<Mutex<VecDeque<Staged>>>]>,
    /// One bit for each queue that contains bios. Submitters set it, and the owner of the hardware queue clears
    /// it (the kernel's `ctx_map`).
    pending: CachePadded<AtomicU64>,
    next: AtomicUsize,
}

impl SoftwareQueues {
    pub fn new() -> SoftwareQueues {
        SoftwareQueues {
            queues: (0..SOFTWARE_QUEUES).map(|_| CachePadded::new(Mutex::new(VecDeque::new()))).collect(),
            pending: CachePadded::new(AtomicU64::new(0)),
            next: AtomicUsize::new(0),
        }
    }

    pub fn assign(&self) -> usize {
        // Relaxed: the number only spreads submitters over the queues.
        self.next.fetch_add(1, Relaxed) % SOFTWARE_QUEUES
    }

    /// Merges the bio with a staged bio in software queue `index` if `limits` are given and permit it.
    /// Otherwise stages the bio if `may_enter` permits one more request. Takes the lock once.
    pub fn stage(
        &self,
        index: usize,
        bio: Bio,
        completer: Completer,
        limits: Option<&QueueLimits>,
        may_enter: impl FnOnce() -> bool,
    ) -> Staging {
        let mut queue = lock(&self.queues[index]);
        if let Some(limits) = limits
            && is_mergeable(&bio)
        {
            let end = bio.sector + bio.sectors;
            // The youngest bios are in the second slice if the deque wraps around.
            let (first, second) = queue.as_mut_slices();
            let youngest = if second.is_empty() { first } else { second };
            let from = youngest.len().saturating_sub(MERGE_CANDIDATES);
            for staged in youngest[from..].iter_mut().rev() {
                let touches = staged.end == bio.sector || staged.start() == end;
                if touches && let Some(side) = staged.side(&bio, limits) {
                    staged.join(bio, completer, side);
                    return Staging::Merged;
                }
            }
        }
        if !may_enter() {
            return Staging::Full(bio, completer);
        }
        queue.push_back(Staged::new(bio, completer));
        drop(queue);
        self.set_pending(index);
        Staging::Pushed
    }

    pub fn push(&self, index: usize, bio: Bio, completer: Completer) {
        lock(&self.queues[index]).push_back(Staged::new(bio, completer));
        self.set_pending(index);
    }

    /// `owner` is the number of the hardware queue. The map of pending queues is written by `everybody`.
    pub fn hot_fields(&self, owner: usize, everybody: Writer, fields: &mut Vec<HotField>) {
        fields.push(HotField::of("software queues", Writer::Nobody, &self.queues));
        fields.push(HotField::of("pending", everybody, &*self.pending));
        for (index, queue) in self.queues.iter().enumerate() {
            fields.push(HotField::of("software queue", Writer::Submitter(owner, index), &**queue));
        }
    }

    pub fn has_pending(&self) -> bool {
        self.pending.load(SeqCst) != 0
    }

    /// Takes the marks of all pending queues. They are then unset, so that later work sets them again.
    pub fn take_pending(&self) -> u64 {
        if self.has_pending() { self.pending.swap(0, SeqCst) } else { 0 }
    }

    pub fn set_pending(&self, index: usize) {
        self.pending.fetch_or(1 << index, SeqCst);
    }

    /// Takes at most `count` of the oldest bios of software queue `index`, and returns whether more are left.
    /// `None` if a submitter holds the lock.
    #[inline]
    pub fn try_take(&self, index: usize, count: usize, into: &mut VecDeque<Staged>) -> Option<bool> {
        let mut queue = try_lock(&self.queues[index])?;
        if into.is_empty() && queue.len() <= count {
            std::mem::swap(&mut *queue, into);
            return Some(false);
        }
        for _ in 0..count {
            let Some(staged) = queue.pop_front() else { return Some(false) };
            into.push_back(staged);
        }
        Some(!queue.is_empty())
    }

    /// Takes all bios, because the owner of the queue will not take any.
    pub fn take_all(&self) -> Vec<Staged> {
        self.queues.iter().flat_map(|queue| std::mem::take(&mut *lock(queue))).collect()
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn each_mark_is_taken_once() {
        let queues = SoftwareQueues::new();
        for index in [63, 0, 63] {
            queues.set_pending(index);
        }
        assert_eq!((queues.take_pending(), queues.take_pending()), (1 << 63 | 1, 0));
        queues.set_pending(63);
        assert_eq!((queues.take_pending(), queues.has_pending()), (1 << 63, false));
    }
}
