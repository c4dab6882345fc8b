//! How a queue is opened, enters and leaves the disk, so that a freeze waits for the queue, applies changes
//! that were made under a freeze, and is closed.

use std::sync::Arc;

use crate::buffer::Data;
use crate::disk::Disk;
use crate::driver::{DriverQueue, OpenContext};
use crate::error::{Error, Status};
use crate::remote::gate::Direction;
use crate::ring::{Registrar, Ring};

use super::broken::BrokenQueue;
use super::disk_view::DiskView;
use super::dispatch::Dispatch;
use super::hang_tracker::HangTracker;
use super::hold::Hold;
use super::io::Io;
use super::plug::Plug;
use super::rounds::Rounds;
use super::{PullCursor, Queue};

fn open_driver(
    view: &DiskView,
    slots: usize,
    ring: Option<&mut Ring>,
) -> Result<Box<dyn DriverQueue>, Error> {
    let (ring, wake) = (ring.map(Registrar::new), view.shared().kick.clone());
    view.driver().open_queue(OpenContext { index: view.index() as u16, tags: slots, ring, wake })
}

impl Queue {
    /// Opens queue `index` of `disk` on this thread. `owner` marks the queue's submissions on the ring, which
    /// several queues may share. Fails with the driver's error, or
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if the queue is open already.
    pub fn open(disk: &Arc<Disk>, index: usize, owner: u16, ring: Option<&mut Ring>) -> Result<Queue, Error> {
        let claim = disk.claim_queue(index)?;
        let view = DiskView::new(disk, index)?;
        // One request beyond the tags is the queue's own flush.
        let slots = usize::from(disk.depth_max()) + 1;
        let driver = open_driver(&view, slots, ring)?;
        let io = Io::new(view, slots)?;
        Ok(Queue {
            plug: Plug::new(),
            pull_cursor: PullCursor::default(),
            dispatch: Dispatch::new(owner, driver, &io),
            hold: Hold::new(disk, index, io.flush.tag(), slots),
            rounds: Rounds::default(),
            hang_tracker: HangTracker::default(),
            io,
            _claim: claim,
        })
    }

    /// Enters the disk, because the idle queue is about to have requests, and applies what was changed
    /// meanwhile. Returns false while the disk is frozen.
    #[cold]
    pub(super) fn enter(&mut self, ring: Option<&mut Ring>) -> bool {
        let entered = self.io.disk.enter();
        if entered {
            self.io.tags.join();
            if self.io.disk.is_outdated() {
                self.reload(ring);
            }
        }
        entered
    }

    #[inline]
    pub(super) fn leave_if_idle(&mut self) {
        if self.io.disk.is_entered() && self.io.in_flight.in_use() == 0 {
            self.leave();
        }
    }

    #[inline(never)]
    fn leave(&mut self) {
        self.close_fast_path();
        self.io.clock.idle();
        if self.io.tags.is_shared() {
            self.leave_shared_tags();
        }
        self.io.disk.leave();
    }

    /// A queue that waits for a tag stays a user of the set. Otherwise the share of the others would change within
    /// each turn, and an engine whose other queue has its share would not sleep.
    #[inline(never)]
    fn leave_shared_tags(&mut self) {
        if self.io.waiting.is_empty() {
            self.io.tags.leave();
        }
    }

    /// Applies changed settings if the queue is idle, so that a change takes effect without a submission.
    #[inline]
    pub(super) fn refresh(&mut self, ring: Option<&mut Ring>) {
        if !self.io.disk.is_entered() && self.io.disk.is_outdated() {
            self.enter(ring);
        }
    }

    #[cold]
    fn reload(&mut self, mut ring: Option<&mut Ring>) {
        if let Some(scheduler) = self.io.disk.reload_settings() {
            self.dispatch.set_scheduler(scheduler, &self.io);
        }
        self.io.tags.set_depth(self.io.disk.settings().requests());
        self.io.clock.set_mode(self.io.disk.settings().clock);
        let is_new = self.io.disk.reload_driver();
        let _ = self.io.completions.take_limits_changed();
        self.io.reload_limits();
        if self.io.is_traced() {
            self.change_tracer(|_, _| {});
        }
        if !is_new {
            return self.dispatch.reload(&mut self.io, ring);
        }
        // The old queue unregisters its files first, so that those of the new one find room on the ring.
        self.close(ring.as_deref_mut());
        let opened = open_driver(&self.io.disk, self.io.in_flight.requests().len(), ring);
        let driver = opened.unwrap_or_else(|why| {
            self.io.disk.disk().set_broken(Some(format!("queue {}: {why}", self.io.disk.index())));
            Box::new(BrokenQueue)
        });
        self.dispatch.set_driver(driver, &self.io);
    }

    /// Stops taking bios of other threads, lifts limits and fails held requests: the owner is stopping.
    pub fn close_to_submitters(&mut self) {
        self.pull_cursor.closed = true;
        self.dispatch.close_limits();
        self.close_hold();
    }

    /// Lets the driver unregister its files and buffers from the ring, which may outlive the queue.
    pub fn close(&mut self, ring: Option<&mut Ring>) {
        self.dispatch.close(&mut self.io, ring);
    }

    /// Completes the requests that the driver has finished. Requests and bios that need the driver after that complete
    /// with [`Status::Offline`].
    pub fn finish_started(&mut self, ring: Option<&mut Ring>) {
        self.dispatch.poll(&mut self.io, ring);
        self.abandon();
    }

    /// Completes everything that the driver has not taken with [`Status::Offline`].
    pub fn abandon(&mut self) {
        self.close_fast_path();
        if self.io.disk.settings().iostats {
            self.plug.count(self.io.in_flight.requests(), &mut self.io.stats);
        }
        self.close_hold();
        self.trace_fast_path();
        let slots = self.io.in_flight.requests().len();
        let abandoned = self.dispatch.abandon(self.plug.take_requests(), slots);
        self.io.completions.extend_requests(abandoned.into_iter(), Err(Status::Offline));
        self.complete_batch();
        self.io.abandon_flushes(Err(Status::Offline));
        while let Some((index, _)) = self.io.pop_waiting() {
            self.io.reject(index, Status::Offline);
        }
        self.io.disk.disk().fail(self.pull_cursor.taken.drain(..));
        self.io.deliver_remote();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.abandon();
        // After a panic of the driver, a quiesce must not wait for this queue.
        self.io.disk.leave_dispatch();
        // The kernel may use the memory of I/O in flight until the I/O completes. LocalQueue and Engine drain
        // a queue before they drop it, so this happens only after a panic. The memory is leaked then.
        let leaks = self.in_flight() > 0;
        if leaks {
            for (completer, gated) in self.io.in_flight.leak() {
                if let Some(operation) = gated {
                    self.io.disk.disk().gate.leave(Direction::of(operation), 1);
                }
                completer.notify(Err(Status::Offline), Data::None);
            }
        }
        self.hold.forget_writes(self.io.disk.disk());
        // Each queue has requests of its own, so other queues may use the tags of leaked requests. They return
        // before the queue leaves, because a freeze may change their number when no queue has requests.
        let Io { in_flight, tags, flush, .. } = &mut self.io;
        tags.freed().extend(in_flight.tags().filter(|&tag| tag != flush.tag()));
        in_flight.reset();
        tags.share_freed();
        self.leave_if_idle();
        self.io.tags.close(self.io.disk.settings().requests(), leaks);
    }
}
