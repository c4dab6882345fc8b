//! Software queues: where threads that do not own a queue leave their bios, so that
//! neighbours merge before the owner takes them (`struct blk_mq_ctx`).

#[cfg(all(test, any(loom, shuttle)))]
mod model;

use std::collections::VecDeque;

use crate::bio::{Bio, Operation};
use crate::completion::End;
use crate::layout::{CachePadded, HotField, Writer};
use crate::limits::QueueLimits;
use crate::merge;
use crate::pending::PendingMap;
use crate::queue::Queue;
use crate::ring::Ring;
use crate::sched::MergeSide;
use crate::sector::Sector;
use crate::slab::SlotMarks;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Mutex, lock, try_lock};

/// Software queues of one hardware queue: submitters share them round robin.
pub(crate) const SOFTWARE_QUEUES: usize = u64::BITS as usize;
/// Staged requests that a bio is compared with, youngest first (blk_bio_list_merge).
const MERGE_CANDIDATES: usize = 8;
/// Staged requests that the owner takes from one software queue before it goes to the next.
const TAKE_AT_ONCE: usize = 8;

/// Bios of one submitter that continue each other, not yet with the queue's owner.
pub(crate) struct Staged {
    pub operation: Operation,
    start: Sector,
    end: Sector,
    segments: u32,
    mergeable: bool,
    pub bios: VecDeque<(Bio, End)>,
}

impl Staged {
    fn new(bio: Bio, end: End) -> Staged {
        Staged {
            operation: bio.operation,
            start: bio.sector,
            // Nobody has checked the bio yet: its end may be beyond all numbers.
            end: Sector(bio.sector.0.saturating_add(bio.sectors)),
            segments: segments(&bio),
            mergeable: is_mergeable(&bio),
            bios: VecDeque::from([(bio, end)]),
        }
    }

    /// Where the bio joins, if it may.
    fn side(&self, bio: &Bio, limits: &QueueLimits) -> Option<MergeSide> {
        if !self.mergeable || self.operation != bio.operation {
            return None;
        }
        let side = merge::side(self.start, self.end, bio.sector, bio.sectors)?;
        let start = if side == MergeSide::Back { self.start } else { bio.sector };
        let sectors = (self.end - self.start) + bio.sectors;
        merge::fits(limits, bio.operation, start, sectors, self.segments + segments(bio)).then_some(side)
    }

    fn join(&mut self, bio: Bio, end: End, side: MergeSide) {
        self.segments += segments(&bio);
        match side {
            MergeSide::Back => {
                self.end = bio.sector + bio.sectors;
                self.bios.push_back((bio, end));
            }
            MergeSide::Front => {
                self.start = bio.sector;
                self.bios.push_front((bio, end));
            }
        }
    }
}

/// Whether the bio may join another, as far as can be told before it is checked.
fn is_mergeable(bio: &Bio) -> bool {
    merge::is_mergeable(bio.operation, bio.flags)
        && bio.sectors != 0
        && bio.sectors <= u64::from(u32::MAX)
        && bio.sector.0.checked_add(bio.sectors).is_some()
}

fn segments(bio: &Bio) -> u32 {
    bio.data.with_shape(|segments| segments.len() as u32)
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

    /// Merges the bio with one that waits in software queue `index`.
    ///
    /// # Errors
    /// The bio and its end, if it merges with none.
    pub fn try_merge(
        &self,
        index: usize,
        bio: Bio,
        end: End,
        limits: &QueueLimits,
    ) -> Result<(), (Bio, End)> {
        if !is_mergeable(&bio) {
            return Err((bio, end));
        }
        let mut queue = lock(&self.queues[index]);
        for staged in queue.iter_mut().rev().take(MERGE_CANDIDATES) {
            if let Some(side) = staged.side(&bio, limits) {
                staged.join(bio, end, side);
                return Ok(());
            }
        }
        Err((bio, end))
    }

    /// Puts the bio into software queue `index`.
    pub fn push(&self, index: usize, bio: Bio, end: End) {
        lock(&self.queues[index]).push_back(Staged::new(bio, end));
        self.pending.set(index);
    }

    /// What submitters and the owner, of queue `owner`, use, and where it lies.
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

    /// Takes everything out: the queue's owner will never come.
    pub fn take_all(&self) -> Vec<Staged> {
        self.queues.iter().flat_map(|queue| std::mem::take(&mut *lock(queue))).collect()
    }
}

impl Queue {
    /// Takes staged bios in, round robin over the software queues, while there are tags
    /// for them; what stays can still merge.
    pub(crate) fn pull_software_queues(&mut self, mut ring: Option<&mut Ring>) {
        while self.can_take() && self.shared().software.has_pending() {
            let from = self.software_from;
            let mut pending = 0u64;
            self.shared().software.pending.take_all(|index| pending |= 1 << index);
            let mut rotated = pending.rotate_right(from);
            let mut moved = false;
            while rotated != 0 {
                let index = (rotated.trailing_zeros() + from) % SOFTWARE_QUEUES as u32;
                rotated &= rotated - 1;
                if self.can_take() {
                    moved |= self.pull_one(index as usize, ring.as_deref_mut());
                    self.software_from = index + 1;
                } else {
                    self.shared().software.pending.set(index as usize);
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Whether staged bios can become requests now.
    pub(crate) fn can_take(&self) -> bool {
        !self.closing
            && self.waiting.is_empty()
            && self.dispatch.is_empty()
            && self.in_use < u32::from(self.settings.requests())
            && self.bios.has_room()
            && !self.disk.control.is_frozen()
    }

    /// Takes some of one software queue. False if nothing could be taken.
    fn pull_one(&mut self, index: usize, mut ring: Option<&mut Ring>) -> bool {
        let mut moved = false;
        for _ in 0..TAKE_AT_ONCE {
            // A submitter holds the lock just now: it is looked at again in the next turn.
            let Some(mut queue) = try_lock(&self.shared().software.queues[index]) else { break };
            let Some(staged) = queue.pop_front() else { return moved };
            drop(queue);
            moved = true;
            let mut marks = SlotMarks::GATED;
            for (bio, end) in staged.bios {
                self.accept(bio, end, marks, ring.as_deref_mut());
                marks = SlotMarks::empty();
            }
            if !self.can_take() {
                break;
            }
        }
        self.shared().software.pending.set(index);
        moved
    }
}
