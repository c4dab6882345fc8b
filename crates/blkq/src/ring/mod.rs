//! The io_uring of a thread: set-up with fallbacks for older kernels, probing, registered files and buffers,
//! and a submission queue that never reports that it is full.

mod interface;
mod registrar;
mod tables;
#[cfg_attr(simulation, path = "simulated.rs")]
#[cfg_attr(model_check, path = "twin.rs")]
mod uring;

#[cfg(not(model_check))]
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::{opcode, types};

use crate::buffer::Segment;
use crate::error::Error;
use crate::kick::Kick;

pub use interface::{Cqe, FileSlot, Policy, RingCounters, Token};
pub(crate) use interface::{KICK, policy};
pub use registrar::Registrar;
pub(crate) use uring::Ring;

/// Applies `policy` to all rings set up from now on. Only the first call of a process takes effect.
pub fn set_policy(policy: Policy) {
    #[cfg(not(any(simulation, model_check)))]
    uring::read_limits();
    // A second policy is either identical or too late, because rings may exist already.
    let _ = interface::POLICY.set(policy);
}

/// The largest number of bytes that can be registered together: 1 GiB (io_uring/rsrc.c,
/// `io_buffer_validate`).
pub const REGISTERED_MEMORY_MAX_BYTES: u64 = 1 << 30;

/// Queries which operations the rings of an engine support. The result returns whether the kernel supports the
/// operation with a number (`opcode::X::CODE`). Fails with
/// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) on kernels before 6.1 or where io_uring is
/// forbidden.
pub fn probe() -> Result<impl Fn(u8) -> bool, Error> {
    Ring::new(8).map(|ring| move |code| ring.supports(code))
}

/// The operations that every blkq engine uses, with their names, for probing.
pub const ENGINE_OPERATIONS: [(&str, u8); 3] = [
    ("IORING_OP_READ", opcode::Read::CODE),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE),
];

impl Ring {
    /// The index of a registered file, for use in an entry. Panics if the file is not registered with this ring:
    /// another file may have its index by now.
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        assert!(slot.ring == self.tables.ring, "the file is not registered with this ring");
        types::Fixed(slot.index)
    }

    /// The slot of the registered buffer in which `segment` lies, for use in an entry. `None` if the buffer
    /// is not registered with this ring, or not all of the segment is registered.
    pub fn registered_buffer(&self, segment: &Segment) -> Option<u16> {
        self.tables.place_of(segment)
    }

    pub fn kernel_buffers_left(&self) -> u16 {
        self.tables.kernel_buffers.len() as u16
    }

    pub fn counters(&self) -> RingCounters {
        self.counters
    }

    /// Lets an operation of [`KICK`] complete when `kick` is readable.
    pub fn watch(&mut self, kick: &Arc<Kick>) {
        self.tables.kicks.push(kick.clone());
        self.arm(self.tables.kicks.len() - 1);
    }

    /// Empties the kick of `cqe`, an operation of [`KICK`], and waits for it again.
    pub fn rewatch(&mut self, cqe: Cqe) {
        let index = cqe.token.payload() as usize;
        self.tables.kicks[index].drain();
        self.arm(index);
    }

    /// Calls [`Kick::prepare_sleep`] for all kicks of the ring.
    pub fn prepare_sleep(&self) {
        self.tables.kicks.iter().for_each(|kick| kick.prepare_sleep());
    }

    /// Calls [`Kick::woke`] for all kicks of the ring.
    pub fn woke(&self) {
        self.tables.kicks.iter().for_each(|kick| kick.woke());
    }

    #[cfg(not(model_check))]
    fn arm(&mut self, index: usize) {
        let kick = types::Fd(self.tables.kicks[index].fd().as_raw_fd());
        let entry = opcode::PollAdd::new(kick, libc::POLLIN as u32).build();
        // SAFETY: the ring keeps the kick, and so its descriptor open; the entry refers to no memory.
        unsafe { self.push(entry, Token::new(KICK, index as u64)) }
    }
}
