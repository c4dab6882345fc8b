//! A [`Request`] is what a driver gets: one slot of the tag set, preallocated, one
//! cache line, holding one or more merged bios.

use crate::bio::{BioFlags, Operation};
use crate::buffer::{Data, IoBuffer, Segment};
use crate::completion::End;
use crate::error::Status;
use crate::sector::{SECTOR_SHIFT, Sector};

/// The number of a request within its tag set: 0 to one below the set's size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Tag(pub u16);

impl Tag {
    /// The tag as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a request is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum RequestState {
    /// The tag is free.
    Idle,
    /// Built, not yet given to the driver: in the plug, the scheduler or the dispatch list.
    Queued,
    /// The driver has it.
    Started,
}

/// Nothing: the end of a list of bios.
pub(crate) const NIL: u32 = u32::MAX;

/// One slot of the tag set. Drivers read it through its methods and keep words of
/// their own in `pdu`.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Request {
    pub(crate) sector: Sector,
    pub(crate) sectors: u32,
    pub(crate) segments: u16,
    pub(crate) bios: u16,
    pub(crate) first_bio: u32,
    pub(crate) last_bio: u32,
    /// When the first of its bios was accepted, in nanoseconds of the queue's clock.
    pub(crate) start_ns: u64,
    pub(crate) operation: Operation,
    pub(crate) flags: BioFlags,
    pub(crate) state: RequestState,
    pub(crate) requeues: u8,
    pub(crate) reserved: u32,
    /// The driver's own words, zeroed when the request starts.
    pub pdu: [u64; 2],
}

const _: () = assert!(size_of::<Request>() == 64 && align_of::<Request>() == 64);

impl Request {
    pub(crate) const fn idle() -> Request {
        Request {
            sector: Sector(0),
            sectors: 0,
            segments: 0,
            bios: 0,
            first_bio: NIL,
            last_bio: NIL,
            start_ns: 0,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            state: RequestState::Idle,
            requeues: 0,
            reserved: 0,
            pdu: [0; 2],
        }
    }

    /// What to do. A driver sees only what its limits declare.
    #[inline]
    pub fn operation(&self) -> Operation {
        self.operation
    }

    /// How to do it.
    #[inline]
    pub fn flags(&self) -> BioFlags {
        self.flags
    }

    /// Where it begins.
    #[inline]
    pub fn sector(&self) -> Sector {
        self.sector
    }

    /// Where it begins, in bytes.
    #[inline]
    pub fn offset(&self) -> u64 {
        self.sector.bytes()
    }

    /// Its length in bytes; 0 for a flush.
    #[inline]
    pub fn bytes(&self) -> u64 {
        u64::from(self.sectors) << SECTOR_SHIFT
    }

    /// How many pieces of memory it consists of.
    #[inline]
    pub fn segment_count(&self) -> usize {
        self.segments as usize
    }

    /// The first sector after it.
    #[inline]
    pub(crate) fn end(&self) -> Sector {
        self.sector + u64::from(self.sectors)
    }
}

/// Where the bytes of a bio in flight come from or go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Memory {
    /// Its own `data`.
    Own,
    /// A part of its parent's, from `data_offset` on.
    Parent,
    /// The queue's page of zeroes.
    Zeroes,
}

/// A bio in flight.
#[derive(Debug)]
pub(crate) struct BioSlot {
    pub data: Data,
    pub end: End,
    pub sector: Sector,
    /// Length in sectors.
    pub sectors: u64,
    /// The next bio of the request, the waiting list or the free list.
    pub next: u32,
    /// The bio that this is a part of, or [`NIL`].
    pub parent: u32,
    /// Where its memory begins within its parent's, in bytes.
    pub data_offset: u32,
    /// Parts that have not ended yet, with one more while parts are still being made.
    pub pending: u32,
    pub operation: Operation,
    pub flags: BioFlags,
    pub memory: Memory,
    /// What the caller holds besides: see [`SlotMarks`].
    pub marks: SlotMarks,
    pub error: Option<Status>,
}

bitflags::bitflags! {
    /// What the block layer notes about a bio in flight.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct SlotMarks: u8 {
        /// Its end gives one allocation back to the request gate.
        const GATED = 1 << 0;
        /// A step of a flush sequence: its end goes to the flush machine first.
        const FLUSH_SEQUENCE = 1 << 1;
    }
}

/// The bios in flight of one queue: a slab with a free list, which never shrinks below
/// what it was made with and never allocates while it has room.
pub(crate) struct BioSlab {
    slots: Vec<BioSlot>,
    free: u32,
    used: u32,
    capacity: u32,
}

impl BioSlab {
    pub fn new(capacity: u32) -> BioSlab {
        BioSlab { slots: Vec::with_capacity(capacity as usize), free: NIL, used: 0, capacity }
    }

    /// Bios in flight.
    pub fn len(&self) -> u32 {
        self.used
    }

    /// Room for that many more bios of callers.
    pub fn room(&self) -> u32 {
        self.capacity.saturating_sub(self.used)
    }

    /// Takes a slot. Parts of bios may go over the capacity; the slab then grows, once.
    #[inline]
    pub fn insert(&mut self, slot: BioSlot) -> u32 {
        self.used += 1;
        if self.free != NIL {
            let index = self.free;
            let place = &mut self.slots[index as usize];
            self.free = place.next;
            *place = slot;
            return index;
        }
        self.slots.push(slot);
        self.slots.len() as u32 - 1
    }

    /// Gives the slot back; its memory and end must have been taken.
    #[inline]
    pub fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.next = self.free;
        self.free = index;
        self.used -= 1;
    }

    /// Calls `each` with every piece of memory of bio `index`, in the order of its bytes.
    #[inline]
    pub fn for_each_segment(&self, index: u32, zeroes: &IoBuffer, mut each: impl FnMut(Segment)) {
        let slot = &self[index];
        let length = (slot.sectors << SECTOR_SHIFT) as u32;
        match slot.memory {
            Memory::Own => {
                if let Data::Buffer(buffer) = &slot.data {
                    let mut segment = buffer.segment();
                    segment.len = length;
                    each(segment);
                } else {
                    slot.data.with_segments(|s| slice_segments(s, 0, length, &mut each));
                }
            }
            Memory::Parent => {
                let root = &self[slot.parent];
                root.data.with_segments(|s| slice_segments(s, slot.data_offset, length, &mut each));
            }
            Memory::Zeroes => {
                let page = zeroes.segment();
                let mut left = length;
                while left > 0 {
                    let len = left.min(page.len);
                    each(Segment { len, ..page });
                    left -= len;
                }
            }
        }
    }
}

/// Calls `each` with the part of `segments` from byte `skip` on that is `length` long.
pub(crate) fn slice_segments(
    segments: &[Segment],
    mut skip: u32,
    mut length: u32,
    mut each: impl FnMut(Segment),
) {
    for segment in segments {
        if skip >= segment.len {
            skip -= segment.len;
            continue;
        }
        if length == 0 {
            return;
        }
        let len = (segment.len - skip).min(length);
        each(Segment { ptr: segment.ptr.wrapping_add(skip as usize), len, registered: segment.registered });
        length -= len;
        skip = 0;
    }
}

impl std::ops::Index<u32> for BioSlab {
    type Output = BioSlot;
    #[inline]
    fn index(&self, index: u32) -> &BioSlot {
        &self.slots[index as usize]
    }
}

impl std::ops::IndexMut<u32> for BioSlab {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut BioSlot {
        &mut self.slots[index as usize]
    }
}
