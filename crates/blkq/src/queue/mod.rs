//! A hardware queue (`struct blk_mq_hw_ctx`): everything that one thread owns of a disk. Bios enter through
//! [`Queue::submit`], become requests in the plug, reach the driver in batches, and complete in batches. This
//! path takes no lock, passes nothing to another thread, and allocates nothing.
//!
//! Each part of a queue is a module and owns its fields:
//!
//! * `io`: bios and requests in flight, and what each of their steps needs: `disk_view` (the settings and limits
//!   in force, and whether the queue has entered the disk), `in_flight` (their slots), `tag_cache` (the free
//!   tags), `flush` (the flush machine), `completions`, `failures`, `tracer`, the clock and the statistics;
//! * `plug`: requests that are collected for one batch, and the fast path into it;
//! * `dispatch`, `throttle`, `device_time`: requests between the plug and the driver;
//! * `hold`: failed requests that are held;
//! * `rounds`: the budget of a turn;
//! * `hang_tracker`: slow I/O that was reported.
//!
//! The steps of a bio that need no other part than `io` are its methods: in `io` itself, `merge`, `parts`
//! (splits), `sequence` (flushes) and `complete`. The steps of the queue are in `submit` and `pull` (bios of other
//! threads). This file has the turn, in which the owner runs them. `lifecycle` opens a queue, applies what was
//! changed under a freeze, and closes it; `scan` searches for hangs.
//!
//! The ring is lent to each call that may reach the driver, because several queues of a thread share it.

mod broken;
mod complete;
mod completions;
mod device_time;
mod disk_view;
mod dispatch;
mod dispatch_path;
pub mod failures;
mod fast_limits;
mod flush;
pub mod hang;
mod hang_tracker;
mod hold;
mod in_flight;
mod io;
mod lifecycle;
mod merge;
mod parts;
pub mod plug;
mod pull;
mod rounds;
mod scan;
mod sequence;
mod submit;
mod tag_cache;
mod throttle;
mod trace;
mod tracer;

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bio::Completion;
use crate::clock::monotonic_ns;
use crate::disk::{Disk, QueueClaim, Resume};
use crate::error::{IoResult, Status};
use crate::limits::QueueLimits;
use crate::remote::software::Staged;
use crate::ring::{Cqe, Ring};
use crate::stats::Counter;
use crate::tags::Tag;

use dispatch::Dispatch;
use dispatch_path::DispatchPath;
use hang_tracker::HangTracker;
use hold::Hold;
use io::Io;
use plug::Plug;
use rounds::Rounds;

/// Plugs that a queue without a sleep flushes between two checks whether USDT probes are attached.
const PROBE_PLUGS: u64 = 256;

/// The round-robin position of a queue over the software queues (`hctx->dispatch_from` in the kernel).
#[derive(Default)]
struct PullCursor {
    /// The software queue from which staged bios are taken next.
    from: u32,
    /// The owner is stopping, and takes no bios of other threads.
    closed: bool,
    /// The staged requests that were taken together, oldest first. Each one stays here until the queue
    /// accepts it, so that a panic loses none.
    taken: VecDeque<Staged>,
}

/// One hardware queue of a disk, owned by one thread.
pub(crate) struct Queue {
    io: Io,
    plug: Plug,
    pull_cursor: PullCursor,
    dispatch: Dispatch,
    hold: Hold,
    rounds: Rounds,
    hang_tracker: HangTracker,
    /// Must be the last field: the driver's queue must be dropped before another thread may open this queue.
    _claim: QueueClaim,
}

impl Queue {
    /// First half of a turn: completes the requests that the driver has finished, and takes bios that other
    /// threads have submitted.
    #[inline]
    pub fn begin_turn(&mut self, mut ring: Option<&mut Ring>) {
        self.close_fast_path();
        self.rounds.begin_turn();
        let woken = self.io.disk.shared().kick.take_woken();
        if woken || self.has_started() {
            if woken {
                self.dispatch.refresh_limits(&self.io);
            }
            self.dispatch.poll(&mut self.io, ring.as_deref_mut());
        }
        if self.io.completions.has_requests() {
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
        if self.rounds.has_clock() {
            self.rounds.restart_clock();
            self.io.waits_for_turn &= !self.io.waiting.is_empty();
        }
    }

    #[inline(never)]
    fn dispatch_ready(&mut self, mut ring: Option<&mut Ring>) {
        self.rounds.begin();
        loop {
            self.kick_flush(ring.as_deref_mut());
            self.flush_plug(ring.as_deref_mut());
            let completed = self.io.completions.request_count();
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
}

impl Queue {
    #[inline]
    fn can_dispatch(&self) -> bool {
        !self.plug.is_empty()
            || self.io.completions.has_requests()
            || self.dispatch.has_ready()
            || self.io.flush.is_wanted()
    }

    #[inline]
    pub fn complete_cqe(&mut self, cqe: Cqe, ring: Option<&mut Ring>) {
        self.dispatch.complete_cqe(cqe, &mut self.io, ring);
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
        if self.io.disk.settings().iostats {
            self.plug.count(self.io.in_flight.requests(), &mut self.io.stats);
        }
        if self.io.stats.count_to(Counter::PlugFlushes, PROBE_PLUGS) {
            self.check_probes();
        }
        let data_sectors = self.plug.data_sectors();
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
        if self.io.completions.take_limits_changed() {
            self.trace_fast_path();
            self.io.reload_limits();
        }
        // A new clock reading, so that no request completes at an earlier time than it was issued.
        self.io.clock.invalidate();
        self.dispatch.clear_rerun();
        let mut completed = self.io.completions.take_requests();
        if self.hold.is_on() {
            self.trace_fast_path();
            self.hold.hold_failed(&mut completed, &mut self.io, &mut self.dispatch);
        }
        self.complete_requests(completed);
    }

    /// Completes `completed`, from which the requests that must be held have been removed.
    fn complete_requests(&mut self, completed: Vec<(Tag, IoResult)>) {
        if self.dispatch.observers().completions || self.hang_tracker.has_reported() {
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
    #[inline]
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
        if self.io.disk.has_held_writes() {
            if self.hold.is_closing() {
                // Another queue has the held writes. They may not be resumed before this queue has stopped.
                self.io.abandon_flushes(Err(Status::Offline));
            }
        } else if (self.io.disk.is_entered() || self.enter(ring)) && self.io.start_flush() {
            self.dispatch.push_flush(self.io.flush.tag());
        }
    }
}

/// Requests that are held after errors.
impl Queue {
    #[inline]
    pub fn has_held(&self) -> bool {
        self.hold.has_held()
    }

    /// Applies the disk's policy, and resumes held requests if the operator has asked for that.
    fn refresh_hold(&mut self) {
        let disk = self.io.disk.disk();
        self.hold.reload(disk);
        match self.hold.take_resumed(disk) {
            Some(Resume::Fail) => self.fail_held(|_| true),
            Some(Resume::Reissue) => self.hold.reissue(&mut self.io, &mut self.dispatch),
            None => return,
        }
        self.hold.note_resumed(self.io.disk.disk(), self.io.disk.index());
    }

    /// Fails held requests and stops holding others, because the owner of the queue is stopping.
    fn close_hold(&mut self) {
        self.hold.close(self.io.disk.disk());
        self.fail_held(|_| true);
    }

    /// Fails held requests that must not be reissued, because clients have disconnected. `is_abandoned` is
    /// called with the `user_data` of bios.
    pub(crate) fn fail_abandoned(&mut self, ring: Option<&mut Ring>, is_abandoned: impl Fn(u64) -> bool) {
        self.close_fast_path();
        let abandoned = self.hold.find_abandoned(&mut self.io, is_abandoned);
        if abandoned.contains(&true) {
            self.fail_held(|tag| abandoned[tag.index()]);
            self.admit_waiting(ring);
        }
    }

    /// Completes the held requests for which `which` returns true with their errors.
    fn fail_held(&mut self, which: impl Fn(Tag) -> bool) {
        let failed = self.hold.take_failed(which, &mut self.io, &mut self.dispatch);
        if !failed.is_empty() {
            self.io.clock.invalidate();
            self.complete_requests(failed);
        }
    }
}

impl Queue {
    pub fn disk(&self) -> &Arc<Disk> {
        self.io.disk.disk()
    }

    /// Counts calls of io_uring_enter(2) since the last call of this method, and how many were early.
    pub fn count_enters(&mut self, enters: u64, early_submissions: u64) {
        self.io.stats.count(Counter::Enters, enters);
        self.io.stats.count(Counter::EarlySubmissions, early_submissions);
    }

    pub fn limits(&self) -> &QueueLimits {
        self.io.disk.limits()
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

    #[inline]
    pub fn completions(&self) -> &[Completion] {
        self.io.completions.own()
    }

    pub fn take_completion(&mut self) -> Option<Completion> {
        self.io.completions.take_own()
    }

    #[inline]
    pub fn completions_mut(&mut self) -> &mut Vec<Completion> {
        self.io.completions.own_mut()
    }

    /// The number of bios, and parts of bios, that have not completed.
    pub fn in_flight(&self) -> u32 {
        self.io.in_flight.bios().len()
    }

    #[inline]
    pub fn has_started(&self) -> bool {
        self.dispatch.started() > 0
    }

    #[inline]
    pub fn has_completed(&self) -> bool {
        self.io.completions.has_requests()
    }

    /// The latest time at which the queue must run again, in nanoseconds of the monotonic clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        // A frozen disk issues its flush after the thaw, and a flush behind held writes after these have
        // completed.
        let flush_ns = if self.io.disk.is_frozen() || self.io.disk.has_held_writes() {
            None
        } else {
            self.io.flush.deadline_ns()
        };
        [self.dispatch.deadline_ns(), flush_ns].into_iter().flatten().min()
    }

    /// Whether the last turn stopped at its budget with work left.
    #[inline]
    pub fn is_cut_short(&self) -> bool {
        self.rounds.is_cut_short() && self.can_dispatch()
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
        !self.io.completions.own().is_empty() || self.io.completions.has_requests() || self.has_changed()
    }

    /// The clauses of [`Queue::has_work`] without the first one, for an owner that waits for several
    /// completions.
    pub fn has_changed(&self) -> bool {
        self.io.disk.shared().kick.is_woken()
            || self.is_cut_short()
            || (self.io.disk.shared().software.has_pending() && self.can_take())
            || self.can_continue_now()
            || (self.dispatch.is_blocked_by_quiesce() && !self.io.disk.is_quiesced())
    }

    /// Whether a flush, reload or bio was delayed by a freeze, or by a lack of tags, and can continue.
    fn can_continue_now(&self) -> bool {
        if self.io.disk.is_frozen() {
            return self.dispatch.waits_for_limit();
        }
        let may_flush = self.io.flush.is_due() && !self.io.disk.has_held_writes();
        if may_flush || (!self.io.disk.is_entered() && self.io.disk.is_outdated()) {
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
        let stopped = self.io.disk.is_frozen() || self.io.disk.is_quiesced();
        self.in_flight() == 0 || (stopped && !self.has_started())
    }
}

#[cfg(all(test, not(model_check)))]
mod work_tests;
