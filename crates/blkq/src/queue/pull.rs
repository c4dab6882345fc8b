//! Bios that submitters on other threads staged become this queue's own.

use std::collections::VecDeque;

use crate::remote::software::{SOFTWARE_QUEUES, StagedBio};
use crate::ring::Ring;
use crate::slab::SlotFlags;

use super::Queue;

/// Staged requests that the owner takes from one software queue at once while others have some too.
const TAKE_AT_ONCE: usize = 8;

impl Queue {
    /// Takes staged bios in, round robin over the software queues, while there are tags
    /// for them; what stays can still merge.
    #[inline]
    pub(super) fn pull_software_queues(&mut self, ring: Option<&mut Ring>) {
        if self.disk.shared().software.has_pending() {
            self.pull_pending(ring);
        }
    }

    #[inline(never)]
    fn pull_pending(&mut self, mut ring: Option<&mut Ring>) {
        while self.disk.shared().software.has_pending() && self.can_take() {
            let from = self.pull_cursor.from();
            let mut rotated = self.disk.shared().software.take_pending().rotate_right(from);
            let at_once = if rotated.is_power_of_two() { usize::MAX } else { TAKE_AT_ONCE };
            let mut moved = false;
            while rotated != 0 {
                let index = (rotated.trailing_zeros() + from) % SOFTWARE_QUEUES as u32;
                rotated &= rotated - 1;
                if self.can_take() {
                    moved |= self.pull_one(index as usize, at_once, ring.as_deref_mut());
                    self.pull_cursor.set_from(index + 1);
                } else {
                    self.disk.shared().software.set_pending(index as usize);
                }
            }
            if !moved {
                return;
            }
        }
    }

    /// Whether staged bios can become requests now.
    pub(super) fn can_take(&self) -> bool {
        !self.pull_cursor.is_closed()
            && self.waiting.is_empty()
            && !self.dispatch.has_requeued()
            && self.in_flight.in_use() < u32::from(self.disk.settings().requests())
            && self.in_flight.bios().has_room()
            && !self.disk.is_frozen()
    }

    /// Takes at most so many of one software queue. False if nothing could be taken.
    #[inline(never)]
    fn pull_one(&mut self, index: usize, at_once: usize, mut ring: Option<&mut Ring>) -> bool {
        // As many as there are tags for: of shared ones that is not known.
        let free = usize::from(self.disk.settings().requests()) - self.in_flight.in_use() as usize;
        let count = if self.tags.is_shared() { 1 } else { free.min(at_once) };
        let more = self.disk.shared().software.try_take(index, count, self.pull_cursor.taken());
        let mut moved = false;
        while let Some(staged) = self.pull_cursor.taken().pop_front() {
            moved = true;
            let ((bio, completer), others) = staged.into_bios();
            self.accept(bio, completer, SlotFlags::GATED, ring.as_deref_mut());
            if let Some(others) = others {
                self.accept_others(others, ring.as_deref_mut());
            }
        }
        // If a submitter had the lock just now, the next turn takes what is there.
        if more.unwrap_or(true) {
            self.disk.shared().software.set_pending(index);
        }
        moved
    }

    /// Bios that join the one before them.
    #[inline(never)]
    fn accept_others(&mut self, others: VecDeque<StagedBio>, mut ring: Option<&mut Ring>) {
        for (bio, completer) in others {
            self.accept(bio, completer, SlotFlags::empty(), ring.as_deref_mut());
        }
    }
}
