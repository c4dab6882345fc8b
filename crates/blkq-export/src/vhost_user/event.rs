//! Eventfds of this process's own, that do not block.

use std::os::fd::OwnedFd;

/// Writes to `event`, which does not block; one that is full has been written already.
pub fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
