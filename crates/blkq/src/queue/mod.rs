//! A hardware queue (`struct blk_mq_hw_ctx`): everything that one thread owns of a disk. Bios enter through
//! [`Queue::submit`], become requests in the plug, reach the driver in batches, and complete in batches. This
//! path takes no lock, passes nothing to another thread, and allocates nothing.
//!
//! Each part of a queue is a module and owns its fields:
//!
//! * `disk_view`: the settings and limits in force, and whether the queue has entered the disk;
//! * `in_flight`, `tag_cache`: requests and bios in flight, and the free tags;
//! * `plug`: requests that are collected for one batch, and the fast path into it;
//! * `pull_cursor`: the round-robin position over the software queues of other threads;
//! * `dispatch`, `throttle`, `device_time`: requests between the plug and the driver;
//! * `flush`: the flush machine; `hold`: failed requests that are held;
//! * `completions`, `rounds`: completed requests, and the budget of a turn;
//! * `hang`, `tracer`: reports of slow I/O, and the trace.
//!
//! The steps of a bio are in `submit`, `pull` (bios of other threads), `merge`, `parts` (splits), `sequence`
//! (flushes), `complete` and `resume`. This file has the turn, in which the owner runs them. `change` applies
//! what was changed under a freeze, `scan` searches for hangs, and `close` closes the queue.
//!
//! The ring is lent to each call that may reach the driver, because several queues of a thread share it.

mod broken;
mod change;
mod close;
mod complete;
mod completions;
mod device_time;
mod disk_view;
mod dispatch;
pub mod failures;
mod fast_limits;
mod flush;
pub mod hang;
mod hold;
mod in_flight;
mod merge;
mod parts;
pub mod plug;
mod pull;
mod pull_cursor;
mod resume;
mod rounds;
mod scan;
mod sequence;
mod submit;
mod tag_cache;
mod throttle;
mod trace;
mod tracer;
mod tracked;

use std::sync::Arc;

use crate::bio::Completion;
use crate::clock::Clock;
use crate::disk::{Disk, QueueClaim};
use crate::driver::{DriverQueue, OpenContext};
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::ring::{Cqe, Registrar, Ring};
use crate::slab::BioList;
use crate::stats::{Counter, StatsWriter};
use crate::tags::Tag;

use completions::Completions;
use disk_view::DiskView;
use dispatch::Dispatch;
use failures::FailureNotes;
use flush::FlushMachine;
use hang::HangTracker;
use hold::Hold;
use in_flight::InFlight;
use plug::Plug;
use pull_cursor::PullCursor;
use rounds::Rounds;
use tag_cache::TagCache;

/// Plugs that a queue without a sleep flushes between two checks whether USDT probes are attached.
const PROBE_PLUGS: u64 = 256;

/// One hardware queue of a disk, owned by one thread.
pub(crate) struct Queue {
    disk: DiskView,
    in_flight: InFlight,
    tags: TagCache,
    plug: Plug,
    /// Bios without a tag, and parts of split bios, in the order in which they become requests.
    waiting: BioList,
    /// How many bios at the front of `waiting` are counted in [`Counter::TagWaits`].
    counted_waits: u32,
    pull_cursor: PullCursor,
    dispatch: Dispatch,
    flush: FlushMachine,
    hold: Hold,
    completions: Completions,
    rounds: Rounds,
    clock: Clock,
    stats: StatsWriter,
    hang_tracker: HangTracker,
    failures: FailureNotes,
    /// The driver's queue is wrapped in a [`TrackedQueue`](tracked::TrackedQueue), which sets bits of dirty
    /// bitmaps.
    is_tracked: bool,
    /// Must be the last field: the driver's queue must be dropped before another thread may open this queue.
    _claim: QueueClaim,
}

fn open_driver(
    view: &DiskView,
    slots: usize,
    ring: Option<&mut Ring>,
) -> Result<Box<dyn DriverQueue>, Error> {
    let (ring, wake) = (ring.map(Registrar::new), view.shared().kick.clone());
    view.driver().open_queue(OpenContext { index: view.index() as u16, tags: slots, ring, wake })
}

impl Queue {
    /// Opens queue `index` of `disk` on this thread. `owner` marks the queue's submissions on the ring, which
    /// several queues may share. Fails with the driver's error, or
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if the queue is open already.
    pub fn open(disk: &Arc<Disk>, index: usize, owner: u16, ring: Option<&mut Ring>) -> Result<Queue, Error> {
        let claim = disk.claim_queue(index)?;
        let view = DiskView::new(disk, index)?;
        let shared = view.shared();
        // One request beyond the tags is the queue's own flush.
        let slots = usize::from(disk.depth_max()) + 1;
        let mut driver = open_driver(&view, slots, ring)?;
        let is_tracked = tracked::track(&mut driver, disk);
        let tags = TagCache::new(shared, view.settings().requests(), disk.depth_max())?;
        Ok(Queue {
            in_flight: InFlight::new(slots, view.limits()),
            tags,
            plug: Plug::new(),
            waiting: BioList::new(),
            counted_waits: 0,
            pull_cursor: PullCursor::default(),
            dispatch: Dispatch::new(owner, driver, &view, slots),
            flush: FlushMachine::new(Tag(slots as u16 - 1)),
            hold: Hold::new(disk, view.index(), Tag(slots as u16 - 1), slots),
            completions: Completions::new(slots),
            rounds: Rounds::default(),
            clock: Clock::new(view.settings().clock),
            stats: StatsWriter::over(shared.stats.clone()),
            hang_tracker: HangTracker::default(),
            failures: FailureNotes::default(),
            is_tracked,
            disk: view,
            _claim: claim,
        })
    }

    /// First half of a turn: completes the requests that the driver has finished, and takes bios that other
    /// threads have submitted.
    #[inline]
    pub fn begin_turn(&mut self, mut ring: Option<&mut Ring>) {
        self.close_fast_path();
        self.rounds.begin_turn();
        let woken = self.disk.shared().kick.take_woken();
        if woken || self.has_started() {
            if woken {
                self.dispatch.refresh_limits(self.disk.disk());
            }
            self.poll_driver(ring.as_deref_mut());
        }
        if self.completions.has_requests() {
            self.complete_batch();
        }
        if woken {
            self.refresh_hold();
        }
        self.refresh(ring.as_deref_mut());
        self.kick_flush(ring.as_deref_mut());
        self.pull_software_queues(ring.as_deref_mut());
        self.admit_waiting(ring);
        // Bios that were rejected or are empty complete without a request, so `complete_batch` has not
        // delivered them.
        self.completions.deliver_remote(&self.disk.disk().gate);
    }

    /// Second half of a turn; may be called several times. Flushes the plug and dispatches until nothing
    /// changes, or until the turn's budget is spent.
    #[inline]
    pub fn dispatch_all(&mut self, ring: Option<&mut Ring>) {
        self.close_fast_path();
        if self.can_dispatch() {
            self.dispatch_ready(ring);
        }
        self.clock.invalidate();
        self.leave_if_idle();
        self.completions.deliver_remote(&self.disk.disk().gate);
    }

    #[inline(never)]
    fn dispatch_ready(&mut self, mut ring: Option<&mut Ring>) {
        self.rounds.begin();
        loop {
            self.kick_flush(ring.as_deref_mut());
            self.flush_plug(ring.as_deref_mut());
            let completed = self.completions.request_count();
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
            || self.completions.has_requests()
            || self.dispatch.has_ready()
            || self.flush.is_wanted()
    }

    #[inline]
    pub fn complete_cqe(&mut self, cqe: Cqe, ring: Option<&mut Ring>) {
        let mut cx = self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
        self.dispatch.complete_cqe(cqe, &mut cx);
    }

    #[inline(never)]
    fn poll_driver(&mut self, ring: Option<&mut Ring>) {
        let mut cx = self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
        self.dispatch.poll(&mut cx);
    }

    /// Passes everything in the plug to the scheduler or the driver. The fast path must be closed. The cached
    /// time is dropped with the plug, as in `blk_flush_plug`.
    #[inline(always)]
    fn flush_plug(&mut self, ring: Option<&mut Ring>) {
        debug_assert!(!self.plug.is_open());
        self.clock.invalidate();
        if !self.plug.is_empty() {
            self.flush_requests(ring);
        } else if self.dispatch.has_ready() {
            self.run_dispatch(ring);
        }
    }

    #[inline]
    fn flush_requests(&mut self, ring: Option<&mut Ring>) {
        if self.disk.settings().iostats {
            self.plug.count(self.in_flight.requests(), &mut self.stats);
        }
        if self.stats.count_to(Counter::PlugFlushes, PROBE_PLUGS) {
            self.check_probes();
        }
        let data_sectors = self.plug.data_sectors();
        let batch = self.plug.take_requests();
        if self.dispatch.is_direct()
            || self.dispatch.pay_limits(batch, data_sectors, self.in_flight.requests())
        {
            let mut cx =
                self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
            self.dispatch.issue_directly(batch, &self.disk, &mut self.stats, &mut cx);
        } else if self.dispatch.has_only_limits() {
            let mut cx =
                self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
            self.dispatch.issue_limited(batch, &self.disk, &mut self.stats, &mut cx);
        } else if self.dispatch.has_only_tracer() {
            let mut cx =
                self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
            self.dispatch.issue_traced(batch, &self.disk, &mut self.stats, &mut cx);
        } else {
            self.dispatch.trace_unplug(batch, &self.in_flight, &mut self.clock);
            self.dispatch.insert(batch, &self.in_flight, &mut self.clock, &self.disk, &mut self.stats);
            self.run_dispatch(ring);
        }
    }

    fn run_dispatch(&mut self, ring: Option<&mut Ring>) {
        let mut cx = self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
        self.dispatch.run(&self.disk, &mut self.stats, &mut cx);
    }
}

impl Queue {
    pub fn disk(&self) -> &Arc<Disk> {
        self.disk.disk()
    }

    /// Counts calls of io_uring_enter(2) since the last call of this method, and how many were early.
    pub fn count_enters(&mut self, enters: u64, early_submissions: u64) {
        self.stats.count(Counter::Enters, enters);
        self.stats.count(Counter::EarlySubmissions, early_submissions);
    }

    pub fn limits(&self) -> &QueueLimits {
        self.disk.limits()
    }

    /// Raises the size of the plug, because the thread owns several queues.
    pub fn set_several_queues(&mut self) {
        self.plug.set_several_queues();
    }

    /// Stops taking bios of other threads, lifts limits and fails held requests: the owner is stopping.
    pub fn close_to_submitters(&mut self) {
        self.pull_cursor.close();
        self.dispatch.close_limits();
        self.close_hold();
    }

    /// Must be called before the owner sleeps: drops the cached time.
    pub fn idle(&mut self) {
        self.clock.idle();
    }

    /// Must be called when the owner has slept: checks whether probes were attached meanwhile.
    pub fn woke(&mut self) {
        self.check_probes();
    }

    #[inline]
    pub fn completions(&self) -> &[Completion] {
        self.completions.own()
    }

    pub fn take_completion(&mut self) -> Option<Completion> {
        self.completions.take_own()
    }

    #[inline]
    pub fn completions_mut(&mut self) -> &mut Vec<Completion> {
        self.completions.own_mut()
    }

    /// The number of bios, and parts of bios, that have not completed.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.bios().len()
    }

    #[inline]
    pub fn has_started(&self) -> bool {
        self.dispatch.started() > 0
    }

    #[inline]
    pub fn has_completed(&self) -> bool {
        self.completions.has_requests()
    }

    /// The latest time at which the queue must run again, in nanoseconds of the monotonic clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        // A frozen disk issues its flush after the thaw, and a flush behind held writes after these have
        // completed.
        let flush_ns = if self.disk.is_frozen() || self.disk.has_held_writes() {
            None
        } else {
            self.flush.deadline_ns()
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
    /// 7. A tag of a shared set was freed, or the queue's share of the set has grown: another queue.
    /// 8. A quiesce was lifted: a control thread.
    ///
    /// Held writes of another queue also delay a flush. The queue that completes the last of them wakes all
    /// others (clause 2).
    pub fn has_work(&self) -> bool {
        !self.completions.own().is_empty()
            || self.completions.has_requests()
            || self.disk.shared().kick.is_woken()
            || self.is_cut_short()
            || (self.disk.shared().software.has_pending() && self.can_take())
            || self.can_continue_now()
            || (self.dispatch.is_blocked_by_quiesce() && !self.disk.is_quiesced())
    }

    /// Whether a flush, reload or bio was delayed by a freeze, or by a lack of tags, and can continue.
    fn can_continue_now(&self) -> bool {
        if self.disk.is_frozen() {
            return self.dispatch.waits_for_limit();
        }
        let may_flush = self.flush.is_due() && !self.disk.has_held_writes();
        if may_flush || (!self.disk.is_entered() && self.disk.is_outdated()) {
            return true;
        }
        let may_get = || self.tags.may_get_shared(self.in_flight.in_use()).unwrap_or(self.tags.own() > 0);
        !self.waiting.is_empty() && may_get()
    }

    /// Whether the queue waits for a batch of tags that other queues free.
    #[cfg(simulation)]
    pub fn waits_for_batch(&self) -> bool {
        self.tags.waits_for_batch()
    }

    /// Whether everything has completed that can complete. While the disk is frozen or quiesced, requests
    /// that the driver does not have stay.
    pub fn is_drained(&self) -> bool {
        let stopped = self.disk.is_frozen() || self.disk.is_quiesced();
        self.in_flight() == 0 || (stopped && !self.has_started())
    }
}

#[cfg(all(test, not(model_check)))]
mod work_tests;
