//! Holds requests that failed, and resumes them: they are reissued, or they complete with their errors.

use crate::disk::Resume;
use crate::error::{IoResult, Status};
use crate::request::NIL;
use crate::ring::Ring;
use crate::stats::Counter;
use crate::tags::Tag;
use crate::trace::EventKind;

use super::Queue;

impl Queue {
    #[inline]
    pub fn has_held(&self) -> bool {
        self.hold.has_held()
    }

    /// Moves requests that must be held from `completed` to the held requests.
    #[cold]
    pub(super) fn hold_failed(&mut self, completed: &mut Vec<(Tag, IoResult)>) {
        let (hold, in_flight, disk) = (&mut self.hold, &mut self.in_flight, self.disk.disk());
        let (before, held_before) = (completed.len(), hold.len());
        let mut is_last = false;
        completed.retain(|&(tag, result)| match hold.holds(tag, result) {
            Some(status) => {
                let request = &mut in_flight[tag];
                // The driver starts with clean words when the request is reissued.
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
        let failed: Vec<(Tag, Status)> = hold.held_from(held_before).collect();
        for &(tag, status) in &failed {
            self.in_flight.fill_plain(tag);
            self.note_failure(tag, self.in_flight[tag].first_bio, status);
        }
        let tags: Vec<Tag> = failed.iter().map(|(tag, _)| *tag).collect();
        self.trace_fast_path();
        if let Some(tracer) = self.dispatch.tracer() {
            tracer.requests(EventKind::Requeue, &tags, self.in_flight.requests(), &mut self.clock);
        }
        self.dispatch.hold(&tags);
        self.tags.hold(count);
        self.stats.held(self.hold.len() as u64);
        self.stats.count(Counter::HeldRequests, count as u64);
        if self.disk.is_frozen() {
            // A freeze would wait for the held requests until its timeout. It fails instead.
            self.disk.disk().control.wake_waiters();
        }
    }

    /// Applies the disk's policy, and resumes held requests if the operator has asked for that.
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

    /// Fails held requests and stops holding others, because the owner of the queue is stopping.
    pub(super) fn close_hold(&mut self) {
        self.hold.close(self.disk.disk());
        self.fail_held(|_| true);
    }

    /// Fails held requests that must not be reissued, because clients have disconnected: a write if one of
    /// its merged bios is abandoned, because the reissued write could overwrite newer data of that client,
    /// and a read if all of its bios are abandoned. `is_abandoned` is called with the `user_data` of bios.
    pub(crate) fn fail_abandoned(&mut self, ring: Option<&mut Ring>, is_abandoned: impl Fn(u64) -> bool) {
        self.close_fast_path();
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

    /// Completes the held requests for which `which` returns true with their errors.
    fn fail_held(&mut self, which: impl Fn(Tag) -> bool) {
        let failed = self.hold.take_if(which);
        self.tags.resume(failed.len());
        self.stats.held(self.hold.len() as u64);
        if !failed.is_empty() {
            self.dispatch.claim(failed.len() as u32);
            self.complete_held(failed);
        }
    }

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
