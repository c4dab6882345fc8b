//! The parts that both kinds of ring have in common: descriptors, indirect tables and event indexes.

use std::sync::Arc;

use super::area::Area;
use super::chain::{Buffer, DESCRIPTOR_BYTES, DESCRIPTOR_NEXT, DESCRIPTORS_MAX, RingError};
use super::memory::{Cursor, GuestMemory, Span};

/// A ring as a front end describes it. Addresses are those of the front end ("user addresses").
#[derive(Clone, Debug)]
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

/// The guest's memory as a ring uses it.
pub struct RingMemory {
    memory: Arc<GuestMemory>,
    cursor: Cursor,
    /// Whether indirect tables were negotiated.
    indirect: bool,
}

impl RingMemory {
    pub fn new(memory: &Arc<GuestMemory>, spec: &RingSpec) -> RingMemory {
        RingMemory { memory: Arc::clone(memory), cursor: Cursor::default(), indirect: spec.indirect }
    }

    /// Finds a part of the ring at the front end's address `at`, or returns why the ring cannot be used.
    pub fn area(&self, part: &'static str, at: u64, bytes: usize, align: usize) -> Result<Area, RingError> {
        self.memory.area(at, bytes, align).ok_or(RingError::Unmapped { part, address: at })
    }

    /// The table that `descriptor` in the chain of `head` names.
    #[inline]
    pub fn table(&mut self, head: u16, descriptor: &Descriptor) -> Result<Table<'_>, RingError> {
        if !self.indirect {
            return Err(RingError::IndirectNotNegotiated { head });
        }
        if descriptor.has(DESCRIPTOR_NEXT) {
            return Err(RingError::IndirectNext { head });
        }
        let &Descriptor { address, length, .. } = descriptor;
        let entries = length / DESCRIPTOR_BYTES as u32;
        if !length.is_multiple_of(DESCRIPTOR_BYTES as u32) || !(1..=DESCRIPTORS_MAX as u32).contains(&entries)
        {
            return Err(RingError::IndirectLength { head, length });
        }
        let memory = &*self.memory;
        let whole = memory.span(&mut self.cursor, address, length).filter(|span| span.len() == length);
        Ok(Table { entries, memory, cursor: &mut self.cursor, address, length, whole })
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
    #[inline]
    pub fn split((address, high): (u64, u64)) -> Descriptor {
        Descriptor { address, length: high as u32, flags: (high >> 32) as u16, next: (high >> 48) as u16 }
    }

    #[inline]
    pub fn packed((address, high): (u64, u64)) -> Descriptor {
        Descriptor { address, length: high as u32, flags: (high >> 48) as u16, next: 0 }
    }

    #[inline]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    #[inline]
    pub fn buffer(&self) -> Buffer {
        Buffer { address: self.address, length: self.length }
    }
}

/// Whether an index that moves from `old` to `new` passes `event` (virtio 1.2, 2.7.7.1).
#[inline]
pub fn needs_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// An indirect table.
pub struct Table<'a> {
    /// Number of descriptors in the table.
    pub entries: u32,
    memory: &'a GuestMemory,
    cursor: &'a mut Cursor,
    address: u64,
    length: u32,
    /// The whole table, unless it crosses two memory regions: then each entry is looked up.
    whole: Option<Span<'a>>,
}

impl Table<'_> {
    /// Reads each byte once. Fails with [`RingError::BufferUnmapped`] if the entry is not guest memory.
    #[inline]
    pub fn entry(&mut self, index: u32) -> Result<(u64, u64), RingError> {
        let offset = index * DESCRIPTOR_BYTES as u32;
        let (address, length) = (self.address, self.length);
        let entry = match self.whole {
            Some(span) => span.load::<DESCRIPTOR_BYTES>(offset),
            None => address.checked_add(offset.into()).and_then(|at| self.memory.load(self.cursor, at)),
        };
        let both = u128::from_le_bytes(entry.ok_or(RingError::BufferUnmapped { address, length })?);
        Ok((both as u64, (both >> 64) as u64))
    }
}
