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
    /// Built, and not ended.
    Busy,
}

/// Nothing: the end of a list of bios.
pub(crate) const NIL: u32 = u32::MAX;

/// One slot of the tag set. Drivers read it through its methods and keep words of
/// their own in `pdu`.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Request {
    pub(crate) sector: Sector,
    pub(crate) sectors: u64,
    pub(crate) first_bio: u32,
    pub(crate) last_bio: u32,
    /// When the first of its bios was accepted, in nanoseconds of the queue's clock.
    pub(crate) start_ns: u64,
    pub(crate) operation: Operation,
    pub(crate) flags: BioFlags,
    pub(crate) state: RequestState,
    pub(crate) segments: u16,
    /// The driver's own words, zeroed when the request starts.
    pub pdu: [u64; 2],
}

const _: () = assert!(size_of::<Request>() == 64 && align_of::<Request>() == 64);

impl Request {
    pub(crate) const fn idle() -> Request {
        Request {
            sector: Sector(0),
            sectors: 0,
            first_bio: NIL,
            last_bio: NIL,
            start_ns: 0,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            state: RequestState::Idle,
            segments: 0,
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
        self.sectors << SECTOR_SHIFT
    }

    /// How many pieces of memory it consists of.
    #[inline]
    pub fn segment_count(&self) -> usize {
        self.segments as usize
    }

    /// The first sector after it.
    #[inline]
    pub(crate) fn end(&self) -> Sector {
        self.sector + self.sectors
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
    /// When it was accepted, in nanoseconds of the queue's clock; 0 without iostats.
    pub start_ns: u64,
    /// How many of them have been handed to parts, if it is split.
    pub issued: u64,
    /// The next bio of the request, the waiting list or the free list.
    pub next: u32,
    /// The bio that this is a part of, or [`NIL`].
    pub parent: u32,
    /// Where its memory begins within its parent's, in bytes.
    pub data_offset: u32,
    /// Parts in flight.
    pub pending: u32,
    pub operation: Operation,
    pub flags: BioFlags,
    pub memory: Memory,
    pub marks: SlotMarks,
    /// The step of the flush sequence that it is in.
    pub step: FlushStep,
    pub error: Option<Status>,
}

bitflags::bitflags! {
    /// What the block layer notes about a bio in flight.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct SlotMarks: u8 {
        /// Its end gives one allocation back to the request gate.
        const GATED = 1 << 0;
        /// It is done through parts: write zeroes that are written as zeroes.
        const AS_ZEROES = 1 << 1;
        /// It is done through parts, in flight at most [`PARTS_MAX`](crate::split) at a time.
        const SPLIT = 1 << 2;
    }
}

/// The steps of the flush machine (block/blk-flush.c), as far as a bio has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub(crate) enum FlushStep {
    /// Not in a flush sequence, or at its end.
    #[default]
    None,
    /// Waits for the flush before its data.
    Preflush,
    /// Its data is on the way, and another flush follows.
    DataThenFlush,
    /// Its data is on the way, and nothing follows.
    Data,
    /// Waits for the flush that ends the sequence.
    Postflush,
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

    /// Takes a slot. Parts of bios may go over the capacity: the slab then grows, once.
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

    /// Pieces of memory of bio `index`. Limits keep it below 65536.
    #[inline]
    pub fn count_segments(&self, index: u32, zeroes: &IoBuffer) -> u16 {
        if let (Memory::Own, Data::Buffer(_)) = (self[index].memory, &self[index].data) {
            return 1;
        }
        let mut count = 0;
        self.for_each_segment(index, zeroes, |_| count += 1);
        count
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
                let (mut skip, mut root) = (slot.data_offset, &self[slot.parent]);
                while root.memory == Memory::Parent {
                    skip += root.data_offset;
                    root = &self[root.parent];
                }
                root.data.with_segments(|s| slice_segments(s, skip, length, &mut each));
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

/// A list of bios linked through their slots, first in first out.
#[derive(Debug)]
pub(crate) struct BioList {
    first: u32,
    last: u32,
    len: u32,
}

impl BioList {
    pub fn new() -> BioList {
        BioList { first: NIL, last: NIL, len: 0 }
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts back what `pop_front` took.
    pub fn push_front(&mut self, bios: &mut BioSlab, index: u32) {
        bios[index].next = self.first;
        self.first = index;
        if self.last == NIL {
            self.last = index;
        }
        self.len += 1;
    }

    pub fn push_back(&mut self, bios: &mut BioSlab, index: u32) {
        bios[index].next = NIL;
        match self.last {
            NIL => self.first = index,
            last => bios[last].next = index,
        }
        self.last = index;
        self.len += 1;
    }

    pub fn pop_front(&mut self, bios: &mut BioSlab) -> Option<u32> {
        let index = self.first;
        if index == NIL {
            return None;
        }
        self.first = bios[index].next;
        if self.first == NIL {
            self.last = NIL;
        }
        bios[index].next = NIL;
        self.len -= 1;
        Some(index)
    }
}
