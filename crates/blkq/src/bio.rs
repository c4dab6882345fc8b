//! A [`Bio`] is what a caller asks for: operation, flags, place, length, memory.

use bitflags::bitflags;

use crate::buffer::{Data, IoBuffer};
use crate::error::IoResult;
use crate::sector::{SECTOR_SHIFT, Sector};

/// The operation of an I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Device to memory.
    Read = 0,
    /// Memory to device.
    Write = 1,
    /// The content of the range is no longer needed.
    Discard = 2,
    /// The range shall read as zeroes.
    WriteZeroes = 3,
    /// Makes all writes that completed before this was submitted survive a loss of power.
    Flush = 4,
}

impl Operation {
    /// Number of operations.
    pub const COUNT: usize = 5;
    /// Every operation, in the order of its number.
    pub const ALL: [Operation; Self::COUNT] =
        [Operation::Read, Operation::Write, Operation::Discard, Operation::WriteZeroes, Operation::Flush];

    /// Whether it changes the device.
    pub const fn is_write(self) -> bool {
        !matches!(self, Operation::Read | Operation::Flush)
    }

    /// Whether it carries memory.
    pub const fn has_data(self) -> bool {
        matches!(self, Operation::Read | Operation::Write)
    }

    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Discard => "discard",
            Operation::WriteZeroes => "write-zeroes",
            Operation::Flush => "flush",
        }
    }
}

bitflags! {
    /// Modifiers of an operation.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct BioFlags: u8 {
        /// The write itself survives a loss of power once it has completed (REQ_FUA).
        const FUA = 1 << 0;
        /// A flush comes before it (REQ_PREFLUSH). Writes only.
        const PREFLUSH = 1 << 1;
        /// Write zeroes must not deallocate (REQ_NOUNMAP).
        const NO_UNMAP = 1 << 2;
        /// Write zeroes fails with NotSupported where the layer would have to write
        /// zeroes itself (BLKDEV_ZERO_NOFALLBACK; NBD's fast zero).
        const NO_FALLBACK = 1 << 3;
        /// Fail with [`Status::Again`](crate::Status::Again) instead of waiting for a tag (REQ_NOWAIT).
        const NO_WAIT = 1 << 4;
        /// Never merge this bio with another (REQ_NOMERGE).
        const NO_MERGE = 1 << 5;
    }
}

/// An I/O as its caller states it.
///
/// Accepted by `submit` means completed exactly once; rejected means handed back, with
/// no completion.
#[derive(Debug)]
pub struct Bio {
    /// The operation.
    pub operation: Operation,
    /// How.
    pub flags: BioFlags,
    /// Where it begins. Must be 0 for a flush.
    pub sector: Sector,
    /// How long it is, in 512-byte sectors. 0 for a flush; any other operation then does nothing,
    /// but that PREFLUSH still flushes.
    pub sectors: u64,
    /// Memory to fill or to write; none for other operations, which with memory are
    /// [`Status::Invalid`](crate::Status::Invalid).
    pub data: Data,
    /// The caller's own number, returned in the [`Completion`].
    pub user_data: u64,
}

impl Bio {
    /// Reads into all of `buffer`, whose length must be a multiple of 512.
    pub fn read(sector: Sector, buffer: IoBuffer, user_data: u64) -> Bio {
        Bio::transfer(Operation::Read, sector, buffer, user_data)
    }

    /// Writes all of `buffer`, whose length must be a multiple of 512.
    pub fn write(sector: Sector, buffer: IoBuffer, user_data: u64) -> Bio {
        Bio::transfer(Operation::Write, sector, buffer, user_data)
    }

    fn transfer(operation: Operation, sector: Sector, buffer: IoBuffer, user_data: u64) -> Bio {
        let sectors = buffer.len() as u64 >> SECTOR_SHIFT;
        Bio { operation, flags: BioFlags::empty(), sector, sectors, data: Data::Buffer(buffer), user_data }
    }

    /// Discards: the content of a range is no longer needed.
    pub fn discard(sector: Sector, sectors: u64, user_data: u64) -> Bio {
        Bio::bare(Operation::Discard, sector, sectors, user_data)
    }

    /// Makes a range read as zeroes.
    pub fn write_zeroes(sector: Sector, sectors: u64, user_data: u64) -> Bio {
        Bio::bare(Operation::WriteZeroes, sector, sectors, user_data)
    }

    /// Makes everything that has completed survive a loss of power.
    pub fn flush(user_data: u64) -> Bio {
        Bio::bare(Operation::Flush, Sector(0), 0, user_data)
    }

    fn bare(operation: Operation, sector: Sector, sectors: u64, user_data: u64) -> Bio {
        Bio { operation, flags: BioFlags::empty(), sector, sectors, data: Data::None, user_data }
    }

    /// The same bio with `flags` added.
    #[must_use]
    pub fn with_flags(mut self, flags: BioFlags) -> Bio {
        self.flags |= flags;
        self
    }
}

/// The completion of a bio.
#[derive(Debug)]
pub struct Completion {
    /// The `user_data` of the bio.
    pub user_data: u64,
    /// Whether it did all that was asked, or why not. There are no short counts.
    pub result: IoResult,
    /// The memory of the bio, returned.
    pub data: Data,
}

/// A bio without its memory: the first state of its request.
#[derive(Clone, Copy)]
pub(crate) struct Outline {
    pub operation: Operation,
    pub flags: BioFlags,
    pub sector: Sector,
    pub sectors: u64,
    pub start_ns: u64,
}
