use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// Whether the device has a block device of the kernel, which the next daemon takes over.
pub(super) struct BlockDeviceState {
    exists: AtomicBool,
}

impl BlockDeviceState {
    pub(super) fn new(exists: bool) -> BlockDeviceState {
        BlockDeviceState { exists: AtomicBool::new(exists) }
    }

    pub(super) fn removed(&self) {
        self.exists.store(false, SeqCst);
    }

    /// Whether the block device survives this process, as far as is known.
    pub(super) fn outlives_daemon(&self) -> bool {
        self.exists.load(SeqCst)
    }
}
