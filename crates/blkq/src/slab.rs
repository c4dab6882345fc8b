//! Bios in flight: their slots, the slab that has them, and lists through it.

use std::mem::{ManuallyDrop, MaybeUninit};

use crate::bio::{BioFlags, Operation, Outline};
use crate::buffer::{Data, IoBuffer, KernelPages, Segment};
use crate::completer::{Completer, InlineCallback};
use crate::error::Status;
use crate::request::{NIL, Request};
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::sync::Arc;
use crate::tags::Tag;

/// Where the bytes of a bio in flight come from or go to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum DataSource {
    /// Its own `data`.
    Own,
    /// A part of its parent's, from `data_offset` on.
    Parent,
    /// The queue's page of zeroes.
    Zeroes,
}

/// Which completer a [`BioSlot`] has, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum CompleterKind {
    /// A completion for the queue's owner; the word is its `user_data`.
    Owner,
    /// It is the slot's `callback`.
    Callback,
    /// The word is the pointer of an `Arc`.
    Waiter,
    /// It is a part of another bio, or its completer was taken.
    None,
}

/// A bio in flight. Its completer is kept in parts with a kind: an enum would be copied through the
/// stack in other sizes than it was written in, and that stalls the processor for longer than
/// all else that submitting does.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct BioSlot {
    /// Never dropped in place: what is in flight when the process exits is leaked.
    pub data: ManuallyDrop<Data>,
    completer_word: u64,
    pub sector: Sector,
    /// Length in sectors.
    pub sectors: u64,
    /// When it was accepted, in nanoseconds of the queue's clock; 0 without iostats.
    pub start_ns: u64,
    /// The next bio of the request or of the waiting list.
    pub next: u32,
    /// The bio that this is a part of, or [`NIL`].
    pub parent: u32,
    pub operation: Operation,
    pub flags: BioFlags,
    pub data_source: DataSource,
    pub slot_flags: SlotFlags,
    /// The step of the flush sequence that it is in.
    pub step: FlushStep,
    pub error: Option<Status>,
    completer_kind: CompleterKind,
    /// How many of its sectors have been handed to parts, if it is split.
    pub issued: u64,
    /// Where its memory begins within its parent's, in bytes, if it is a part.
    pub data_offset: u32,
    /// Parts in flight, if it is split.
    pub pending: u32,
    callback: MaybeUninit<InlineCallback>,
}

const _: () = {
    // The path of a plain bio touches one cache line.
    assert!(
        std::mem::offset_of!(BioSlot, completer_kind) < 64 && std::mem::offset_of!(BioSlot, issued) == 64
    );
    assert!(size_of::<BioSlot>() == 128);
};

impl BioSlot {
    const fn empty() -> BioSlot {
        BioSlot {
            data: ManuallyDrop::new(Data::None),
            completer_kind: CompleterKind::None,
            completer_word: 0,
            sector: Sector(0),
            sectors: 0,
            start_ns: 0,
            next: NIL,
            parent: NIL,
            operation: Operation::Read,
            flags: BioFlags::empty(),
            data_source: DataSource::Own,
            slot_flags: SlotFlags::empty(),
            step: FlushStep::None,
            error: None,
            issued: 0,
            data_offset: 0,
            pending: 0,
            callback: MaybeUninit::uninit(),
        }
    }

    /// The slot of a tag, for plain bios of one buffer. Those write no more than they must.
    const fn of_tag() -> BioSlot {
        BioSlot { completer_kind: CompleterKind::Owner, slot_flags: SlotFlags::PLAIN, ..BioSlot::empty() }
    }

    /// Takes the memory out.
    #[inline]
    pub fn take_data(&mut self) -> Data {
        ManuallyDrop::into_inner(std::mem::replace(&mut self.data, ManuallyDrop::new(Data::None)))
    }

    /// The pieces of its own memory, to be measured only.
    pub fn with_shape<R>(&self, f: impl FnOnce(&[Segment]) -> R) -> R {
        self.data.with_shape(f)
    }

    /// Its memory, if that is one buffer of its own.
    #[inline]
    fn own_buffer(&self) -> Option<Segment> {
        match &*self.data {
            Data::Buffer(buffer) if self.data_source == DataSource::Own => {
                debug_assert!(
                    self.operation.has_data() && self.sectors << SECTOR_SHIFT <= buffer.len() as u64
                );
                Some(Segment { len: (self.sectors << SECTOR_SHIFT) as u32, ..buffer.segment() })
            }
            _ => None,
        }
    }

    /// Where the bytes of its parts come from: zeroes stay zeroes, however often they are split.
    pub fn data_source_of_parts(&self) -> DataSource {
        let zeroes = self.data_source == DataSource::Zeroes || self.slot_flags.contains(SlotFlags::AS_ZEROES);
        if zeroes { DataSource::Zeroes } else { DataSource::Parent }
    }

    #[inline]
    fn set_completer(&mut self, completer: Completer) {
        (self.completer_kind, self.completer_word) = match completer {
            Completer::Owner(user_data) => (CompleterKind::Owner, user_data),
            Completer::Callback(callback) => {
                self.callback.write(callback);
                (CompleterKind::Callback, 0)
            }
            Completer::Waiter(waiter) => (CompleterKind::Waiter, Arc::into_raw(waiter) as u64),
            Completer::None => (CompleterKind::None, 0),
        };
    }

    /// Takes the completer out: it is notified once.
    #[inline]
    pub fn take_completer(&mut self) -> Completer {
        match std::mem::replace(&mut self.completer_kind, CompleterKind::None) {
            CompleterKind::Owner => Completer::Owner(self.completer_word),
            CompleterKind::Callback => {
                // SAFETY: `set_completer` wrote it, and the kind shows that it was not taken since.
                Completer::Callback(unsafe { self.callback.assume_init_read() })
            }
            CompleterKind::Waiter => {
                // SAFETY: `set_completer` took it apart; else as above.
                Completer::Waiter(unsafe { Arc::from_raw(self.completer_word as *const _) })
            }
            CompleterKind::None => Completer::None,
        }
    }

    /// The `user_data` of a bio that completes to the queue's owner.
    pub fn owner_user_data(&self) -> Option<u64> {
        (self.completer_kind == CompleterKind::Owner).then_some(self.completer_word)
    }

    /// The `user_data` of a plain bio.
    #[inline(always)]
    pub fn user_data(&self) -> u64 {
        debug_assert!(self.completer_kind == CompleterKind::Owner);
        self.completer_word
    }

    pub fn outline(&self) -> Outline {
        let &BioSlot { operation, flags, sector, sectors, start_ns, .. } = self;
        Outline { operation, flags, sector, sectors, start_ns }
    }

    /// The `user_data` of a bio that completes plainly: its owner's, whole, with nothing else to do.
    #[inline]
    pub fn plain_user_data(&self) -> Option<u64> {
        (self.slot_flags == SlotFlags::PLAIN).then_some(self.completer_word)
    }
}

/// A bio as it enters the slab.
pub(crate) struct NewBio {
    pub outline: Outline,
    // Never dropped: what might have to be is kept in memory instead of registers.
    pub data: ManuallyDrop<Data>,
    pub completer: ManuallyDrop<Completer>,
    pub slot_flags: SlotFlags,
}

bitflags::bitflags! {
    /// The flags of the block layer on a bio in flight.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct SlotFlags: u8 {
        /// Its completion releases one allocation of the request gate.
        const GATED = 1 << 0;
        /// It is done through parts: write zeroes that are written as zeroes.
        const AS_ZEROES = 1 << 1;
        /// It is done through parts, in flight at most `PARTS_MAX` of them at a time (`queue/parts.rs`).
        const SPLIT = 1 << 2;
        /// It was accepted as one legal piece of its owner's, which gets a completion.
        /// Without other flags its completion is nothing more.
        const PLAIN = 1 << 3;
        /// It was submitted with FUA to a device without a write cache, and the flag was removed. If the device gets a
        /// write cache before the data has reached the driver, a flush must follow the data.
        const UNCACHED_FUA = 1 << 4;
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
    /// Waits for the flush that completes the sequence.
    Postflush,
}

/// The bios in flight of one queue: a slab with a stack of its free slots. (A list through the
/// slots takes fewer instructions but more time: each bio would wait for the slot of the one
/// before.) It never allocates but when parts of bios go over its capacity.
///
/// Before all others come the slots of plain bios, one for each tag: such a bio needs none of the
/// others, as long as it is submitted while there is a tag for it.
pub(crate) struct BioSlab {
    slots: Vec<BioSlot>,
    free: Vec<u32>,
    /// How many slots belong to tags, and how many of these are in use.
    tags: u32,
    plain: u32,
    /// How many slots were added beyond the capacity, for parts.
    extra: usize,
}

impl BioSlab {
    /// A slab for one plain bio of each of `tags` tags, and `capacity` others.
    pub fn new(tags: u32, capacity: u32) -> BioSlab {
        let of_tags = (0..tags).map(|_| BioSlot::of_tag());
        let slots = of_tags.chain((0..capacity).map(|_| BioSlot::empty())).collect();
        BioSlab { slots, free: (tags..tags + capacity).rev().collect(), tags, plain: 0, extra: 0 }
    }

    /// Takes the completers of all bios in flight, to be notified that they failed, each with the operation of the bio
    /// if that has an allocation of the request gate. Their memory stays with those that may still use it.
    pub fn take_completers(&mut self) -> impl Iterator<Item = (Completer, Option<Operation>)> {
        let in_use = self.slots.iter_mut().filter(|slot| slot.completer_kind != CompleterKind::None);
        in_use.map(|slot| {
            let gated = slot.slot_flags.contains(SlotFlags::GATED).then_some(slot.operation);
            (slot.take_completer(), gated)
        })
    }

    /// Bios in flight.
    pub fn len(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32 - self.tags + self.plain
    }

    /// Whether there is room for one more bio of a caller that is not plain, or has no tag.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.free.len() > self.extra
    }

    /// Takes a bio in.
    #[inline]
    pub fn insert(&mut self, bio: NewBio) -> u32 {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.grow(),
        };
        // Field by field, for the reason that `BioSlot` gives.
        let slot = &mut self.slots[index as usize];
        slot.data = bio.data;
        slot.set_completer(ManuallyDrop::into_inner(bio.completer));
        slot.sector = bio.outline.sector;
        slot.sectors = bio.outline.sectors;
        slot.start_ns = bio.outline.start_ns;
        slot.next = NIL;
        slot.parent = NIL;
        slot.operation = bio.outline.operation;
        slot.flags = bio.outline.flags;
        slot.data_source = DataSource::Own;
        slot.slot_flags = bio.slot_flags;
        slot.step = FlushStep::None;
        slot.error = None;
        index
    }

    /// Takes the plain bio of a tag into its slot. The fields that are not written are as
    /// [`BioSlot::of_tag`] has them, or the request's.
    #[inline(always)]
    pub fn insert_plain(&mut self, tag: Tag, data: ManuallyDrop<Data>, user_data: u64) {
        let slot = &mut self.slots[tag.index()];
        slot.data = data;
        slot.completer_word = user_data;
        self.plain += 1;
    }

    /// Writes what the slot of a plain bio lacks as long as it is alone in its `request`: before it is
    /// handled as any other bio.
    pub fn fill_plain(&mut self, request: &Request) {
        debug_assert!(request.is_plain());
        let slot = &mut self.slots[request.first_bio as usize];
        slot.sector = request.sector;
        slot.sectors = request.sectors;
        slot.start_ns = request.start_ns;
        slot.operation = request.operation;
        slot.flags = request.flags;
    }

    /// The memory of a plain bio alone in its `request`.
    #[inline]
    pub fn plain_segment(&self, request: &Request) -> Option<Segment> {
        match &*self[request.first_bio].data {
            Data::Buffer(buffer) => Some(Segment { len: request.bytes() as u32, ..buffer.segment() }),
            _ => None,
        }
    }

    /// Plain bios in the slots of tags.
    #[inline]
    pub fn plain(&self) -> u32 {
        self.plain
    }

    /// The slots of the first `tags` tags.
    #[inline]
    pub fn of_tags(&mut self, tags: usize) -> &mut [BioSlot] {
        &mut self.slots[..tags]
    }

    /// So many plain bios completed alone; their memory has been taken.
    #[inline]
    pub fn release_plain(&mut self, count: u32) {
        self.plain -= count;
    }

    #[cold]
    fn grow(&mut self) -> u32 {
        self.slots.push(BioSlot::empty());
        self.extra += 1;
        self.free.reserve(self.slots.len());
        self.slots.len() as u32 - 1
    }

    /// Frees the slot; its memory and completer have been taken.
    #[inline]
    pub fn remove(&mut self, index: u32) {
        debug_assert!(matches!(*self[index].data, Data::None));
        if index < self.tags {
            self[index] = BioSlot::of_tag();
            self.plain -= 1;
        } else {
            self.free.push(index);
        }
    }

    /// The bio that its submitter knows, of which bio `index` is a part, or a part of a part; `index` itself if it is
    /// no part.
    pub fn root_of(&self, mut index: u32) -> u32 {
        while self[index].parent != NIL {
            index = self[index].parent;
        }
        index
    }

    /// The bio whose memory bio `index` uses, which is not the page of zeroes, and from which byte
    /// of it on.
    pub fn memory_of(&self, index: u32) -> (&BioSlot, u64) {
        let (mut slot, mut skip) = (&self[index], 0);
        while slot.data_source == DataSource::Parent {
            skip += u64::from(slot.data_offset);
            slot = &self[slot.parent];
        }
        debug_assert!(slot.data_source == DataSource::Own, "the page of zeroes is nobody's memory");
        (slot, skip)
    }

    /// The memory of bio `index`, if no thread reaches it.
    #[inline]
    pub fn kernel_pages(&self, index: u32) -> Option<KernelPages> {
        let slot = &self[index];
        match (&*slot.data, slot.data_source) {
            (Data::Kernel(pages), DataSource::Own) => {
                Some(pages.part(0, (slot.sectors << SECTOR_SHIFT) as u32))
            }
            (_, DataSource::Parent) => self.kernel_pages_of_part(index),
            _ => None,
        }
    }

    #[cold]
    fn kernel_pages_of_part(&self, index: u32) -> Option<KernelPages> {
        let (root, skip) = self.memory_of(index);
        match &*root.data {
            Data::Kernel(pages) => {
                Some(pages.part(skip as u32, (self[index].sectors << SECTOR_SHIFT) as u32))
            }
            _ => None,
        }
    }

    /// Pieces of memory of bio `index`. Limits keep it below 65536.
    #[inline]
    pub fn count_segments(&self, index: u32, zeroes: &IoBuffer) -> u16 {
        if self[index].own_buffer().is_some() || self.kernel_pages(index).is_some() {
            return 1;
        }
        let mut count = 0;
        self.for_each_segment(index, zeroes, |_| count += 1);
        count
    }

    /// Calls `each` with every piece of memory of bio `index`, in the order of its bytes; with none
    /// of memory that has no address.
    #[inline]
    pub fn for_each_segment(&self, index: u32, zeroes: &IoBuffer, mut each: impl FnMut(Segment)) {
        let slot = &self[index];
        if let Some(segment) = slot.own_buffer() {
            return each(segment);
        }
        let length = (slot.sectors << SECTOR_SHIFT) as u32;
        match slot.data_source {
            DataSource::Own | DataSource::Parent => {
                let (root, skip) = self.memory_of(index);
                root.data.with_segments(|s| slice_segments(s, skip as u32, length, &mut each));
            }
            DataSource::Zeroes => {
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

    /// The first of them, or [`NIL`].
    pub fn first(&self) -> u32 {
        self.first
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
