//! Bios in flight: their slots, the slab that holds them, and lists through it.

use crate::bio::{BioFlags, Operation};
use crate::buffer::{Data, IoBuffer, Segment, SegmentOwner};
use crate::completion::End;
use crate::error::Status;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::sync::Arc;

/// Nothing: the end of a list of bios.
pub(crate) const NIL: u32 = u32::MAX;

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

/// What the word of [`DataWords`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
enum DataKind {
    None,
    Buffer,
    Segments,
}

/// The memory of a bio, taken apart into words. An enum would be copied through the
/// stack in other sizes than it was written in, and that stalls the processor for longer
/// than all else that submitting does.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct DataWords {
    word: *mut u8,
    len: u32,
    registered: u16,
    kind: DataKind,
}

impl DataWords {
    pub const NONE: DataWords =
        DataWords { word: std::ptr::null_mut(), len: 0, registered: 0, kind: DataKind::None };

    /// # Safety
    /// The words take `data` over: the caller forgets it.
    #[inline]
    pub unsafe fn of(data: &Data) -> DataWords {
        match data {
            Data::None => DataWords::NONE,
            Data::Buffer(buffer) => {
                let Segment { ptr, len, registered } = buffer.segment();
                DataWords { word: ptr, len, registered, kind: DataKind::Buffer }
            }
            Data::Segments(owner) => {
                // SAFETY: the caller forgets the box that is read here.
                let owner = unsafe { std::ptr::read(owner) };
                let word = Box::into_raw(owner).cast();
                DataWords { word, len: 0, registered: 0, kind: DataKind::Segments }
            }
        }
    }

    /// The length of the buffer in sectors; 0 if it is none.
    #[inline]
    pub fn buffer_sectors(&self) -> u64 {
        if self.kind == DataKind::Buffer { u64::from(self.len >> SECTOR_SHIFT) } else { 0 }
    }
}

/// What the end word of a [`BioSlot`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum EndKind {
    /// A completion for the queue's owner; the word is its mark.
    Owner,
    Callback,
    Waiter,
    /// None: it is a part of another bio, or its end was taken.
    Taken,
}

/// A bio in flight, its end kept as a word for the reason that [`DataWords`] gives.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct BioSlot {
    data: DataWords,
    end_word: u64,
    pub sector: Sector,
    /// Length in sectors.
    pub sectors: u64,
    /// When it was accepted, in nanoseconds of the queue's clock; 0 without iostats.
    pub start_ns: u64,
    /// The next bio of the request, the waiting list or the free list.
    pub next: u32,
    /// The bio that this is a part of, or [`NIL`].
    pub parent: u32,
    pub operation: Operation,
    pub flags: BioFlags,
    pub memory: Memory,
    pub marks: SlotMarks,
    /// The step of the flush sequence that it is in.
    pub step: FlushStep,
    pub error: Option<Status>,
    end_kind: EndKind,
    /// How many of its sectors have been handed to parts, if it is split.
    pub issued: u64,
    /// Where its memory begins within its parent's, in bytes.
    pub data_offset: u32,
    /// Parts in flight.
    pub pending: u32,
}

const _: () = {
    // What the path of a plain bio touches is one cache line.
    assert!(std::mem::offset_of!(BioSlot, error) < 64 && std::mem::offset_of!(BioSlot, issued) == 64);
};

impl BioSlot {
    const fn empty() -> BioSlot {
        BioSlot {
            data: DataWords::NONE,
            end_kind: EndKind::Taken,
            end_word: 0,
            sector: Sector(0),
            sectors: 0,
            start_ns: 0,
            next: NIL,
            parent: NIL,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            memory: Memory::Own,
            marks: SlotMarks::empty(),
            step: FlushStep::None,
            error: None,
            issued: 0,
            data_offset: 0,
            pending: 0,
        }
    }

    /// Gives the memory back, if it is one buffer.
    #[inline(always)]
    pub fn take_buffer(&mut self) -> Option<IoBuffer> {
        if self.data.kind != DataKind::Buffer {
            return None;
        }
        self.data.kind = DataKind::None;
        let DataWords { word: ptr, len, registered, .. } = self.data;
        // SAFETY: `DataWords::of` took a buffer apart, and the kind said that it was not
        // taken since.
        Some(unsafe { IoBuffer::from_segment(Segment { ptr, len, registered }) })
    }

    /// Gives the memory back.
    #[inline]
    pub fn take_data(&mut self) -> Data {
        let DataWords { word, len, registered, kind } = self.data;
        self.data.kind = DataKind::None;
        match kind {
            DataKind::None => Data::None,
            DataKind::Buffer => {
                // SAFETY: as in `take_buffer`.
                Data::Buffer(unsafe { IoBuffer::from_segment(Segment { ptr: word, len, registered }) })
            }
            // SAFETY: as above, with the box of an owner.
            DataKind::Segments => Data::Segments(unsafe { Box::from_raw(word.cast()) }),
        }
    }

    /// Its own memory as segments.
    pub fn with_segments<R>(&self, f: impl FnOnce(&[Segment]) -> R) -> R {
        let DataWords { word, len, registered, kind } = self.data;
        match kind {
            DataKind::None => f(&[]),
            DataKind::Buffer => f(&[Segment { ptr: word, len, registered }]),
            DataKind::Segments => {
                let owner = word.cast::<Box<dyn SegmentOwner>>();
                // SAFETY: the box that `DataWords::of` took over and that was not taken since.
                f(unsafe { (**owner).segments() })
            }
        }
    }

    /// Its memory, if that is one buffer of its own.
    #[inline]
    fn own_buffer(&self) -> Option<Segment> {
        let DataWords { word, registered, kind, .. } = self.data;
        if kind != DataKind::Buffer || self.memory != Memory::Own {
            return None;
        }
        let len = (self.sectors << SECTOR_SHIFT) as u32;
        Some(Segment { ptr: word, len, registered })
    }

    #[inline]
    fn set_end(&mut self, end: End) {
        (self.end_kind, self.end_word) = match end {
            End::Owner(mark) => (EndKind::Owner, mark),
            End::Callback(callback) => (EndKind::Callback, Box::into_raw(callback) as u64),
            End::Waiter(waiter) => (EndKind::Waiter, Arc::into_raw(waiter) as u64),
            End::Taken => (EndKind::Taken, 0),
        };
    }

    /// Gives the end back: it is told once.
    #[inline]
    pub fn take_end(&mut self) -> End {
        match std::mem::replace(&mut self.end_kind, EndKind::Taken) {
            EndKind::Owner => End::Owner(self.end_word),
            // SAFETY: `set_end` took it apart, and the kind says that it was not taken since.
            EndKind::Callback => End::Callback(unsafe { Box::from_raw(self.end_word as *mut _) }),
            // SAFETY: as above.
            EndKind::Waiter => End::Waiter(unsafe { Arc::from_raw(self.end_word as *const _) }),
            EndKind::Taken => End::Taken,
        }
    }

    /// The mark of a bio that ends plainly: its owner's, whole, with nothing else to do.
    #[inline]
    pub fn plain_mark(&self) -> Option<u64> {
        let plain = self.marks.is_empty()
            && self.step == FlushStep::None
            && self.parent == NIL
            && self.end_kind == EndKind::Owner;
        plain.then_some(self.end_word)
    }
}

/// What a bio begins with in the slab.
pub(crate) struct NewBio {
    pub operation: Operation,
    pub flags: BioFlags,
    pub sector: Sector,
    pub sectors: u64,
    pub data: DataWords,
    pub end: End,
    pub marks: SlotMarks,
    pub start_ns: u64,
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

/// The bios in flight of one queue: a slab with a free list. It never allocates but when
/// parts of bios go over its capacity.
pub(crate) struct BioSlab {
    slots: Vec<BioSlot>,
    free: u32,
    used: u32,
    capacity: u32,
}

impl BioSlab {
    pub fn new(capacity: u32) -> BioSlab {
        let mut slots: Vec<BioSlot> = (0..capacity).map(|_| BioSlot::empty()).collect();
        for (next, slot) in (1..).zip(&mut slots) {
            slot.next = if next < capacity { next } else { NIL };
        }
        BioSlab { slots, free: if capacity == 0 { NIL } else { 0 }, used: 0, capacity }
    }

    /// Takes the ends of all bios in flight, to be told that nothing will come of them. Their
    /// memory stays with whoever may still use it.
    pub fn take_ends(&mut self) -> impl Iterator<Item = End> {
        self.slots.iter_mut().map(BioSlot::take_end)
    }

    /// Bios in flight.
    pub fn len(&self) -> u32 {
        self.used
    }

    /// Room for that many more bios of callers.
    pub fn room(&self) -> u32 {
        self.capacity.saturating_sub(self.used)
    }

    /// Takes a bio in.
    #[inline]
    pub fn insert(&mut self, bio: NewBio) -> u32 {
        if self.free == NIL {
            self.grow();
        }
        let index = self.free;
        let slot = &mut self.slots[index as usize];
        self.free = slot.next;
        self.used += 1;
        // Word by word, for the reason that `DataWords` gives.
        slot.data.word = bio.data.word;
        slot.data.len = bio.data.len;
        slot.data.registered = bio.data.registered;
        slot.data.kind = bio.data.kind;
        slot.set_end(bio.end);
        slot.sector = bio.sector;
        slot.sectors = bio.sectors;
        slot.start_ns = bio.start_ns;
        slot.next = NIL;
        slot.parent = NIL;
        slot.operation = bio.operation;
        slot.flags = bio.flags;
        slot.memory = Memory::Own;
        slot.marks = bio.marks;
        slot.step = FlushStep::None;
        slot.error = None;
        slot.issued = 0;
        slot.pending = 0;
        index
    }

    #[cold]
    fn grow(&mut self) {
        self.free = self.slots.len() as u32;
        self.slots.push(BioSlot::empty());
    }

    /// Gives the slot back; its memory and end have been taken.
    #[inline]
    pub fn remove(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.data.kind == DataKind::None);
        slot.next = self.free;
        self.free = index;
        self.used -= 1;
    }

    /// The bio whose memory bio `index` uses, and from which byte of it on.
    pub fn memory_of(&self, index: u32) -> (&BioSlot, u64) {
        let (mut slot, mut skip) = (&self[index], 0);
        while slot.memory == Memory::Parent {
            skip += u64::from(slot.data_offset);
            slot = &self[slot.parent];
        }
        (slot, skip)
    }

    /// Pieces of memory of bio `index`. Limits keep it below 65536.
    #[inline]
    pub fn count_segments(&self, index: u32, zeroes: &IoBuffer) -> u16 {
        if self[index].own_buffer().is_some() {
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
        if let Some(segment) = slot.own_buffer() {
            return each(segment);
        }
        let length = (slot.sectors << SECTOR_SHIFT) as u32;
        match slot.memory {
            Memory::Own | Memory::Parent => {
                let (root, skip) = self.memory_of(index);
                root.with_segments(|s| slice_segments(s, skip as u32, length, &mut each));
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
