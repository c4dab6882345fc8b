//! Holding requests that failed, and resuming them: reissued, or failed after all.

use crate::disk::Resume;
use crate::error::IoResult;
use crate::request::NIL;
use crate::ring::Ring;
use crate::stats::Counter;
use crate::tags::Tag;
use crate::trace::EventKind;

use super::Queue;

impl Queue {
    /// Whether requests are held.
    #[inline]
    pub fn has_held(&self) -> bool {
        self.hold.has_held()
    }

    /// Takes those out of `completed` that are to be held.
    #[cold]
    pub(super) fn hold_failed(&mut self, completed: &mut Vec<(Tag, IoResult)>) {
        let (hold, in_flight, disk) = (&mut self.hold, &mut self.in_flight, self.disk.disk());
        let (before, held_before) = (completed.len(), hold.len());
        let mut is_last = false;
        completed.retain(|&(tag, result)| match hold.holds(tag, result) {
            Some(status) => {
                let request = &mut in_flight[tag];
                // The driver begins anew.
                request.pdu = [0; 2];
                hold.push(tag, status, request.operation, disk);
                #[cfg(simulation)]
                if request.operation != crate::bio::Operation::Read {
                    crate::simulation::write_held(self.disk.index(), tag.0);
                }
                false
            }
            None => {
                is_last |= hold.complete(tag, disk);
                true
            }
        });
        if is_last {
            disk.wake_queues();
        }
        let count = before - completed.len();
        if count == 0 {
            return;
        }
        let tags: Vec<Tag> = hold.held().skip(held_before).collect();
        self.trace_lane();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.requests(EventKind::Requeue, &tags, self.in_flight.requests(), &mut self.clock);
        }
        self.dispatch.hold(&tags);
        self.tags.hold(count);
        self.stats.held(self.hold.len() as u64);
        self.stats.count(Counter::HeldRequests, count as u64);
        if self.disk.is_frozen() {
            // A freeze would wait for these in vain.
            self.disk.disk().control.wake_waiters();
        }
    }

    /// Takes over the disk's policy, and resumes what is held if that was asked for.
    pub(super) fn refresh_hold(&mut self) {
        let disk = self.disk.disk();
        self.hold.reload(disk);
        match self.hold.take_resumed(disk) {
            Some(Resume::Fail) => self.fail_held(|_| true),
            Some(Resume::Reissue) => {
                let held = self.hold.take();
                self.tags.resume(held.len());
                self.dispatch.requeue(held.into_iter());
                self.stats.held(0);
            }
            None => return,
        }
        self.hold.note_resumed(self.disk.disk(), self.disk.index());
    }

    /// Nothing is held from now on.
    pub(super) fn close_hold(&mut self) {
        self.hold.close(self.disk.disk());
        self.fail_held(|_| true);
    }

    /// Completes requests with their errors that are not to be reissued: a write of which `is_abandoned` is
    /// true for one of its merged bios, as that one would overwrite what its client wrote since, and a read
    /// that nobody waits for any more. `is_abandoned` gets their `user_data`.
    pub(crate) fn fail_abandoned(&mut self, ring: Option<&mut Ring>, is_abandoned: impl Fn(u64) -> bool) {
        self.close_lane();
        let mut failing = vec![false; self.in_flight.requests().len()];
        let held: Vec<Tag> = self.hold.held().collect();
        for tag in held {
            self.in_flight.fill_plain(tag);
            let (mut bio, mut any, mut all) = (self.in_flight[tag].first_bio, false, true);
            while bio != NIL {
                let is = self.submitter_of(bio).0.is_some_and(&is_abandoned);
                (any, all) = (any || is, all && is);
                bio = self.in_flight[bio].next;
            }
            if any && (all || self.in_flight[tag].operation.is_write()) {
                failing[tag.index()] = true;
            }
        }
        if failing.contains(&true) {
            self.fail_held(|tag| failing[tag.index()]);
            self.admit_waiting(ring);
        }
    }

    /// Completes those of the held requests with their errors that `which` names.
    fn fail_held(&mut self, which: impl Fn(Tag) -> bool) {
        let failed = self.hold.take_if(which);
        self.tags.resume(failed.len());
        self.stats.held(self.hold.len() as u64);
        if !failed.is_empty() {
            self.dispatch.claim(failed.len() as u32);
            self.complete_held(failed);
        }
    }

    /// Completes requests that were held, and are not any more.
    fn complete_held(&mut self, failed: Vec<(Tag, IoResult)>) {
        let disk = self.disk.disk();
        let (mut is_last, hold) = (false, &mut self.hold);
        failed.iter().for_each(|&(tag, _)| is_last |= hold.complete(tag, disk));
        if is_last {
            disk.wake_queues();
        }
        self.clock.invalidate();
        self.complete_requests_of(failed);
    }
}
