//! When a cluster that nothing refers to any more may have another use.

use std::sync::Arc;

use blkq::sync::atomic::AtomicU32;
use blkq::sync::atomic::Ordering::Relaxed;

/// The I/O on clusters of an image, in two epochs: a cluster is free only when no I/O is in flight that
/// began when it was still in use.
#[derive(Default)]
pub(super) struct Epochs {
    in_flight: [AtomicU32; 2],
    present: AtomicU32,
}

impl Epochs {
    /// Notes the beginning of an I/O; returns its epoch, for [`Epochs::leave`].
    pub fn enter(&self) -> usize {
        let epoch = self.present.load(Relaxed) as usize;
        self.in_flight[epoch].fetch_add(1, Relaxed);
        epoch
    }

    /// Notes the completion of an I/O of that epoch.
    pub fn leave(&self, epoch: usize) {
        self.in_flight[epoch].fetch_sub(1, Relaxed);
    }

    /// Whether the other epoch is idle.
    pub fn may_turn(&self) -> bool {
        self.is_idle(1 - self.present.load(Relaxed) as usize)
    }

    /// Begins the other epoch, which must be idle; returns the one so far.
    pub fn turn(&self) -> usize {
        self.present.fetch_xor(1, Relaxed) as usize
    }

    /// Whether no I/O of that epoch is in flight.
    pub fn is_idle(&self, epoch: usize) -> bool {
        self.in_flight[epoch].load(Relaxed) == 0
    }
}

/// One I/O on a cluster, in its epoch until it is dropped.
pub(super) struct InEpoch {
    epochs: Arc<Epochs>,
    epoch: usize,
}

impl InEpoch {
    pub fn new(epochs: &Arc<Epochs>) -> InEpoch {
        InEpoch { epochs: Arc::clone(epochs), epoch: epochs.enter() }
    }
}

impl Drop for InEpoch {
    fn drop(&mut self) {
        self.epochs.leave(self.epoch);
    }
}
