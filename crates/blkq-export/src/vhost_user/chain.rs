//! A chain of descriptors, copied out of the ring once; and the errors that stop a ring.

use std::fmt;

/// Most descriptors of a chain. A driver makes no chain longer than its ring, and no known front end has
/// rings of more than 1024 descriptors. An indirect table may be longer than the ring, up to this limit.
pub const DESCRIPTORS_MAX: usize = 1024;

/// The chain continues with another descriptor.
pub const DESCRIPTOR_NEXT: u16 = 1;
/// The device writes the buffer, and does not read it.
pub const DESCRIPTOR_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const DESCRIPTOR_INDIRECT: u16 = 4;
/// Size of a descriptor in the ring.
pub const DESCRIPTOR_BYTES: usize = 16;

/// A buffer of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// Guest address of the first byte.
    pub address: u64,
    /// Length in bytes, at least 1.
    pub length: u32,
}

/// Identifies a chain from the time it is taken from the ring until it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// The index of the first descriptor, or the buffer identifier of a packed ring. It is less than the
    /// ring's size, and no two chains in flight have the same.
    pub index: u16,
    /// Number of descriptors of the ring that the chain occupies. Only a packed ring counts them.
    pub(super) slots: u16,
    /// The first entry of the chain in the record of requests in flight of a packed ring.
    pub(super) record: u16,
}

/// The buffers of a chain: first those that the device reads, then those that it writes.
#[derive(Default, Debug)]
pub struct Chain {
    buffers: Vec<Buffer>,
    readable: usize,
}

impl Chain {
    pub fn new() -> Chain {
        Chain { buffers: Vec::with_capacity(256), readable: 0 }
    }

    #[inline]
    pub fn readable(&self) -> &[Buffer] {
        &self.buffers[..self.readable]
    }

    #[inline]
    pub fn writable(&self) -> &[Buffer] {
        &self.buffers[self.readable..]
    }

    /// The number of buffers, which is the number of descriptors that were read for them.
    #[inline]
    pub fn descriptors(&self) -> usize {
        self.buffers.len()
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.buffers.clear();
        self.readable = 0;
    }

    #[inline]
    pub(super) fn push(&mut self, head: u16, buffer: Buffer, flags: u16) -> Result<(), RingError> {
        if buffer.length == 0 {
            return Err(RingError::EmptyBuffer { head });
        }
        if self.buffers.len() >= DESCRIPTORS_MAX {
            return Err(RingError::ChainTooLong { head });
        }
        if flags & DESCRIPTOR_WRITE == 0 {
            if self.buffers.len() > self.readable {
                return Err(RingError::Order { head });
            }
            self.readable += 1;
        }
        self.buffers.push(buffer);
        Ok(())
    }
}

/// A part of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    Descriptors,
    /// The area that the driver writes: the available ring, or the event suppression of a packed ring.
    Driver,
    /// The area that the device writes: the used ring, or the device's event suppression of a packed ring.
    Device,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Descriptors => "descriptors",
            Part::Driver => "driver area",
            Part::Device => "device area",
        })
    }
}

/// Why a ring was stopped: how the guest or its front end violated the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the message of each variant explains its fields")]
pub enum RingError {
    Size { size: u32 },
    Unmapped { part: Part, address: u64 },
    Base { base: u32 },
    AvailableIndex { index: u16, expected: u16, size: u16 },
    HeadRange { head: u16, size: u16 },
    HeadInFlight { head: u16 },
    NextRange { head: u16, next: u16 },
    ChainLoop { head: u16 },
    ChainTooLong { head: u16 },
    RingOverrun { head: u16 },
    IndirectNotNegotiated { head: u16 },
    IndirectLength { head: u16, length: u32 },
    IndirectNested { head: u16 },
    IndirectNext { head: u16 },
    EmptyBuffer { head: u16 },
    Order { head: u16 },
    BufferUnmapped { address: u64, length: u32 },
    HeaderShort { bytes: u64 },
    NoStatus,
    Inflight { what: &'static str },
    MemoryLost,
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use RingError::*;
        match *self {
            Size { size } => write!(f, "a ring cannot have {size} descriptors"),
            Unmapped { part, address } => write!(
                f,
                "cannot use the {part} at {address:#x}: misaligned, or not inside one memory region"
            ),
            Base { base } => write!(f, "the ring cannot start at base {base:#x}"),
            AvailableIndex { index, expected, size } => write!(
                f,
                "the available index jumped from {expected} to {index}, but the ring has {size} descriptors"
            ),
            HeadRange { head, size } => {
                write!(f, "descriptor {head} was made available, but the ring has {size} descriptors")
            }
            HeadInFlight { head } => write!(f, "descriptor {head} was made available while it is in flight"),
            NextRange { head, next } => write!(
                f,
                "the chain of descriptor {head} continues at descriptor {next}, which does not exist"
            ),
            ChainLoop { head } => write!(f, "the chain of descriptor {head} is a loop"),
            ChainTooLong { head } => {
                write!(f, "the chain of descriptor {head} has more than {DESCRIPTORS_MAX} buffers")
            }
            RingOverrun { head } => {
                write!(f, "the chain of buffer {head} has more descriptors than are free in the ring")
            }
            IndirectNotNegotiated { head } => {
                write!(f, "the chain of descriptor {head} has an indirect table, which was not negotiated")
            }
            IndirectLength { head, length } => {
                write!(f, "the indirect table of descriptor {head} cannot have {length} bytes")
            }
            IndirectNested { head } => {
                write!(f, "the indirect table of descriptor {head} contains another indirect table")
            }
            IndirectNext { head } => {
                write!(f, "the chain of descriptor {head} continues after an indirect table")
            }
            EmptyBuffer { head } => write!(f, "the chain of descriptor {head} has a buffer of 0 bytes"),
            Order { head } => {
                write!(f, "the chain of descriptor {head} has a readable buffer after a writable one")
            }
            BufferUnmapped { address, length } => {
                write!(f, "the {length} bytes at guest address {address:#x} are not guest memory")
            }
            HeaderShort { bytes } => write!(f, "a request has only {bytes} bytes of its header"),
            NoStatus => f.write_str("a request has no byte for its status"),
            Inflight { what } => write!(f, "the in-flight table is invalid: {what}"),
            MemoryLost => f.write_str("the file of guest memory was truncated"),
        }
    }
}
