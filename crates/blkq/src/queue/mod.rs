//! A hardware queue: everything that one thread owns of a disk. Bios come in through
//! [`Queue::submit`], become requests under the plug, reach the driver in batches, and
//! complete in batches. No lock, no hand-over, no allocation on that way.
//!
//! The parts of a queue own their fields: `disk_view`, `in_flight`, `tag_cache`, `plug`, `pull_cursor`,
//! `dispatch`, `throttle`, `device_time`, `flush`, `hold`, `completions`, `rounds`, `hang`, `tracer`. The steps of a bio lead from one part to the next:
//! `submit`, `pull` (from other threads), `merge`, `parts`, `sequence` (of flushes), `complete`, `resume`.
//! Here is the turn that they make together; `change` is what a freeze brings, `scan` what is
//! found to hang, `close` closing it.
//!
//! The ring is lent to every call that may reach the driver, because one thread has one
//! ring and perhaps several queues.

mod broken;
mod change;
mod close;
mod complete;
mod completions;
mod device_time;
mod disk_view;
mod dispatch;
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
use flush::FlushMachine;
use hang::HangTracker;
use hold::Hold;
use in_flight::InFlight;
use plug::Plug;
use pull_cursor::PullCursor;
use rounds::Rounds;
use tag_cache::TagCache;

/// Plugs of a queue that does not sleep from one check of the probes to the next.
const PROBE_PLUGS: u64 = 256;

/// One hardware queue of a disk, owned by one thread.
pub(crate) struct Queue {
    disk: DiskView,
    in_flight: InFlight,
    tags: TagCache,
    plug: Plug,
    /// Bios that have no tag yet, and parts of split bios, in order.
    waiting: BioList,
    /// How many of these, from the first on, are counted as tag waits.
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
    /// The driver's writes set the bits of bitmaps.
    is_tracked: bool,
    /// Last, as the driver's part of the queue is dropped before another thread may open it.
    _claim: QueueClaim,
}

/// Opens the driver's part of a queue.
fn open_driver(
    view: &DiskView,
    slots: usize,
    ring: Option<&mut Ring>,
) -> Result<Box<dyn DriverQueue>, Error> {
    let (ring, wake) = (ring.map(Registrar::new), view.shared().kick.clone());
    view.driver().open_queue(OpenContext { index: view.index() as u16, tags: slots, ring, wake })
}

/// The turn.
impl Queue {
    /// Opens queue `index` of `disk` on this thread. `owner` is its name on the ring.
    ///
    /// # Errors
    /// The driver's, or that the queue is open already.
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
            is_tracked,
            disk: view,
            _claim: claim,
        })
    }

    /// The first part of a turn: completes what the driver finished, and takes in what other
    /// threads submitted.
    #[inline]
    pub fn begin_turn(&mut self, mut ring: Option<&mut Ring>) {
        self.close_lane();
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
        // Some may have completed without a request: rejected, or empty.
        self.completions.deliver_remote(&self.disk.disk().gate);
    }

    /// The second part, any number of times: flushes the plug and dispatches until nothing moves any more, or the budget
    /// of the turn is spent.
    #[inline]
    pub fn dispatch_all(&mut self, ring: Option<&mut Ring>) {
        self.close_lane();
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

/// Where the driver is called.
impl Queue {
    /// Whether there may be something to dispatch, or to complete.
    #[inline]
    fn can_dispatch(&self) -> bool {
        !self.plug.is_empty()
            || self.completions.has_requests()
            || self.dispatch.has_ready()
            || self.flush.is_wanted()
    }

    /// Passes a completion of the ring to the driver.
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

    /// Hands everything under the plug, whose lane is closed, to the scheduler, or straight to the driver.
    /// The cached time is dropped with the plug.
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
            || self.dispatch.is_prepaid(batch, data_sectors, self.in_flight.requests())
        {
            let mut cx =
                self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
            self.dispatch.issue_directly(batch, &self.disk, &mut self.stats, &mut cx);
        } else if self.dispatch.is_limited_only() {
            let mut cx =
                self.dispatch.context(&mut self.in_flight, &mut self.completions, &mut self.clock, ring);
            self.dispatch.issue_limited(batch, &self.disk, &mut self.stats, &mut cx);
        } else if self.dispatch.is_traced_only() {
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

/// The interface of the owner.
impl Queue {
    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        self.disk.disk()
    }

    /// The calls into the kernel since the last time, by its owner's ring.
    pub fn count_enters(&mut self, enters: u64, early_submissions: u64) {
        self.stats.count(Counter::Enters, enters);
        self.stats.count(Counter::EarlySubmissions, early_submissions);
    }

    /// The limits in force.
    pub fn limits(&self) -> &QueueLimits {
        self.disk.limits()
    }

    /// The thread has several queues: the plug takes more requests.
    pub fn set_several_queues(&mut self) {
        self.plug.set_several_queues();
    }

    /// The owner stops: nothing more is taken from submitters.
    pub fn close_to_submitters(&mut self) {
        self.pull_cursor.close();
        self.dispatch.close_limits();
        self.close_hold();
    }

    /// The owner is about to sleep.
    pub fn idle(&mut self) {
        self.clock.idle();
    }

    /// The owner has slept.
    pub fn woke(&mut self) {
        self.check_probes();
    }

    /// Completions of the owner's bios that have not been taken, oldest first.
    #[inline]
    pub fn completions(&self) -> &[Completion] {
        self.completions.own()
    }

    /// Takes the oldest of them.
    pub fn take_completion(&mut self) -> Option<Completion> {
        self.completions.take_own()
    }

    #[inline]
    pub fn completions_mut(&mut self) -> &mut Vec<Completion> {
        self.completions.own_mut()
    }

    /// Bios that have not completed, and parts of them.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.bios().len()
    }

    /// Whether the driver has requests.
    #[inline]
    pub fn has_started(&self) -> bool {
        self.dispatch.started() > 0
    }

    /// Whether the driver completed requests that are not completed yet.
    #[inline]
    pub fn has_completed(&self) -> bool {
        self.completions.has_requests()
    }

    /// When the queue wants to run at the latest, in nanoseconds of the monotonic clock.
    pub fn deadline_ns(&self) -> Option<u64> {
        // A frozen disk flushes when it thaws, and after a write that is held.
        let flush_ns = if self.disk.is_frozen() || self.disk.has_held_writes() {
            None
        } else {
            self.flush.deadline_ns()
        };
        [self.dispatch.deadline_ns(), flush_ns].into_iter().flatten().min()
    }

    /// Whether the last turn stopped at its budget, before all was done that can be done now.
    #[inline]
    pub fn is_cut_short(&self) -> bool {
        self.rounds.is_cut_short() && self.can_dispatch()
    }

    /// Whether a turn would do something now. The owner sleeps only if it would not.
    ///
    /// The owner checks this once more after it has announced that it sleeps, because a [`kick`](crate::kick::Kick) of
    /// an owner that runs is not recorded: a condition that another thread changes between the step of the turn that
    /// depends on it and the sleep is seen here or not at all. Therefore each condition that changes what a turn does has
    /// a clause, and a turn makes each clause false, or the owner would not sleep at all. The clauses, in this order, and
    /// the threads that change the conditions (`work_tests.rs` has a test of each):
    ///
    /// 1. There are completions for the owner, or requests that the driver has completed: this thread.
    /// 2. The owner was woken: a driver that completes elsewhere, or a change of limits, of the error policy or of what
    ///    is held. Recorded by [`Kick::is_woken`](crate::kick::Kick::is_woken).
    /// 3. The last turn stopped at its budget: this thread.
    /// 4. Bios are staged for which there is room: a submitter.
    /// 5. A freeze has begun, for which no request waits for a limit any longer: a control thread.
    /// 6. A freeze was lifted, also one that failed while this queue had requests. Then a flush may begin, the idle queue
    ///    takes over what was changed, and waiting bios get tags.
    /// 7. A tag of a shared set was freed, or the queue's share of the set has grown: another queue.
    /// 8. A quiesce was lifted: a control thread.
    ///
    /// Writes that are held by another queue keep a flush waiting, too; the queue that completes the last of them wakes
    /// all others (2).
    pub fn has_work(&self) -> bool {
        !self.completions.own().is_empty()
            || self.completions.has_requests()
            || self.disk.shared().kick.is_woken()
            || self.is_cut_short()
            || (self.disk.shared().software.has_pending() && self.can_take())
            || self.can_continue_now()
            || (self.dispatch.is_blocked_by_quiesce() && !self.disk.is_quiesced())
    }

    /// Whether something waits that a freeze, its absence, or tags have kept waiting, and do not now.
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

    /// Whether all that can complete has: of a disk that is stopped nothing else does.
    pub fn is_drained(&self) -> bool {
        let stopped = self.disk.is_frozen() || self.disk.is_quiesced();
        self.in_flight() == 0 || (stopped && !self.has_started())
    }
}

#[cfg(all(test, not(model_check)))]
mod work_tests;
