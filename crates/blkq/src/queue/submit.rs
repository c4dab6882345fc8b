//! How a bio gets in: checked, and on the fast path made a request at once; else it waits,
//! is split, or takes the flush machine first (submit_bio_noacct in
//! block/blk-core.c, blk_mq_submit_bio in block/blk-mq.c).

use std::mem::ManuallyDrop;

use crate::bio::{Bio, BioFlags, Operation, Outline};
use crate::buffer::Data;
use crate::completer::Completer;
use crate::error::{IoResult, Status};
use crate::request::NIL;
use crate::ring::Ring;
use crate::slab::{DataSource, NewBio, SlotFlags};
use crate::split;
use crate::stats::Counter;
use crate::tags::Tag;
use crate::trace::TraceClient;

use super::Queue;

impl Queue {
    /// Takes a bio of the queue's owner. The completion reports an error of the bio
    /// itself.
    ///
    /// # Errors
    /// The bio, when the queue has no room; there will be some after a completion.
    #[inline(always)]
    pub fn submit(&mut self, bio: Bio, mut ring: Option<&mut Ring>) -> Result<(), Bio> {
        // In parts from the beginning, and whole again only for the slow path: a bio that is passed on
        // as it is goes through the stack (see `BioSlot`).
        let Bio { operation, flags, sector, sectors, data, user_data } = bio;
        let data = ManuallyDrop::new(data);
        let outline = Outline { operation, flags, sector, sectors, start_ns: 0 };
        if (self.plug.is_open() || self.open_lane(matches!(*data, Data::Buffer(_)), ring.as_deref_mut()))
            && self.disk.fast().fits_small(&outline, &data)
            && !self.plug.is_touched(sector, sectors)
        {
            let outline = Outline { start_ns: self.plug.start_ns(), ..outline };
            let tag = self.plug.take(&outline);
            self.in_flight.begin_plain(tag, &outline, data, user_data);
            if !self.plug.is_open() && self.plug.is_full() {
                self.flush_full_plug(ring);
            }
            return Ok(());
        }
        let data = ManuallyDrop::into_inner(data);
        self.submit_slow(Bio { operation, flags, sector, sectors, data, user_data }, ring)
    }

    /// Opens the fast lane for a bio, of one buffer or not, if it can be: the queue has entered the disk,
    /// no freeze has begun, no bio waits, no scheduler wants to merge, there are tags, and it is not traced.
    #[inline(never)]
    fn open_lane(&mut self, is_buffer: bool, ring: Option<&mut Ring>) -> bool {
        if !is_buffer
            || !(self.disk.is_entered() || self.enter(ring))
            || self.disk.is_frozen()
            || !self.waiting.is_empty()
            || self.dispatch.is_observed()
            || self.plug.has_grown()
            || self.dispatch.throttle().has_waiting()
            || self.tags.own() == 0
        {
            return false;
        }
        let bios = self.plug.lane_len().min(self.tags.own());
        let (start_ns, bios) =
            if self.disk.settings().iostats { self.clock.now_ns_for(bios) } else { (0, bios) };
        self.clock.count_uses(bios);
        self.tags.take_own(bios, |tags| self.plug.open(tags, start_ns));
        true
    }

    /// Closes the fast lane: the plug is flushed, or something is not as it has to be.
    #[inline]
    pub(super) fn close_lane(&mut self) {
        if self.plug.is_open() {
            self.close_open_lane();
        }
    }

    #[inline(never)]
    fn close_open_lane(&mut self) {
        let start_ns = self.plug.start_ns();
        let rest = self.plug.close();
        self.clock.return_uses(start_ns, rest.len());
        self.tags.put_own(rest);
    }

    #[inline(never)]
    fn submit_slow(&mut self, bio: Bio, ring: Option<&mut Ring>) -> Result<(), Bio> {
        if !self.in_flight.bios().has_room() {
            self.set_trace_client(|| TraceClient::NONE);
            return Err(bio);
        }
        let completer = Completer::Owner(bio.user_data);
        self.accept(bio, completer, SlotFlags::empty(), ring);
        Ok(())
    }

    /// Makes the bio this queue's own and sends it on its way.
    #[inline(always)]
    pub(super) fn accept(
        &mut self,
        bio: Bio,
        completer: Completer,
        slot_flags: SlotFlags,
        mut ring: Option<&mut Ring>,
    ) {
        let Bio { operation, flags, sector, sectors, data, .. } = bio;
        let (data, completer) = (ManuallyDrop::new(data), ManuallyDrop::new(completer));
        if !self.disk.is_entered() {
            self.enter(ring.as_deref_mut());
        }
        let start_ns = if self.disk.settings().iostats { self.clock.now_ns() } else { 0 };
        let outline = Outline { operation, flags, sector, sectors, start_ns };
        if !self.disk.fast().fits(&outline, &data) || self.dispatch.is_traced() {
            return self.accept_slow(NewBio { outline, data, completer, slot_flags }, ring);
        }
        let plain =
            if matches!(*completer, Completer::Owner(_)) { SlotFlags::PLAIN } else { SlotFlags::empty() };
        let index =
            self.in_flight.insert(NewBio { outline, data, completer, slot_flags: slot_flags | plain });
        // It is one buffer.
        if !self.waiting.is_empty() || !self.admit(index, &outline, Some(1), ring) {
            self.queue_or_reject(index);
        }
    }

    /// A bio for which there is no tag now waits, or completes if it will not wait.
    #[cold]
    fn queue_or_reject(&mut self, index: u32) {
        if self.in_flight[index].flags.contains(BioFlags::NO_WAIT) {
            self.reject_again(index);
            return self.want_no_tags();
        }
        self.close_lane();
        self.waiting.push_back(self.in_flight.bios_mut(), index);
        self.count_tag_waits();
    }

    /// Completes a bio that found no tag and will not wait for one.
    fn reject_again(&mut self, index: u32) {
        if self.is_out_of_tags() {
            self.stats.count(Counter::TagWaits, 1);
        }
        self.reject(index, Status::Again);
    }

    /// Whether bios that get no tag wait for a tag, and not for a freeze to be lifted.
    fn is_out_of_tags(&self) -> bool {
        self.disk.is_entered() && !self.disk.is_frozen()
    }

    /// Counts the bios that wait for a tag and were not counted yet.
    fn count_tag_waits(&mut self) {
        if self.is_out_of_tags() {
            let waiting = self.waiting.len();
            self.stats.count(Counter::TagWaits, u64::from(waiting - self.counted_waits));
            self.counted_waits = waiting;
        }
    }

    /// The first of the bios that wait.
    pub(super) fn pop_waiting(&mut self) -> Option<u32> {
        let index = self.waiting.pop_front(self.in_flight.bios_mut())?;
        self.counted_waits = self.counted_waits.saturating_sub(1);
        Some(index)
    }

    /// Accepts a bio that is not one legal read or write with a buffer, or is traced.
    #[cold]
    fn accept_slow(&mut self, mut bio: NewBio, ring: Option<&mut Ring>) {
        if self.disk.fast().fits(&bio.outline, &bio.data) {
            return self.accept_piece(bio, Some(1), ring);
        }
        if let Data::Kernel(pages) = *bio.data {
            // An operation on the ring names one registered buffer.
            bio.outline.flags.insert(BioFlags::NO_MERGE);
            if self.disk.fast().fits_pages(&bio.outline, pages.len()) {
                return self.accept_piece(bio, Some(1), ring);
            }
        }
        if let Data::Segments(owner) = &*bio.data
            && self.disk.fast().fits_segments(&bio.outline, owner.segments(), self.disk.limits())
        {
            return self.accept_piece(bio, None, ring);
        }
        let index = self.in_flight.insert(bio);
        self.trace_queued(index);
        self.begin(index);
        self.admit_waiting(ring);
        // It may have completed already: then a freeze need not wait for a poll.
        self.leave_if_idle();
    }

    /// The rest of [`Queue::accept`] for a legal piece that is no buffer, or is traced. Its `segments` are counted if
    /// they are not known: of a list, empty ones and those beyond the bio's end are none.
    fn accept_piece(&mut self, mut bio: NewBio, segments: Option<u16>, ring: Option<&mut Ring>) {
        if matches!(*bio.completer, Completer::Owner(_)) {
            bio.slot_flags.insert(SlotFlags::PLAIN);
        }
        let outline = bio.outline;
        let index = self.in_flight.insert(bio);
        self.trace_queued(index);
        if !self.waiting.is_empty() || !self.admit(index, &outline, segments, ring) {
            return self.queue_or_reject(index);
        }
        self.trace_merge(index);
    }

    /// Checks, flush sequences, splits, emulation.
    fn begin(&mut self, index: u32) {
        if let Err(status) = self.check(index) {
            return self.reject(index, status);
        }
        let slot = &mut self.in_flight[index];
        if slot.operation == Operation::Flush {
            return self.begin_flush(index);
        }
        if slot.sectors == 0 {
            // Without data what is left of a write with PREFLUSH is the flush.
            let flushes = slot.flags.contains(BioFlags::PREFLUSH);
            return if flushes { self.begin_flush(index) } else { self.complete_at_once(index, Ok(())) };
        }
        if slot.operation != Operation::WriteZeroes {
            // It means nothing to other operations, and their drivers did not declare it.
            slot.flags.remove(BioFlags::NO_UNMAP);
        }
        if !self.disk.limits().write_cache {
            slot.slot_flags.set(SlotFlags::UNCACHED_FUA, slot.flags.contains(BioFlags::FUA));
            slot.flags.remove(BioFlags::FUA | BioFlags::PREFLUSH);
        }
        if slot.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH) {
            return self.begin_flush_sequence(index);
        }
        self.begin_data(index);
    }

    /// The rules of a bio (submit_bio_noacct in block/blk-core.c).
    pub(super) fn check(&self, index: u32) -> IoResult {
        let slot = &self.in_flight[index];
        // Nothing would compare the length of that memory with what drivers are shown of it.
        if !slot.operation.has_data() && !matches!(*slot.data, Data::None) {
            return Err(Status::Invalid);
        }
        if slot.operation == Operation::Flush {
            return if slot.sectors == 0 { Ok(()) } else { Err(Status::Invalid) };
        }
        if slot.operation.is_write() && self.disk.limits().read_only {
            return Err(Status::ReadOnly);
        }
        let offset = slot.sector.0.checked_mul(512).ok_or(Status::Invalid)?;
        let length = slot.sectors.checked_mul(512).ok_or(Status::Invalid)?;
        self.disk.limits().check_range(offset, length)?;
        let is_write = slot.operation.is_write();
        if slot.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH) && !is_write {
            return Err(Status::Invalid);
        }
        if slot.operation.has_data() && slot.data_source != DataSource::Zeroes {
            self.check_memory(index)?;
        }
        Ok(())
    }

    /// Checks the memory of bio `index`. A part uses that of the bio which was submitted: it was checked with that, but
    /// the limits may have changed since.
    fn check_memory(&self, index: u32) -> IoResult {
        let (root, _) = self.in_flight.bios().memory_of(index);
        if matches!(*root.data, Data::Kernel(_)) && !self.disk.limits().kernel_pages {
            return Err(Status::NotSupported);
        }
        let length = root.sectors.checked_mul(512).filter(|length| *length <= u64::from(u32::MAX));
        let length = length.ok_or(Status::Invalid)?;
        if let Data::Buffer(buffer) = &*root.data {
            // Aligned as any device may ask, and drivers are shown no more of it than the bio's length.
            return if buffer.len() as u64 >= length { Ok(()) } else { Err(Status::Invalid) };
        }
        root.with_shape(|segments| split::check_memory(self.disk.limits(), segments, length))
    }

    /// Puts a bio behind those that wait for a tag.
    pub(super) fn await_tag(&mut self, index: u32) {
        let slot = &self.in_flight[index];
        let may_wait = !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL;
        if !may_wait && (!self.waiting.is_empty() || !self.disk.is_entered()) {
            return self.reject_again(index);
        }
        self.waiting.push_back(self.in_flight.bios_mut(), index);
    }

    /// Turns waiting bios into requests while there are tags.
    #[inline]
    pub(super) fn admit_waiting(&mut self, ring: Option<&mut Ring>) {
        if self.waiting.is_empty() {
            return self.want_no_tags();
        }
        self.admit_all(ring);
    }

    #[inline(never)]
    fn admit_all(&mut self, mut ring: Option<&mut Ring>) {
        if !(self.disk.is_entered() || self.enter(ring.as_deref_mut())) {
            return;
        }
        while !self.waiting.is_empty() {
            let is_counted = self.counted_waits > 0;
            let Some(index) = self.pop_waiting() else { break };
            if self.disk.settings().iostats && self.in_flight[index].start_ns == 0 {
                // Statistics were off when it came.
                self.in_flight[index].start_ns = self.clock.now_ns();
            }
            let outline = self.in_flight[index].outline();
            if self.admit(index, &outline, None, ring.as_deref_mut()) {
                self.trace_merge(index);
                continue;
            }
            let slot = &self.in_flight[index];
            if !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL {
                self.waiting.push_front(self.in_flight.bios_mut(), index);
                self.counted_waits += u32::from(is_counted);
                return self.count_tag_waits();
            }
            self.reject_again(index);
        }
        self.want_no_tags();
    }

    /// If nothing needs a tag any more, a wake-up is for another queue.
    #[inline]
    fn want_no_tags(&mut self) {
        if self.waiting.is_empty() {
            self.tags.cancel_wait();
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
        if self.try_merge(index, outline, segments) {
            return true;
        }
        let Some(tag) = self.take_tag() else { return false };
        let segments = segments.unwrap_or_else(|| self.in_flight.count_segments(index));
        self.in_flight.begin(tag, index, outline, segments);
        self.plug_request(tag, outline, ring);
        true
    }

    /// A tag for a new request, if there is one now.
    #[inline]
    fn take_tag(&mut self) -> Option<Tag> {
        self.close_lane();
        // A frozen disk takes no new request; those in flight complete.
        if !self.disk.is_entered() || self.disk.is_frozen() {
            return None;
        }
        let Queue { tags, in_flight, hold, .. } = self;
        tags.next().or_else(|| tags.next_shared(in_flight.in_use(), hold.len() as u32))
    }

    /// Puts a request under the plug; flushes it when it is full or the request large.
    #[inline]
    fn plug_request(&mut self, tag: Tag, outline: &Outline, mut ring: Option<&mut Ring>) {
        if self.plug.has_grown() {
            self.flush_full_plug(ring.as_deref_mut());
        }
        if self.dispatch.is_traced() {
            self.trace_request(tag);
        }
        if self.plug.push(tag, outline, self.disk.settings().merge) {
            self.flush_full_plug(ring);
        }
    }

    /// Flushes the plug in the middle of a turn.
    #[inline(never)]
    fn flush_full_plug(&mut self, ring: Option<&mut Ring>) {
        self.flush_plug(ring);
    }
}
