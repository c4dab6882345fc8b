//! Submission of a bio (`submit_bio_noacct` in block/blk-core.c, `blk_mq_submit_bio` in block/blk-mq.c). The
//! bio is checked. On the fast path it becomes a request immediately; otherwise it may wait for a tag, be
//! split, or pass through the flush machine first.

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
    /// Accepts a bio of the queue's owner. Errors of the bio itself are reported by its completion. Returns
    /// the bio if the queue has no room. There will be room after a completion.
    #[inline(always)]
    pub fn submit(&mut self, bio: Bio, mut ring: Option<&mut Ring>) -> Result<(), Bio> {
        // The bio is taken apart and put together again only for the slow path: a bio that is passed on as a
        // whole is copied through the stack (see `BioSlot`).
        let Bio { operation, flags, sector, sectors, data, user_data } = bio;
        let data = ManuallyDrop::new(data);
        let outline = Outline { operation, flags, sector, sectors, start_ns: 0 };
        if (self.plug.is_open() || self.open_fast_path(matches!(*data, Data::Buffer(_)), ring.as_deref_mut()))
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

    /// Opens the plug's fast path, if the bio has one buffer, the queue has entered the disk, no freeze has
    /// begun, no bio waits, nothing must see each bio, no merged request is about to be flushed, no request
    /// waits for a limit, and there are free tags. Returns whether it is open.
    #[inline(never)]
    fn open_fast_path(&mut self, is_buffer: bool, ring: Option<&mut Ring>) -> bool {
        if !is_buffer
            || !(self.disk.is_entered() || self.enter(ring))
            || self.disk.is_frozen()
            || !self.waiting.is_empty()
            || self.dispatch.observes_bios()
            || self.plug.has_large_request()
            || self.dispatch.throttle().has_waiting()
            || self.tags.own() == 0
        {
            return false;
        }
        let bios = self.plug.fast_path_len().min(self.tags.own());
        let (start_ns, bios) =
            if self.disk.settings().iostats { self.clock.now_ns_for(bios) } else { (0, bios) };
        self.clock.count_uses(bios);
        self.tags.take_own(bios, |tags| self.plug.open(tags, start_ns));
        true
    }

    /// Closes the plug's fast path. Must be called before the plug is flushed, and before any of the
    /// conditions for the path changes.
    #[inline]
    pub(super) fn close_fast_path(&mut self) {
        if self.plug.is_open() {
            self.close_open_fast_path();
        }
    }

    #[inline(never)]
    fn close_open_fast_path(&mut self) {
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

    /// Accepts the bio: it has a slot of this queue from now on, and completes exactly once.
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
            // Only a bio of the owner can complete as a plain one; see `Completions::complete_plain`.
            return self.accept_slow(NewBio { outline, data, completer, slot_flags }, ring);
        }
        let plain =
            if matches!(*completer, Completer::Owner(_)) { SlotFlags::PLAIN } else { SlotFlags::empty() };
        let index =
            self.in_flight.insert(NewBio { outline, data, completer, slot_flags: slot_flags | plain });
        // A bio that passes `fits` has one buffer, and so one segment.
        if !self.waiting.is_empty() || !self.admit(index, &outline, Some(1), ring) {
            self.queue_or_reject(index);
        }
    }

    /// Queues a bio that got no tag, or rejects it if it has NO_WAIT.
    #[cold]
    fn queue_or_reject(&mut self, index: u32) {
        if self.in_flight[index].flags.contains(BioFlags::NO_WAIT) {
            self.reject_again(index);
            return self.stop_waiting_for_tags();
        }
        self.close_fast_path();
        self.waiting.push_back(self.in_flight.bios_mut(), index);
        self.count_tag_waits();
    }

    /// Completes a bio that got no tag and must not wait for one.
    fn reject_again(&mut self, index: u32) {
        if self.is_out_of_tags() {
            self.stats.count(Counter::TagWaits, 1);
        }
        self.reject(index, Status::Again);
    }

    /// Whether bios without a tag wait for a tag, and not for the end of a freeze.
    fn is_out_of_tags(&self) -> bool {
        self.disk.is_entered() && !self.disk.is_frozen()
    }

    fn count_tag_waits(&mut self) {
        if self.is_out_of_tags() {
            let waiting = self.waiting.len();
            self.stats.count(Counter::TagWaits, u64::from(waiting - self.counted_waits));
            self.counted_waits = waiting;
        }
    }

    pub(super) fn pop_waiting(&mut self) -> Option<u32> {
        let index = self.waiting.pop_front(self.in_flight.bios_mut())?;
        self.counted_waits = self.counted_waits.saturating_sub(1);
        Some(index)
    }

    /// Accepts a bio that is not a legal read or write of one buffer, or that is traced.
    #[cold]
    fn accept_slow(&mut self, mut bio: NewBio, ring: Option<&mut Ring>) {
        if self.disk.fast().fits(&bio.outline, &bio.data) {
            return self.accept_piece(bio, Some(1), ring);
        }
        if let Data::Kernel(pages) = *bio.data {
            // An io_uring operation names one registered buffer, so kernel pages cannot be merged.
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
        // The bio may have completed already. The queue leaves now, so that a freeze need not wait for its
        // next turn.
        self.leave_if_idle();
    }

    /// The rest of [`Queue::accept`] for a legal bio that needs no split, but is not one buffer, or is
    /// traced. `segments` is its number of segments; `None`: they must be counted, because empty segments and
    /// segments beyond the end of the bio do not count.
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

    /// Checks a bio, and starts its first step: a flush, its data, or a flush sequence.
    fn begin(&mut self, index: u32) {
        if let Err(status) = self.check(index) {
            return self.reject(index, status);
        }
        let slot = &mut self.in_flight[index];
        if slot.operation == Operation::Flush {
            return self.begin_flush(index);
        }
        if slot.sectors == 0 {
            // A write with PREFLUSH and no data is only a flush.
            let flushes = slot.flags.contains(BioFlags::PREFLUSH);
            return if flushes {
                self.begin_flush(index)
            } else {
                self.complete_without_request(index, Ok(()))
            };
        }
        if slot.operation != Operation::WriteZeroes {
            // The flag has no meaning for other operations, and drivers do not declare it for them.
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

    /// Checks a bio against the rules of the device (`submit_bio_noacct` in block/blk-core.c).
    pub(super) fn check(&self, index: u32) -> IoResult {
        let slot = &self.in_flight[index];
        // Rejected, because nothing else would compare the length of this memory with what drivers see of it.
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

    /// Checks the memory of bio `index`. A part uses the memory of the bio that was submitted. That memory
    /// was checked on submission, but the limits may have changed since.
    fn check_memory(&self, index: u32) -> IoResult {
        let (root, _) = self.in_flight.bios().memory_of(index);
        if matches!(*root.data, Data::Kernel(_)) && !self.disk.limits().kernel_pages {
            return Err(Status::NotSupported);
        }
        let length = root.sectors.checked_mul(512).filter(|length| *length <= u64::from(u32::MAX));
        let length = length.ok_or(Status::Invalid)?;
        if let Data::Buffer(buffer) = &*root.data {
            // Any buffer is aligned for any device. Drivers get a segment of the bio's length.
            return if buffer.len() as u64 >= length { Ok(()) } else { Err(Status::Invalid) };
        }
        root.with_shape(|segments| split::check_memory(self.disk.limits(), segments, length))
    }

    /// Queues a bio behind those that wait for a tag.
    pub(super) fn await_tag(&mut self, index: u32) {
        let slot = &self.in_flight[index];
        let may_wait = !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL;
        if !may_wait && (!self.waiting.is_empty() || !self.disk.is_entered()) {
            return self.reject_again(index);
        }
        self.waiting.push_back(self.in_flight.bios_mut(), index);
    }

    #[inline]
    pub(super) fn admit_waiting(&mut self, ring: Option<&mut Ring>) {
        if self.waiting.is_empty() {
            return self.stop_waiting_for_tags();
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
                // Statistics were off when the bio was submitted.
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
        self.stop_waiting_for_tags();
    }

    /// Stops waiting for a tag of a shared set if no bio needs one, so that a wake-up goes to another queue.
    #[inline]
    fn stop_waiting_for_tags(&mut self) {
        if self.waiting.is_empty() {
            self.tags.cancel_wait();
        }
    }

    /// Merges the bio into a request, or makes it a request of its own in the plug. Returns false if there is
    /// no tag. `segments` is its number of segments, `None` if unknown.
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

    #[inline]
    fn take_tag(&mut self) -> Option<Tag> {
        self.close_fast_path();
        // A frozen disk starts no request; those in flight complete.
        if !self.disk.is_entered() || self.disk.is_frozen() {
            return None;
        }
        let Queue { tags, in_flight, hold, .. } = self;
        tags.next().or_else(|| tags.next_shared(in_flight.in_use(), hold.len() as u32))
    }

    /// Adds a request to the plug, and flushes the plug if it is full or the request is large.
    #[inline]
    fn plug_request(&mut self, tag: Tag, outline: &Outline, mut ring: Option<&mut Ring>) {
        if self.plug.has_large_request() {
            self.flush_full_plug(ring.as_deref_mut());
        }
        if self.dispatch.is_traced() {
            self.trace_request(tag);
        }
        if self.plug.push(tag, outline, self.disk.settings().merge) {
            self.flush_full_plug(ring);
        }
    }

    #[inline(never)]
    fn flush_full_plug(&mut self, ring: Option<&mut Ring>) {
        self.flush_plug(ring);
    }
}
