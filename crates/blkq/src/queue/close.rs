//! Closing a queue: everything that can complete completes, and the rest fails or is leaked.

use crate::buffer::Data;
use crate::error::Status;
use crate::remote::gate::Direction;
use crate::ring::Ring;

use super::Queue;

impl Queue {
    /// Lets the driver unregister its files and buffers from the ring, which may outlive the queue.
    pub fn close(&mut self, ring: Option<&mut Ring>) {
        let mut cx = self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
        self.dispatch.close(&mut cx);
    }

    /// Completes everything that the driver has not taken with [`Status::Offline`].
    fn abandon(&mut self) {
        self.close_fast_path();
        if self.disk.settings().iostats {
            self.plug.count(self.in_flight.requests(), &mut self.stats);
        }
        self.close_hold();
        self.trace_fast_path();
        let abandoned = self.dispatch.abandon(self.plug.take_requests(), self.in_flight.requests().len());
        self.completions.extend_requests(abandoned.into_iter(), Err(Status::Offline));
        self.complete_batch();
        self.abandon_flushes(Err(Status::Offline));
        while let Some(index) = self.pop_waiting() {
            self.reject(index, Status::Offline);
        }
        self.disk.disk().fail(self.pull_cursor.taken().drain(..));
        self.completions.deliver_remote(&self.disk.disk().gate);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.abandon();
        // The kernel may use the memory of I/O in flight until the I/O completes. LocalQueue and Engine drain
        // a queue before they drop it, so this happens only after a panic. The memory is leaked then.
        let leaks = self.in_flight() > 0;
        if leaks {
            for (completer, gated) in self.in_flight.leak() {
                if let Some(operation) = gated {
                    self.disk.disk().gate.leave(Direction::of(operation), 1);
                }
                completer.notify(Err(Status::Offline), Data::None);
            }
        }
        if self.hold.forget_writes(self.disk.disk()) {
            self.disk.disk().wake_queues();
        }
        self.in_flight.reset();
        self.leave_if_idle();
        self.tags.close(self.disk.settings().requests(), leaks);
    }
}
