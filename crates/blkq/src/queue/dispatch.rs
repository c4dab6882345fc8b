//! Dispatch: requests reach the driver, in this order: what was requeued, then the
//! scheduler's (block/blk-mq-sched.c). A busy driver is no error: the request is requeued.

mod traced;

use std::borrow::Cow;
use std::collections::VecDeque;

use crate::clock::{Clock, monotonic_ns};
use crate::disk::Disk;
use crate::driver::{Busy, DriverContext, DriverQueue, Taken};
use crate::error::IoResult;
use crate::request::Request;
use crate::ring::{Cqe, Ring};
use crate::sched::{Scheduler, SchedulerKind};
use crate::stats::{Counter, StatsWriter};
use crate::tags::Tag;
use crate::trace::EventKind;

use super::completions::Completions;
use super::device_time::DeviceTime;
use super::disk_view::DiskView;
use super::in_flight::InFlight;
use super::plug::PLUG_REQUESTS;
use super::throttle::QueueThrottle;
use super::tracer::Tracer;

/// When a driver that ran out of resources is asked again (BLK_MQ_RESOURCE_DELAY).
const RESOURCE_DELAY_NS: u64 = 3_000_000;

/// The driver of a queue, and the requests on their way to it.
pub(super) struct Dispatch {
    /// The queue's name on the ring.
    owner: u16,
    driver: Box<dyn DriverQueue>,
    /// [`Settings::early_submission`].
    early_submission: bool,
    scheduler: Option<Box<dyn Scheduler>>,
    /// Requests that were requeued, or that go before all others.
    requeued: VecDeque<Tag>,
    /// Those that wait for a limit.
    throttle: QueueThrottle,
    /// Requests that the driver has.
    started: u32,
    /// When a driver that was out of resources is asked again.
    rerun_at_ns: Option<u64>,
    /// The driver takes more requests of the scheduler than it has, as far as that was looked at.
    has_room: bool,
    /// The disk was quiesced when there were requests for the driver.
    blocked_by_quiesce: bool,
    tracing: Option<Box<Tracer>>,
    /// How long the driver has requests, if that is measured.
    device_time: Option<Box<DeviceTime>>,
    /// There is a scheduler or a tracer that sees each bio: none takes the fast lane.
    observed: bool,
    /// There is a scheduler or a tracer, or there are limits: no request takes the shortest way.
    detours: bool,
    /// The scheduler may have requests, or some may wait for a limit.
    lingering: bool,
    /// There is a scheduler or a tracer, or the driver's time is measured: all are informed of completions.
    notes_completions: bool,
    index: usize,
    slots: usize,
}

impl Dispatch {
    pub fn new(owner: u16, driver: Box<dyn DriverQueue>, disk: &DiskView, slots: usize) -> Dispatch {
        let settings = disk.settings();
        let scheduler = settings.scheduler.open(slots);
        let mut dispatch = Dispatch {
            owner,
            driver,
            early_submission: settings.early_submission,
            observed: scheduler.is_some(),
            scheduler,
            requeued: VecDeque::with_capacity(slots),
            throttle: QueueThrottle::new(disk.disk(), slots),
            started: 0,
            rerun_at_ns: None,
            has_room: true,
            blocked_by_quiesce: false,
            tracing: None,
            device_time: None,
            detours: false,
            lingering: false,
            notes_completions: false,
            index: disk.index(),
            slots,
        };
        dispatch.measure();
        dispatch
    }

    /// A scheduler, a tracer, or limits have come or were removed.
    fn note_detours(&mut self) {
        let seen = self.scheduler.is_some() || self.tracing.is_some();
        let sees_bios = self.tracing.as_ref().is_some_and(|tracer| !tracer.allows_lane());
        self.observed = self.scheduler.is_some() || sees_bios;
        self.detours = seen || self.throttle.is_on();
        self.lingering = self.scheduler.is_some() || self.throttle.has_waiting();
        self.notes_completions = seen || self.device_time.is_some();
    }

    /// Measures how long the driver has requests from now on, or no longer.
    fn measure(&mut self) {
        let times = self.throttle.device_times(self.index);
        match (times, &self.device_time) {
            (Some(times), Some(device_time)) if device_time.counts_in(times) => {}
            (times, _) => {
                self.device_time = times.map(|times| Box::new(DeviceTime::new(times.clone(), self.slots)));
            }
        }
        self.note_detours();
    }

    /// Takes over changed limits.
    #[cold]
    pub fn refresh_limits(&mut self, disk: &Disk) {
        self.throttle.refresh(disk);
        self.measure();
    }

    /// The owner stops: no request waits for a limit any more.
    pub fn close_limits(&mut self) {
        self.throttle.close();
    }

    /// The queue as the driver sees it, for one call.
    #[inline(always)]
    pub fn context<'a>(
        &self,
        in_flight: &'a mut InFlight,
        completions: &'a mut Completions,
        clock: &'a mut Clock,
        ring: Option<&'a mut Ring>,
    ) -> DriverContext<'a> {
        let (requests, bios, zeroes) = in_flight.for_driver();
        let (completed, limits_changed) = completions.for_driver();
        DriverContext {
            requests,
            bios,
            zeroes,
            completed,
            clock,
            ring,
            owner: self.owner,
            early_submission: self.early_submission,
            limits_changed,
        }
    }

    /// Whether a scheduler or a tracer sees each bio.
    #[inline]
    pub fn is_observed(&self) -> bool {
        self.observed
    }

    /// Whether somebody is to be informed of requests that complete.
    #[inline]
    pub fn notes_completions(&self) -> bool {
        self.notes_completions
    }

    #[inline]
    pub fn has_scheduler(&self) -> bool {
        self.scheduler.is_some()
    }

    #[inline]
    pub fn scheduler(&self) -> Option<&dyn Scheduler> {
        self.scheduler.as_deref()
    }

    #[inline]
    pub fn scheduler_mut(&mut self) -> Option<&mut (dyn Scheduler + 'static)> {
        self.scheduler.as_deref_mut()
    }

    pub fn set_early_submission(&mut self, on: bool) {
        self.early_submission = on;
    }

    /// The old scheduler has no requests.
    pub fn set_scheduler(&mut self, scheduler: SchedulerKind, slots: usize) {
        self.scheduler = scheduler.open(slots);
        self.note_detours();
    }

    /// Requests that the driver has.
    #[inline]
    pub fn started(&self) -> u32 {
        self.started
    }

    /// Whether requeued requests are to be reissued.
    #[inline]
    pub fn has_requeued(&self) -> bool {
        !self.requeued.is_empty()
    }

    /// Whether a request comes to the driver without a detour.
    #[inline]
    pub fn is_direct(&self) -> bool {
        !self.detours && self.requeued.is_empty()
    }

    /// Whether requests stayed because of a quiesce.
    pub fn is_blocked_by_quiesce(&self) -> bool {
        self.blocked_by_quiesce
    }

    /// The limits.
    #[inline]
    pub fn throttle(&self) -> &QueueThrottle {
        &self.throttle
    }

    /// When the driver, a requeued request, or one that waits for a limit wants the queue to run at the latest.
    pub fn deadline_ns(&self) -> Option<u64> {
        let deadlines = [self.driver.deadline_ns(), self.rerun_at_ns, self.throttled_deadline_ns()];
        deadlines.into_iter().flatten().min()
    }

    /// When the first request that waits for a limit may begin.
    fn throttled_deadline_ns(&self) -> Option<u64> {
        // While the driver is busy or stopped nothing begins, whatever time it is.
        let is_stopped = self.rerun_at_ns.is_some() || !self.requeued.is_empty();
        if is_stopped { None } else { self.throttle.deadline_ns(self.has_room) }
    }

    /// Whether requests wait for nothing but a limit.
    pub fn waits_for_limit(&self) -> bool {
        self.throttled_deadline_ns().is_some()
    }

    /// A flush goes before all others, but obeys the limits.
    pub fn push_first(&mut self, tag: Tag) {
        match self.throttle.is_on() {
            true => {
                self.throttle.push_first(tag);
                self.lingering = true;
            }
            false => self.requeued.push_front(tag),
        }
    }

    /// Takes the requests of a plug: for the scheduler, or behind what was requeued.
    pub fn insert(
        &mut self,
        batch: &[Tag],
        in_flight: &InFlight,
        clock: &mut Clock,
        disk: &DiskView,
        stats: &mut StatsWriter,
    ) {
        match &mut self.scheduler {
            Some(scheduler) => {
                let now_ns = clock.now_ns();
                batch.iter().for_each(|&tag| scheduler.insert(tag, in_flight.requests(), now_ns));
            }
            None if self.throttle.is_on() => {
                let count = self.admit(batch, disk, in_flight.requests(), clock.last_read_ns());
                self.requeued.extend(&batch[..count]);
                if let Some(tracer) = &mut self.tracing {
                    tracer.requests(EventKind::Throttle, &batch[count..], in_flight.requests(), clock);
                }
                self.throttle.push(&batch[count..], in_flight.requests(), stats);
                self.lingering = true;
            }
            None => self.requeued.extend(batch),
        }
    }

    /// Passes `batch` to the driver at once; what that does not take stays.
    #[inline]
    pub fn issue_directly(
        &mut self,
        batch: &[Tag],
        disk: &DiskView,
        stats: &mut StatsWriter,
        cx: &mut DriverContext<'_>,
    ) {
        let taken = self.issue(batch, disk, stats, cx, |_, _| {});
        if taken < batch.len() {
            self.requeued.extend(&batch[taken..]);
        }
    }

    /// Whether limits are all that there is between `batch` and the driver, and let it through at once. It has
    /// `data_sectors`, as [`Plug::data_sectors`](super::plug::Plug::data_sectors) counts them. For a queue that is
    /// not [`Dispatch::is_direct`]: out of line, as it would cost those that are.
    #[inline(never)]
    pub fn is_prepaid(&mut self, batch: &[Tag], data_sectors: u64, requests: &[Request]) -> bool {
        if self.notes_completions || !self.requeued.is_empty() {
            return false;
        }
        // The first needs no more registers than there are free.
        self.throttle.pay_at_once(batch, data_sectors, requests) || self.throttle.pay(batch, requests)
    }

    /// Whether a request comes to the driver without a detour, but for the limits.
    pub fn is_limited_only(&self) -> bool {
        !self.observed && self.tracing.is_none() && self.requeued.is_empty() && self.throttle.is_on()
    }

    /// The same within the limits: requests that have to wait stay, too.
    #[inline(never)]
    pub fn issue_limited(
        &mut self,
        batch: &[Tag],
        disk: &DiskView,
        stats: &mut StatsWriter,
        cx: &mut DriverContext<'_>,
    ) {
        let admitted = self.admit(batch, disk, cx.requests, cx.clock.last_read_ns());
        let (batch, delayed) = batch.split_at(admitted);
        self.note_issued(batch, cx.clock);
        let taken = self.issue(batch, disk, stats, cx, |_, _| {});
        if taken < batch.len() {
            self.requeued.extend(&batch[taken..]);
        }
        if !delayed.is_empty() {
            self.throttle.push(delayed, cx.requests, stats);
            self.lingering = true;
            self.run(disk, stats, cx);
        }
    }

    /// How many requests of a plug may begin now, by the limits.
    #[inline(never)]
    fn admit(&mut self, batch: &[Tag], disk: &DiskView, requests: &[Request], read_ns: u64) -> usize {
        if disk.is_frozen() { batch.len() } else { self.throttle.admit(batch, requests, read_ns) }
    }

    /// Whether there is something for [`Dispatch::run`].
    #[inline]
    pub fn has_ready(&self) -> bool {
        !self.requeued.is_empty() || (self.lingering && self.has_scheduled_or_waiting())
    }

    fn has_scheduled_or_waiting(&self) -> bool {
        self.scheduler.as_ref().is_some_and(|scheduler| scheduler.len() > 0) || self.throttle.has_waiting()
    }

    /// Hands what is ready to the driver until nothing is, or it is busy.
    pub fn run(&mut self, disk: &DiskView, stats: &mut StatsWriter, cx: &mut DriverContext<'_>) {
        if let Some(at_ns) = self.rerun_at_ns {
            if monotonic_ns() < at_ns {
                return;
            }
            self.rerun_at_ns = None;
        }
        let mut batch = [Tag(0); PLUG_REQUESTS];
        loop {
            let len = self.next_batch(&mut batch, disk, stats, cx);
            self.note_issued(&batch[..len], cx.clock);
            let taken = self.issue(&batch[..len], disk, stats, cx, |tracing, cx| {
                if let Some(tracer) = tracing {
                    tracer.requests(EventKind::Issue, &batch[..len], cx.requests, cx.clock);
                }
            });
            if self.tracing.is_some() && !self.blocked_by_quiesce {
                self.trace(EventKind::Requeue, &batch[taken..len], cx);
            }
            for &tag in batch[taken..len].iter().rev() {
                self.requeued.push_front(tag);
            }
            if taken < len || len == 0 {
                break;
            }
        }
        if !self.throttle.is_on() {
            return;
        }
        if let Some(flush) = self.throttle.take_new_flush().filter(|_| self.tracing.is_some()) {
            self.trace(EventKind::Throttle, &[flush], cx);
        }
        self.throttle.note_waiting(self.scheduler.as_ref().map_or(0, |scheduler| scheduler.len()), stats);
        self.note_detours();
    }

    fn next_batch(
        &mut self,
        batch: &mut [Tag],
        disk: &DiskView,
        stats: &mut StatsWriter,
        cx: &mut DriverContext<'_>,
    ) -> usize {
        let mut len = 0;
        while len < batch.len() {
            let Some(tag) = self.requeued.pop_front() else { break };
            batch[len] = tag;
            len += 1;
        }
        if len == 0 && self.throttle.has_waiting() {
            len = self.throttle.take(batch, cx.requests, disk.is_frozen());
        }
        if len > 0 {
            return len;
        }
        let Some(scheduler) = &mut self.scheduler else { return 0 };
        let room = u32::from(disk.settings().depth).saturating_sub(self.started) as usize;
        self.has_room = room > 0;
        let now_ns = cx.clock.now_ns();
        let passes_limits = self.throttle.is_on() && !disk.is_frozen();
        if !passes_limits {
            self.throttle.unblock();
        }
        while len < batch.len().min(room) {
            let open = if passes_limits && scheduler.len() > 0 { self.throttle.open() } else { [true; 2] };
            let Some(tag) = scheduler.dispatch(cx.requests, open, now_ns) else { break };
            if passes_limits && !self.throttle.admit_scheduled(tag, cx.requests, stats) {
                if let Some(tracer) = &mut self.tracing {
                    tracer.requests(EventKind::Throttle, &[tag], cx.requests, cx.clock);
                }
                continue;
            }
            batch[len] = tag;
            len += 1;
        }
        len
    }

    /// Offers `tags` to the driver, unless it is quiesced; `trace` comes right before that. Returns how many it took.
    #[inline(always)]
    fn issue(
        &mut self,
        tags: &[Tag],
        disk: &DiskView,
        stats: &mut StatsWriter,
        cx: &mut DriverContext<'_>,
        trace: impl FnOnce(&mut Option<Box<Tracer>>, &mut DriverContext<'_>),
    ) -> usize {
        if tags.is_empty() {
            return 0;
        }
        // While quiesced nothing reaches the driver; lifting the quiesce kicks the queue.
        self.blocked_by_quiesce = !disk.begin_dispatch();
        if self.blocked_by_quiesce {
            return 0;
        }
        debug_assert!(
            tags.iter().map(|tag| &cx.requests[tag.index()]).all(|request| disk.declares(request)),
            "a request has flags that the driver does not declare"
        );
        trace(&mut self.tracing, cx);
        let taken = self.driver.queue_requests(cx, tags);
        self.driver.commit(cx);
        disk.leave_dispatch();
        stats.count(Counter::DispatchBatches, 1);
        match taken {
            Taken::All => {
                self.started += tags.len() as u32;
                tags.len()
            }
            Taken::First(count, busy) => self.note_busy(tags.len(), count, busy, stats),
        }
    }

    #[cold]
    fn note_busy(&mut self, offered: usize, count: usize, busy: Busy, stats: &mut StatsWriter) -> usize {
        self.started += count as u32;
        stats.count(Counter::Requeues, (offered - count) as u64);
        // With nothing in the driver no completion will come to run the queue again.
        if busy == Busy::Resource || self.started == 0 {
            self.rerun_at_ns = Some(monotonic_ns() + RESOURCE_DELAY_NS);
        }
        count
    }

    /// Requests are about to complete: the driver may have room again.
    #[inline]
    pub fn clear_rerun(&mut self) {
        self.rerun_at_ns = None;
    }

    /// These are about to be issued.
    #[inline]
    fn note_issued(&mut self, tags: &[Tag], clock: &mut Clock) {
        if let Some(device_time) = &mut self.device_time
            && !tags.is_empty()
        {
            device_time.issued(tags, clock.now_ns());
        }
    }

    /// These have completed.
    #[cold]
    pub fn note_device_time(
        &mut self,
        completed: &[(Tag, IoResult)],
        requests: &[Request],
        clock: &mut Clock,
    ) {
        if let Some(device_time) = &mut self.device_time {
            let left = u64::from(self.started).saturating_sub(completed.len() as u64);
            device_time.completed(completed, requests, clock.now_ns(), left);
        }
    }

    /// Informs the scheduler of requests that completed: most disks have none.
    #[cold]
    pub fn notify_scheduler(&mut self, completed: &[(Tag, IoResult)], clock: &mut Clock) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.completed(completed, clock.now_ns());
        }
    }

    /// The driver has failed `tags`, which are held instead of being completed: it no longer has them.
    #[cold]
    pub fn hold(&mut self, tags: &[Tag]) {
        self.started -= tags.len() as u32;
        if let Some(scheduler) = &mut self.scheduler {
            tags.iter().for_each(|&tag| scheduler.requeued(tag));
        }
        if let Some(device_time) = &mut self.device_time {
            device_time.held(tags, u64::from(self.started));
        }
    }

    /// So many requests complete that the driver no longer had.
    pub fn claim(&mut self, count: u32) {
        self.started += count;
    }

    /// Has the driver get `tags`, which it had before, in this order and behind what was requeued.
    pub fn requeue(&mut self, tags: impl Iterator<Item = Tag>) {
        self.requeued.extend(tags);
    }

    /// So many requests have completed.
    #[inline]
    pub fn release(&mut self, count: u32) {
        self.started -= count;
    }

    /// Takes out every request that the driver never got, `plugged` among them, as if it had
    /// them: they are to complete.
    pub fn abandon(&mut self, plugged: &[Tag], slots: usize) -> Vec<Tag> {
        self.requeued.extend(plugged);
        self.requeued.extend(self.throttle.drain());
        if let Some(scheduler) = &mut self.scheduler {
            // Not by dispatching: it may want others to complete before.
            let tags = (0..slots).map(|index| Tag(index as u16));
            self.requeued.extend(tags.filter(|&tag| scheduler.remove(tag)));
        }
        self.started += self.requeued.len() as u32;
        self.requeued.drain(..).collect()
    }

    /// Passes a completion of the ring to the driver.
    #[inline]
    pub fn complete_cqe(&mut self, cqe: Cqe, cx: &mut DriverContext<'_>) {
        self.driver.complete_cqe(cx, cqe);
    }

    /// Has the driver check for completions that no ring announces.
    #[inline]
    pub fn poll(&mut self, cx: &mut DriverContext<'_>) {
        self.driver.poll(cx);
    }

    /// Has the driver take over settings, size and backing.
    pub fn reload(&mut self, cx: &mut DriverContext<'_>) {
        self.driver.reload(cx);
    }

    /// The driver's part of the queue, for another one in its place.
    pub fn driver_mut(&mut self) -> &mut Box<dyn DriverQueue> {
        &mut self.driver
    }

    /// Has the driver release what it registered with the ring.
    pub fn close(&mut self, cx: &mut DriverContext<'_>) {
        self.driver.close(cx);
    }

    /// Whether the scheduler has the request.
    pub fn is_scheduled(&self, tag: Tag) -> bool {
        self.scheduler.as_ref().is_some_and(|scheduler| scheduler.holds(tag))
    }

    /// Whether the request was requeued.
    pub fn is_requeued(&self, tag: Tag) -> bool {
        self.requeued.contains(&tag)
    }

    /// The state that the driver reports of a request that it has.
    pub fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        self.driver.state(tag, request)
    }
}
