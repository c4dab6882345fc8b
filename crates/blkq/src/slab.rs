use std::mem::{ManuallyDrop, MaybeUninit};

use crate::bio::{BioFlags, Operation, Outline};
use crate::buffer::{Data, IoBuffer, KernelPages, Segment};
use crate::completer::{Completer, InlineCallback};
use crate::error::Status;
use crate::request::{NIL, Request};
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::sync::Arc;
use crate::tags::Tag;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum DataSource {
    /// The memory in the bio's own `data` field.
    Own,
    /// A part of the parent's memory, from `data_offset` on.
    Parent,
    /// The queue's page of zeroes.
    Zeroes,
}

/// The kind of completer of a [`BioSlot`], and where it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum CompleterKind {
    /// The queue's owner gets a completion; the word is its `user_data`.
    Owner,
    /// A callback, stored in the slot's `callback`.
    Callback,
    /// A waiting thread; the word is the pointer of an `Arc`.
    Waiter,
    /// No completer: the bio is a part of another bio, or its completer was taken.
    None,
}

/// A bio in flight. Its completer is stored as a kind and separate fields. An enum would be copied through
/// the stack in other sizes than those in which it was written. The failed store forwarding would stall the
/// processor for longer than the rest of submitting takes.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct BioSlot {
    /// Never dropped in place: the memory of bios that are in flight when the process exits is leaked.
    pub data: ManuallyDrop<Data>,
    completer_word: u64,
    pub sector: Sector,
    pub sectors: u64,
    /// The time when the bio was accepted, in nanoseconds of the queue's clock; 0 while statistics are off.
    pub start_ns: u64,
    /// The next bio of the same request or waiting list.
    pub next: u32,
    /// The bio of which this one is a part, or [`NIL`].
    pub parent: u32,
    pub operation: Operation,
    pub flags: BioFlags,
    pub data_source: DataSource,
    pub slot_flags: SlotFlags,
    pub step: FlushStep,
    pub error: Option<Status>,
    completer_kind: CompleterKind,
    /// If the bio is split: the number of its sectors that were handed to parts.
    pub issued: u64,
    /// If the bio is a part: the offset of its memory within its parent's memory, in bytes.
    pub data_offset: u32,
    /// If the bio is split: the number of its parts in flight.
    pub pending: u32,
    callback: MaybeUninit<InlineCallback>,
}

const _: () = {
    // The path of a plain bio accesses one cache line.
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

    /// The slot of a tag, for plain bios with one buffer, for which as few fields as possible are written.
    const fn of_tag() -> BioSlot {
        BioSlot { completer_kind: CompleterKind::Owner, slot_flags: SlotFlags::PLAIN, ..BioSlot::empty() }
    }

    #[inline]
    pub fn take_data(&mut self) -> Data {
        ManuallyDrop::into_inner(std::mem::replace(&mut self.data, ManuallyDrop::new(Data::None)))
    }

    /// Calls `f` with the segments of the bio's own memory, which must be used only to measure it.
    pub fn with_shape<R>(&self, f: impl FnOnce(&[Segment]) -> R) -> R {
        self.data.with_shape(f)
    }

    /// The bio's memory, if it is one buffer of its own.
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

    /// Where the parts of the bio get their bytes from. Parts of a bio written as zeroes are zeroes.
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

    /// Takes the completer, so that it is notified only once.
    #[inline]
    pub fn take_completer(&mut self) -> Completer {
        match std::mem::replace(&mut self.completer_kind, CompleterKind::None) {
            CompleterKind::Owner => Completer::Owner(self.completer_word),
            CompleterKind::Callback => {
                // SAFETY: `set_completer` wrote the callback, and the kind shows that it was not taken since.
                Completer::Callback(unsafe { self.callback.assume_init_read() })
            }
            CompleterKind::Waiter => {
                // SAFETY: `set_completer` converted the `Arc` into the pointer, and the kind shows that it
                // was not taken since.
                Completer::Waiter(unsafe { Arc::from_raw(self.completer_word as *const _) })
            }
            CompleterKind::None => Completer::None,
        }
    }

    /// The `user_data` of a bio of which the queue's owner gets a completion.
    pub fn owner_user_data(&self) -> Option<u64> {
        (self.completer_kind == CompleterKind::Owner).then_some(self.completer_word)
    }

    #[inline(always)]
    pub fn user_data(&self) -> u64 {
        debug_assert!(self.completer_kind == CompleterKind::Owner);
        self.completer_word
    }

    pub fn outline(&self) -> Outline {
        let &BioSlot { operation, flags, sector, sectors, start_ns, .. } = self;
        Outline { operation, flags, sector, sectors, start_ns }
    }

    /// The `user_data` of a bio that the queue's owner submitted as one piece, and whose completion needs no
    /// other action.
    #[inline]
    pub fn plain_user_data(&self) -> Option<u64> {
        (self.slot_flags == SlotFlags::PLAIN).then_some(self.completer_word)
    }
}

pub(crate) struct NewBio {
    pub outline: Outline,
    // Never dropped, because the compiler would keep values with a destructor in memory instead of registers.
    pub data: ManuallyDrop<Data>,
    pub completer: ManuallyDrop<Completer>,
    pub slot_flags: SlotFlags,
}

bitflags::bitflags! {
    /// The block layer's flags of a bio in flight.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct SlotFlags: u8 {
        /// The completion of the bio releases one allocation of the request gate.
        const GATED = 1 << 0;
        /// The bio is executed as parts: write zeroes for a device without support, written as zeroes.
        const AS_ZEROES = 1 << 1;
        /// The bio is executed as parts, of which at most `PARTS_MAX` are in flight (`queue/parts.rs`).
        const SPLIT = 1 << 2;
        /// The bio was accepted from the queue's owner as one piece within the limits. Without other flags,
        /// its completion needs no other action than notifying the owner.
        const PLAIN = 1 << 3;
        /// It was submitted with FUA to a device without a write cache, and the flag was removed. If the device gets a
        /// write cache before the data has reached the driver, a flush must follow the data.
        const UNCACHED_FUA = 1 << 4;
    }
}

/// The steps of a bio's flush sequence (block/blk-flush.c).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub(crate) enum FlushStep {
    /// Not in a flush sequence, or at its end.
    #[default]
    None,
    /// Waits for the flush before the data.
    Preflush,
    /// The data is in flight, and a flush will follow.
    DataThenFlush,
    /// The data is in flight, and no flush follows.
    Data,
    /// Waits for the flush that completes the sequence.
    Postflush,
}

/// The bios in flight of one queue: a slab with a stack of free slots. (A free list through the slots would
/// need fewer instructions but more time, because each bio would wait until the slot of the previous one is
/// in the cache.) The slab allocates memory only when parts of bios exceed its capacity. The first slots are
/// for plain bios, one for each tag. A plain bio needs no other slot if it is submitted while a tag is free.
pub(crate) struct BioSlab {
    slots: Vec<BioSlot>,
    free: Vec<u32>,
    /// The number of slots for tags, and the number of these in use.
    tags: u32,
    plain: u32,
    /// The number of slots that were added beyond the capacity, for parts.
    extra: usize,
}

impl BioSlab {
    /// A slab for one plain bio of each of `tags` tags, and `capacity` other bios.
    pub fn new(tags: u32, capacity: u32) -> BioSlab {
        let of_tags = (0..tags).map(|_| BioSlot::of_tag());
        let slots = of_tags.chain((0..capacity).map(|_| BioSlot::empty())).collect();
        BioSlab { slots, free: (tags..tags + capacity).rev().collect(), tags, plain: 0, extra: 0 }
    }

    /// Takes the completers of all bios in flight, in order to fail them; each with the operation of the bio
    /// if that has an allocation of the request gate. The memory of the bios is not freed, because the device
    /// may still use it.
    pub fn take_completers(&mut self) -> impl Iterator<Item = (Completer, Option<Operation>)> {
        let in_use = self.slots.iter_mut().filter(|slot| slot.completer_kind != CompleterKind::None);
        in_use.map(|slot| {
            let gated = slot.slot_flags.contains(SlotFlags::GATED).then_some(slot.operation);
            (slot.take_completer(), gated)
        })
    }

    pub fn len(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32 - self.tags + self.plain
    }

    /// Whether the slab has room for a bio that is not plain, or for which no tag is free.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.free.len() > self.extra
    }

    #[inline]
    pub fn insert(&mut self, bio: NewBio) -> u32 {
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.grow(),
        };
        // Field by field, for the reason described at [`BioSlot`].
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

    /// Adds the plain bio of a tag to the tag's slot. The other fields of the slot have the values of
    /// [`BioSlot::of_tag`], or are taken from the request later.
    #[inline(always)]
    pub fn insert_plain(&mut self, tag: Tag, data: ManuallyDrop<Data>, user_data: u64) {
        let slot = &mut self.slots[tag.index()];
        slot.data = data;
        slot.completer_word = user_data;
        self.plain += 1;
    }

    /// Writes the fields of a plain bio's slot that are unset while the bio is the only one of its `request`.
    /// Must be called before the bio is handled like other bios.
    pub fn fill_plain(&mut self, request: &Request) {
        debug_assert!(request.is_plain());
        let slot = &mut self.slots[request.first_bio as usize];
        slot.sector = request.sector;
        slot.sectors = request.sectors;
        slot.start_ns = request.start_ns;
        slot.operation = request.operation;
        slot.flags = request.flags;
    }

    /// The memory of a plain bio that is the only one of its `request`.
    #[inline]
    pub fn plain_segment(&self, request: &Request) -> Option<Segment> {
        match &*self[request.first_bio].data {
            Data::Buffer(buffer) => Some(Segment { len: request.bytes() as u32, ..buffer.segment() }),
            _ => None,
        }
    }

    #[inline]
    pub fn plain(&self) -> u32 {
        self.plain
    }

    #[inline]
    pub fn of_tags(&mut self, tags: usize) -> &mut [BioSlot] {
        &mut self.slots[..tags]
    }

    /// Removes `count` completed plain bios, each the only one of its request. Their memory was taken.
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

    /// Frees a slot whose memory and completer have been taken.
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

    /// The submitted bio of which bio `index` is a part, or a part of a part; `index` if it is no part.
    pub fn root_of(&self, mut index: u32) -> u32 {
        while self[index].parent != NIL {
            index = self[index].parent;
        }
        index
    }

    /// The bio whose memory bio `index` uses, and the offset in bytes within that memory. Must not be called
    /// for a bio that uses the page of zeroes.
    pub fn memory_of(&self, index: u32) -> (&BioSlot, u64) {
        let (mut slot, mut skip) = (&self[index], 0);
        while slot.data_source == DataSource::Parent {
            skip += u64::from(slot.data_offset);
            slot = &self[slot.parent];
        }
        debug_assert!(slot.data_source == DataSource::Own, "the page of zeroes belongs to no bio");
        (slot, skip)
    }

    /// The memory of bio `index`, if it is memory that only the kernel can access.
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

    /// The number of segments of bio `index`. The limits keep it below 65536.
    #[inline]
    pub fn count_segments(&self, index: u32, zeroes: &IoBuffer) -> u16 {
        if self[index].own_buffer().is_some() || self.kernel_pages(index).is_some() {
            return 1;
        }
        let mut count = 0;
        self.for_each_segment(index, zeroes, |_| count += 1);
        count
    }

    /// Calls `each` with all segments of bio `index`, in order; with none if the memory has no address.
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

/// Calls `each` with the `length` bytes of `segments` from byte `skip` on.
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

/// A list of bios linked through their slots, first in, first out.
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

    /// The index of the first bio, or [`NIL`].
    pub fn first(&self) -> u32 {
        self.first
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a bio at the front.
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
