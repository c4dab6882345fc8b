//! The code that both kinds of ring share: chains of descriptors, copied out of the ring once; parts in memory,
//! indirect tables and event indexes; and the errors that stop a ring.

use std::fmt;
use std::sync::Arc;

use super::area::Area;
use super::memory::{Cursor, GuestMemory};

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

/// Calls `part` with the guest address and length of each part of the `bytes` bytes of `buffers` after the first
/// `skip`, and returns the number of these bytes that exist. Fails with [`RingError::BufferUnmapped`] if `part`
/// returns false.
pub fn for_each_part(
    buffers: &[Buffer],
    mut skip: u64,
    bytes: u64,
    mut part: impl FnMut(u64, u32) -> bool,
) -> Result<u64, RingError> {
    let mut left = bytes;
    for &Buffer { address, length } in buffers {
        if skip >= u64::from(length) {
            skip -= u64::from(length);
            continue;
        }
        let take = (u64::from(length) - skip).min(left) as u32;
        if !address.checked_add(skip).is_some_and(|at| part(at, take)) {
            return Err(RingError::BufferUnmapped { address, length });
        }
        (skip, left) = (0, left - u64::from(take));
        if left == 0 {
            break;
        }
    }
    Ok(bytes - left)
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

/// Offset of the entries in the available and the used ring of a split ring.
pub const ENTRIES_AT: usize = 4;
/// Size of an event suppression area of a packed ring.
const EVENT_BYTES: usize = 4;

/// A ring as a front end describes it. Addresses are those of the front end ("user addresses").
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct RingSpec {
    /// Number of descriptors: a power of two for a split ring.
    pub size: u16,
    /// Whether VIRTIO_F_RING_PACKED was negotiated: a packed ring, not a split one.
    pub packed: bool,
    /// Whether VIRTIO_F_RING_EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether VIRTIO_F_INDIRECT_DESC was negotiated.
    pub indirect: bool,
    /// Address of the descriptor table, or of the descriptor ring.
    pub descriptors: u64,
    /// Address of the available ring, or of the driver's event suppression area.
    pub driver_area: u64,
    /// Address of the used ring, or of the device's event suppression area.
    pub device_area: u64,
    /// The start position, as in SET_VRING_BASE.
    pub base: u32,
}

/// A ring of either kind: its three parts in the guest's memory, and the features that it is read with.
pub struct RingParts {
    pub descriptors: Area,
    /// The available ring, or the driver's event suppression area.
    pub driver: Area,
    /// The used ring, or the device's event suppression area.
    pub device: Area,
    pub size: u16,
    pub event_idx: bool,
    packed: bool,
    /// Whether indirect tables were negotiated.
    indirect: bool,
    memory: Arc<GuestMemory>,
    cursor: Cursor,
}

impl RingParts {
    /// Finds the parts in `memory`. Fails for a part that is misaligned or not inside one region.
    pub fn open(memory: &Arc<GuestMemory>, spec: &RingSpec) -> Result<RingParts, RingError> {
        let &RingSpec { size, packed, event_idx, indirect, .. } = spec;
        let entries = usize::from(size);
        // Flags and an index precede the entries of the available and the used ring, and an event index follows
        // them.
        let (driver, device) = match packed {
            true => ((EVENT_BYTES, 4), (EVENT_BYTES, 4)),
            false => ((ENTRIES_AT + entries * 2 + 2, 2), (ENTRIES_AT + entries * 8 + 2, 4)),
        };
        let area = |part, address, (bytes, align)| {
            memory.area(address, bytes, align).ok_or(RingError::Unmapped { part, address })
        };
        Ok(RingParts {
            descriptors: area("descriptors", spec.descriptors, (entries * DESCRIPTOR_BYTES, 16))?,
            driver: area("driver area", spec.driver_area, driver)?,
            device: area("device area", spec.device_area, device)?,
            size,
            event_idx,
            packed,
            indirect,
            memory: Arc::clone(memory),
            cursor: Cursor::default(),
        })
    }

    /// Adds the buffers of `descriptor`, which is in the chain of `head`. Returns whether it ends the chain.
    pub fn read(&mut self, head: u16, descriptor: &Descriptor, chain: &mut Chain) -> Result<bool, RingError> {
        if descriptor.has(DESCRIPTOR_INDIRECT) {
            return self.read_indirect(head, descriptor, chain).map(|()| true);
        }
        chain.push(head, descriptor.buffer(), descriptor.flags)?;
        Ok(!descriptor.has(DESCRIPTOR_NEXT))
    }

    /// Adds the buffers of the indirect table that `table`, a descriptor in the chain of `head`, names. Reads
    /// each byte of the table once.
    fn read_indirect(&mut self, head: u16, table: &Descriptor, chain: &mut Chain) -> Result<(), RingError> {
        if !self.indirect {
            return Err(RingError::IndirectNotNegotiated { head });
        }
        if table.has(DESCRIPTOR_NEXT) {
            return Err(RingError::IndirectNext { head });
        }
        let &Descriptor { address, length, .. } = table;
        let entries = length / DESCRIPTOR_BYTES as u32;
        if !length.is_multiple_of(DESCRIPTOR_BYTES as u32) || !(1..=DESCRIPTORS_MAX as u32).contains(&entries)
        {
            return Err(RingError::IndirectLength { head, length });
        }
        let (memory, cursor) = (&*self.memory, &mut self.cursor);
        // If the table crosses two memory regions, each entry is looked up.
        let whole = memory.span(cursor, address, length).filter(|span| span.len() == length);
        let mut index = 0;
        for _ in 0..entries {
            let offset = index * DESCRIPTOR_BYTES as u32;
            let bytes = match whole {
                Some(span) => span.load::<DESCRIPTOR_BYTES>(offset),
                None => address.checked_add(offset.into()).and_then(|at| memory.load(cursor, at)),
            };
            let both = u128::from_le_bytes(bytes.ok_or(RingError::BufferUnmapped { address, length })?);
            let mut entry = Descriptor::split(both as u64, (both >> 64) as u64);
            if self.packed {
                // A packed ring has the flags last.
                entry.flags = entry.next;
            }
            if entry.has(DESCRIPTOR_INDIRECT) {
                return Err(RingError::IndirectNested { head });
            }
            chain.push(head, entry.buffer(), entry.flags)?;
            index = match entry.next {
                // A table of a packed ring has no links: its entries are used in their order.
                _ if self.packed => index + 1,
                _ if !entry.has(DESCRIPTOR_NEXT) => return Ok(()),
                next if u32::from(next) >= entries => return Err(RingError::NextRange { head, next }),
                next => next.into(),
            };
        }
        if self.packed { Ok(()) } else { Err(RingError::ChainLoop { head }) }
    }
}

/// A descriptor, copied out of the ring once.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    pub address: u64,
    pub length: u32,
    pub flags: u16,
    pub next: u16,
}

impl Descriptor {
    /// Decodes the two words of a descriptor of a split ring.
    pub fn split(address: u64, high: u64) -> Descriptor {
        Descriptor { address, length: high as u32, flags: (high >> 32) as u16, next: (high >> 48) as u16 }
    }

    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    pub fn buffer(&self) -> Buffer {
        Buffer { address: self.address, length: self.length }
    }
}

/// Whether an index that moves from `old` to `new` passes `event` (virtio 1.2, 2.7.7.1).
pub fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
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
