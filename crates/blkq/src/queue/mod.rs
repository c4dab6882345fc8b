//! A hardware queue (`struct blk_mq_hw_ctx`): everything that one thread owns of a disk. Bios enter through
//! [`Queue::submit`], become requests in the plug, reach the driver in batches, and complete in batches. This
//! path takes no lock, passes nothing to another thread, and allocates nothing.
//!
//! Each part of a queue is a module and owns its fields:
//!
//! * `io`: bios and requests in flight, their steps that need no other part, and what each of these needs: `disk_view`
//!   (the settings and limits in force), the slots ([`InFlight`]), `tag_cache` (the free tags), `flush` (the flush
//!   machine), `completions`, `failures`, `tracer`, the clock and the statistics;
//! * `plug`: requests that are collected for one batch, and the fast path into it;
//! * `dispatch`, `throttle`: requests between the plug and the driver;
//! * `hold`: failed requests that are held;
//! * `rounds`: the budget of a turn;
//! * `hang`: finds I/O that hangs.
//!
//! This file has the steps that need several parts.
//!
//! The ring is lent to each call that may reach the driver, because several queues of a thread share it.

mod completions;
mod disk_view;
mod dispatch;
pub mod failures;
mod flush;
pub mod hang;
mod hold;
mod io;
pub mod plug;
mod rounds;
mod tag_cache;
mod throttle;
mod tracer;

use std::collections::VecDeque;
use std::fmt::Write;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::bio::{Bio, BioFlags, Completion, Outline};
use crate::buffer::Data;
use crate::clock::{Clock, monotonic_ns};
use crate::completer::Completer;
use crate::disk::{Disk, QueueClaim, Resume};
use crate::error::{Error, IoResult, Status};
use crate::limits::{MergeSide, QueueLimits};
use crate::remote::gate::Direction;
use crate::remote::software::{SOFTWARE_QUEUES, Staged, StagedBio};
use crate::ring::{Cqe, Ring};
use crate::slab::{InFlight, NewBio, SlotFlags};
use crate::stats::Counter;
use crate::tags::Tag;
use crate::trace::{EventKind, Probes, TraceClient, TraceMemory, TraceWriter};

use disk_view::DiskView;
use dispatch::{Dispatch, DispatchPath};
use hang::{HangScan, HangTracker, Scan};
use hold::Hold;
use io::Io;
use plug::Plug;
use rounds::Rounds;
use tracer::Tracer;

/// Plugs that a queue without a sleep flushes between two checks whether USDT probes are attached.
const PROBE_PLUGS: u64 = 256;
/// Staged requests that are taken together from one software queue while others have requests too.
const TAKE_AT_ONCE: usize = 8;

/// One hardware queue of a disk, owned by one thread.
pub(crate) struct Queue {
    io: Io,
    plug: Plug,
    /// The software queue from which staged bios are taken next (`hctx->dispatch_from` in the kernel).
    pull_from: u32,
    /// The staged requests that were taken together, oldest first. Each one stays here until the queue
    /// accepts it, so that a panic loses none.
    pulled: VecDeque<Staged>,
    dispatch: Dispatch,
    hold: Hold,
    rounds: Rounds,
    hang_tracker: HangTracker,
    /// Must be the last field: the driver's queue must be dropped before another thread may open this queue.
    _claim: QueueClaim,
}

/// How a queue is opened, enters and leaves the disk, so that a freeze waits for the queue, applies changes that were made
/// under a freeze, and is closed.
impl Queue {
    /// Opens queue `index` of `disk` on this thread. `owner` marks the queue's submissions on the ring, which
    /// several queues may share. Fails with the driver's error, or
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if the queue is open already.
    pub fn open(disk: &Arc<Disk>, index: usize, owner: u16, ring: Option<&mut Ring>) -> Result<Queue, Error> {
        let claim = disk.claim_queue(index)?;
        let view = DiskView::new(disk, index)?;
        // One request beyond the tags is the queue's own flush.
        let slots = usize::from(disk.depth_max()) + 1;
        let driver = dispatch::open_driver(&view, slots, ring)?;
        let io = Io::new(view, slots)?;
        Ok(Queue {
            plug: Plug::new(),
            pull_from: 0,
            pulled: VecDeque::new(),
            dispatch: Dispatch::new(owner, driver, &io),
            hold: Hold::new(disk, index),
            rounds: Rounds::default(),
            hang_tracker: HangTracker::default(),
            io,
            _claim: claim,
        })
    }

    /// Enters the disk, because the idle queue is about to have requests, and applies what was changed
    /// meanwhile. Returns false while the disk is frozen.
    #[cold]
    fn enter(&mut self, ring: Option<&mut Ring>) -> bool {
        let view = &mut self.io.disk;
        view.entered = view.control().enter(view.index);
        if view.entered {
            self.io.tags.join();
            if self.io.disk.is_outdated() {
                self.reload(ring);
            }
        }
        self.io.disk.entered
    }

    fn leave_if_idle(&mut self) {
        if self.io.disk.entered && self.io.in_flight.in_use() == 0 {
            self.leave();
        }
    }

    #[inline(never)]
    fn leave(&mut self) {
        self.close_fast_path();
        self.io.clock.idle();
        // A queue that waits for a tag stays a user of the set. Otherwise the share of the others would change within
        // each turn, and an engine whose other queue has its share would not sleep.
        if self.io.waiting.is_empty() {
            self.io.tags.leave();
        }
        self.io.disk.entered = false;
        self.io.disk.control().leave(self.io.disk.index);
    }

    /// Applies changed settings if the queue is idle, so that a change takes effect without a submission.
    fn refresh(&mut self, ring: Option<&mut Ring>) {
        if !self.io.disk.entered && self.io.disk.is_outdated() {
            self.enter(ring);
        }
    }

    #[cold]
    fn reload(&mut self, ring: Option<&mut Ring>) {
        let (has_new_scheduler, has_new_driver) = self.io.disk.reload();
        if has_new_scheduler {
            self.dispatch.reload_scheduler(&self.io);
        }
        self.io.tags.set_depth(self.io.disk.settings.requests());
        self.io.clock.set_mode(self.io.disk.settings.clock);
        self.io.completions.limits_changed = false;
        self.io.reload_limits();
        if self.io.tracer.is_some() {
            self.change_tracer(|_| {});
        }
        if has_new_driver {
            self.dispatch.exchange_driver(&mut self.io, ring);
        } else {
            self.dispatch.reload(&mut self.io, ring);
        }
    }

    /// Stops taking bios of other threads, lifts limits and fails held requests: the owner is stopping.
    pub fn close_to_submitters(&mut self) {
        self.dispatch.throttle.closing = true;
        self.close_hold();
    }

    /// Lets the driver unregister its files and buffers from the ring, which may outlive the queue.
    pub fn close(&mut self, ring: Option<&mut Ring>) {
        self.dispatch.call(&mut self.io, ring, |driver, cx| driver.close(cx));
    }

    /// Completes the requests that the driver has finished. Requests and bios that need the driver after that complete
    /// with [`Status::Offline`].
    pub fn finish_started(&mut self, ring: Option<&mut Ring>) {
        self.dispatch.call(&mut self.io, ring, |driver, cx| driver.poll(cx));
        self.abandon();
    }

    /// Completes everything that the driver has not taken with [`Status::Offline`].
    pub fn abandon(&mut self) {
        self.close_fast_path();
        if self.io.disk.settings.iostats {
            self.plug.count(self.io.in_flight.requests(), &mut self.io.stats);
        }
        self.close_hold();
        self.trace_fast_path();
        let slots = self.io.in_flight.requests().len();
        let abandoned = self.dispatch.abandon(self.plug.take_requests(), slots);
        self.io.completions.requests.extend(abandoned.map(|tag| (tag, Err(Status::Offline))));
        self.complete_batch();
        self.io.abandon_flushes(Err(Status::Offline));
        while let Some((index, _)) = self.io.waiting.pop_front() {
            self.io.reject(index, Status::Offline);
        }
        self.io.disk.disk.fail(self.pulled.drain(..));
        self.io.deliver_remote();
    }
}

/// The turn, in which the owner runs the steps of the queue.
impl Queue {
    /// First half of a turn: completes the requests that the driver has finished, and takes bios that other
    /// threads have submitted.
    #[inline]
    pub fn begin_turn(&mut self, mut ring: Option<&mut Ring>) {
        self.close_fast_path();
        self.rounds.begin_turn();
        let woken = self.io.disk.shared.kick.take_woken();
        if woken || self.has_started() {
            if woken {
                self.dispatch.refresh_limits(&self.io);
            }
            self.dispatch.call(&mut self.io, ring.as_deref_mut(), |driver, cx| driver.poll(cx));
        }
        if !self.io.completions.requests.is_empty() {
            self.complete_batch();
        }
        if woken {
            self.refresh_hold();
        }
        self.refresh(ring.as_deref_mut());
        self.kick_flush(ring.as_deref_mut());
        if self.io.waits_for_turn {
            self.pull_behind_waiting(ring.as_deref_mut());
        } else {
            self.pull_software_queues(ring.as_deref_mut());
        }
        self.admit_waiting(ring);
        // Bios that were rejected or are empty complete without a request, so `complete_batch` has not
        // delivered them.
        self.io.deliver_remote();
    }

    /// Second half of a turn; may be called several times. Flushes the plug and dispatches until nothing
    /// changes, or until the turn's budget is spent.
    #[inline]
    pub fn dispatch_all(&mut self, ring: Option<&mut Ring>) {
        self.close_fast_path();
        if self.can_dispatch() {
            self.dispatch_ready(ring);
        }
        self.io.clock.invalidate();
        self.leave_if_idle();
        self.io.deliver_remote();
    }

    /// Must be called at the end of a turn by an owner that submits bios between two turns, because these bios
    /// have the time of a turn of their own.
    #[inline]
    pub fn end_turn(&mut self) {
        // Otherwise no time of the turn can be over.
        if self.rounds.restart_clock() {
            self.io.waits_for_turn &= !self.io.waiting.is_empty();
        }
    }

    #[inline(never)]
    fn dispatch_ready(&mut self, mut ring: Option<&mut Ring>) {
        self.rounds.begin();
        loop {
            self.kick_flush(ring.as_deref_mut());
            self.flush_plug(ring.as_deref_mut());
            let completed = self.io.completions.requests.len();
            if completed == 0 {
                break;
            }
            self.complete_batch();
            self.admit_waiting(ring.as_deref_mut());
            if !self.can_dispatch() || self.rounds.spend(completed) {
                break;
            }
        }
    }

    #[inline]
    fn can_dispatch(&self) -> bool {
        !self.plug.is_empty()
            || !self.io.completions.requests.is_empty()
            || self.dispatch.has_ready()
            || self.io.flush.is_wanted()
    }

    pub fn complete_cqe(&mut self, cqe: Cqe, ring: Option<&mut Ring>) {
        self.dispatch.call(&mut self.io, ring, |driver, cx| driver.complete_cqe(cx, cqe));
    }

    /// Passes everything in the plug to the scheduler or the driver. The fast path must be closed. The cached
    /// time is dropped with the plug, as in `blk_flush_plug`.
    #[inline(always)]
    fn flush_plug(&mut self, ring: Option<&mut Ring>) {
        debug_assert!(!self.plug.is_open());
        self.io.clock.invalidate();
        if !self.plug.is_empty() {
            self.flush_requests(ring);
        } else if self.dispatch.has_ready() {
            self.dispatch.run(&mut self.io, ring);
        }
    }

    #[inline]
    fn flush_requests(&mut self, ring: Option<&mut Ring>) {
        if self.io.disk.settings.iostats {
            self.plug.count(self.io.in_flight.requests(), &mut self.io.stats);
        }
        if self.io.stats.count_to(Counter::PlugFlushes, PROBE_PLUGS) {
            self.check_probes();
        }
        let data_sectors = self.plug.data_sectors;
        let batch = self.plug.take_requests();
        let Queue { dispatch, io, .. } = self;
        match dispatch.path() {
            DispatchPath::Limited if !dispatch.pay_limits(batch, data_sectors, io.in_flight.requests()) => {
                dispatch.issue_limited(batch, io, ring);
            }
            DispatchPath::Direct | DispatchPath::Limited => dispatch.issue_directly(batch, io, ring),
            DispatchPath::Traced => dispatch.issue_traced(batch, io, ring),
            DispatchPath::Queued => {
                dispatch.insert(batch, io);
                dispatch.run(io, ring);
            }
        }
    }

    /// Completes the requests that the driver has finished. The batch shares one clock reading, one return of
    /// tags and one update of the shared counters.
    #[inline(always)]
    fn complete_batch(&mut self) {
        if std::mem::take(&mut self.io.completions.limits_changed) {
            self.trace_fast_path();
            self.io.reload_limits();
        }
        // A new clock reading, so that no request completes at an earlier time than it was issued.
        self.io.clock.invalidate();
        // Requests that complete free resources of the driver.
        self.dispatch.rerun_at_ns = None;
        let mut completed = std::mem::take(&mut self.io.completions.requests);
        if self.hold.is_on() {
            self.trace_fast_path();
            self.hold.hold_failed(&mut completed, &mut self.io, &mut self.dispatch);
        }
        self.complete_requests(completed);
    }

    /// Completes `completed`, from which the requests that must be held have been removed.
    fn complete_requests(&mut self, completed: Vec<(Tag, IoResult)>) {
        if self.dispatch.sees_completions || self.hang_tracker.has_reported() {
            self.note_completed(&completed);
        }
        self.io.complete_requests(&completed);
        self.dispatch.release(completed.len() as u32);
        self.io.completions.put_back_requests(completed);
        self.io.deliver_remote();
    }

    /// Notifies the tracer, the scheduler and the measurement of device time, and records completions of
    /// requests that were reported as hanging.
    #[cold]
    fn note_completed(&mut self, completed: &[(Tag, IoResult)]) {
        self.trace(|tracer, in_flight, clock| tracer.completed(completed, in_flight.requests(), clock));
        self.dispatch.note_completed(completed, &mut self.io);
        if self.hang_tracker.has_reported() {
            self.hang_tracker.note_completed(completed, &mut self.io);
        }
    }

    /// Issues a flush if bios wait for one, none is in flight, and nothing delays it.
    fn kick_flush(&mut self, ring: Option<&mut Ring>) {
        if self.io.flush.is_wanted() {
            self.issue_flush(ring);
        }
    }

    #[cold]
    fn issue_flush(&mut self, ring: Option<&mut Ring>) {
        // A flush waits for data of other sequences, so that one flush serves them all, and for the end of a
        // freeze.
        if self.io.flush.is_delayed(monotonic_ns()) || self.io.disk.is_frozen() {
            return;
        }
        self.trace_fast_path();
        if self.io.disk.disk.hold.has_writes() {
            if self.hold.closing {
                // Another queue has the held writes. They may not be resumed before this queue has stopped.
                self.io.abandon_flushes(Err(Status::Offline));
            }
        } else if (self.io.disk.entered || self.enter(ring)) && self.io.start_flush() {
            self.dispatch.push_flush(self.io.flush.tag);
        }
    }
}

/// The flag of a bio that is submitted in one piece: only a bio of the queue's owner can complete as a plain
/// one (`InFlight::complete_plain`).
fn plain_flag(completer: &Completer) -> SlotFlags {
    if matches!(completer, Completer::Owner(_)) { SlotFlags::PLAIN } else { SlotFlags::empty() }
}

/// Submission of a bio (`submit_bio_noacct` in block/blk-core.c, `blk_mq_submit_bio` in block/blk-mq.c). The
/// bio is checked. On the fast path it becomes a request immediately; otherwise it may wait for a tag, be
/// split, or pass through the flush machine first.
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
            && self.io.disk.fast.fits_small(&outline, &data)
            && !self.plug.is_touched(sector, sectors)
        {
            let outline = Outline { start_ns: self.plug.start_ns, ..outline };
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
            || !(self.io.disk.entered || self.enter(ring))
            || self.io.disk.is_frozen()
            || !self.io.waiting.is_empty()
            || self.dispatch.sees_bios
            || self.plug.has_large_request
            || self.dispatch.throttle.has_waiting
            || self.io.tags.free.is_empty()
        {
            return false;
        }
        let bios = self.plug.fast_path_len().min(self.io.tags.free.len());
        let (start_ns, bios) =
            if self.io.disk.settings.iostats { self.io.clock.now_ns_for(bios) } else { (0, bios) };
        self.io.clock.count_uses(bios);
        let left = self.io.tags.free.len() - bios;
        self.plug.open(&self.io.tags.free[left..], start_ns);
        self.io.tags.free.truncate(left);
        true
    }

    /// Closes the plug's fast path. Must be called before the plug is flushed, and before any of the
    /// conditions for the path changes.
    fn close_fast_path(&mut self) {
        if self.plug.is_open() {
            self.close_open_fast_path();
        }
    }

    #[inline(never)]
    fn close_open_fast_path(&mut self) {
        let start_ns = self.plug.start_ns;
        let rest = self.plug.close();
        self.io.clock.return_uses(start_ns, rest.len());
        self.io.tags.free.extend_from_slice(rest);
    }

    #[inline(never)]
    fn submit_slow(&mut self, bio: Bio, ring: Option<&mut Ring>) -> Result<(), Bio> {
        if !self.io.in_flight.has_room() {
            self.set_trace_client(|| TraceClient::NONE);
            return Err(bio);
        }
        let completer = Completer::Owner(bio.user_data);
        self.accept(bio, completer, SlotFlags::empty(), ring);
        Ok(())
    }

    /// Accepts the bio: it has a slot of this queue from now on, and completes exactly once.
    #[inline(always)]
    fn accept(&mut self, bio: Bio, completer: Completer, slot_flags: SlotFlags, mut ring: Option<&mut Ring>) {
        let Bio { operation, flags, sector, sectors, data, .. } = bio;
        let (data, completer) = (ManuallyDrop::new(data), ManuallyDrop::new(completer));
        if !self.io.disk.entered {
            self.enter(ring.as_deref_mut());
        }
        let start_ns = if self.io.disk.settings.iostats { self.io.clock.now_ns() } else { 0 };
        let outline = Outline { operation, flags, sector, sectors, start_ns };
        if !self.io.disk.fast.fits(&outline, &data) || self.io.tracer.is_some() {
            return self.accept_slow(NewBio { outline, data, completer, slot_flags }, ring);
        }
        let slot_flags = slot_flags | plain_flag(&completer);
        let index = self.io.in_flight.insert(NewBio { outline, data, completer, slot_flags });
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
        if self.io.disk.fast.fits(&bio.outline, &bio.data) {
            return self.accept_piece(bio, Some(1), ring);
        }
        if let Data::Kernel(pages) = *bio.data {
            // An io_uring operation names one registered buffer, so kernel pages cannot be merged.
            bio.outline.flags.insert(BioFlags::NO_MERGE);
            if self.io.disk.limits.kernel_pages
                && self.io.disk.fast.fits_memory(&bio.outline, pages.len().into())
            {
                return self.accept_piece(bio, Some(1), ring);
            }
        }
        if let Data::Segments(owner) = &*bio.data
            && self.io.disk.fast.fits_segments(&bio.outline, owner.segments(), &self.io.disk.limits)
        {
            return self.accept_piece(bio, None, ring);
        }
        let index = self.io.in_flight.insert(bio);
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
        let index = self.io.in_flight.insert(bio);
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
    fn admit_waiting(&mut self, ring: Option<&mut Ring>) {
        if self.io.waiting.is_empty() {
            return self.io.stop_waiting_for_tags();
        }
        self.admit_all(ring);
    }

    /// Admits waiting bios until there is no tag or the turn's time is over: a flush of the plug takes as long
    /// as a driver that executes requests immediately. The other bios wait for the next turn.
    #[inline(never)]
    fn admit_all(&mut self, mut ring: Option<&mut Ring>) {
        let may_admit = self.io.may_admit_first();
        if !may_admit || !(self.io.disk.entered || self.enter(ring.as_deref_mut())) {
            // The path must not be open while a bio waits.
            return self.close_fast_path();
        }
        while self.io.may_admit_first()
            && let Some((index, is_counted)) = self.io.waiting.pop_front()
        {
            if self.io.disk.settings.iostats && self.io.in_flight[index].start_ns == 0 {
                // Statistics were off when the bio was submitted.
                self.io.in_flight[index].start_ns = self.io.clock.now_ns();
            }
            let outline = self.io.in_flight[index].outline();
            let (plugged, in_use) = (self.plug.requests().len(), self.io.in_flight.in_use());
            if self.admit(index, &outline, None, ring.as_deref_mut()) {
                self.trace_merge(index);
                // A plug that did not grow by a new request was flushed.
                let is_new = self.io.in_flight.in_use() > in_use;
                if is_new && self.plug.requests().len() <= plugged && self.rounds.is_over() {
                    self.io.waits_for_turn = true;
                }
            } else if self.io.may_wait(index) {
                self.io.waiting.push_front((index, is_counted));
                return self.io.count_tag_waits();
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
        if !self.io.disk.entered || self.io.disk.is_frozen() {
            return None;
        }
        let Io { tags, in_flight, .. } = &mut self.io;
        tags.free.pop().or_else(|| tags.next_shared(in_flight.in_use(), self.hold.len() as u32))
    }

    /// Adds a request to the plug, and flushes the plug if it is full or the request is large.
    #[inline]
    fn plug_request(&mut self, tag: Tag, outline: &Outline, mut ring: Option<&mut Ring>) {
        if self.plug.has_large_request {
            self.flush_full_plug(ring.as_deref_mut());
        }
        if self.io.tracer.is_some() {
            self.trace_request(tag);
        }
        if self.plug.push(tag, outline, self.io.disk.settings.merge) {
            self.flush_full_plug(ring);
        }
    }

    /// Tries to merge bio `index`: with the youngest request of the plug, else with a neighbour in the
    /// scheduler, else with the youngest request that waits for a limit. `segments` is the bio's number of
    /// segments, `None` if unknown.
    #[inline(always)]
    fn try_merge(&mut self, index: u32, outline: &Outline, segments: Option<u16>) -> bool {
        (self.plug.is_touched(outline.sector, outline.sectors) && self.try_plug_merge(index, segments))
            || (self.dispatch.scheduler.is_some() && self.try_scheduler_merge(index, segments))
            || (self.dispatch.throttle.has_waiting && self.try_throttled_merge(index, segments))
    }

    #[inline(always)]
    fn try_plug_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let Some(tag) = self.plug.last() else { return false };
        let merged = self.io.try_merge(tag, index, segments);
        if merged {
            self.plug.merged(&self.io.in_flight[tag]);
            if self.plug.has_large_request {
                // The slow path flushes the plug before it adds the next request.
                self.close_fast_path();
            }
        }
        merged
    }

    #[cold]
    fn try_throttled_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        let youngest = self.dispatch.throttle.youngest(self.io.in_flight[index].operation);
        let merged = youngest.filter(|&tag| self.io.try_merge(tag, index, segments));
        merged.inspect(|&tag| self.trace_merge_into(tag, index)).is_some()
    }

    #[cold]
    fn try_scheduler_merge(&mut self, index: u32, segments: Option<u16>) -> bool {
        if !self.io.may_merge(index) {
            return false;
        }
        let Some(scheduler) = &mut self.dispatch.scheduler else { return false };
        let found = scheduler.find_merge(self.io.in_flight.requests(), &self.io.in_flight[index].outline());
        let Some((tag, side)) = found.filter(|&(tag, _)| self.io.try_merge(tag, index, segments)) else {
            return false;
        };
        let requests = self.io.in_flight.requests();
        scheduler.merged(tag, requests);
        let neighbour = scheduler.find_neighbour(requests, tag, side);
        self.trace_merge_into(tag, index);
        if let Some(neighbour) = neighbour {
            let is_back = side == MergeSide::Back;
            let (first, second) = if is_back { (tag, neighbour) } else { (neighbour, tag) };
            if self.io.try_join(first, second)
                && let Some(scheduler) = &mut self.dispatch.scheduler
            {
                scheduler.joined(first, second);
            }
        }
        true
    }

    #[inline(never)]
    fn flush_full_plug(&mut self, ring: Option<&mut Ring>) {
        self.flush_plug(ring);
    }
}

/// Bios that submitters on other threads have staged.
///
/// Two sources of bios compete for tags: waiting bios, most of which the owner has submitted, and bios staged
/// by other threads. Neither source may starve the other. While bios wait, staged bios get at most half of
/// the free tags per turn, and join the end of the waiting list.
impl Queue {
    /// Takes staged bios, round robin over the software queues, as far as [`Queue::pull_quota`] allows. Those
    /// that stay can still be merged.
    fn pull_software_queues(&mut self, ring: Option<&mut Ring>) {
        if self.io.disk.shared.software.has_pending() {
            self.pull_pending(ring);
        }
    }

    /// [`Queue::pull_software_queues`] after a turn whose time was over. Bios that wait for this turn are
    /// admitted after the bios of other threads have joined them.
    #[cold]
    fn pull_behind_waiting(&mut self, ring: Option<&mut Ring>) {
        let have_waited = !self.io.waiting.is_empty();
        self.io.waits_for_turn = have_waited;
        self.pull_software_queues(ring);
        self.io.waits_for_turn &= !have_waited;
    }

    #[inline(never)]
    fn pull_pending(&mut self, mut ring: Option<&mut Ring>) {
        // If bios wait, this is the quota for the whole turn; otherwise it shrinks with the free tags.
        let mut quota = self.pull_quota();
        while self.io.disk.shared.software.has_pending() && quota > 0 {
            let from = self.pull_from;
            let mut rotated = self.io.disk.shared.software.take_pending().rotate_right(from);
            let at_once = if rotated.is_power_of_two() { usize::MAX } else { TAKE_AT_ONCE };
            let before = quota;
            while rotated != 0 {
                let index = (rotated.trailing_zeros() + from) % SOFTWARE_QUEUES as u32;
                rotated &= rotated - 1;
                if quota > 0 {
                    let taken = self.pull_one(index as usize, quota.min(at_once), ring.as_deref_mut());
                    quota = (quota - taken).min(self.pull_quota());
                    self.pull_from = index + 1;
                } else {
                    self.io.disk.shared.software.set_pending(index as usize);
                }
            }
            if quota == before {
                return;
            }
        }
    }

    /// The number of staged requests that may be taken now: the number of free tags, or half of it if other
    /// bios wait for a tag or for a busy driver.
    fn pull_quota(&self) -> usize {
        if self.hold.closing || !self.io.in_flight.has_room() || self.io.disk.is_frozen() {
            return 0;
        }
        let in_use = self.io.in_flight.in_use();
        let free = u32::from(self.io.disk.settings.requests()).saturating_sub(in_use) as usize;
        if free == 0 {
            // If all requests are held, no completion frees a tag, but a staged flush needs none and must
            // still be taken.
            return usize::from(in_use == self.hold.len() as u32);
        }
        let is_idle = self.io.waiting.is_empty() && self.dispatch.requeued.is_empty();
        if is_idle { free } else { free.div_ceil(2) }
    }

    /// Takes at most `count` requests from one software queue, and returns how many.
    #[inline(never)]
    fn pull_one(&mut self, index: usize, count: usize, mut ring: Option<&mut Ring>) -> usize {
        // The number of free tags in a shared set is not known, so requests are taken one by one.
        let count = if self.io.tags.is_shared() { 1 } else { count };
        let more = self.io.disk.shared.software.try_take(index, count, &mut self.pulled);
        let mut taken = 0;
        while let Some(staged) = self.pulled.pop_front() {
            taken += 1;
            let ((bio, completer), others) = staged.into_bios();
            self.accept(bio, completer, SlotFlags::GATED, ring.as_deref_mut());
            if let Some(others) = others {
                self.accept_others(others, ring.as_deref_mut());
            }
        }
        // `None`: a submitter had the lock. The next turn tries again.
        if more.unwrap_or(true) {
            self.io.disk.shared.software.set_pending(index);
        }
        taken
    }

    /// Accepts the bios that were merged into the staged request before them. The request gate has counted
    /// them together with that request.
    #[inline(never)]
    fn accept_others(&mut self, others: VecDeque<StagedBio>, mut ring: Option<&mut Ring>) {
        for (bio, completer) in others {
            self.accept(bio, completer, SlotFlags::empty(), ring.as_deref_mut());
        }
    }
}

/// Requests that hang, fail, or are held after errors.
impl Queue {
    /// Finds requests and bios that started more than `limit_ns` before `now_ns`.
    pub fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let Queue { io, plug, dispatch, hold, hang_tracker, .. } = self;
        let (plug, found) = (plug.requests(), HangScan::default());
        hang_tracker.scan(Scan { io, dispatch, plug, hold, now_ns, limit_ns, found })
    }

    /// If the client of the first failed request is not known yet, calls `name` to write it. Must be called
    /// before the queue's owner takes the completion of the bio whose `user_data` `name` receives.
    pub fn name_failed(&mut self, name: impl FnOnce(u64, &mut dyn Write)) {
        self.io.failures.name(name);
    }

    pub fn has_held(&self) -> bool {
        self.hold.len() > 0
    }

    /// Applies the disk's policy, and resumes held requests if the operator has asked for that.
    fn refresh_hold(&mut self) {
        let disk = &self.io.disk.disk;
        self.hold.reload(disk);
        match self.hold.take_resumed(disk) {
            Some(Resume::Fail) => self.fail_held(|_| true),
            Some(Resume::Reissue) => self.hold.reissue(&mut self.io, &mut self.dispatch),
            None => return,
        }
        // The resume must have been applied and counted before: commands wait for this.
        self.io.disk.disk.hold.follow(self.io.disk.index, self.hold.resumed);
    }

    /// Fails held requests and stops holding others, because the owner of the queue is stopping.
    fn close_hold(&mut self) {
        self.hold.closing = true;
        self.hold.reload(&self.io.disk.disk);
        self.fail_held(|_| true);
    }

    /// Fails held requests that must not be reissued, because clients have disconnected. `is_abandoned` is
    /// called with the `user_data` of bios.
    pub(crate) fn fail_abandoned(&mut self, ring: Option<&mut Ring>, is_abandoned: impl Fn(u64) -> bool) {
        self.close_fast_path();
        let abandoned = self.hold.find_abandoned(&mut self.io, is_abandoned);
        if !abandoned.is_empty() {
            self.fail_held(|tag| abandoned.contains(&tag));
            self.admit_waiting(ring);
        }
    }

    /// Completes the held requests for which `which` returns true with their errors.
    fn fail_held(&mut self, which: impl Fn(Tag) -> bool) {
        let failed = self.hold.take_failed(which, &mut self.io);
        if !failed.is_empty() {
            // The requests are about to complete, which subtracts them a second time.
            self.dispatch.started += failed.len() as u32;
            self.io.clock.invalidate();
            self.complete_requests(failed);
        }
    }
}

/// Trace points. The tracer's part is out of line, so that a queue that is not traced pays one branch for each step.
impl Queue {
    /// Starts a trace of the queue into `memory`; `None` stops the trace.
    pub fn set_trace(&mut self, memory: Option<&Arc<TraceMemory>>) {
        let writer = memory.and_then(|memory| TraceWriter::new(memory, self.io.disk.index));
        let in_flight = self.io.in_flight.tags().collect();
        self.change_tracer(|tracer| tracer.set_writer(writer, in_flight));
    }

    /// Starts or stops to fire USDT probes, depending on whether a tracer such as bpftrace is attached.
    #[cold]
    #[inline(never)]
    fn check_probes(&mut self) {
        let probes = Probes::attached(self.io.disk.disk.number(), self.io.disk.index);
        let fires = self.io.tracer.as_ref().is_some_and(|tracer| tracer.probes.is_some());
        if probes.is_some() != fires {
            self.change_tracer(|tracer| tracer.probes = probes);
        }
    }

    /// Applies `change` and the disk's settings to the tracer, which is created before and removed after as needed.
    #[cold]
    fn change_tracer(&mut self, change: impl FnOnce(&mut Tracer)) {
        self.trace_fast_path();
        self.close_fast_path();
        let mut tracer = self.io.tracer.take().unwrap_or_default();
        change(&mut tracer);
        tracer.reload(self.io.disk.settings.clock, &self.io.disk.limits, self.plug.requests().len());
        self.io.tracer = tracer.is_on().then_some(tracer);
        self.dispatch.update(self.io.tracer.as_deref());
    }

    pub fn set_trace_client(&mut self, client: impl FnOnce() -> TraceClient) {
        let plugged = self.plug.requests().len();
        self.io.trace(|tracer, _, _| tracer.set_client(client(), plugged));
    }

    /// Records the requests that took the plug's fast path, if the queue is traced. Must be called before any
    /// other event is recorded, because events are in order.
    fn trace_fast_path(&mut self) {
        let plug = self.plug.requests();
        self.io.trace(|tracer, in_flight, clock| tracer.record_fast_path(plug, in_flight.requests(), clock));
    }

    /// Calls `record` if the queue is traced, after the fast path was recorded.
    fn trace(&mut self, record: impl FnOnce(&mut Tracer, &InFlight, &mut Clock)) {
        self.trace_fast_path();
        self.io.trace(record);
    }

    fn trace_queued(&mut self, index: u32) {
        self.trace(|tracer, in_flight, clock| tracer.queued(index, &in_flight[index], clock));
    }

    #[cold]
    fn trace_request(&mut self, tag: Tag) {
        self.trace(|tracer, in_flight, clock| tracer.begun(tag, &in_flight[tag], clock));
    }

    /// Records a merge of bio `index` into the youngest request of the plug, if it was merged there. Merges
    /// in the scheduler, or into a request that waits for a limit, are recorded where they are made.
    fn trace_merge(&mut self, index: u32) {
        if self.io.tracer.is_some()
            && let Some(tag) = self.plug.last()
        {
            let request = &self.io.in_flight[tag];
            if request.first_bio != request.last_bio && [request.first_bio, request.last_bio].contains(&index)
            {
                self.trace_merge_into(tag, index);
            }
        }
    }

    #[cold]
    fn trace_merge_into(&mut self, tag: Tag, index: u32) {
        self.trace(|tracer, in_flight, clock| {
            let is_back = in_flight[tag].last_bio == index;
            let kind = if is_back { EventKind::BackMerge } else { EventKind::FrontMerge };
            tracer.bio(kind, index, Some(tag), &in_flight[index], Ok(()), clock);
        });
    }
}

/// The state of the queue, for its owner.
impl Queue {
    pub fn disk(&self) -> &Arc<Disk> {
        &self.io.disk.disk
    }

    /// Counts calls of io_uring_enter(2) since the last call of this method, and how many were early.
    pub fn count_enters(&mut self, enters: u64, early_submissions: u64) {
        self.io.stats.count(Counter::Enters, enters);
        self.io.stats.count(Counter::EarlySubmissions, early_submissions);
    }

    pub fn limits(&self) -> &QueueLimits {
        &self.io.disk.limits
    }

    /// Raises the size of the plug, because the thread owns several queues.
    pub fn set_several_queues(&mut self) {
        self.plug.set_several_queues();
    }

    /// Must be called before the owner sleeps: drops the cached time.
    pub fn idle(&mut self) {
        self.io.clock.idle();
    }

    /// Must be called when the owner has slept: checks whether probes were attached meanwhile.
    pub fn woke(&mut self) {
        self.check_probes();
    }

    pub fn completions(&self) -> &[Completion] {
        self.io.completions.own()
    }

    pub fn take_completion(&mut self) -> Option<Completion> {
        self.io.completions.take_own()
    }

    pub fn completions_mut(&mut self) -> &mut Vec<Completion> {
        self.io.completions.own_mut()
    }

    /// The number of bios, and parts of bios, that have not completed.
    pub fn in_flight(&self) -> u32 {
        self.io.in_flight.bio_count()
    }

    pub fn has_started(&self) -> bool {
        self.dispatch.started > 0
    }

    pub fn has_completed(&self) -> bool {
        !self.io.completions.requests.is_empty()
    }

    /// The latest time at which the queue must run again, in nanoseconds of the monotonic clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        // A frozen disk issues its flush after the thaw, and a flush behind held writes after these have
        // completed.
        let must_wait = self.io.disk.is_frozen() || self.io.disk.disk.hold.has_writes();
        let flush_ns = self.io.flush.deadline_ns().filter(|_| !must_wait);
        [self.dispatch.deadline_ns(), flush_ns].into_iter().flatten().min()
    }

    /// Whether the last turn stopped at its budget with work left.
    pub fn is_cut_short(&self) -> bool {
        self.rounds.is_cut_short && self.can_dispatch()
    }

    /// Whether a turn would do something now. The owner sleeps only if it would not.
    ///
    /// The owner checks this again after it has announced that it sleeps, because a
    /// [`kick`](crate::kick::Kick) of a running owner is not recorded. If another thread changes a condition
    /// after the step of the turn that depends on it and before the sleep, this check is the only place that
    /// sees the change. Therefore each condition that changes what a turn does has a clause here. A turn must
    /// make each clause false, or the owner would never sleep. The clauses in order, with the threads that
    /// change the conditions (`work_tests.rs` tests each one):
    ///
    /// 1. There are completions for the owner, or requests that the driver has finished: this thread.
    /// 2. The owner was woken: by a driver that completes on another thread, or by a change of the limits,
    ///    the error policy or the held requests. [`Kick::is_woken`](crate::kick::Kick::is_woken) records it.
    /// 3. The last turn stopped at its budget: this thread.
    /// 4. Bios are staged and there is room for them: a submitter.
    /// 5. A freeze has begun, under which no request waits for a limit: a control thread.
    /// 6. A freeze was lifted, or failed while this queue had requests. Then a flush may start, the idle
    ///    queue applies what was changed, and waiting bios get tags.
    /// 7. Bios wait although they may get tags. A tag of a shared set was freed, or the queue's share of the
    ///    set has grown: another queue. Or the time of the last turn was over: this thread.
    /// 8. A quiesce was lifted: a control thread.
    ///
    /// Held writes of another queue also delay a flush. The queue that completes the last of them wakes all
    /// others (clause 2).
    pub fn has_work(&self) -> bool {
        !self.io.completions.own().is_empty()
            || !self.io.completions.requests.is_empty()
            || self.has_changed()
    }

    /// The clauses of [`Queue::has_work`] without the first one, for an owner that waits for several
    /// completions.
    pub fn has_changed(&self) -> bool {
        self.io.disk.shared.kick.is_woken()
            || self.is_cut_short()
            || (self.io.disk.shared.software.has_pending() && self.pull_quota() > 0)
            || self.can_continue_now()
            || (self.dispatch.blocked_by_quiesce && !self.io.disk.control().is_quiesced())
    }

    /// Whether a flush, reload or bio was delayed by a freeze, or by a lack of tags, and can continue.
    fn can_continue_now(&self) -> bool {
        if self.io.disk.is_frozen() {
            return self.dispatch.throttled_deadline_ns().is_some();
        }
        let may_flush = self.io.flush.is_wanted()
            && self.io.flush.data_in_flight == 0
            && !self.io.disk.disk.hold.has_writes();
        if may_flush || (!self.io.disk.entered && self.io.disk.is_outdated()) {
            return true;
        }
        !self.io.waiting.is_empty() && (self.io.waits_for_turn || self.io.may_get_tag())
    }

    /// Whether the queue waits for a batch of tags that other queues free.
    #[cfg(simulation)]
    pub fn waits_for_batch(&self) -> bool {
        self.io.tags.waits_for_batch()
    }

    /// Whether everything has completed that can complete. While the disk is frozen or quiesced, requests
    /// that the driver does not have stay.
    pub fn is_drained(&self) -> bool {
        let stopped = self.io.disk.is_frozen() || self.io.disk.control().is_quiesced();
        self.in_flight() == 0 || (stopped && !self.has_started())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.abandon();
        // After a panic of the driver, a quiesce must not wait for this queue.
        self.io.disk.control().leave_dispatch(self.io.disk.index);
        // The kernel may use the memory of I/O in flight until the I/O completes. LocalQueue and Engine drain
        // a queue before they drop it, so this happens only after a panic. The memory is leaked then.
        let leaks = self.in_flight() > 0;
        if leaks {
            for (completer, gated) in self.io.in_flight.leak() {
                if let Some(operation) = gated {
                    self.io.disk.disk.gate.leave(Direction::of(operation), 1);
                }
                completer.notify(Err(Status::Offline), Data::None);
            }
        }
        self.hold.forget_writes(&self.io.disk.disk);
        // Each queue has requests of its own, so other queues may use the tags of leaked requests. They return
        // before the queue leaves, because a freeze may change their number when no queue has requests.
        let Io { in_flight, tags, flush, .. } = &mut self.io;
        tags.free.extend(in_flight.tags().filter(|&tag| tag != flush.tag));
        tags.share_freed();
        self.leave_if_idle();
        self.io.tags.close(self.io.disk.settings.requests(), leaks);
    }
}

#[cfg(all(test, not(model_check)))]
mod work_tests;
