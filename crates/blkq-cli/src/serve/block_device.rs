//! The kernel's block device as the state file has it: it may outlive its daemon.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use blkq_export::ublk::UblkDevice;

use crate::info::BlockDevice;

/// The block device of a device, if it has one, for its next daemon.
pub(super) struct KeptBlockDevice {
    device: Option<BlockDevice>,
    is_removed: AtomicBool,
}

impl KeptBlockDevice {
    /// Of a device that is served now.
    pub(super) fn new(device: Option<BlockDevice>) -> KeptBlockDevice {
        KeptBlockDevice { device, is_removed: AtomicBool::new(false) }
    }

    /// Notes that it no longer exists.
    pub(super) fn removed(&self) {
        self.is_removed.store(true, SeqCst);
    }

    /// Whether it outlives this process, as far as that is known.
    pub(super) fn outlives_daemon(&self) -> bool {
        self.device.is_some() && !self.is_removed.load(SeqCst)
    }

    /// As the state file has it, with the number that the kernel gave to `ublk`.
    pub(super) fn for_state_file(&self, ublk: Option<&UblkDevice>) -> Option<BlockDevice> {
        let mut device = self.device.clone()?;
        if let Some(ublk) = ublk {
            device.id = ublk.identity().id;
        }
        Some(device)
    }
}
