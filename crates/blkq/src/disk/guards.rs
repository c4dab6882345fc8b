use std::sync::Arc;

use super::Disk;
use crate::sync::atomic::Ordering;

/// Ownership of an open queue. The owner must drop it after everything else, because the next owner may open
/// the queue from then on. Bios that submitters have staged in the queue fail.
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

/// A freeze of a disk ([`Disk::freeze`]). Dropping this lifts it.
#[must_use = "the freeze is over when this is dropped"]
pub struct Frozen<'a>(pub(super) &'a Disk);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.control.unfreeze(|queue| self.0.queues[queue].kick.kick());
    }
}

/// A time in which no rate limit applies ([`Disk::bypass_limits`]), or no request is held
/// ([`Disk::report_errors`]). Dropping this ends it.
#[must_use = "the disk's own rules apply again when this is dropped"]
pub struct Suspension {
    pub(super) disk: Arc<Disk>,
    pub(super) end: fn(&Disk),
}

impl Drop for Suspension {
    fn drop(&mut self) {
        (self.end)(&self.disk);
        self.disk.wake_queues();
    }
}

/// A quiesce of a disk ([`Disk::quiesce`]). Dropping this lifts it.
#[must_use = "the quiesce is over when this is dropped"]
pub struct Quiesced<'a>(pub(super) &'a Disk);

impl Drop for Quiesced<'_> {
    fn drop(&mut self) {
        self.0.control.unquiesce(|queue| self.0.queues[queue].kick.kick());
    }
}
