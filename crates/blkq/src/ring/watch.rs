//! Waiting for a kick: a poll of its descriptor.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, types};

use super::{Ring, Token};
use crate::kick::Kick;

impl Ring {
    /// Completes `token` when `kick`'s descriptor is readable: once, and then again only when
    /// asked again.
    ///
    /// # Safety
    /// The kick lives until that completion, or as long as the ring.
    pub unsafe fn watch(&mut self, kick: &Arc<Kick>, token: Token) {
        let entry = opcode::PollAdd::new(types::Fd(kick.fd().as_raw_fd()), libc::POLLIN as u32).build();
        // SAFETY: the caller's promise; the entry has no memory.
        unsafe { self.push(entry, token) }
    }
}
