//! States of a disk that are over when a value is dropped.

use std::sync::Arc;

use super::Disk;
use crate::sync::atomic::Ordering;

/// A queue is open while its owner has this, which is to be dropped last: the next owner may open the
/// queue from then on. Bios that submitters left there fail.
pub(crate) struct QueueClaim {
    pub(super) disk: Arc<Disk>,
    pub(super) index: usize,
}

impl Drop for QueueClaim {
    fn drop(&mut self) {
        let queue = &self.disk.queues[self.index];
        queue.open.store(false, Ordering::SeqCst);
        self.disk.fail_staged(queue);
    }
}

/// A freeze of a disk ([`Disk::freeze`]), over when this is dropped.
#[must_use = "the freeze is over when this is dropped"]
pub struct Frozen<'a>(pub(super) &'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.control.unfreeze(|queue| self.0.queues[queue].kick.kick());
    }
}

/// The time in which no limit counts ([`Disk::bypass_limits`]), over when this is dropped.
#[must_use = "the limits count again when this is dropped"]
pub struct Unlimited(pub(super) Arc<Disk>);

impl Drop for Unlimited {
    fn drop(&mut self) {
        self.0.throttle.set_bypassed(false);
        self.0.wake_queues();
    }
}

/// The time in which no request is held ([`Disk::report_errors`]), over when this is dropped.
#[must_use = "requests are held again when this is dropped"]
pub struct Reporting(pub(super) Arc<Disk>);

impl Drop for Reporting {
    fn drop(&mut self) {
        self.0.hold.set_reporting(false);
        self.0.wake_queues();
    }
}

/// A quiesce of a disk ([`Disk::quiesce`]), over when this is dropped.
#[must_use = "the quiesce is over when this is dropped"]
pub struct Quiesced<'a>(pub(super) &'a Disk);

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        self.0.control.unquiesce(|queue| self.0.queues[queue].kick.kick());
    }
}
