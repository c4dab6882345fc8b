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
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
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

    pub fn readable(&self) -> &[Buffer] {
        &self.buffers[..self.readable]
    }

    pub fn writable(&self) -> &[Buffer] {
        &self.buffers[self.readable..]
    }

    /// The number of buffers, which is the number of descriptors that were read for them.
    pub fn descriptors(&self) -> usize {
        self.buffers.len()
    }

    pub(super) fn clear(&mut self) {
        self.buffers.clear();
        self.readable = 0;
    }

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

/// Declares the errors, each with its message.
macro_rules! ring_errors {
    ($($Error:ident $({ $($field:ident: $type:ty),* })? => $message:literal,)*) => {
        /// Why a ring was stopped: how the guest or its front end violated the specification.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[allow(missing_docs, reason = "the message of each variant explains its fields")]
        pub enum RingError {
            $($Error $({ $($field: $type),* })?,)*
        }

        impl fmt::Display for RingError {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(RingError::$Error $({ $($field),* })? => write!(f, $message),)*
                }
            }
        }
    };
}

ring_errors! {
    Size { size: u32 } => "a ring cannot have {size} descriptors",
    Unmapped { part: &'static str, address: u64 } =>
        "cannot use the {part} at {address:#x}: misaligned, or not inside one memory region",
    Base { base: u32 } => "the ring cannot start at base {base:#x}",
    AvailableIndex { index: u16, expected: u16, size: u16 } =>
        "the available index jumped from {expected} to {index}, but the ring has {size} descriptors",
    HeadRange { head: u16, size: u16 } =>
        "descriptor {head} was made available, but the ring has {size} descriptors",
    HeadInFlight { head: u16 } => "descriptor {head} was made available while it is in flight",
    NextRange { head: u16, next: u16 } =>
        "the chain of descriptor {head} continues at descriptor {next}, which does not exist",
    ChainLoop { head: u16 } => "the chain of descriptor {head} is a loop",
    ChainTooLong { head: u16 } => "the chain of descriptor {head} has more than {DESCRIPTORS_MAX} buffers",
    RingOverrun { head: u16 } => "the chain of buffer {head} has more descriptors than are free in the ring",
    IndirectNotNegotiated { head: u16 } =>
        "the chain of descriptor {head} has an indirect table, which was not negotiated",
    IndirectLength { head: u16, length: u32 } =>
        "the indirect table of descriptor {head} cannot have {length} bytes",
    IndirectNested { head: u16 } =>
        "the indirect table of descriptor {head} contains another indirect table",
    IndirectNext { head: u16 } => "the chain of descriptor {head} continues after an indirect table",
    EmptyBuffer { head: u16 } => "the chain of descriptor {head} has a buffer of 0 bytes",
    Order { head: u16 } => "the chain of descriptor {head} has a readable buffer after a writable one",
    BufferUnmapped { address: u64, length: u32 } =>
        "the {length} bytes at guest address {address:#x} are not guest memory",
    HeaderShort { bytes: u64 } => "a request has only {bytes} bytes of its header",
    NoStatus => "a request has no byte for its status",
    Inflight { what: &'static str } => "the in-flight table is invalid: {what}",
    MemoryLost => "the file of guest memory was truncated",
}
