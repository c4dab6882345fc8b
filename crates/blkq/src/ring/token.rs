//! The values that go in and out of a ring: tokens, completions, registered files.

use io_uring::{cqueue, types};

/// To which owner a completion of the ring belongs: 16 bits of owner, 48 of the owner's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Token(pub u64);

impl Token {
    /// A token of `owner`, with the low 48 bits of `payload`: no payload reaches another owner.
    #[inline]
    pub const fn new(owner: u16, payload: u64) -> Token {
        Token((owner as u64) << 48 | payload & PAYLOAD_MASK)
    }

    /// The owner that submitted it.
    #[inline]
    pub const fn owner(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The owner's own number.
    #[inline]
    pub const fn payload(self) -> u64 {
        self.0 & PAYLOAD_MASK
    }
}

/// The bits of a token that are its owner's own.
const PAYLOAD_MASK: u64 = (1 << 48) - 1;

/// The result of one submission: an errno below zero, or the operation's count.
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

/// The counters of a ring.
#[derive(Clone, Copy, Default, Debug)]
#[non_exhaustive]
pub struct RingCounters {
    /// Calls of io_uring_enter.
    pub enters: u64,
    /// Of these, those that submitted what drivers had pushed before they pushed more.
    pub early_submissions: u64,
    /// Submissions.
    pub submissions: u64,
    /// Completions.
    pub completions: u64,
}

/// A number that no other ring of the process has had; 0 is none.
#[cfg(not(model_check))]
pub(crate) fn new_ring_id() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Relaxed)
}

/// A file in a ring's table: operations on it skip the reference counting of a descriptor. Made by
/// [`Registrar::register_file`](crate::Registrar::register_file) and good for that ring alone, until it is
/// unregistered.
#[derive(Debug)]
pub struct FileSlot {
    /// The ring's number; 0 once it is unregistered.
    ring: u64,
    index: u32,
}

impl FileSlot {
    #[cfg(not(model_check))]
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
    #[cfg(not(model_check))]
    pub(crate) fn take(&mut self, ring: u64) -> u32 {
        let types::Fixed(index) = self.of_ring(ring);
        self.ring = 0;
        index
    }
}
