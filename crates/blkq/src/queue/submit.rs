//! Submission of a bio (`submit_bio_noacct` in block/blk-core.c, `blk_mq_submit_bio` in block/blk-mq.c). The
//! bio is checked. On the fast path it becomes a request immediately; otherwise it may wait for a tag, be
//! split, or pass through the flush machine first.

use std::mem::ManuallyDrop;

use crate::bio::{Bio, BioFlags, Outline};
use crate::buffer::Data;
use crate::completer::Completer;
use crate::limits::MergeSide;
use crate::ring::Ring;
use crate::slab::{NewBio, SlotFlags};
use crate::tags::Tag;
use crate::trace::TraceClient;

use super::Queue;
use super::io::Io;

/// The flag of a bio that is submitted in one piece: only a bio of the queue's owner can complete as a plain
/// one (`Completions::complete_plain`).
fn plain_flag(completer: &Completer) -> SlotFlags {
    if matches!(completer, Completer::Owner(_)) { SlotFlags::PLAIN } else { SlotFlags::empty() }
}

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
            && self.io.disk.fast().fits_small(&outline, &data)
            && !self.plug.is_touched(sector, sectors)
        {
            let outline = Outline { start_ns: self.plug.start_ns(), ..outline };
            let tag = self.plug.take(&outline);
            self.io.in_flight.begin_plain(tag, &outline, data, user_data);
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
            || !(self.io.disk.is_entered() || self.enter(ring))
            || self.io.disk.is_frozen()
            || !self.io.waiting.is_empty()
            || self.dispatch.observers().bios
            || self.plug.has_large_request()
            || self.dispatch.throttle().has_waiting()
            || self.io.tags.own() == 0
        {
            return false;
        }
        let bios = self.plug.fast_path_len().min(self.io.tags.own());
        let (start_ns, bios) =
            if self.io.disk.settings().iostats { self.io.clock.now_ns_for(bios) } else { (0, bios) };
        self.io.clock.count_uses(bios);
        self.io.tags.take_own(bios, |tags| self.plug.open(tags, start_ns));
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
        self.io.clock.return_uses(start_ns, rest.len());
        self.io.tags.put_own(rest);
    }

    #[inline(never)]
    fn submit_slow(&mut self, bio: Bio, ring: Option<&mut Ring>) -> Result<(), Bio> {
        if !self.io.in_flight.bios().has_room() {
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
        if !self.io.disk.is_entered() {
            self.enter(ring.as_deref_mut());
        }
        let start_ns = if self.io.disk.settings().iostats { self.io.clock.now_ns() } else { 0 };
        let outline = Outline { operation, flags, sector, sectors, start_ns };
        if !self.io.disk.fast().fits(&outline, &data) || self.io.is_traced() {
            return self.accept_slow(NewBio { outline, data, completer, slot_flags }, ring);
        }
        let slot_flags = slot_flags | plain_flag(&completer);
        let index = self.io.in_flight.bios_mut().insert(NewBio { outline, data, completer, slot_flags });
        if !self.io.waiting.is_empty() {
            return self.queue_behind_others(index, ring);
        }
        // A bio that passes `fits` has one buffer, and so one segment.
        if !self.admit(index, &outline, Some(1), ring) {
            self.queue_or_reject(index);
        }
    }

    #[cold]
    fn queue_behind_others(&mut self, index: u32, ring: Option<&mut Ring>) {
        if self.io.waits_for_turn && !self.io.may_wait(index) {
            self.io.await_tag(index);
            return self.admit_all(ring);
        }
        self.queue_or_reject(index);
    }

    #[cold]
    fn queue_or_reject(&mut self, index: u32) {
        self.close_fast_path();
        self.io.queue_or_reject(index);
    }

    /// Accepts a bio that is not a legal read or write of one buffer, or that is traced.
    #[cold]
    fn accept_slow(&mut self, mut bio: NewBio, ring: Option<&mut Ring>) {
        if self.io.disk.fast().fits(&bio.outline, &bio.data) {
            return self.accept_piece(bio, Some(1), ring);
        }
        if let Data::Kernel(pages) = *bio.data {
            // An io_uring operation names one registered buffer, so kernel pages cannot be merged.
            bio.outline.flags.insert(BioFlags::NO_MERGE);
            if self.io.disk.fast().fits_pages(&bio.outline, pages.len()) {
                return self.accept_piece(bio, Some(1), ring);
            }
        }
        if let Data::Segments(owner) = &*bio.data
            && self.io.disk.fast().fits_segments(&bio.outline, owner.segments(), self.io.disk.limits())
        {
            return self.accept_piece(bio, None, ring);
        }
        let index = self.io.in_flight.bios_mut().insert(bio);
        self.trace_queued(index);
        self.io.begin(index);
        self.admit_waiting(ring);
        // The bio may have completed already. The queue leaves now, so that a freeze need not wait for its
        // next turn.
        self.leave_if_idle();
    }

    /// The rest of [`Queue::accept`] for a legal bio that needs no split, but is not one buffer, or is
    /// traced. `segments` is its number of segments; `None`: they must be counted, because empty segments and
    /// segments beyond the end of the bio do not count.
    fn accept_piece(&mut self, mut bio: NewBio, segments: Option<u16>, ring: Option<&mut Ring>) {
        bio.slot_flags |= plain_flag(&bio.completer);
        let outline = bio.outline;
        let index = self.io.in_flight.bios_mut().insert(bio);
        self.trace_queued(index);
        if !self.io.waiting.is_empty() {
            return self.queue_behind_others(index, ring);
        }
        if !self.admit(index, &outline, segments, ring) {
            return self.queue_or_reject(index);
        }
        self.trace_merge(index);
    }

    #[inline]
    pub(super) fn admit_waiting(&mut self, ring: Option<&mut Ring>) {
        if self.io.waiting.is_empty() {
            return self.io.stop_waiting_for_tags();
        }
        self.admit_all(ring);
    }

    /// Admits waiting bios until there is no tag or the turn's time is over: a flush of the plug takes as long
    /// as a driver that executes requests immediately. The other bios wait for the next turn.
    #[inline(never)]
    pub(super) fn admit_all(&mut self, mut ring: Option<&mut Ring>) {
        let may_admit = self.io.may_admit_first();
        if !may_admit || !(self.io.disk.is_entered() || self.enter(ring.as_deref_mut())) {
            // The path must not be open while a bio waits.
            return self.close_fast_path();
        }
        while self.io.may_admit_first()
            && let Some((index, is_counted)) = self.io.pop_waiting()
        {
            if self.io.disk.settings().iostats && self.io.in_flight[index].start_ns == 0 {
                // Statistics were off when the bio was submitted.
                self.io.in_flight[index].start_ns = self.io.clock.now_ns();
            }
            let outline = self.io.in_flight[index].outline();
            let (plugged, in_use) = (self.plug.requests().len(), self.io.in_flight.in_use());
            if self.admit(index, &outline, None, ring.as_deref_mut()) {
                self.trace_merge(index);
                // A plug that did not grow by a new request was flushed.
                let is_new = self.io.in_flight.in_use() > in_use;
                if is_new && self.plug.requests().len() <= plugged && self.rounds.spend_time() {
                    self.io.waits_for_turn = true;
                }
            } else if self.io.may_wait(index) {
                return self.io.return_waiting(index, is_counted);
            } else {
                self.trace_fast_path();
                self.io.reject_again(index);
            }
        }
        self.io.stop_waiting_for_tags();
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
        let segments = segments.unwrap_or_else(|| self.io.in_flight.count_segments(index));
        self.io.in_flight.begin(tag, index, outline, segments);
        self.plug_request(tag, outline, ring);
        true
    }

    #[inline]
    fn take_tag(&mut self) -> Option<Tag> {
        self.close_fast_path();
        // A frozen disk starts no request; those in flight complete.
        if !self.io.disk.is_entered() || self.io.disk.is_frozen() {
            return None;
        }
        let Io { tags, in_flight, .. } = &mut self.io;
        tags.next().or_else(|| tags.next_shared(in_flight.in_use(), self.hold.len() as u32))
    }

    /// Adds a request to the plug, and flushes the plug if it is full or the request is large.
    #[inline]
    fn plug_request(&mut self, tag: Tag, outline: &Outline, mut ring: Option<&mut Ring>) {
        if self.plug.has_large_request() {
            self.flush_full_plug(ring.as_deref_mut());
        }
        if self.io.is_traced() {
            self.trace_request(tag);
        }
        if self.plug.push(tag, outline, self.io.disk.settings().merge) {
            self.flush_full_plug(ring);
        }
    }

    /// Tries to merge bio `index`: with the youngest request of the plug, else with a neighbour in the
    /// scheduler, else with the youngest request that waits for a limit. `segments` is the bio's number of
    /// segments, `None` if unknown.
    #[inline(always)]
    fn try_merge(&mut self, index: u32, outline: &Outline, segments: Option<u16>) -> bool {
        (self.plug.is_touched(outline.sector, outline.sectors) && self.try_plug_merge(index, segments))
            || (self.dispatch.scheduler().is_some() && self.try_scheduler_merge(index, segments))
            || (self.dispatch.throttle().has_waiting() && self.try_throttled_merge(index, segments))
    }

    #[inline(always)]
    fn try_plug_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let Some(tag) = self.plug.last() else { return false };
        let merged = self.io.try_merge(tag, index, segments);
        if merged {
            self.plug.merged(&self.io.in_flight[tag]);
            if self.plug.has_large_request() {
                // The slow path flushes the plug before it adds the next request.
                self.close_fast_path();
            }
        }
        merged
    }

    #[cold]
    fn try_throttled_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let youngest = self.dispatch.throttle().youngest(self.io.in_flight[index].operation);
        let merged = youngest.filter(|&tag| self.io.try_merge(tag, index, segments));
        merged.inspect(|&tag| self.trace_merge_into(tag, index)).is_some()
    }

    #[cold]
    fn try_scheduler_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        if !self.io.may_merge(index) {
            return false;
        }
        let Some(scheduler) = self.dispatch.scheduler_mut() else { return false };
        let (requests, slot) = (self.io.in_flight.requests(), &self.io.in_flight[index]);
        let found = scheduler.find_merge(requests, slot.operation, slot.sector, slot.sectors);
        let Some((tag, side)) = found.filter(|&(tag, _)| self.io.try_merge(tag, index, segments)) else {
            return false;
        };
        let requests = self.io.in_flight.requests();
        scheduler.merged(tag, requests);
        let neighbour = scheduler.find_neighbour(requests, tag, side);
        self.trace_merge_into(tag, index);
        match (side, neighbour) {
            (MergeSide::Back, Some(next)) => self.join(tag, next),
            (MergeSide::Front, Some(previous)) => self.join(previous, tag),
            (_, None) => {}
        }
        true
    }

    /// Joins two requests of the scheduler that touch after a merge, if the limits allow it.
    fn join(&mut self, first: Tag, second: Tag) {
        if self.io.can_join(first, second) {
            self.trace(|tracer, in_flight, clock| tracer.joined(first, second, in_flight.requests(), clock));
            self.io.join(first, second);
            if let Some(scheduler) = self.dispatch.scheduler_mut() {
                scheduler.joined(first, second);
            }
        }
    }

    #[inline(never)]
    fn flush_full_plug(&mut self, ring: Option<&mut Ring>) {
        self.flush_plug(ring);
    }
}
