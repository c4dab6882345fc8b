//! Whether the kernel's block device survives its daemon.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// The kernel's block device, if the device has one, which the next daemon takes over.
pub(super) struct BlockDeviceState {
    exists: AtomicBool,
}

impl BlockDeviceState {
    pub(super) fn new(exists: bool) -> BlockDeviceState {
        BlockDeviceState { exists: AtomicBool::new(exists) }
    }

    /// Records that the block device no longer exists.
    pub(super) fn removed(&self) {
        self.exists.store(false, SeqCst);
    }

    /// Whether the block device survives this process, as far as is known.
    pub(super) fn outlives_daemon(&self) -> bool {
        self.exists.load(SeqCst)
    }
}
