//! The one io_uring of a thread: set-up with fallbacks, probing, registered files and
//! buffers, and a submission queue that cannot be full.

#[cfg(any(loom, shuttle))]
mod twin;
#[cfg(not(any(simulation, loom, shuttle)))]
mod uring;

use std::sync::OnceLock;

use io_uring::{cqueue, opcode};

use crate::error::Error;

#[cfg(simulation)]
pub use crate::simulation::Ring;
#[cfg(any(loom, shuttle))]
pub use twin::Ring;
#[cfg(not(any(simulation, loom, shuttle)))]
pub use uring::Ring;

/// Whom a completion of the ring belongs to: 16 bits of owner, 48 of the owner's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token(pub u64);

impl Token {
    /// A token of `owner`; `payload` below 2^48.
    #[inline]
    pub const fn new(owner: u16, payload: u64) -> Token {
        debug_assert!(payload < 1 << 48);
        Token((owner as u64) << 48 | payload)
    }

    /// Who submitted it.
    #[inline]
    pub const fn owner(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The owner's own mark.
    #[inline]
    pub const fn payload(self) -> u64 {
        self.0 & ((1 << 48) - 1)
    }
}

/// The end of one submission: an errno below zero, or the operation's count.
#[derive(Clone, Copy, Debug)]
pub struct Cqe {
    /// As it was submitted.
    pub token: Token,
    /// Negative errno or count.
    pub result: i32,
    /// `IORING_CQE_F_*`.
    pub flags: u32,
}

impl Cqe {
    /// Whether a multishot submission will post more completions.
    pub fn more(self) -> bool {
        cqueue::more(self.flags)
    }
}

/// What the ring did so far.
#[derive(Clone, Copy, Default, Debug)]
pub struct RingCounters {
    /// Calls of io_uring_enter.
    pub enters: u64,
    /// Submissions.
    pub submissions: u64,
    /// Completions.
    pub completions: u64,
}

/// A file in the ring's table: operations on it skip the reference counting of a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileSlot(pub u32);

/// What the rings of this process may do from when it is set, for a process that is confined: the
/// operations of a ring are no system calls, and what filters those does not see them.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The numbers (`opcode::X::CODE`) of those that a ring carries out; others fail with EACCES.
    pub operations: &'static [u8],
    /// Called on the thread of each engine when its ring is there: it makes no other.
    pub sealed: fn() -> Result<(), Error>,
}

static POLICY: OnceLock<Policy> = OnceLock::new();

/// Has `policy` hold for all rings that are made from now on. The first one stays.
pub fn set_policy(policy: Policy) {
    #[cfg(not(any(simulation, loom, shuttle)))]
    uring::look_at_limits();
    // A second one would be the same one again, or come too late.
    let _ = POLICY.set(policy);
}

/// What holds for new rings.
pub(crate) fn policy() -> Option<&'static Policy> {
    POLICY.get()
}

/// The operations that every blkq engine uses, by name, to be probed.
pub const ENGINE_OPERATIONS: [(&str, u8); 3] = [
    ("IORING_OP_READ", opcode::Read::CODE),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE),
];
