//! How a bio gets in: checked, and on the fast path made a request at once; else it waits,
//! is split, or goes through the flush machine first (submit_bio_noacct in
//! block/blk-core.c, blk_mq_submit_bio in block/blk-mq.c).

use std::mem::ManuallyDrop;

use crate::bio::Outline;
use crate::bio::{Bio, BioFlags, Operation};
use crate::buffer::Data;
use crate::completer::Completer;
use crate::error::{IoResult, Status};
use crate::limits::QueueLimits;
use crate::queue::Queue;
use crate::request::NIL;
use crate::ring::Ring;
use crate::sector::SECTOR_SHIFT;
use crate::slab::{NewBio, SlotMarks};
use crate::split;
use crate::stats::Counter;
use crate::tags::Tag;
use crate::tags::TagBatch;

/// The limits in the units of the fast path, so that it is a few compares.
#[derive(Clone, Copy)]
pub(crate) struct FastLimits {
    capacity_sectors: u64,
    /// Bits that must be zero in the sector and the length.
    block_mask: u64,
    /// Largest read and write that surely need no split; 0 sends all through the slow path.
    whole_sectors: [u64; 2],
    kernel_pages: bool,
}

impl FastLimits {
    pub fn new(limits: &QueueLimits) -> FastLimits {
        let whole = limits.max_request_bytes.min(limits.max_segment_bytes);
        let whole = if limits.chunk_bytes == 0 { u64::from(whole >> SECTOR_SHIFT) } else { 0 };
        FastLimits {
            capacity_sectors: limits.capacity_bytes >> SECTOR_SHIFT,
            block_mask: u64::from(limits.logical_block_bytes >> SECTOR_SHIFT) - 1,
            whole_sectors: [whole, if limits.read_only { 0 } else { whole }],
            kernel_pages: limits.kernel_pages,
        }
    }

    /// Whether this is a legal read or write of one buffer, in one piece, without a flush.
    #[inline]
    fn fits(&self, outline: &Outline, data: &Data) -> bool {
        let Data::Buffer(buffer) = data else { return false };
        self.fits_bytes(outline, buffer.len() as u64)
    }

    /// The same for memory of `bytes`.
    #[inline(always)]
    fn fits_bytes(&self, outline: &Outline, bytes: u64) -> bool {
        let &Outline { operation, flags, sector, sectors, .. } = outline;
        // Reads are 0 and writes 1; a length of 0 wraps around and is too long.
        let Some(&whole) = self.whole_sectors.get(operation as usize) else { return false };
        (sector.0 | sectors) & self.block_mask == 0
            && sectors.wrapping_sub(1) < whole
            && sectors <= bytes >> SECTOR_SHIFT
            && self.capacity_sectors.checked_sub(sector.0).is_some_and(|left| sectors <= left)
            && !flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH | BioFlags::NO_UNMAP)
    }
}

impl Queue {
    /// Takes a bio of the queue's owner. What is wrong with the bio itself is told in
    /// its completion.
    ///
    /// # Errors
    /// The bio, when the queue has no room; there will be some after a completion.
    #[inline(always)]
    pub fn submit(&mut self, bio: Bio, ring: Option<&mut Ring>) -> Result<(), Bio> {
        if !self.bios.has_room() {
            return Err(bio);
        }
        let completer = Completer::Owner(bio.user_data);
        self.accept(bio, completer, SlotMarks::empty(), ring);
        Ok(())
    }

    /// Makes the bio this queue's own and sends it on its way.
    #[inline(always)]
    pub(crate) fn accept(
        &mut self,
        bio: Bio,
        completer: Completer,
        marks: SlotMarks,
        mut ring: Option<&mut Ring>,
    ) {
        let Bio { operation, flags, sector, sectors, data, .. } = bio;
        let (data, completer) = (ManuallyDrop::new(data), ManuallyDrop::new(completer));
        if !self.entered {
            self.enter(ring.as_deref_mut());
        }
        let start_ns = if self.settings.iostats { self.clock.now_ns() } else { 0 };
        let outline = Outline { operation, flags, sector, sectors, start_ns };
        if !self.fast.fits(&outline, &data) {
            return self.accept_slow(NewBio { outline, data, completer, marks }, ring);
        }
        let plain =
            if matches!(*completer, Completer::Owner(_)) { SlotMarks::PLAIN } else { SlotMarks::empty() };
        let index = self.bios.insert(NewBio { outline, data, completer, marks: marks | plain });
        // It is one buffer.
        if !self.waiting.is_empty() || !self.admit(index, &outline, Some(1), ring) {
            self.hold_back(index);
        }
    }

    /// A bio for which there is no tag now waits, or ends if it will not wait.
    #[cold]
    fn hold_back(&mut self, index: u32) {
        if self.bios[index].flags.contains(BioFlags::NO_WAIT) {
            self.refuse(index, Status::Again);
            return self.want_no_tags();
        }
        self.waiting.push_back(&mut self.bios, index);
    }

    /// What is not one legal piece of reading or writing with a buffer.
    #[cold]
    fn accept_slow(&mut self, mut bio: NewBio, ring: Option<&mut Ring>) {
        if let Data::Kernel(pages) = *bio.data {
            // An operation on the ring names one registered buffer.
            bio.outline.flags.insert(BioFlags::NO_MERGE);
            if self.fast.kernel_pages && self.fast.fits_bytes(&bio.outline, u64::from(pages.len())) {
                return self.accept_pages(bio, ring);
            }
        }
        let index = self.bios.insert(bio);
        self.begin(index);
        self.admit_waiting(ring);
        // It may have ended already: then nobody need poll for a freeze to go on.
        self.leave_if_idle();
    }

    /// The rest of [`Queue::accept`] for a legal piece with pages of the kernel's.
    fn accept_pages(&mut self, mut bio: NewBio, ring: Option<&mut Ring>) {
        if matches!(*bio.completer, Completer::Owner(_)) {
            bio.marks.insert(SlotMarks::PLAIN);
        }
        let outline = bio.outline;
        let index = self.bios.insert(bio);
        if !self.waiting.is_empty() || !self.admit(index, &outline, Some(1), ring) {
            self.hold_back(index);
        }
    }

    /// Checks, flush sequences, splits, emulation.
    fn begin(&mut self, index: u32) {
        if let Err(status) = self.check(index) {
            return self.refuse(index, status);
        }
        let slot = &mut self.bios[index];
        if slot.operation == Operation::Flush {
            return self.begin_flush(index);
        }
        if slot.sectors == 0 {
            // Without data what is left of a write with PREFLUSH is the flush.
            let flushes = slot.flags.contains(BioFlags::PREFLUSH);
            return if flushes { self.begin_flush(index) } else { self.end_bio(index, Ok(())) };
        }
        if slot.operation != Operation::WriteZeroes {
            // It means nothing to other operations, and their drivers did not declare it.
            slot.flags.remove(BioFlags::NO_UNMAP);
        }
        if !self.limits.write_cache {
            slot.flags.remove(BioFlags::FUA | BioFlags::PREFLUSH);
        }
        if slot.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH) {
            return self.begin_flush_sequence(index);
        }
        self.begin_data(index);
    }

    /// The rules of a bio (submit_bio_noacct in block/blk-core.c).
    pub(crate) fn check(&self, index: u32) -> IoResult {
        let slot = &self.bios[index];
        // Nothing would compare the length of that memory with what drivers are shown of it.
        if !slot.operation.has_data() && !matches!(*slot.data, Data::None) {
            return Err(Status::Invalid);
        }
        if slot.operation == Operation::Flush {
            return if slot.sectors == 0 { Ok(()) } else { Err(Status::Invalid) };
        }
        if slot.operation.is_write() && self.limits.read_only {
            return Err(Status::ReadOnly);
        }
        let offset = slot.sector.0.checked_mul(512).ok_or(Status::Invalid)?;
        let length = slot.sectors.checked_mul(512).ok_or(Status::Invalid)?;
        self.limits.check_range(offset, length)?;
        let is_write = slot.operation.is_write();
        if slot.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH) && !is_write {
            return Err(Status::Invalid);
        }
        // The memory of a part is its parent's, checked with that.
        if slot.operation.has_data() && slot.parent == NIL {
            if matches!(*slot.data, Data::Kernel(_)) && !self.limits.kernel_pages {
                return Err(Status::NotSupported);
            }
            slot.with_shape(|segments| {
                if length > u64::from(u32::MAX) {
                    return Err(Status::Invalid);
                }
                split::check_memory(&self.limits, segments, length)
            })?;
        }
        Ok(())
    }

    /// Puts a bio at the end of those that wait for a tag.
    pub(crate) fn wait(&mut self, index: u32) {
        let slot = &self.bios[index];
        let may_wait = !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL;
        if !may_wait && (!self.waiting.is_empty() || !self.entered) {
            return self.refuse(index, Status::Again);
        }
        self.waiting.push_back(&mut self.bios, index);
    }

    /// Turns waiting bios into requests while there are tags.
    #[inline]
    pub(crate) fn admit_waiting(&mut self, ring: Option<&mut Ring>) {
        if self.waiting.is_empty() {
            return self.want_no_tags();
        }
        self.admit_all(ring);
    }

    fn admit_all(&mut self, mut ring: Option<&mut Ring>) {
        if !(self.entered || self.enter(ring.as_deref_mut())) {
            return;
        }
        while let Some(index) = self.waiting.pop_front(&mut self.bios) {
            if self.settings.iostats && self.bios[index].start_ns == 0 {
                // Statistics were off when it came.
                self.bios[index].start_ns = self.clock.now_ns();
            }
            let outline = self.bios[index].outline();
            if self.admit(index, &outline, None, ring.as_deref_mut()) {
                continue;
            }
            let slot = &self.bios[index];
            if !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL {
                self.waiting.push_front(&mut self.bios, index);
                return;
            }
            self.refuse(index, Status::Again);
        }
        self.want_no_tags();
    }

    /// If nothing needs a tag any more, a wake-up is for another queue.
    #[inline]
    fn want_no_tags(&mut self) {
        if let Some(waiter) = &mut self.sharing
            && self.waiting.is_empty()
        {
            self.tags.cancel_wait(waiter);
        }
    }

    /// Makes the bio part of a request under the plug: merged with one, or its own.
    /// False if there is no tag. Its `segments` are counted if they are not known.
    #[inline(always)]
    fn admit(
        &mut self,
        index: u32,
        outline: &Outline,
        segments: Option<u16>,
        ring: Option<&mut Ring>,
    ) -> bool {
        if self.try_merge(index, outline) {
            return true;
        }
        let Some(tag) = self.take_tag() else { return false };
        let segments = segments.unwrap_or_else(|| self.bios.count_segments(index, &self.zeroes));
        self.requests[tag.index()].begin(index, outline, segments);
        self.in_use += 1;
        self.plug_request(tag, outline, ring);
        true
    }

    /// A tag, out of the plug's batch.
    #[inline]
    fn take_tag(&mut self) -> Option<Tag> {
        match self.plug.tags.next() {
            Some(tag) => Some(tag),
            None => self.refill_tags(),
        }
    }

    #[cold]
    fn refill_tags(&mut self) -> Option<Tag> {
        // A frozen disk takes no new request; those in flight end.
        if !self.entered || self.disk.control.is_frozen() {
            return None;
        }
        let want = self.plug.tags_wanted(self.waiting.len() as usize);
        self.plug.tags = match &self.sharing {
            None => self.tags.get_batch(&mut self.hint, want),
            Some(_) => self.get_shared_tags(),
        };
        let tag = self.plug.tags.next();
        if tag.is_none() {
            self.stats.count(Counter::TagWaits, 1);
        }
        tag
    }

    /// A tag of a set that other queues use too: never more than the fair share, and a
    /// queue that finds none is woken when another gives some back.
    fn get_shared_tags(&mut self) -> TagBatch {
        let Some(waiter) = &mut self.sharing else { return TagBatch::default() };
        if !self.tags.may_get(self.in_use) {
            return TagBatch::default();
        }
        let mut batch = self.tags.get_batch(&mut self.hint, 1);
        if batch.is_empty() {
            self.tags.prepare_wait(waiter);
            batch = self.tags.get_batch(&mut self.hint, 1);
        }
        if !batch.is_empty() {
            self.tags.finish_wait(waiter);
        }
        batch
    }
}
