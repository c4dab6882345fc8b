//! Whether the kernel's block device outlives its daemon.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

/// The block device of a device, if it has one, which the next daemon takes over.
pub(super) struct KeptBlockDevice {
    is_kept: AtomicBool,
}

impl KeptBlockDevice {
    /// Of a device that is served now, and may have one.
    pub(super) fn new(is_kept: bool) -> KeptBlockDevice {
        KeptBlockDevice { is_kept: AtomicBool::new(is_kept) }
    }

    /// Notes that it no longer exists.
    pub(super) fn removed(&self) {
        self.is_kept.store(false, SeqCst);
    }

    /// Whether it outlives this process, as far as that is known.
    pub(super) fn outlives_daemon(&self) -> bool {
        self.is_kept.load(SeqCst)
    }
}
