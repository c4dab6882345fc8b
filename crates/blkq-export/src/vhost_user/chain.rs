//! A chain of descriptors as it was read, once, and why a ring cannot be served any longer.

use std::fmt;

/// Most descriptors of a chain. A driver makes none longer than its ring, which has at most 1024 in
/// every front end known; some make longer ones in an indirect table, up to this.
pub const DESCRIPTORS_MAX: usize = 1024;

/// A descriptor may be followed by another.
pub const DESCRIPTOR_NEXT: u16 = 1;
/// The device writes the buffer.
pub const DESCRIPTOR_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub const DESCRIPTOR_INDIRECT: u16 = 4;
/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// A buffer of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Buffer {
    /// Guest address of the first byte.
    pub address: u64,
    /// Bytes, at least one.
    pub length: u32,
}

/// A chain that was taken from a ring and goes back to it: which one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Less than the ring's size, and in flight once at a time.
    pub index: u16,
    /// Descriptors of the ring that it takes: those of a packed ring are counted.
    pub(super) slots: u16,
    /// Of a packed ring that records what is in flight: the first record.
    pub(super) record: u16,
}

/// The buffers of a chain: first those that the device reads, then those that it writes.
#[derive(Default, Debug)]
pub struct Chain {
    buffers: Vec<Buffer>,
    readable: usize,
}

impl Chain {
    /// An empty one, which is filled again and again.
    pub fn new() -> Chain {
        Chain { buffers: Vec::with_capacity(256), readable: 0 }
    }

    /// The buffers that the device reads.
    #[inline]
    pub fn readable(&self) -> &[Buffer] {
        &self.buffers[..self.readable]
    }

    /// The buffers that the device writes.
    #[inline]
    pub fn writable(&self) -> &[Buffer] {
        &self.buffers[self.readable..]
    }

    /// How many buffers there are: the descriptors that were read for them.
    #[inline]
    pub fn descriptors(&self) -> usize {
        self.buffers.len()
    }

    #[inline]
    pub(super) fn clear(&mut self) {
        self.buffers.clear();
        self.readable = 0;
    }

    /// Adds the buffer of a descriptor with `flags`.
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
    /// The descriptors.
    Descriptors,
    /// Written by the driver: the available ring, or when it wants to be called.
    Driver,
    /// Written by the device: the used ring, or when it wants to be kicked.
    Device,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Descriptors => "descriptors",
            Part::Driver => "driver's area",
            Part::Device => "device's area",
        })
    }
}

/// Why a ring was stopped: what the guest, or its front end, did against the specification.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the text of each names its fields")]
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
            Size { size } => write!(f, "a ring of {size} descriptors"),
            Unmapped { part, address } => {
                write!(f, "the {part} at {address:#x} are misaligned or not inside one memory region")
            }
            Base { base } => write!(f, "the ring cannot begin at {base:#x}"),
            AvailableIndex { index, expected, size } => write!(
                f,
                "the available index jumped from {expected} to {index}, which is more than {size} descriptors"
            ),
            HeadRange { head, size } => write!(f, "descriptor {head} is available, of {size}"),
            HeadInFlight { head } => write!(f, "descriptor {head} is available again while it is in flight"),
            NextRange { head, next } => write!(f, "the chain of descriptor {head} names descriptor {next}"),
            ChainLoop { head } => write!(f, "the chain of descriptor {head} is a loop"),
            ChainTooLong { head } => {
                write!(f, "the chain of descriptor {head} has more than {DESCRIPTORS_MAX} buffers")
            }
            RingOverrun { head } => {
                write!(f, "the chain of buffer {head} is longer than what is free in the ring")
            }
            IndirectNotNegotiated { head } => {
                write!(f, "the chain of descriptor {head} is indirect, which was not negotiated")
            }
            IndirectLength { head, length } => {
                write!(f, "the indirect table of descriptor {head} has {length} bytes")
            }
            IndirectNested { head } => write!(f, "the indirect table of descriptor {head} has another one"),
            IndirectNext { head } => write!(f, "an indirect table of descriptor {head} is not the last"),
            EmptyBuffer { head } => write!(f, "the chain of descriptor {head} has a buffer without bytes"),
            Order { head } => {
                write!(f, "the chain of descriptor {head} has a buffer to read behind one to write")
            }
            BufferUnmapped { address, length } => {
                write!(f, "the {length} bytes at guest address {address:#x} are not memory")
            }
            HeaderShort { bytes } => write!(f, "a request header of {bytes} bytes"),
            NoStatus => f.write_str("a request without a byte for its status"),
            Inflight { what } => write!(f, "the record of requests in flight: {what}"),
            MemoryLost => f.write_str("guest memory was truncated under the device"),
        }
    }
}
