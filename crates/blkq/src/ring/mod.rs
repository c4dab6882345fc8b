//! The one io_uring of a thread: set-up with fallbacks, probing, registered files and
//! buffers, and a submission queue that cannot be full.

mod registrar;
#[cfg(any(loom, shuttle))]
mod twin;
#[cfg(not(any(simulation, loom, shuttle)))]
mod uring;

use std::sync::OnceLock;

use io_uring::{cqueue, opcode, types};

use crate::error::Error;

#[cfg(simulation)]
pub(crate) use crate::simulation::Ring;
pub use registrar::Registrar;
#[cfg(any(loom, shuttle))]
pub(crate) use twin::Ring;
#[cfg(not(any(simulation, loom, shuttle)))]
pub(crate) use uring::Ring;

/// Whom a completion of the ring belongs to: 16 bits of owner, 48 of the owner's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token(pub u64);

impl Token {
    /// A token of `owner`, with the low 48 bits of `payload`: no payload reaches another owner.
    #[inline]
    pub const fn new(owner: u16, payload: u64) -> Token {
        Token((owner as u64) << 48 | payload & PAYLOAD_MASK)
    }

    /// Who submitted it.
    #[inline]
    pub const fn owner(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The owner's own mark.
    #[inline]
    pub const fn payload(self) -> u64 {
        self.0 & PAYLOAD_MASK
    }
}

/// The bits of a token that are its owner's own.
const PAYLOAD_MASK: u64 = (1 << 48) - 1;

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

/// A number that no other ring of the process has had; 0 is none.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn new_ring_id() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

/// A file in a ring's table: operations on it skip the reference counting of a descriptor. Made by
/// [`Registrar::register_file`] and good for that ring alone, until it is unregistered.
#[derive(Debug)]
pub struct FileSlot {
    /// The ring's number; 0 once it is unregistered.
    ring: u64,
    index: u32,
}

impl FileSlot {
    #[cfg(not(any(loom, shuttle)))]
    pub(crate) fn new(ring: u64, index: u32) -> FileSlot {
        FileSlot { ring, index }
    }

    /// The place in the table of the ring with number `ring`.
    ///
    /// # Panics
    /// If the slot is another ring's, or was unregistered: the place is another file's by now.
    #[inline]
    pub(crate) fn of_ring(&self, ring: u64) -> types::Fixed {
        assert!(self.ring == ring, "the file is not registered with this ring");
        types::Fixed(self.index)
    }

    /// Empties the slot and returns its place in the table of the ring with number `ring`.
    ///
    /// # Panics
    /// As [`FileSlot::of_ring`].
    #[cfg(not(any(loom, shuttle)))]
    pub(crate) fn take(&mut self, ring: u64) -> u32 {
        let types::Fixed(index) = self.of_ring(ring);
        self.ring = 0;
        index
    }
}

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

/// Asks the kernel what the rings of an engine can do.
///
/// # Errors
/// What keeps a ring from being set up: [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)
/// on kernels before 6.1 or where io_uring is forbidden.
pub fn probe() -> Result<RingProbe, Error> {
    Ring::new(8).map(RingProbe)
}

/// What the rings of this kernel can do.
pub struct RingProbe(Ring);

impl RingProbe {
    /// Whether the kernel knows the operation with number `code` (`opcode::X::CODE`).
    pub fn supports(&self, code: u8) -> bool {
        self.0.supports(code)
    }
}

/// The operations that every blkq engine uses, by name, to be probed.
pub const ENGINE_OPERATIONS: [(&str, u8); 3] = [
    ("IORING_OP_READ", opcode::Read::CODE),
    ("IORING_OP_POLL_ADD", opcode::PollAdd::CODE),
    ("IORING_OP_ASYNC_CANCEL", opcode::AsyncCancel::CODE),
];
