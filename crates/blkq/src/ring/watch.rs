//! Waiting for a kick on a ring, by a poll of the kick's descriptor.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, types};

use super::{Ring, Token};
use crate::kick::Kick;

impl Ring {
    /// Completes `token` once, when `kick`'s descriptor is readable. Must be called again for the next kick.
    ///
    /// # Safety
    /// The kick must exist until that completion, or until the ring is dropped.
    pub unsafe fn watch(&mut self, kick: &Arc<Kick>, token: Token) {
        let entry = opcode::PollAdd::new(types::Fd(kick.fd().as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: the caller keeps the kick's descriptor open; the entry refers to no memory.
        unsafe { self.push(entry, token) }
    }
}
