//! The I/O of a queue: bios and requests in flight, and what each of their steps needs. The steps that have no
//! file of their own are here: a bio is checked, and waits for a tag. `parts` splits bios, `sequence` has the
//! steps around flushes, and `complete` completes requests and bios.

use crate::bio::{BioFlags, Operation};
use crate::buffer::Data;
use crate::clock::Clock;
use crate::error::{Error, IoResult, Status};
use crate::request::NIL;
use crate::slab::{BioList, DataSource, SlotFlags};
use crate::split;
use crate::stats::{Counter, StatsWriter};
use crate::tags::Tag;
use crate::trace::EventKind;

use super::completions::Completions;
use super::disk_view::DiskView;
use super::failures::FailureNotes;
use super::flush::FlushMachine;
use super::in_flight::InFlight;
use super::tag_cache::TagCache;
use super::tracer::Tracer;

pub(super) struct Io {
    pub disk: DiskView,
    pub in_flight: InFlight,
    pub tags: TagCache,
    /// Bios without a tag, and parts of split bios, in the order in which they become requests.
    pub waiting: BioList,
    /// How many bios at the front of `waiting` are counted in [`Counter::TagWaits`].
    counted_waits: u32,
    /// The time of the turn is over: the bios of `waiting`, and those that join them, wait for the next turn.
    pub waits_for_turn: bool,
    pub flush: FlushMachine,
    pub completions: Completions,
    pub failures: FailureNotes,
    pub clock: Clock,
    pub stats: StatsWriter,
    tracer: Option<Box<Tracer>>,
}

impl Io {
    /// The I/O of a queue with `slots` requests, the last of which is the queue's own flush. Fails with
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if too many queues share the disk's tag set.
    pub fn new(disk: DiskView, slots: usize) -> Result<Io, Error> {
        Ok(Io {
            in_flight: InFlight::new(slots, disk.limits()),
            tags: TagCache::new(disk.shared(), disk.settings().requests(), disk.disk().depth_max())?,
            waiting: BioList::new(),
            counted_waits: 0,
            waits_for_turn: false,
            flush: FlushMachine::new(Tag(slots as u16 - 1)),
            completions: Completions::new(slots),
            failures: FailureNotes::default(),
            clock: Clock::new(disk.settings().clock),
            stats: StatsWriter::over(disk.shared().stats.clone()),
            tracer: None,
            disk,
        })
    }

    #[inline]
    pub fn is_traced(&self) -> bool {
        self.tracer.is_some()
    }

    #[inline]
    pub fn tracer(&self) -> Option<&Tracer> {
        self.tracer.as_deref()
    }

    /// Applies `change`, and the disk's settings, to the tracer, which is created before and removed after as
    /// needed.
    #[cold]
    pub fn change_tracer(&mut self, change: impl FnOnce(&mut Tracer)) {
        let mut tracer = self.tracer.take().unwrap_or_default();
        change(&mut tracer);
        tracer.reload(self.disk.settings().clock, self.disk.limits());
        self.tracer = tracer.is_on().then_some(tracer);
    }

    /// Calls `record` if the queue is traced. The requests that took the plug's fast path must have been
    /// recorded (`Queue::trace_fast_path`), because events are in order.
    #[inline]
    pub fn trace(&mut self, record: impl FnOnce(&mut Tracer, &InFlight, &mut Clock)) {
        if let Some(tracer) = &mut self.tracer {
            record(tracer, &self.in_flight, &mut self.clock);
        }
    }

    /// Records one event for each of these requests, if the queue is traced.
    #[inline]
    pub fn trace_requests(&mut self, kind: EventKind, tags: &[Tag]) {
        self.trace(|tracer, in_flight, clock| tracer.requests(kind, tags, in_flight.requests(), clock));
    }

    /// Notifies other threads of completed bios. Must be called after the counters are updated, so that a
    /// submitter that has been notified finds its I/O counted.
    #[inline]
    pub fn deliver_remote(&mut self) {
        self.completions.deliver_remote(&self.disk.disk().gate);
    }

    /// Checks a bio, and starts its first step: a flush, its data, or a flush sequence.
    pub fn begin(&mut self, index: u32) {
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
    pub fn check(&self, index: u32) -> IoResult {
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

    /// Whether bio `index` may wait for a tag. A part always waits.
    pub fn may_wait(&self, index: u32) -> bool {
        let slot = &self.in_flight[index];
        !slot.flags.contains(BioFlags::NO_WAIT) || slot.parent != NIL
    }

    /// Queues a bio behind those that wait. A bio that must not wait goes ahead of them if they leave tags free:
    /// they wait for the next turn, or will get tags in this one.
    pub fn await_tag(&mut self, index: u32) {
        if self.may_wait(index) {
            self.waiting.push_back(self.in_flight.bios_mut(), index);
        } else if self.disk.is_entered() && (self.waiting.is_empty() || self.leaves_tags()) {
            self.waiting.push_front(self.in_flight.bios_mut(), index);
            // `reject_again` counts it if there is no tag.
            self.counted_waits += 1;
        } else {
            self.reject_again(index);
        }
    }

    /// Whether tags are free apart from those that `waiting` may get now.
    fn leaves_tags(&self) -> bool {
        self.waits_for_turn || self.tags.may_get_more_than(self.waiting.len(), self.in_flight.in_use())
    }

    /// Queues a bio that got no tag, or rejects it if it must not wait.
    #[cold]
    pub fn queue_or_reject(&mut self, index: u32) {
        if !self.may_wait(index) {
            self.reject_again(index);
            return self.stop_waiting_for_tags();
        }
        self.waiting.push_back(self.in_flight.bios_mut(), index);
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
        self.disk.is_entered() && !self.disk.is_frozen() && !self.may_get_tag()
    }

    /// Whether a tag is free, or may be free in a shared set.
    pub fn may_get_tag(&self) -> bool {
        self.tags.may_get_shared(self.in_flight.in_use()).unwrap_or(self.tags.own() > 0)
    }

    fn count_tag_waits(&mut self) {
        if self.is_out_of_tags() {
            let waiting = self.waiting.len();
            self.stats.count(Counter::TagWaits, u64::from(waiting - self.counted_waits));
            self.counted_waits = waiting;
        }
    }

    /// Whether a bio waits, and the first one need not wait for the next turn.
    pub fn may_admit_first(&self) -> bool {
        !(self.waiting.is_empty() || self.waits_for_turn && self.may_wait(self.waiting.first()))
    }

    /// Removes the first waiting bio. Returns its index, and whether its wait is counted.
    pub fn pop_waiting(&mut self) -> Option<(u32, bool)> {
        let index = self.waiting.pop_front(self.in_flight.bios_mut())?;
        let is_counted = self.counted_waits > 0;
        self.counted_waits -= u32::from(is_counted);
        Some((index, is_counted))
    }

    /// Undoes [`Io::pop_waiting`], because there is no tag, and counts the waits that are not counted yet.
    pub fn return_waiting(&mut self, index: u32, is_counted: bool) {
        self.waiting.push_front(self.in_flight.bios_mut(), index);
        self.counted_waits += u32::from(is_counted);
        self.count_tag_waits();
    }

    /// Applies changed limits, also those that the driver itself has lowered while requests are in flight.
    pub fn reload_limits(&mut self) {
        if !self.disk.reload_limits() {
            return;
        }
        self.in_flight.reload(self.disk.limits());
        self.renew_durability_of_requests();
        // Waiting bios were checked and split under the old limits, so they start again. Their waits stay
        // counted.
        let (counted, others) = (self.counted_waits, self.waiting.len() - self.counted_waits);
        let mut still_counted = 0;
        for number in 1..=counted + others {
            let Some((index, _)) = self.pop_waiting() else { break };
            match self.check(index) {
                Ok(()) => {
                    self.renew_durability(index);
                    self.begin_data(index);
                }
                Err(status) => self.reject(index, status),
            }
            if number == counted {
                still_counted = self.waiting.len() - others;
            }
        }
        self.counted_waits = still_counted;
    }

    /// The `user_data` of the bio that was submitted as `index`, or of which `index` is a part, if the queue's
    /// owner submitted it.
    pub fn user_data_of(&self, index: u32) -> Option<u64> {
        self.in_flight[self.in_flight.bios().root_of(index)].owner_user_data()
    }

    /// Stops waiting for a tag of a shared set if no bio needs one, so that a wake-up goes to another queue.
    #[inline]
    pub fn stop_waiting_for_tags(&mut self) {
        if self.waiting.is_empty() {
            self.tags.cancel_wait();
        }
    }
}
