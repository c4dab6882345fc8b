//! Software queues: where threads that do not own a queue leave their bios, so that
//! neighbours merge before the owner takes them (`struct blk_mq_ctx`).

#[cfg(all(test, model_check))]
mod model;

use std::collections::VecDeque;

use crate::bio::{Bio, Operation};
use crate::completer::Completer;
use crate::layout::{CachePadded, HotField, Writer};
use crate::limits::{self, MergeSide, QueueLimits};
use crate::remote::pending::PendingMap;
use crate::sector::Sector;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, lock, try_lock};

/// Software queues of one hardware queue: submitters share them round robin.
pub(crate) const SOFTWARE_QUEUES: usize = u64::BITS as usize;
/// Staged requests that a bio is compared with, youngest first (blk_bio_list_merge).
const MERGE_CANDIDATES: usize = 8;

/// Bios of one submitter that continue each other, not yet with the queue's owner.
pub(crate) struct Staged {
    pub operation: Operation,
    start: Sector,
    end: Sector,
    segments: u32,
    mergeable: bool,
    /// The first, in place: most are alone.
    first: (Bio, Completer),
    others: VecDeque<(Bio, Completer)>,
}

impl Staged {
    fn new(bio: Bio, completer: Completer) -> Staged {
        Staged {
            operation: bio.operation,
            start: bio.sector,
            // The bio is not checked yet: its end may be beyond all numbers.
            end: Sector(bio.sector.0.saturating_add(bio.sectors)),
            segments: segments(&bio),
            mergeable: is_mergeable(&bio),
            first: (bio, completer),
            others: VecDeque::new(),
        }
    }

    /// The first bio, and the others, each of which continues the one before.
    #[inline]
    pub fn into_bios(self) -> ((Bio, Completer), VecDeque<(Bio, Completer)>) {
        (self.first, self.others)
    }

    /// Where the bio joins, if it may.
    fn side(&self, bio: &Bio, limits: &QueueLimits) -> Option<MergeSide> {
        if !self.mergeable || self.operation != bio.operation {
            return None;
        }
        let side = MergeSide::of(self.start, self.end, bio.sector, bio.sectors)?;
        let start = if side == MergeSide::Back { self.start } else { bio.sector };
        let sectors = (self.end - self.start) + bio.sectors;
        limits.allow(bio.operation, start, sectors, self.segments + segments(bio)).then_some(side)
    }

    fn join(&mut self, bio: Bio, completer: Completer, side: MergeSide) {
        self.segments += segments(&bio);
        match side {
            MergeSide::Back => {
                self.end = bio.sector + bio.sectors;
                self.others.push_back((bio, completer));
            }
            MergeSide::Front => {
                self.start = bio.sector;
                let second = std::mem::replace(&mut self.first, (bio, completer));
                self.others.push_front(second);
            }
        }
    }
}

/// Whether the bio may join another, as far as is known before it is checked.
fn is_mergeable(bio: &Bio) -> bool {
    limits::is_mergeable(bio.operation, bio.flags)
        && bio.sectors != 0
        && bio.sectors <= u64::from(u32::MAX)
        && bio.sector.0.checked_add(bio.sectors).is_some()
}

fn segments(bio: &Bio) -> u32 {
    bio.data.with_shape(|segments| segments.len() as u32)
}

/// The outcome of staging a bio.
pub(crate) enum Staging {
    /// It is part of another that the owner knows of.
    Merged,
    /// It is in the software queue: the owner is to be kicked.
    Pushed,
    /// There may be no more requests now.
    Full(Bio, Completer),
}

/// The software queues of one hardware queue.
pub(crate) struct SoftwareQueues {
    queues: Box<[CachePadded<Mutex<VecDeque<Staged>>>]>,
    pending: PendingMap,
    next: AtomicUsize,
}

impl SoftwareQueues {
    pub fn new() -> SoftwareQueues {
        SoftwareQueues {
            queues: (0..SOFTWARE_QUEUES).map(|_| CachePadded::new(Mutex::new(VecDeque::new()))).collect(),
            pending: PendingMap::new(SOFTWARE_QUEUES),
            next: AtomicUsize::new(0),
        }
    }

    /// A software queue for a new submitter.
    pub fn assign(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % SOFTWARE_QUEUES
    }

    /// Merges the bio with one that waits in software queue `index`, if there are `limits` for that;
    /// else puts it there if `may_enter` permits one more request. Takes the lock once.
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
            for staged in queue.iter_mut().rev().take(MERGE_CANDIDATES) {
                if let Some(side) = staged.side(&bio, limits) {
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
        self.pending.set(index);
        Staging::Pushed
    }

    /// Puts the bio into software queue `index`.
    pub fn push(&self, index: usize, bio: Bio, completer: Completer) {
        lock(&self.queues[index]).push_back(Staged::new(bio, completer));
        self.pending.set(index);
    }

    /// The words that submitters and the owner, of queue `owner`, use, with their addresses.
    pub fn hot_fields(&self, owner: usize, fields: &mut Vec<HotField>) {
        fields.push(HotField::of("software queues", Writer::Nobody, &self.queues));
        // The first two are those of the gate.
        self.pending.hot_fields(Writer::Everybody(2 + owner), fields);
        for (index, queue) in self.queues.iter().enumerate() {
            fields.push(HotField::of("software queue", Writer::Submitter(owner, index), &**queue));
        }
    }

    /// Whether anything waits.
    pub fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Empties the map of the software queues that have something: a bit for each.
    #[inline]
    pub fn take_pending(&self) -> u64 {
        let mut pending = 0;
        self.pending.take_all(|index| pending |= 1 << index);
        pending
    }

    /// Software queue `index` still has something.
    #[inline]
    pub fn set_pending(&self, index: usize) {
        self.pending.set(index);
    }

    /// Takes the oldest that are staged in software queue `index`, at most `count`, and whether there are
    /// more. None while a submitter has its lock.
    #[inline]
    pub fn try_take(&self, index: usize, count: usize, into: &mut VecDeque<Staged>) -> Option<bool> {
        let mut queue = try_lock(&self.queues[index])?;
        for _ in 0..count {
            let Some(staged) = queue.pop_front() else { return Some(false) };
            into.push_back(staged);
        }
        Some(!queue.is_empty())
    }

    /// Takes everything out: the queue's owner will never come.
    pub fn take_all(&self) -> Vec<Staged> {
        self.queues.iter().flat_map(|queue| std::mem::take(&mut *lock(queue))).collect()
    }
}
