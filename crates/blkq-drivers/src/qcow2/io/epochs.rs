//! Epochs: delay the reuse of a released cluster until no I/O that began before its release is in flight.

use blkq::sync::atomic::AtomicU32;
use blkq::sync::atomic::Ordering::Relaxed;

/// Counts the I/O on clusters of an image in two epochs. A flush that releases clusters begins the other
/// epoch, and frees the clusters when the one before is idle.
///
/// All accesses are `Relaxed`: they run on the queue's thread, or on another thread while no queue does I/O,
/// so that handing over the image orders them.
#[derive(Default)]
pub struct Epochs {
    in_flight: [AtomicU32; 2],
    present: AtomicU32,
}

impl Epochs {
    pub fn enter(&self) -> usize {
        let epoch = self.present.load(Relaxed) as usize;
        self.in_flight[epoch].fetch_add(1, Relaxed);
        epoch
    }

    pub fn leave(&self, epoch: usize) {
        self.in_flight[epoch].fetch_sub(1, Relaxed);
    }

    /// Whether the other epoch is idle, so that it can begin.
    pub fn may_turn(&self) -> bool {
        self.is_idle(1 - self.present.load(Relaxed) as usize)
    }

    /// Begins the other epoch, which must be idle. Returns the epoch before.
    pub fn turn(&self) -> usize {
        self.present.fetch_xor(1, Relaxed) as usize
    }

    pub fn is_idle(&self, epoch: usize) -> bool {
        self.in_flight[epoch].load(Relaxed) == 0
    }
}
