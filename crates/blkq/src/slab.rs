use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Index, IndexMut};

use crate::bio::{BioFlags, Completion, Operation, Outline};
use crate::buffer::{Data, IoBuffer, KernelPages, Segment};
use crate::completer::{Completer, InlineCallback};
use crate::error::{IoResult, Status};
use crate::limits::MergeSide;
use crate::request::{NIL, Request, RequestState};
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::tags::Tag;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum DataSource {
    /// The memory in the bio's own `data` field.
    Own,
    /// A part of the parent's memory, from `data_offset` on.
    Parent,
    /// The queue's buffer of zeroes.
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
    /// The next bio of the same request.
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
    assert!(std::mem::offset_of!(BioSlot, completer_kind) < 64);
    assert!(std::mem::offset_of!(BioSlot, issued) == 64);
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

    pub fn take_data(&mut self) -> Data {
        ManuallyDrop::into_inner(std::mem::replace(&mut self.data, ManuallyDrop::new(Data::None)))
    }

    /// The bio's memory, if it is one buffer of its own.
    fn own_buffer(&self) -> Option<Segment> {
        match &*self.data {
            Data::Buffer(buffer) if self.data_source == DataSource::Own => {
                let bytes = self.sectors << SECTOR_SHIFT;
                debug_assert!(self.operation.has_data() && bytes <= buffer.len() as u64);
                Some(Segment { len: bytes as u32, ..buffer.segment() })
            }
            _ => None,
        }
    }

    fn set_completer(&mut self, completer: Completer) {
        (self.completer_kind, self.completer_word) = match completer {
            Completer::Owner(user_data) => (CompleterKind::Owner, user_data),
            Completer::Callback(callback) => {
                self.callback.write(callback);
                (CompleterKind::Callback, 0)
            }
            Completer::None => (CompleterKind::None, 0),
        };
    }

    /// Takes the completer, so that it is notified only once.
    pub fn take_completer(&mut self) -> Completer {
        match std::mem::replace(&mut self.completer_kind, CompleterKind::None) {
            CompleterKind::Owner => Completer::Owner(self.completer_word),
            CompleterKind::Callback => {
                // SAFETY: `set_completer` wrote the callback, and the kind shows that it was not taken since.
                Completer::Callback(unsafe { self.callback.assume_init_read() })
            }
            CompleterKind::None => Completer::None,
        }
    }

    /// The `user_data` of a bio of which the queue's owner gets a completion.
    pub fn owner_user_data(&self) -> Option<u64> {
        (self.completer_kind == CompleterKind::Owner).then_some(self.completer_word)
    }

    pub fn outline(&self) -> Outline {
        let &BioSlot { operation, flags, sector, sectors, start_ns, .. } = self;
        Outline { operation, flags, sector, sectors, start_ns }
    }

    /// The `user_data` of a bio that the queue's owner submitted as one piece, and whose completion needs no
    /// other action.
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

impl NewBio {
    /// A bio whose completion is not reported.
    pub fn without_completer(outline: Outline, data: Data) -> NewBio {
        let (data, completer) = (ManuallyDrop::new(data), ManuallyDrop::new(Completer::None));
        NewBio { outline, data, completer, slot_flags: SlotFlags::empty() }
    }
}

bitflags::bitflags! {
    /// The block layer's flags of a bio in flight.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub(crate) struct SlotFlags: u8 {
        /// The completion of the bio releases one allocation of the request gate.
        const GATED = 1 << 0;
        /// The bio is executed as parts: write zeroes for a device without support, written as zeroes.
        const AS_ZEROES = 1 << 1;
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

/// The I/O in flight of one queue: the slots of its requests, by tag, and of its bios.
///
/// The bios are a slab with a stack of free slots. (A free list through the slots would need fewer instructions but
/// more time, because each bio would wait until the slot of the previous one is in the cache.) The slab allocates
/// memory only when parts of bios exceed its capacity. The first slots are for plain bios, one for each tag. A plain
/// bio needs no other slot if it is submitted while a tag is free.
pub(crate) struct InFlight {
    requests: Box<[Request]>,
    bios: Vec<BioSlot>,
    free: Vec<u32>,
    /// The number of plain bios in the slots of tags.
    plain: u32,
    /// The number of slots that were added beyond the capacity, for parts.
    extra: usize,
    /// Requests in flight that did not start as a plain bio.
    others: u32,
    /// Memory of bios with [`DataSource::Zeroes`].
    zeroes: IoBuffer,
}

impl InFlight {
    /// Slots for `tags` requests with a plain bio each, and for `capacity` other bios.
    pub fn new(tags: usize, capacity: u32, zeroes: IoBuffer) -> InFlight {
        let of_tags = (0..tags).map(|_| BioSlot::of_tag());
        let first = tags as u32;
        InFlight {
            requests: (0..tags).map(|tag| Request::of_tag(tag as u16)).collect(),
            bios: of_tags.chain((0..capacity).map(|_| BioSlot::empty())).collect(),
            free: (first..first + capacity).rev().collect(),
            plain: 0,
            extra: 0,
            others: 0,
            zeroes,
        }
    }

    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The number of requests in flight.
    pub fn in_use(&self) -> u32 {
        self.others + self.plain
    }

    /// The tags of the requests in flight.
    pub fn tags(&self) -> impl Iterator<Item = Tag> {
        let tags = (0..self.requests.len()).map(|index| Tag(index as u16));
        tags.filter(|&tag| self[tag].state != RequestState::Idle)
    }

    /// The number of bios in flight.
    pub fn bio_count(&self) -> u32 {
        (self.bios.len() - self.free.len() - self.requests.len()) as u32 + self.plain
    }

    /// Whether a bio that is not plain, or for which no tag is free, has room.
    pub fn has_room(&self) -> bool {
        self.free.len() > self.extra
    }

    pub fn zeroes_len(&self) -> usize {
        self.zeroes.len()
    }

    /// Replaces the zeroes, unless a request may use them: also one that began as a plain bio, after a merge.
    pub fn set_zeroes(&mut self, zeroes: impl FnOnce() -> IoBuffer) {
        if self.in_use() == 0 {
            self.zeroes = zeroes();
        }
    }

    pub fn insert(&mut self, bio: NewBio) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| self.grow());
        self.set(index, bio);
        index
    }

    #[cold]
    fn grow(&mut self) -> u32 {
        self.bios.push(BioSlot::empty());
        self.extra += 1;
        self.free.reserve(self.bios.len());
        self.bios.len() as u32 - 1
    }

    pub fn set(&mut self, index: u32, bio: NewBio) {
        // Field by field, for the reason described at [`BioSlot`].
        let slot = &mut self[index];
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
    }

    /// Frees a slot whose memory and completer have been taken.
    pub fn remove(&mut self, index: u32) {
        debug_assert!(matches!(*self[index].data, Data::None));
        if (index as usize) < self.requests.len() {
            self[index] = BioSlot::of_tag();
            self.plain -= 1;
        } else {
            self.free.push(index);
        }
    }

    #[inline(always)]
    pub fn begin(&mut self, tag: Tag, index: u32, outline: &Outline, segments: u16) {
        self[tag].begin(index, outline, segments);
        self.others += 1;
    }

    /// Starts request `tag` with a plain bio, in the slot of the tag. The other fields of the slot have the values of
    /// [`BioSlot::of_tag`], or are taken from the request later.
    #[inline(always)]
    pub fn begin_plain(&mut self, tag: Tag, outline: &Outline, data: ManuallyDrop<Data>, user_data: u64) {
        let slot = &mut self.bios[tag.index()];
        slot.data = data;
        slot.completer_word = user_data;
        self.plain += 1;
        self[tag].begin_plain(outline);
    }

    /// Starts a flush of the queue itself, which has no bio.
    pub fn begin_flush(&mut self, tag: Tag, start_ns: u64) {
        let (operation, state) = (Operation::Flush, RequestState::Busy);
        self[tag] = Request { operation, state, start_ns, ..Request::idle() };
        self.others += 1;
    }

    /// If request `tag` consists of a single plain bio, completes the fields that the bio's slot lacks. Must be called
    /// before the bio is handled like other bios.
    pub fn fill_plain(&mut self, tag: Tag) {
        let request = &self.requests[tag.index()];
        if request.is_plain() {
            let slot = &mut self.bios[request.first_bio as usize];
            slot.sector = request.sector;
            slot.sectors = request.sectors;
            slot.start_ns = request.start_ns;
            slot.operation = request.operation;
            slot.flags = request.flags;
        }
    }

    /// Completes requests from the beginning of `completed`. Stops at a request that has failed, that does
    /// not consist of a single plain bio, that is not of `operation`, or that was not started at `start_ns`.
    /// Adds the completions of their bios to `own`, and their tags to `freed`. Returns the number of requests and of
    /// their sectors.
    #[inline(always)]
    pub fn complete_plain(
        &mut self,
        completed: &[(Tag, IoResult)],
        operation: Operation,
        start_ns: u64,
        own: &mut Vec<Completion>,
        freed: &mut Vec<Tag>,
    ) -> (usize, u64) {
        let Some(state) = RequestState::of_plain(operation) else { return (0, 0) };
        own.reserve(completed.len());
        freed.reserve(completed.len());
        let room = own.spare_capacity_mut().iter_mut().zip(freed.spare_capacity_mut());
        let slots = &mut self.bios[..self.requests.len()];
        let (mut count, mut sectors) = (0, 0);
        for (&(tag, result), (place, freed)) in completed.iter().zip(room) {
            if result.is_err() {
                break;
            }
            let request = &mut self.requests[tag.index()];
            if request.state != state || request.start_ns != start_ns {
                break;
            }
            request.state = RequestState::Idle;
            let slot = &mut slots[tag.index()];
            debug_assert!(slot.completer_kind == CompleterKind::Owner);
            let place = place.as_mut_ptr();
            // Written in place: a struct literal would be copied through the stack (see `BioSlot`).
            // SAFETY: the place is valid for writing, all of its fields are written, and the data is read
            // once, because the slot gets `Data::None` below.
            unsafe {
                (&raw mut (*place).user_data).write(slot.completer_word);
                (&raw mut (*place).result).write(Ok(()));
                (&raw mut (*place).data).write(std::ptr::read(&*slot.data));
            }
            slot.data = ManuallyDrop::new(Data::None);
            freed.write(tag);
            sectors += request.sectors;
            count += 1;
        }
        // SAFETY: the first `count` spare places of both vectors have been written.
        unsafe {
            own.set_len(own.len() + count);
            freed.set_len(freed.len() + count);
        }
        self.plain -= count as u32;
        (count, sectors)
    }

    /// Completes request `tag`; its bios remain. Returns its operation and its first bio. Panics if the
    /// request has already completed, in release builds too: such a driver has corrupted data.
    pub fn complete(&mut self, tag: Tag) -> (Operation, u32) {
        self.fill_plain(tag);
        let request = &mut self.requests[tag.index()];
        match request.state {
            RequestState::Idle => panic!("the driver completed tag {} twice", tag.0),
            RequestState::Busy => self.others -= 1,
            // Counted until the plain bio leaves its slot.
            RequestState::PlainRead | RequestState::PlainWrite | RequestState::PlainMerged => {}
        }
        let completed = (request.operation, request.first_bio);
        request.complete(tag);
        completed
    }

    /// Adds bio `index` to request `tag` at `side`. Together they have `segments`.
    pub fn merge(&mut self, tag: Tag, index: u32, side: MergeSide, segments: u16) {
        self.fill_plain(tag);
        let request = &mut self.requests[tag.index()];
        let bio = &mut self.bios[index as usize];
        if request.state != RequestState::Busy {
            request.state = RequestState::PlainMerged;
        }
        request.sectors += bio.sectors;
        request.segments = segments;
        match side {
            MergeSide::Back => {
                bio.next = NIL;
                self.bios[request.last_bio as usize].next = index;
                request.last_bio = index;
            }
            MergeSide::Front => {
                bio.next = request.first_bio;
                request.sector = bio.sector;
                request.first_bio = index;
            }
        }
    }

    /// Merges request `second`, which starts where `first` ends, into `first`. The earlier start time wins,
    /// as in the kernel.
    pub fn join(&mut self, first: Tag, second: Tag) {
        let tail = std::mem::replace(&mut self[second], Request::of_tag(second.0));
        debug_assert!(tail.state == RequestState::Busy, "schedulers have no request of a plain bio");
        let head = &mut self.requests[first.index()];
        self.bios[head.last_bio as usize].next = tail.first_bio;
        head.last_bio = tail.last_bio;
        head.sectors += tail.sectors;
        head.segments += tail.segments;
        head.start_ns = head.start_ns.min(tail.start_ns);
        self.others -= 1;
    }

    /// Takes the completers of all bios in flight, in order to fail them; each with the operation of the bio
    /// if that has an allocation of the request gate. Leaks the memory of the bios, because the kernel may still use
    /// it. No request counts as in flight afterwards, but [`InFlight::tags`] still returns them;
    /// [`InFlight::bio_count`] must no longer be called.
    pub fn leak(&mut self) -> Vec<(Completer, Option<Operation>)> {
        let in_use = self.bios.iter_mut().filter(|slot| slot.completer_kind != CompleterKind::None);
        let completers = in_use.map(|slot| {
            let gated = slot.slot_flags.contains(SlotFlags::GATED).then_some(slot.operation);
            (slot.take_completer(), gated)
        });
        let completers = completers.collect();
        std::mem::forget(std::mem::take(&mut self.bios));
        std::mem::forget(std::mem::replace(&mut self.zeroes, IoBuffer::zeroed(0)));
        (self.others, self.plain) = (0, 0);
        completers
    }

    /// The bios of request `tag`, in the order of their positions.
    pub fn bios_of(&self, tag: Tag) -> impl Iterator<Item = u32> {
        let bio = |index: u32| (index != NIL).then_some(index);
        std::iter::successors(bio(self[tag].first_bio), move |&index| bio(self[index].next))
    }

    /// The submitted bio of which bio `index` is a part, or a part of a part; `index` if it is no part.
    pub fn root_of(&self, mut index: u32) -> u32 {
        while self[index].parent != NIL {
            index = self[index].parent;
        }
        index
    }

    /// The bio whose memory bio `index` uses, and the offset in bytes within that memory. Must not be called
    /// for a bio that uses the zeroes.
    pub fn memory_of(&self, index: u32) -> (&BioSlot, u64) {
        let (mut slot, mut skip) = (&self[index], 0);
        while slot.data_source == DataSource::Parent {
            skip += u64::from(slot.data_offset);
            slot = &self[slot.parent];
        }
        debug_assert!(slot.data_source == DataSource::Own, "the zeroes belong to no bio");
        (slot, skip)
    }

    /// The memory of bio `index`, if it is memory that only the kernel can access.
    pub fn kernel_pages(&self, index: u32) -> Option<KernelPages> {
        let slot = &self[index];
        if slot.data_source == DataSource::Zeroes {
            return None;
        }
        let (root, skip) = self.memory_of(index);
        let Data::Kernel(pages) = &*root.data else { return None };
        Some(pages.part(skip as u32, (slot.sectors << SECTOR_SHIFT) as u32))
    }

    /// The number of segments of bio `index`. The limits keep it below 65536.
    pub fn count_segments(&self, index: u32) -> u16 {
        if self[index].own_buffer().is_some() || self.kernel_pages(index).is_some() {
            return 1;
        }
        let mut count = 0;
        self.segments_of_bio(index, |_| count += 1);
        count
    }

    /// Calls `each` with the segments of request `tag`, in order; with none if the memory has no address.
    pub fn for_each_segment(&self, tag: Tag, mut each: impl FnMut(Segment)) {
        let request = &self[tag];
        if request.is_plain() {
            if let Data::Buffer(buffer) = &*self[request.first_bio].data {
                each(Segment { len: request.bytes() as u32, ..buffer.segment() });
            }
            return;
        }
        self.bios_of(tag).for_each(|bio| self.segments_of_bio(bio, &mut each));
    }

    fn segments_of_bio(&self, index: u32, mut each: impl FnMut(Segment)) {
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
                let page = self.zeroes.segment();
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

impl Index<Tag> for InFlight {
    type Output = Request;
    fn index(&self, tag: Tag) -> &Request {
        &self.requests[tag.index()]
    }
}

impl IndexMut<Tag> for InFlight {
    fn index_mut(&mut self, tag: Tag) -> &mut Request {
        &mut self.requests[tag.index()]
    }
}

impl Index<u32> for InFlight {
    type Output = BioSlot;
    fn index(&self, index: u32) -> &BioSlot {
        &self.bios[index as usize]
    }
}

impl IndexMut<u32> for InFlight {
    fn index_mut(&mut self, index: u32) -> &mut BioSlot {
        &mut self.bios[index as usize]
    }
}
