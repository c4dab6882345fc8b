//! Bios that submitters on other threads staged become this queue's own.
//!
//! A queue has two sources of bios that need tags: those that its owner submitted and that wait, and those that other
//! threads staged. Neither has priority over the other for good. While bios wait, at most half of the tags that
//! completions have freed since the last turn are for staged ones, which join the end of the waiting list.

use std::collections::VecDeque;

use crate::remote::software::{SOFTWARE_QUEUES, StagedBio};
use crate::ring::Ring;
use crate::slab::SlotFlags;

use super::Queue;

/// Staged requests that the owner takes from one software queue at once while others have some too.
const TAKE_AT_ONCE: usize = 8;

impl Queue {
    /// Takes staged bios in, round robin over the software queues, as far as [`Queue::pull_quota`] allows; the others
    /// can still merge.
    #[inline]
    pub(super) fn pull_software_queues(&mut self, ring: Option<&mut Ring>) {
        if self.disk.shared().software.has_pending() {
            self.pull_pending(ring);
        }
    }

    #[inline(never)]
    fn pull_pending(&mut self, mut ring: Option<&mut Ring>) {
        // Of this turn, if bios wait; otherwise it shrinks with the tags that are left.
        let mut quota = self.pull_quota();
        while self.disk.shared().software.has_pending() && quota > 0 {
            let from = self.pull_cursor.from();
            let mut rotated = self.disk.shared().software.take_pending().rotate_right(from);
            let at_once = if rotated.is_power_of_two() { usize::MAX } else { TAKE_AT_ONCE };
            let before = quota;
            while rotated != 0 {
                let index = (rotated.trailing_zeros() + from) % SOFTWARE_QUEUES as u32;
                rotated &= rotated - 1;
                if quota > 0 {
                    let taken = self.pull_one(index as usize, quota.min(at_once), ring.as_deref_mut());
                    quota = (quota - taken).min(self.pull_quota());
                    self.pull_cursor.set_from(index + 1);
                } else {
                    self.disk.shared().software.set_pending(index as usize);
                }
            }
            if quota == before {
                return;
            }
        }
    }

    /// Whether staged bios can be taken now.
    #[inline]
    pub(super) fn can_take(&self) -> bool {
        self.pull_quota() > 0
    }

    /// How many staged requests may be taken now: as many as there are free tags. Half of those if bios wait already,
    /// for a tag or because the driver is busy: the freed tags are shared among both.
    fn pull_quota(&self) -> usize {
        if self.pull_cursor.is_closed() || !self.in_flight.bios().has_room() || self.disk.is_frozen() {
            return 0;
        }
        let in_use = self.in_flight.in_use();
        let free = u32::from(self.disk.settings().requests()).saturating_sub(in_use) as usize;
        if free == 0 {
            // If all requests are held, none completes and frees its tag; but a flush needs none.
            return usize::from(in_use == self.hold.len() as u32);
        }
        let is_idle = self.waiting.is_empty() && !self.dispatch.has_requeued();
        if is_idle { free } else { free.div_ceil(2) }
    }

    /// Takes at most `count` requests of one software queue. Returns how many.
    #[inline(never)]
    fn pull_one(&mut self, index: usize, count: usize, mut ring: Option<&mut Ring>) -> usize {
        // Of shared tags it is not known how many are free.
        let count = if self.tags.is_shared() { 1 } else { count };
        let more = self.disk.shared().software.try_take(index, count, self.pull_cursor.taken());
        let mut taken = 0;
        while let Some(staged) = self.pull_cursor.taken().pop_front() {
            taken += 1;
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
        taken
    }

    /// Bios that join the one before them.
    #[inline(never)]
    fn accept_others(&mut self, others: VecDeque<StagedBio>, mut ring: Option<&mut Ring>) {
        for (bio, completer) in others {
            self.accept(bio, completer, SlotFlags::empty(), ring.as_deref_mut());
        }
    }
}
