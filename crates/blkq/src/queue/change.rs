//! Entering and leaving a disk, so that a freeze waits for the queue, and what changed under one.

use crate::ring::Ring;

use super::broken::BrokenQueue;
use super::tracked::track;
use super::{Queue, open_driver};

impl Queue {
    /// The idle queue is to have requests, and takes over what changed meanwhile.
    /// False while the disk is frozen.
    #[cold]
    pub(super) fn enter(&mut self, ring: Option<&mut Ring>) -> bool {
        let entered = self.disk.enter();
        if entered {
            self.tags.join();
            if self.disk.is_outdated() {
                self.reload(ring);
            }
        }
        entered
    }

    /// The queue is idle again, if it has no request any more.
    #[inline]
    pub(super) fn leave_if_idle(&mut self) {
        if self.disk.is_entered() && self.in_flight.in_use() == 0 {
            self.leave();
        }
    }

    #[inline(never)]
    fn leave(&mut self) {
        self.close_lane();
        self.clock.idle();
        self.tags.leave();
        self.disk.leave();
    }

    /// Takes over changed settings even while nothing is submitted.
    #[inline]
    pub(super) fn refresh(&mut self, ring: Option<&mut Ring>) {
        if !self.disk.is_entered() && self.disk.is_outdated() {
            self.enter(ring);
        }
    }

    /// Takes over limits and settings that were changed under a freeze.
    #[cold]
    fn reload(&mut self, mut ring: Option<&mut Ring>) {
        if let Some(scheduler) = self.disk.reload_settings() {
            self.dispatch.set_scheduler(scheduler, self.in_flight.requests().len());
        }
        self.tags.set_depth(self.disk.settings().requests());
        self.clock.set_mode(self.disk.settings().clock);
        let is_new = self.disk.reload_driver();
        let _ = self.completions.take_limits_changed();
        self.reload_limits();
        if self.dispatch.is_traced() {
            self.reload_tracer();
        }
        self.dispatch.set_early_submission(self.disk.settings().early_submission);
        if is_new {
            // Its registered files make room for the other's.
            self.close(ring.as_deref_mut());
            let slots = self.in_flight.requests().len();
            let opened = open_driver(&self.disk, slots, ring);
            *self.dispatch.driver_mut() = opened.unwrap_or_else(|why| {
                self.disk.disk().set_broken(Some(format!("queue {}: {why}", self.disk.index())));
                Box::new(BrokenQueue)
            });
            self.is_tracked = track(self.dispatch.driver_mut(), self.disk.disk());
            return;
        }
        if !self.is_tracked {
            self.is_tracked = track(self.dispatch.driver_mut(), self.disk.disk());
        }
        let mut cx = self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
        self.dispatch.reload(&mut cx);
    }

    pub(super) fn reload_limits(&mut self) {
        if !self.disk.reload_limits() {
            return;
        }
        self.in_flight.reload(self.disk.limits());
        self.renew_durability_of_requests();
        // All that was decided about waiting bios under the old limits is decided again.
        for _ in 0..self.waiting.len() {
            let Some(index) = self.pop_waiting() else { break };
            match self.check(index) {
                Ok(()) => {
                    self.renew_durability(index);
                    self.begin_data(index);
                }
                Err(status) => self.reject(index, status),
            }
        }
    }
}
