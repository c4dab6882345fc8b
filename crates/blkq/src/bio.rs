use bitflags::bitflags;

use crate::buffer::{Data, IoBuffer};
use crate::enumeration::enumeration;
use crate::error::IoResult;
use crate::sector::{SECTOR_SHIFT, Sector};

enumeration! {
    /// The operation of an I/O.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
    #[repr(u8)]
    pub enum Operation {
        /// Reads from the device into memory.
        Read = 0 => "read",
        /// Writes from memory to the device.
        Write = 1 => "write",
        /// Declares that the contents of a range are no longer needed.
        Discard = 2 => "discard",
        /// Makes a range read as zeroes.
        WriteZeroes = 3 => "write-zeroes",
        /// Makes all writes durable that completed before the flush was submitted.
        Flush = 4 => "flush",
    }

    /// The name of the operation in tables.
    pub const fn name(self) -> &'static str;
}

impl Operation {
    /// Whether the operation changes the device.
    pub const fn is_write(self) -> bool {
        !matches!(self, Operation::Read | Operation::Flush)
    }

    /// Whether the operation carries memory.
    pub const fn has_data(self) -> bool {
        matches!(self, Operation::Read | Operation::Write)
    }
}

bitflags! {
    /// Modifiers of an operation, a subset of the kernel's REQ_ flags.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct BioFlags: u8 {
        /// The write is durable when it completes (REQ_FUA).
        const FUA = 1 << 0;
        /// A flush precedes the data (REQ_PREFLUSH). Only for operations that change the device.
        const PREFLUSH = 1 << 1;
        /// Write-zeroes must not deallocate (REQ_NOUNMAP).
        const NO_UNMAP = 1 << 2;
        /// Write-zeroes fails with [`Status::NotSupported`](crate::Status::NotSupported) if the queue would
        /// have to write zeroes itself (BLKDEV_ZERO_NOFALLBACK; NBD's fast zero).
        const NO_FALLBACK = 1 << 3;
        /// The bio fails with [`Status::Again`](crate::Status::Again) instead of waiting for a tag
        /// (REQ_NOWAIT).
        const NO_WAIT = 1 << 4;
        /// The bio is never merged with another (REQ_NOMERGE).
        const NO_MERGE = 1 << 5;
    }
}

/// An I/O as its caller describes it (`struct bio`).
///
/// A bio that `submit` accepts completes exactly once. A rejected bio is returned and does not complete.
#[derive(Debug)]
pub struct Bio {
    /// The operation on the range.
    pub operation: Operation,
    /// Flags that modify the operation.
    pub flags: BioFlags,
    /// First sector. Must be 0 for a flush.
    pub sector: Sector,
    /// Length in 512-byte sectors. 0 for a flush. Any other operation of length 0 completes without effect,
    /// except that PREFLUSH still flushes.
    pub sectors: u64,
    /// Memory to fill or to write. Must be [`Data::None`] for operations without data; otherwise the bio
    /// fails with [`Status::Invalid`](crate::Status::Invalid).
    pub data: Data,
    /// A number of the caller's choice, returned in the [`Completion`].
    pub user_data: u64,
}

impl Bio {
    /// A read into all of `buffer`, whose length must be a multiple of 512.
    pub fn read(sector: Sector, buffer: IoBuffer, user_data: u64) -> Bio {
        Bio::transfer(Operation::Read, sector, buffer, user_data)
    }

    /// A write of all of `buffer`, whose length must be a multiple of 512.
    pub fn write(sector: Sector, buffer: IoBuffer, user_data: u64) -> Bio {
        Bio::transfer(Operation::Write, sector, buffer, user_data)
    }

    fn transfer(operation: Operation, sector: Sector, buffer: IoBuffer, user_data: u64) -> Bio {
        let sectors = buffer.len() as u64 >> SECTOR_SHIFT;
        Bio { operation, flags: BioFlags::empty(), sector, sectors, data: Data::Buffer(buffer), user_data }
    }

    /// A discard: the contents of the range are no longer needed.
    pub fn discard(sector: Sector, sectors: u64, user_data: u64) -> Bio {
        Bio::bare(Operation::Discard, sector, sectors, user_data)
    }

    /// A write-zeroes, which may deallocate the range.
    pub fn write_zeroes(sector: Sector, sectors: u64, user_data: u64) -> Bio {
        Bio::bare(Operation::WriteZeroes, sector, sectors, user_data)
    }

    /// A flush: makes everything durable that has completed.
    pub fn flush(user_data: u64) -> Bio {
        Bio::bare(Operation::Flush, Sector(0), 0, user_data)
    }

    pub(crate) fn bare(operation: Operation, sector: Sector, sectors: u64, user_data: u64) -> Bio {
        Bio { operation, flags: BioFlags::empty(), sector, sectors, data: Data::None, user_data }
    }

    /// Adds `flags` to the bio.
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
    /// Success, or why the bio failed. There are no short transfers.
    pub result: IoResult,
    /// The memory of the bio.
    pub data: Data,
}

/// A bio without its memory: what its request is built from.
#[derive(Clone, Copy)]
pub(crate) struct Outline {
    pub operation: Operation,
    pub flags: BioFlags,
    pub sector: Sector,
    pub sectors: u64,
    pub start_ns: u64,
}
