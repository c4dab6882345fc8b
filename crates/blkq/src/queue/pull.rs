//! Takes bios that submitters on other threads have staged.
//!
//! Two sources of bios compete for tags: waiting bios, most of which the owner has submitted, and bios staged
//! by other threads. Neither source may starve the other. While bios wait, staged bios get at most half of
//! the free tags per turn, and join the end of the waiting list.

use std::collections::VecDeque;

use crate::remote::software::{SOFTWARE_QUEUES, StagedBio};
use crate::ring::Ring;
use crate::slab::SlotFlags;

use super::Queue;

/// Staged requests that are taken together from one software queue while others have requests too.
const TAKE_AT_ONCE: usize = 8;

impl Queue {
    /// Takes staged bios, round robin over the software queues, as far as [`Queue::pull_quota`] allows. Those
    /// that stay can still be merged.
    #[inline]
    pub(super) fn pull_software_queues(&mut self, ring: Option<&mut Ring>) {
        if self.io.disk.shared().software.has_pending() {
            self.pull_pending(ring);
        }
    }

    /// [`Queue::pull_software_queues`] after a turn whose time was over. Bios that wait for this turn are
    /// admitted after the bios of other threads have joined them.
    #[cold]
    pub(super) fn pull_behind_waiting(&mut self, ring: Option<&mut Ring>) {
        let have_waited = !self.io.waiting.is_empty();
        self.io.waits_for_turn = have_waited;
        self.pull_software_queues(ring);
        if have_waited {
            self.io.waits_for_turn = false;
        }
    }

    #[inline(never)]
    fn pull_pending(&mut self, mut ring: Option<&mut Ring>) {
        // If bios wait, this is the quota for the whole turn; otherwise it shrinks with the free tags.
        let mut quota = self.pull_quota();
        while self.io.disk.shared().software.has_pending() && quota > 0 {
            let from = self.pull_cursor.from;
            let mut rotated = self.io.disk.shared().software.take_pending().rotate_right(from);
            let at_once = if rotated.is_power_of_two() { usize::MAX } else { TAKE_AT_ONCE };
            let before = quota;
            while rotated != 0 {
                let index = (rotated.trailing_zeros() + from) % SOFTWARE_QUEUES as u32;
                rotated &= rotated - 1;
                if quota > 0 {
                    let taken = self.pull_one(index as usize, quota.min(at_once), ring.as_deref_mut());
                    quota = (quota - taken).min(self.pull_quota());
                    self.pull_cursor.from = index + 1;
                } else {
                    self.io.disk.shared().software.set_pending(index as usize);
                }
            }
            if quota == before {
                return;
            }
        }
    }

    #[inline]
    pub(super) fn can_take(&self) -> bool {
        self.pull_quota() > 0
    }

    /// The number of staged requests that may be taken now: the number of free tags, or half of it if other
    /// bios wait for a tag or for a busy driver.
    fn pull_quota(&self) -> usize {
        if self.pull_cursor.closed || !self.io.in_flight.bios().has_room() || self.io.disk.is_frozen() {
            return 0;
        }
        let in_use = self.io.in_flight.in_use();
        let free = u32::from(self.io.disk.settings().requests()).saturating_sub(in_use) as usize;
        if free == 0 {
            // If all requests are held, no completion frees a tag, but a staged flush needs none and must
            // still be taken.
            return usize::from(in_use == self.hold.len() as u32);
        }
        let is_idle = self.io.waiting.is_empty() && !self.dispatch.has_requeued();
        if is_idle { free } else { free.div_ceil(2) }
    }

    /// Takes at most `count` requests from one software queue, and returns how many.
    #[inline(never)]
    fn pull_one(&mut self, index: usize, count: usize, mut ring: Option<&mut Ring>) -> usize {
        // The number of free tags in a shared set is not known, so requests are taken one by one.
        let count = if self.io.tags.is_shared() { 1 } else { count };
        let more = self.io.disk.shared().software.try_take(index, count, &mut self.pull_cursor.taken);
        let mut taken = 0;
        while let Some(staged) = self.pull_cursor.taken.pop_front() {
            taken += 1;
            let ((bio, completer), others) = staged.into_bios();
            self.accept(bio, completer, SlotFlags::GATED, ring.as_deref_mut());
            if let Some(others) = others {
                self.accept_others(others, ring.as_deref_mut());
            }
        }
        // `None`: a submitter had the lock. The next turn tries again.
        if more.unwrap_or(true) {
            self.io.disk.shared().software.set_pending(index);
        }
        taken
    }

    /// Accepts the bios that were merged into the staged request before them. The request gate has counted
    /// them together with that request.
    #[inline(never)]
    fn accept_others(&mut self, others: VecDeque<StagedBio>, mut ring: Option<&mut Ring>) {
        for (bio, completer) in others {
            self.accept(bio, completer, SlotFlags::empty(), ring.as_deref_mut());
        }
    }
}
