//! The values with which users of a ring name operations, completions and files, and the policy of all rings.

use std::sync::OnceLock;

use crate::error::Error;

/// The operations that are permitted on the rings of a confined process. A system call filter does not see
/// operations of a ring, so the ring itself has to be restricted.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The numbers (`opcode::X::CODE`) of the permitted operations. The kernel fails all others with EACCES.
    pub operations: &'static [u8],
    /// Called on the thread of each engine once its ring is set up. The engine sets up no other ring.
    pub sealed: fn() -> Result<(), Error>,
}

pub(super) static POLICY: OnceLock<Policy> = OnceLock::new();

pub(crate) fn policy() -> Option<&'static Policy> {
    POLICY.get()
}

/// Identifies an operation of the ring: 16 bits for its owner, and 48 bits of payload for the owner's use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token(pub u64);

impl Token {
    /// A token of `owner`, with the low 48 bits of `payload`. No payload can change the owner.
    pub const fn new(owner: u16, payload: u64) -> Token {
        Token((owner as u64) << 48 | payload & PAYLOAD_MASK)
    }

    /// The owner, to which completions of the operation are routed.
    pub const fn owner(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The 48 bits for the owner's use.
    pub const fn payload(self) -> u64 {
        self.0 & PAYLOAD_MASK
    }
}

const PAYLOAD_MASK: u64 = (1 << 48) - 1;

/// The owner in the tokens of operations that wait for kicks.
pub(crate) const KICK: u16 = u16::MAX;

/// The completion of one submission.
#[derive(Clone, Copy, Debug)]
pub struct Cqe {
    /// The token of the submission.
    pub token: Token,
    /// The operation's result, or a negative errno.
    pub result: i32,
    /// The flags of the completion (`IORING_CQE_F_*` of io_uring.h).
    pub flags: u32,
}

impl Cqe {
    /// Whether a multishot submission will post more completions.
    pub fn more(self) -> bool {
        io_uring::cqueue::more(self.flags)
    }
}

/// The counters of a ring, since it was set up.
#[derive(Clone, Copy, Default, Debug)]
#[non_exhaustive]
pub struct RingCounters {
    /// Calls of io_uring_enter(2), including those that only submit.
    pub enters: u64,
    /// The calls that submitted a part of a driver's batch before the driver had pushed the rest.
    pub early_submissions: u64,
    /// Operations that were added to the submission queue.
    pub submissions: u64,
}

/// A file in a ring's table. Operations on it avoid the reference counting of descriptors. Created by
/// [`Registrar::register_file`](crate::Registrar::register_file), and valid only for that ring until the file
/// is unregistered.
#[derive(Debug)]
pub struct FileSlot {
    /// The ring's number; 0 once the file is unregistered.
    pub(super) ring: u64,
    pub(super) index: u32,
}
