//! Entering and leaving the disk, so that a freeze waits for the queue, and applying changes made under it.

use crate::ring::Ring;

use super::broken::BrokenQueue;
use super::tracked::track;
use super::{Queue, open_driver};

impl Queue {
    /// Enters the disk, because the idle queue is about to have requests, and applies what was changed
    /// meanwhile. Returns false while the disk is frozen.
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

    #[inline]
    pub(super) fn leave_if_idle(&mut self) {
        if self.disk.is_entered() && self.in_flight.in_use() == 0 {
            self.leave();
        }
    }

    #[inline(never)]
    fn leave(&mut self) {
        self.close_fast_path();
        self.clock.idle();
        self.tags.leave();
        self.disk.leave();
    }

    /// Applies changed settings if the queue is idle, so that a change takes effect without a submission.
    #[inline]
    pub(super) fn refresh(&mut self, ring: Option<&mut Ring>) {
        if !self.disk.is_entered() && self.disk.is_outdated() {
            self.enter(ring);
        }
    }

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
            // The old queue unregisters its files first, so that those of the new one find room on the ring.
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

    /// Applies changed limits, also those that the driver itself has lowered while requests are in flight.
    pub(super) fn reload_limits(&mut self) {
        if !self.disk.reload_limits() {
            return;
        }
        self.in_flight.reload(self.disk.limits());
        self.renew_durability_of_requests();
        // Waiting bios were checked and split under the old limits, so they start again.
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
