//! The I/O of a queue: bios and requests in flight, and the steps of a bio that need no other part of the queue.
//!
//! A bio is checked, and waits for a tag. It merges into a request that it continues (block/blk-merge.c); a merged
//! request never exceeds the limits ([`QueueLimits::allow`]), and only bios of the same operation without special flags
//! are merged. Requests complete in batches (`struct io_comp_batch`), and with each request its bios.
//!
//! A bio that exceeds the limits becomes several requests (`bio_split_to_limits` in block/blk-merge.c), and so does a
//! write-zeroes that is emulated by writes of zeroes (`blkdev_issue_zeroout`). A part has its own bio slot, which
//! contains its parent's index. The parent completes when all parts have completed, with the first error among them;
//! after an error no further part is made.
//!
//! A bio with PREFLUSH or FUA may need a flush before its data, after it, or both (`blk_insert_flush` in
//! block/blk-flush.c).

use std::collections::VecDeque;

use crate::bio::{BioFlags, Operation, Outline};
use crate::buffer::{Data, IoBuffer, Segment};
use crate::clock::Clock;
use crate::completer::Completer;
use crate::error::{Error, IoResult, Status};
use crate::limits::{ALONE, MergeSide, QueueLimits, is_mergeable};
use crate::request::{NIL, Request, RequestState};
use crate::sector::SECTOR_SHIFT;
use crate::slab::{DataSource, FlushStep, InFlight, NewBio, SlotFlags};
use crate::split;
use crate::stats::{Counter, StatGroup, StatsWriter};
use crate::tags::Tag;
use crate::trace::EventKind;

use super::completions::Completions;
use super::disk_view::DiskView;
use super::failures::{FailureNotes, THREAD};
use super::flush::FlushMachine;
use super::tag_cache::TagCache;
use super::tracer::Tracer;

/// Bios that a queue accepts per tag before it rejects further ones.
const BIOS_PER_TAG: u32 = 8;
/// Bios that a queue accepts at least.
const BIOS_MIN: u32 = 1024;
/// Largest size of the buffer of zeroes. A request may use it once per segment.
const ZEROES_BYTES: u32 = 64 << 10;
/// Parts of one bio that are in flight at the same time, so that even an emulated write-zeroes of the whole device needs
/// little memory.
const PARTS_MAX: u32 = 16;

/// The buffer of zeroes for devices with these limits. It must be legal as a segment.
fn zeroes_for(limits: &QueueLimits) -> IoBuffer {
    let longest = limits.max_segment_bytes & !(limits.logical_block_bytes - 1);
    IoBuffer::zeroed(longest.min(ZEROES_BYTES) as usize)
}

pub(super) struct Io {
    pub disk: DiskView,
    pub in_flight: InFlight,
    pub tags: TagCache,
    /// Bios without a tag, and parts of split bios, in the order in which they become requests.
    /// True: the wait is counted in [`Counter::TagWaits`].
    pub waiting: VecDeque<(u32, bool)>,
    /// The time of the turn is over: the bios of `waiting`, and those that join them, wait for the next turn.
    pub waits_for_turn: bool,
    pub flush: FlushMachine,
    pub completions: Completions,
    pub failures: FailureNotes,
    pub clock: Clock,
    pub stats: StatsWriter,
    /// The tracer, if the queue is traced. Changed by `Queue::change_tracer`.
    pub tracer: Option<Box<Tracer>>,
}

impl Io {
    /// The I/O of a queue with `slots` requests, the last of which is the queue's own flush. Fails with
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if too many queues share the disk's tag set.
    pub fn new(disk: DiskView, slots: usize) -> Result<Io, Error> {
        let bios = (slots as u32 * BIOS_PER_TAG).max(BIOS_MIN);
        Ok(Io {
            in_flight: InFlight::new(slots, bios, zeroes_for(&disk.limits)),
            tags: TagCache::new(&disk.shared, disk.settings.requests(), disk.disk.depth_max())?,
            waiting: VecDeque::with_capacity(slots + bios as usize),
            waits_for_turn: false,
            flush: FlushMachine::new(Tag(slots as u16 - 1)),
            completions: Completions::new(slots),
            failures: FailureNotes::default(),
            clock: Clock::new(disk.settings.clock),
            stats: StatsWriter::over(disk.shared.stats.clone()),
            tracer: None,
            disk,
        })
    }

    /// Calls `record` if the queue is traced. The requests that took the plug's fast path must have been
    /// recorded (`Queue::trace_fast_path`), because events are in order.
    pub fn trace(&mut self, record: impl FnOnce(&mut Tracer, &InFlight, &mut Clock)) {
        if let Some(tracer) = &mut self.tracer {
            record(tracer, &self.in_flight, &mut self.clock);
        }
    }

    /// Records one event for each of these requests, if the queue is traced.
    pub fn trace_requests(&mut self, kind: EventKind, tags: &[Tag]) {
        self.trace(|tracer, in_flight, clock| tracer.requests(kind, tags, in_flight.requests(), clock));
    }

    /// Notifies other threads of completed bios. Must be called after the counters are updated, so that a
    /// submitter that has been notified finds its I/O counted.
    pub fn deliver_remote(&mut self) {
        if !self.completions.remote.is_empty() {
            self.completions.notify_remote(&self.disk.disk.gate);
        }
    }

    /// Checks a bio, and starts its first step: a flush, its data, or a flush sequence.
    pub fn begin(&mut self, index: u32) {
        if let Err(status) = self.check(index) {
            return self.reject(index, status);
        }
        let slot = &mut self.in_flight[index];
        // A write with PREFLUSH and no data is only a flush.
        let is_empty = slot.sectors == 0;
        if slot.operation == Operation::Flush || (is_empty && slot.flags.contains(BioFlags::PREFLUSH)) {
            return self.begin_flush(index);
        }
        if is_empty {
            return self.complete_without_request(index, Ok(()));
        }
        if slot.operation != Operation::WriteZeroes {
            // The flag has no meaning for other operations, and drivers do not declare it for them.
            slot.flags.remove(BioFlags::NO_UNMAP);
        }
        if !self.disk.limits.write_cache {
            slot.slot_flags.set(SlotFlags::UNCACHED_FUA, slot.flags.contains(BioFlags::FUA));
            slot.flags.remove(BioFlags::FUA | BioFlags::PREFLUSH);
        }
        if slot.flags.contains(BioFlags::PREFLUSH) {
            return self.await_flush(index, FlushStep::Preflush);
        }
        // A driver with FUA makes the write durable itself. So the write is no flush sequence, and no flush waits for it.
        let is_durable = self.disk.limits.fua && slot.operation == Operation::Write;
        if slot.flags.contains(BioFlags::FUA) && !is_durable {
            return self.begin_sequence_data(index);
        }
        self.begin_data(index);
    }

    /// Checks a bio against the rules of the device (`submit_bio_noacct` in block/blk-core.c).
    pub fn check(&self, index: u32) -> IoResult {
        let slot = &self.in_flight[index];
        // Rejected, because nothing else would compare the length of this memory with what drivers see of it.
        if !slot.operation.has_data() && !matches!(*slot.data, Data::None) {
            return Err(Status::Invalid);
        }
        if slot.operation == Operation::Flush {
            return if slot.sectors == 0 { Ok(()) } else { Err(Status::Invalid) };
        }
        if slot.operation.is_write() && self.disk.limits.read_only {
            return Err(Status::ReadOnly);
        }
        let offset = slot.sector.0.checked_mul(512).ok_or(Status::Invalid)?;
        let length = slot.sectors.checked_mul(512).ok_or(Status::Invalid)?;
        self.disk.limits.check_range(offset, length)?;
        if slot.flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH) && !slot.operation.is_write() {
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
        let (root, _) = self.in_flight.memory_of(index);
        if matches!(*root.data, Data::Kernel(_)) && !self.disk.limits.kernel_pages {
            return Err(Status::NotSupported);
        }
        let length = root.sectors.checked_mul(512).filter(|length| *length <= u64::from(u32::MAX));
        let length = length.ok_or(Status::Invalid)?;
        if let Data::Buffer(buffer) = &*root.data {
            // Any buffer is aligned for any device. Drivers get a segment of the bio's length.
            return if buffer.len() as u64 >= length { Ok(()) } else { Err(Status::Invalid) };
        }
        root.data.with_shape(|segments| split::check_memory(&self.disk.limits, segments, length))
    }

    /// Whether bio `index` may wait for a tag. A part always waits.
    pub fn may_wait(&self, index: u32) -> bool {
        let slot = &self.in_flight[index];
        !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL
    }

    /// Queues a bio behind those that wait. A bio that must not wait goes ahead of them if they leave tags free:
    /// they wait for the next turn, or will get tags in this one.
    pub fn await_tag(&mut self, index: u32) {
        if self.may_wait(index) {
            self.waiting.push_back((index, false));
        } else if self.disk.entered
            && (self.waits_for_turn
                || self.waiting.is_empty()
                || self.tags.may_get_more_than(self.waiting.len() as u32, self.in_flight.in_use()))
        {
            // `reject_again` counts the wait if there is no tag.
            self.waiting.push_front((index, true));
        } else {
            self.reject_again(index);
        }
    }

    /// Queues a bio that got no tag, or rejects it if it must not wait.
    #[cold]
    pub fn queue_or_reject(&mut self, index: u32) {
        if !self.may_wait(index) {
            self.reject_again(index);
            return self.stop_waiting_for_tags();
        }
        self.waiting.push_back((index, false));
        self.count_tag_waits();
    }

    /// Completes a bio that got no tag and must not wait for one.
    pub fn reject_again(&mut self, index: u32) {
        if self.is_out_of_tags() {
            self.stats.count(Counter::TagWaits, 1);
        }
        self.reject(index, Status::Again);
    }

    /// Whether bios without a tag wait for a tag, and not for the end of a freeze or for the next turn.
    fn is_out_of_tags(&self) -> bool {
        self.disk.entered && !self.disk.is_frozen() && !self.may_get_tag()
    }

    pub fn may_get_tag(&self) -> bool {
        self.tags.may_get(self.in_flight.in_use())
    }

    /// Counts the waits that are not counted yet: those of the last bios.
    pub fn count_tag_waits(&mut self) {
        if self.is_out_of_tags() {
            let uncounted = self.waiting.iter_mut().rev().take_while(|(_, is_counted)| !is_counted);
            let count = uncounted.map(|(_, is_counted)| *is_counted = true).count();
            self.stats.count(Counter::TagWaits, count as u64);
        }
    }

    /// Whether a bio waits, and the first one need not wait for the next turn.
    pub fn may_admit_first(&self) -> bool {
        self.waiting.front().is_some_and(|&(first, _)| !(self.waits_for_turn && self.may_wait(first)))
    }

    /// Applies changed limits, also those that the driver itself has lowered while requests are in flight.
    pub fn reload_limits(&mut self) {
        if !self.disk.reload_limits() {
            return;
        }
        // While requests are in flight, a driver may only lose capabilities, so the zeroes in use stay legal.
        self.in_flight.set_zeroes(|| zeroes_for(&self.disk.limits));
        self.renew_durability_of_requests();
        // Waiting bios were checked and split under the old limits, so they start again. Their waits stay
        // counted.
        for _ in 0..self.waiting.len() {
            let Some((index, is_counted)) = self.waiting.pop_front() else { break };
            debug_assert!(self.may_wait(index), "a bio that must not wait would be put before the others");
            let others = self.waiting.len();
            match self.check(index) {
                Ok(()) => {
                    self.renew_durability(index);
                    self.begin_data(index);
                }
                Err(status) => self.reject(index, status),
            }
            self.waiting.range_mut(others..).for_each(|(_, of_part)| *of_part |= is_counted);
        }
    }

    /// The `user_data` of the bio that was submitted as `index`, or of which `index` is a part, if the queue's
    /// owner submitted it.
    pub fn user_data_of(&self, index: u32) -> Option<u64> {
        self.in_flight[self.in_flight.root_of(index)].owner_user_data()
    }

    /// Stops waiting for a tag of a shared set if no bio needs one, so that a wake-up goes to another queue.
    pub fn stop_waiting_for_tags(&mut self) {
        if self.waiting.is_empty() {
            self.tags.cancel_wait();
        }
    }

    /// Starts the data step of a bio: as one request, in parts, or as emulated write-zeroes.
    pub fn begin_data(&mut self, index: u32) {
        let (slot, limits) = (&mut self.in_flight[index], &self.disk.limits);
        if slot.operation == Operation::Discard && limits.max_discard_bytes == 0 {
            return self.reject(index, Status::NotSupported);
        }
        if slot.operation == Operation::WriteZeroes {
            // The driver supports write-zeroes only without deallocation. That is allowed for any
            // write-zeroes, because deallocation is optional.
            if limits.max_write_zeroes_bytes == 0 && limits.max_write_zeroes_no_unmap_bytes != 0 {
                slot.flags.insert(BioFlags::NO_UNMAP);
            }
            if limits.write_zeroes_bytes(slot.flags.contains(BioFlags::NO_UNMAP)) == 0 {
                return self.begin_zeroes(index);
            }
        }
        let slot = &self.in_flight[index];
        if self.part_sectors(index, slot.operation, slot.data_source, 0) == slot.sectors {
            self.await_tag(index);
        } else {
            self.issue_first_parts(index);
        }
    }

    /// Emulates a write-zeroes by writing zeroes, unless the bio forbids it.
    pub fn begin_zeroes(&mut self, index: u32) {
        if self.in_flight[index].flags.contains(BioFlags::NO_FALLBACK) {
            return self.reject(index, Status::NotSupported);
        }
        self.in_flight[index].slot_flags.insert(SlotFlags::AS_ZEROES);
        self.issue_first_parts(index);
    }

    fn issue_first_parts(&mut self, index: u32) {
        let slot = &mut self.in_flight[index];
        (slot.issued, slot.pending, slot.error) = (0, 0, None);
        self.issue_parts(index);
        let slot = &self.in_flight[index];
        if let (0, Some(status)) = (slot.pending, slot.error) {
            self.reject(index, status);
        }
    }

    /// Creates parts of bio `index` until [`PARTS_MAX`] are in flight or the whole bio is covered.
    fn issue_parts(&mut self, index: u32) {
        loop {
            let slot = &self.in_flight[index];
            if slot.pending >= PARTS_MAX || slot.issued == slot.sectors || slot.error.is_some() {
                return;
            }
            // The limits may have changed since the first part was made.
            if let Err(status) = self.check_rest(index) {
                self.in_flight[index].error = Some(status);
                continue;
            }
            let slot = &self.in_flight[index];
            let as_zeroes = slot.slot_flags.contains(SlotFlags::AS_ZEROES);
            let operation = if as_zeroes { Operation::Write } else { slot.operation };
            let sector = slot.sector + slot.issued;
            let is_zeroes = as_zeroes || slot.data_source == DataSource::Zeroes;
            let data_source = if is_zeroes { DataSource::Zeroes } else { DataSource::Parent };
            let sectors = self.part_sectors(index, operation, data_source, slot.issued);
            if sectors == 0 {
                // The memory of a single block consists of more segments than a request may have.
                self.in_flight[index].error = Some(Status::Invalid);
                continue;
            }
            let (mut flags, start_ns, issued) = (slot.flags, slot.start_ns, slot.issued);
            if as_zeroes {
                flags.remove(BioFlags::NO_UNMAP);
            }
            let outline = Outline { operation, flags, sector, sectors, start_ns };
            let part = self.in_flight.insert(NewBio::without_completer(outline, Data::None));
            let slot = &mut self.in_flight[part];
            slot.parent = index;
            slot.data_source = data_source;
            // Only reads and writes use the offset into the memory, and their memory is smaller than 4 GiB.
            slot.data_offset = (issued << SECTOR_SHIFT) as u32;
            let slot = &mut self.in_flight[index];
            slot.issued += sectors;
            slot.pending += 1;
            self.stats.count(Counter::Splits, 1);
            self.trace(|tracer, in_flight, clock| tracer.split(index, part, &in_flight[part], clock));
            self.await_tag(part);
        }
    }

    /// Checks whether the device still accepts the rest of bio `index`. If it no longer supports
    /// write-zeroes, the rest is emulated.
    fn check_rest(&mut self, index: u32) -> IoResult {
        let slot = &self.in_flight[index];
        self.disk.limits.check_range(slot.sector.bytes(), slot.sectors << SECTOR_SHIFT)?;
        if slot.operation.is_write() && self.disk.limits.read_only {
            return Err(Status::ReadOnly);
        }
        if slot.operation == Operation::Discard && self.disk.limits.max_discard_bytes == 0 {
            return Err(Status::NotSupported);
        }
        if slot.operation == Operation::WriteZeroes
            && !slot.slot_flags.contains(SlotFlags::AS_ZEROES)
            && self.disk.limits.write_zeroes_bytes(slot.flags.contains(BioFlags::NO_UNMAP)) == 0
        {
            if slot.flags.contains(BioFlags::NO_FALLBACK) {
                return Err(Status::NotSupported);
            }
            self.in_flight[index].slot_flags.insert(SlotFlags::AS_ZEROES);
        }
        Ok(())
    }

    /// The number of sectors of bio `index` from the sector `issued` on that one request of `operation` can have, with
    /// memory from `source`. 0 if not even one block fits into a request.
    fn part_sectors(&self, index: u32, operation: Operation, source: DataSource, issued: u64) -> u64 {
        let slot = &self.in_flight[index];
        let offset = (slot.sector + issued).bytes();
        let left = (slot.sectors - issued) << SECTOR_SHIFT;
        let no_unmap = slot.flags.contains(BioFlags::NO_UNMAP);
        let split_point = |left, segments: &[Segment], skip| {
            split::split_point(&self.disk.limits, operation, no_unmap, offset, left, segments, skip)
        };
        let bytes = if source == DataSource::Zeroes {
            // The buffer of zeroes is used repeatedly, once for each segment that a request may have.
            let segments = u64::from(self.disk.limits.max_segments);
            split_point(left.min(self.in_flight.zeroes_len() as u64 * segments), &[], 0)
        } else {
            let (root, skip) = self.in_flight.memory_of(index);
            root.data.with_shape(|segments| split_point(left, segments, skip + (issued << SECTOR_SHIFT)))
        };
        bytes >> SECTOR_SHIFT
    }

    /// Accounts for a completed part of bio `index`: makes further parts, or completes the bio.
    pub fn complete_part(&mut self, index: u32, result: IoResult) {
        let slot = &mut self.in_flight[index];
        slot.pending -= 1;
        slot.error = slot.error.or(result.err());
        // Makes no part after an error.
        self.issue_parts(index);
        let slot = &self.in_flight[index];
        if slot.pending == 0 {
            self.complete_bio(index, slot.error.map_or(Ok(()), Err));
        }
    }

    /// Whether bio `index` may be merged with other bios at all.
    #[inline(always)]
    pub fn may_merge(&self, index: u32) -> bool {
        let slot = &self.in_flight[index];
        self.disk.settings.merge && is_mergeable(slot.operation, slot.flags)
    }

    /// Merges bio `index` into request `tag` if they touch, and operation, flags and limits allow it.
    /// `segments` is the bio's number of segments, `None` if unknown.
    #[inline(always)]
    pub fn try_merge(&mut self, tag: Tag, index: u32, segments: Option<u16>) -> bool {
        let (slot, request) = (&self.in_flight[index], &self.in_flight[tag]);
        let Some(side) = MergeSide::of(request.sector, request.end(), slot.sector, slot.sectors) else {
            return false;
        };
        if !self.may_merge(index)
            || slot.operation != request.operation
            || request.flags.intersects(ALONE)
            || slot.step != FlushStep::None
        {
            return false;
        }
        let segments = segments.unwrap_or_else(|| self.in_flight.count_segments(index));
        let total_segments = u32::from(request.segments) + u32::from(segments);
        let sectors = request.sectors + slot.sectors;
        let start = if side == MergeSide::Back { request.sector } else { slot.sector };
        let (operation, limits) = (slot.operation, &self.disk.limits);
        if !self.disk.fast.allows(operation, sectors, total_segments)
            && !limits.allow(operation, start, sectors, total_segments)
        {
            return false;
        }
        self.in_flight.merge(tag, index, side, total_segments as u16);
        if self.disk.settings.iostats {
            self.stats.merged(operation.into());
        }
        true
    }

    /// Joins request `second`, which starts where `first` ends, to `first`, if the limits allow it, and frees the tag of
    /// `second`. Both are in the scheduler.
    pub fn try_join(&mut self, first: Tag, second: Tag) -> bool {
        let (head, tail) = (&self.in_flight[first], &self.in_flight[second]);
        let sectors = head.sectors + tail.sectors;
        let segments = u32::from(head.segments) + u32::from(tail.segments);
        if head.operation != tail.operation
            || head.flags.union(tail.flags).intersects(ALONE)
            || !self.disk.limits.allow(head.operation, head.sector, sectors, segments)
        {
            return false;
        }
        self.trace(|tracer, in_flight, clock| tracer.joined(first, second, in_flight.requests(), clock));
        let operation = self.in_flight[first].operation;
        self.in_flight.join(first, second);
        self.tags.free.push(second);
        self.tags.share_freed();
        if self.disk.settings.iostats {
            self.stats.joined(operation.into());
        }
        true
    }

    /// Starts a flush without data. Without a write cache, it completes immediately.
    pub fn begin_flush(&mut self, index: u32) {
        if !self.disk.limits.write_cache {
            return self.complete_without_request(index, Ok(()));
        }
        self.await_flush(index, FlushStep::Postflush);
    }

    /// Starts the data step, with the driver's FUA if it has it, else with a flush to follow.
    fn begin_sequence_data(&mut self, index: u32) {
        let slot = &mut self.in_flight[index];
        slot.flags.remove(BioFlags::PREFLUSH);
        let fua = slot.flags.contains(BioFlags::FUA);
        if fua && !(self.disk.limits.fua && slot.operation == Operation::Write) {
            slot.flags.remove(BioFlags::FUA);
            slot.step = FlushStep::DataThenFlush;
        } else {
            slot.step = FlushStep::Data;
        }
        self.flush.data_in_flight += 1;
        // The device may have changed while the flush was in flight.
        match self.check(index) {
            Ok(()) => self.begin_data(index),
            Err(status) => self.reject(index, status),
        }
    }

    /// Decides again how waiting write `index` becomes durable, because the limits have changed. A driver
    /// that does not declare FUA must not get the flag; a flush must follow the data instead. The decision is
    /// made for the submitted bio, whose flag its parts carry.
    pub fn renew_durability(&mut self, index: u32) {
        let &QueueLimits { write_cache, fua, .. } = &self.disk.limits;
        let root = self.in_flight.root_of(index);
        let has_flag = self.in_flight[index].flags.contains(BioFlags::FUA);
        let is_uncached = self.in_flight[root].slot_flags.contains(SlotFlags::UNCACHED_FUA);
        if has_flag && write_cache && fua || !has_flag && !is_uncached {
            return;
        }
        let mut part = index;
        while part != NIL {
            let slot = &mut self.in_flight[part];
            slot.flags.remove(BioFlags::FUA);
            part = slot.parent;
        }
        let slot = &mut self.in_flight[root];
        slot.slot_flags.set(SlotFlags::UNCACHED_FUA, !write_cache);
        if write_cache && std::mem::replace(&mut slot.step, FlushStep::DataThenFlush) == FlushStep::None {
            self.flush.data_in_flight += 1;
        }
    }

    /// Renews the decision for the requests in flight. There are some only if the driver itself has lost a
    /// capability, because no request is in flight under a freeze.
    pub fn renew_durability_of_requests(&mut self) {
        for index in 0..self.in_flight.requests().len() {
            let tag = Tag(index as u16);
            let Request { state, first_bio, .. } = self.in_flight[tag];
            // Flushes and plain bios do not have the flag, and a bio with the flag is never merged with
            // others.
            if state == RequestState::Busy && first_bio != NIL {
                self.renew_durability(first_bio);
                if !self.in_flight[first_bio].flags.contains(BioFlags::FUA) {
                    self.in_flight[tag].flags.remove(BioFlags::FUA);
                }
            }
        }
    }

    fn await_flush(&mut self, index: u32, step: FlushStep) {
        self.stats.count(Counter::FlushesAsked, 1);
        self.in_flight[index].step = step;
        self.flush.pending.push_back(index);
    }

    /// Starts the driver's flush for all bios that wait for one. Returns false if they need none.
    pub fn start_flush(&mut self) -> bool {
        let served = self.flush.begin();
        if !self.disk.limits.write_cache {
            // The write cache was removed after the bios had asked for a flush. Everything that completed
            // before is durable (see `QueueLimits::write_cache`).
            self.complete_flush(Ok(()));
            return false;
        }
        self.stats.count(Counter::FlushesSent, 1);
        self.stats.count(Counter::FlushesCoalesced, served as u64 - 1);
        let mut start_ns = 0;
        if self.disk.settings.iostats {
            start_ns = self.clock.now_ns();
            self.stats.start(StatGroup::Flush, 1, start_ns);
        }
        let tag = self.flush.tag;
        self.in_flight.begin_flush(tag, start_ns);
        self.trace(|tracer, _, clock| tracer.flush_begun(tag, served, clock));
        true
    }

    /// Completes the bios that wait for the next flush, because none will be issued.
    pub fn abandon_flushes(&mut self, result: IoResult) {
        while let Some(index) = self.flush.pending.pop_front() {
            self.complete_bio(index, result);
        }
    }

    /// Completes the driver's flush: each bio that it served takes its next step.
    pub fn complete_flush(&mut self, result: IoResult) {
        self.flush.in_flight = false;
        while let Some(index) = self.flush.running.pop_front() {
            if self.in_flight[index].step == FlushStep::Preflush && result.is_ok() {
                self.begin_sequence_data(index);
            } else {
                self.complete_bio(index, result);
            }
        }
    }

    /// Completes and counts requests. Requests of one operation and start time are counted together.
    pub fn complete_requests(&mut self, completed: &[(Tag, IoResult)]) {
        let iostats = self.disk.settings.iostats;
        let mut rest = completed;
        while let Some(&(first, _)) = rest.first() {
            let (now_ns, stamped) = if iostats { self.clock.now_ns_for(rest.len()) } else { (0, rest.len()) };
            let stamped = &rest[..stamped];
            let Request { operation, start_ns, .. } = self.in_flight[first];
            let (own, freed) = (&mut self.completions.own, &mut self.tags.free);
            let plain = self.in_flight.complete_plain(stamped, operation, start_ns, own, freed);
            let (count, sectors) = if plain.0 == stamped.len() {
                plain
            } else {
                self.complete_others(stamped, plain, operation, start_ns)
            };
            if iostats {
                self.clock.count_uses(count);
                self.stats.done(operation.into(), (count as u64, sectors), start_ns, now_ns);
            }
            rest = &rest[count..];
        }
        #[cfg(simulation)]
        for (tag, _) in completed {
            crate::simulation::world().request_completed(self.disk.index, tag.0);
        }
        self.stats.count(Counter::ClockReads, self.clock.take_reads());
        self.stats.clock_age(self.clock.age_ns_max());
        self.tags.share_freed();
    }

    /// Completes further requests of `completed`. Its first `count` requests are complete, with `sectors` in
    /// total. Stops at a request that is plain, that is not of `operation` or that has another start time.
    /// Returns the new values of `count` and `sectors`.
    #[inline(never)]
    fn complete_others(
        &mut self,
        completed: &[(Tag, IoResult)],
        (mut count, mut sectors): (usize, u64),
        operation: Operation,
        start_ns: u64,
    ) -> (usize, u64) {
        while let Some(&(tag, result)) = completed.get(count) {
            let request = &self.in_flight[tag];
            let plain = request.is_plain() && result.is_ok();
            if plain || request.operation != operation || request.start_ns != start_ns {
                break;
            }
            (count, sectors) = (count + 1, sectors + request.sectors);
            self.complete_request(tag, result);
        }
        (count, sectors)
    }

    fn complete_request(&mut self, tag: Tag, result: IoResult) {
        let (operation, mut index) = self.in_flight.complete(tag);
        if tag != self.flush.tag {
            self.tags.free.push(tag);
        }
        if let Err(status) = result {
            self.stats.failed(operation.into(), status);
            self.note_failure(tag, index, status);
        }
        if operation == Operation::Flush {
            return self.complete_flush(result);
        }
        while index != NIL {
            let slot = &mut self.in_flight[index];
            let next = slot.next;
            if let Some(user_data) = slot.plain_user_data() {
                self.completions.push_own(user_data, result, slot.take_data());
                self.in_flight.remove(index);
            } else {
                self.complete_bio(index, result);
            }
            index = next;
        }
    }

    /// Records the failure of request `tag`, whose first bio is `first`, for the watcher.
    #[cold]
    pub fn note_failure(&mut self, tag: Tag, first: u32, status: Status) {
        // Clients try operations that a device may not support, and fall back to others.
        if status == Status::NotSupported {
            return;
        }
        let bio = if first == NIL { self.flush.running.front().copied() } else { Some(first) };
        let user_data = bio.and_then(|bio| self.user_data_of(bio));
        self.failures.note(&self.in_flight[tag], status, user_data.ok_or(THREAD));
    }

    /// Completes bio `index`, or its current step: the bio continues if it has further steps.
    pub fn complete_bio(&mut self, index: u32, result: IoResult) {
        let slot = &self.in_flight[index];
        let has_steps = slot.operation == Operation::WriteZeroes || slot.step != FlushStep::None;
        if has_steps && self.complete_step(index, result) {
            return;
        }
        let slot = &mut self.in_flight[index];
        if slot.slot_flags.contains(SlotFlags::GATED) {
            self.completions.gate_owed[usize::from(slot.operation.is_write())] += 1;
        }
        let (data, parent, completer) = (slot.take_data(), slot.parent, slot.take_completer());
        self.in_flight.remove(index);
        match completer {
            Completer::Owner(user_data) => self.completions.push_own(user_data, result, data),
            Completer::Callback(_) => self.completions.remote.push((completer, result, data)),
            Completer::None => self.complete_part(parent, result),
        }
    }

    /// Completes one step of a bio that may have several. Returns true if the bio continues.
    #[inline(never)]
    fn complete_step(&mut self, index: u32, result: IoResult) -> bool {
        let slot = &self.in_flight[index];
        let is_zeroes =
            slot.operation == Operation::WriteZeroes && !slot.slot_flags.contains(SlotFlags::AS_ZEROES);
        // While the bio waits for a flush, `result` is that of the flush, and says nothing about support for
        // write-zeroes.
        let is_data = slot.step != FlushStep::Preflush && slot.step != FlushStep::Postflush;
        if is_zeroes
            && is_data
            && result == Err(Status::NotSupported)
            && !slot.flags.contains(BioFlags::NO_FALLBACK)
        {
            // The driver has learned from this request that the device does not support the operation.
            self.begin_zeroes(index);
            return true;
        }
        let step = std::mem::take(&mut self.in_flight[index].step);
        if matches!(step, FlushStep::Data | FlushStep::DataThenFlush) {
            self.flush.data_in_flight -= 1;
        }
        let needs_flush = step == FlushStep::DataThenFlush && result.is_ok();
        if needs_flush {
            self.await_flush(index, FlushStep::Postflush);
        }
        needs_flush
    }

    /// Completes a bio that never became a request.
    #[cold]
    pub fn reject(&mut self, index: u32, status: Status) {
        self.stats.rejected(self.in_flight[index].operation.into(), status);
        self.complete_without_request(index, Err(status));
    }

    pub fn complete_without_request(&mut self, index: u32, result: IoResult) {
        self.trace(|tracer, in_flight, clock| {
            tracer.bio(EventKind::Complete, index, None, &in_flight[index], result, clock);
        });
        self.complete_bio(index, result);
    }
}
