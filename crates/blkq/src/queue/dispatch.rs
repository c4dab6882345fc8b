//! Dispatch: offers requests to the driver. Requeued requests go first, then requests that waited for a
//! limit, then those of the scheduler (block/blk-mq-sched.c). A busy driver is not an error. It takes the
//! first requests of a batch, and the others are requeued.

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

/// Delay before a driver that is out of resources is offered requests again (BLK_MQ_RESOURCE_DELAY).
const RESOURCE_DELAY_NS: u64 = 3_000_000;

/// The driver's half of a queue, and the requests between the plug and the driver.
pub(super) struct Dispatch {
    /// Marks this queue's submissions on the ring, which several queues may share.
    owner: u16,
    driver: Box<dyn DriverQueue>,
    early_submission: bool,
    scheduler: Option<Box<dyn Scheduler>>,
    /// Requests to offer to the driver before all others, as in the kernel's `hctx->dispatch`: the queue's
    /// flush, requests that a busy driver did not take, held requests that are reissued, and plugged requests
    /// that must not overtake these.
    requeued: VecDeque<Tag>,
    throttle: QueueThrottle,
    /// Requests that the driver has taken and not completed.
    started: u32,
    /// The driver is out of resources: nothing is offered to it before this time.
    rerun_at_ns: Option<u64>,
    /// Fewer than `depth` requests were started when the scheduler was last asked for a request.
    scheduler_has_room: bool,
    /// The disk was quiesced when requests were last offered to the driver, so they were requeued.
    blocked_by_quiesce: bool,
    tracer: Option<Box<Tracer>>,
    device_time: Option<Box<DeviceTime>>,
    /// A scheduler, or a tracer that records each bio, is in use: no bio may take the plug's fast path.
    observes_bios: bool,
    /// No scheduler, no tracer and no limit is in use: plugged requests may go straight to the driver.
    direct_allowed: bool,
    /// The scheduler or the throttle may have requests. This may be true when neither has any, but must never
    /// be false when one of them has.
    may_have_waiting: bool,
    /// There is a scheduler, a tracer or the measurement of device time: each is notified of completions.
    observes_completions: bool,
    index: usize,
    /// Number of tags, including the tag of the queue's own flush.
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
            observes_bios: scheduler.is_some(),
            scheduler,
            requeued: VecDeque::with_capacity(slots),
            throttle: QueueThrottle::new(disk.disk(), slots),
            started: 0,
            rerun_at_ns: None,
            scheduler_has_room: true,
            blocked_by_quiesce: false,
            tracer: None,
            device_time: None,
            direct_allowed: false,
            may_have_waiting: false,
            observes_completions: false,
            index: disk.index(),
            slots,
        };
        dispatch.update_device_time();
        dispatch
    }

    /// Recomputes the flags. Call this after each change of the scheduler, the tracer, the limits or the
    /// measurement of device time.
    fn update_flags(&mut self) {
        let has_stage = self.scheduler.is_some() || self.tracer.is_some();
        let traces_bios = self.tracer.as_ref().is_some_and(|tracer| !tracer.allows_fast_path());
        self.observes_bios = self.scheduler.is_some() || traces_bios;
        self.direct_allowed = !has_stage && !self.throttle.is_on();
        self.may_have_waiting = self.scheduler.is_some() || self.throttle.has_waiting();
        self.observes_completions = has_stage || self.device_time.is_some();
    }

    fn update_device_time(&mut self) {
        let times = self.throttle.device_times(self.index);
        match (times, &self.device_time) {
            // The measurement goes into the same counters as before: keep it.
            (Some(times), Some(device_time)) if device_time.counts_in(times) => {}
            (times, _) => {
                self.device_time = times.map(|times| Box::new(DeviceTime::new(times.clone(), self.slots)));
            }
        }
        self.update_flags();
    }

    #[cold]
    pub fn refresh_limits(&mut self, disk: &Disk) {
        self.throttle.refresh(disk);
        self.update_device_time();
    }

    /// Lifts all limits: the owner of the queue is stopping, and must not wait for them.
    pub fn close_limits(&mut self) {
        self.throttle.close();
    }

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

    #[inline]
    pub fn observes_bios(&self) -> bool {
        self.observes_bios
    }

    #[inline]
    pub fn observes_completions(&self) -> bool {
        self.observes_completions
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

    /// Replaces the scheduler. The old one must be empty: a scheduler is changed under a freeze.
    pub fn set_scheduler(&mut self, scheduler: SchedulerKind, slots: usize) {
        self.scheduler = scheduler.open(slots);
        self.update_flags();
    }

    #[inline]
    pub fn started(&self) -> u32 {
        self.started
    }

    #[inline]
    pub fn has_requeued(&self) -> bool {
        !self.requeued.is_empty()
    }

    /// Whether plugged requests go straight to the driver: nothing must see or delay them, and no requeued
    /// request must go first.
    #[inline]
    pub fn is_direct(&self) -> bool {
        self.direct_allowed && self.requeued.is_empty()
    }

    pub fn is_blocked_by_quiesce(&self) -> bool {
        self.blocked_by_quiesce
    }

    #[inline]
    pub fn throttle(&self) -> &QueueThrottle {
        &self.throttle
    }

    /// The latest time at which the queue must run again: for the driver's own deadline, to retry a driver
    /// that is out of resources, or to issue a request that waits for a limit. `None`: no such time.
    pub fn deadline_ns(&self) -> Option<u64> {
        let deadlines = [self.driver.deadline_ns(), self.rerun_at_ns, self.throttled_deadline_ns()];
        deadlines.into_iter().flatten().min()
    }

    fn throttled_deadline_ns(&self) -> Option<u64> {
        // While the driver is busy, no request after the requeued ones is issued, and the deadline of a
        // limit would wake the thread for nothing.
        let is_stopped = self.rerun_at_ns.is_some() || !self.requeued.is_empty();
        if is_stopped { None } else { self.throttle.deadline_ns(self.scheduler_has_room) }
    }

    pub fn waits_for_limit(&self) -> bool {
        self.throttled_deadline_ns().is_some()
    }

    /// Queues `tag`, the queue's flush, ahead of all other requests. If there are limits, the flush obeys
    /// them, and waits ahead of all other waiting requests but reads.
    pub fn push_first(&mut self, tag: Tag) {
        match self.throttle.is_on() {
            true => {
                self.throttle.push_first(tag);
                self.may_have_waiting = true;
            }
            false => self.requeued.push_front(tag),
        }
    }

    /// Queues the requests of a plug for [`Dispatch::run`]: in the scheduler if there is one, else after the
    /// requeued requests. Without a scheduler, requests beyond a limit wait in the throttle.
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
                if let Some(tracer) = &mut self.tracer {
                    tracer.requests(EventKind::Throttle, &batch[count..], in_flight.requests(), clock);
                }
                self.throttle.push(&batch[count..], in_flight.requests(), stats);
                self.may_have_waiting = true;
            }
            None => self.requeued.extend(batch),
        }
    }

    /// Offers `batch` to the driver. Requests that the driver does not take are requeued.
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

    /// Whether limits are all that is between `batch` and the driver, and the queue has prepaid for all of
    /// it. If so, `batch` is charged and may be issued directly. `data_sectors` is the plug's
    /// [`Plug::data_sectors`](super::plug::Plug::data_sectors). Called if [`Dispatch::is_direct`] is false;
    /// out of line, so that it costs queues without limits nothing.
    #[inline(never)]
    pub fn pay_limits(&mut self, batch: &[Tag], data_sectors: u64, requests: &[Request]) -> bool {
        if self.observes_completions || !self.requeued.is_empty() {
            return false;
        }
        // `pay_at_once` covers the usual case of one limit, and spills no registers.
        self.throttle.pay_at_once(batch, data_sectors, requests) || self.throttle.pay(batch, requests)
    }

    pub fn has_only_limits(&self) -> bool {
        !self.observes_bios && self.tracer.is_none() && self.requeued.is_empty() && self.throttle.is_on()
    }

    /// Issues the requests of `batch` that the limits admit now. The others wait in the throttle.
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
        self.stamp_issued(batch, cx.clock);
        let taken = self.issue(batch, disk, stats, cx, |_, _| {});
        if taken < batch.len() {
            self.requeued.extend(&batch[taken..]);
        }
        if !delayed.is_empty() {
            self.throttle.push(delayed, cx.requests, stats);
            self.may_have_waiting = true;
            // `admit` stops at the first request that must wait. `run` issues later ones whose own limit
            // has room, such as reads behind a write, and starts to count the waiting time.
            self.run(disk, stats, cx);
        }
    }

    /// The number of requests of `batch`, from its beginning, that the limits admit now. A frozen disk has no
    /// limits, because the freeze waits for these requests.
    #[inline(never)]
    fn admit(&mut self, batch: &[Tag], disk: &DiskView, requests: &[Request], read_ns: u64) -> usize {
        if disk.is_frozen() { batch.len() } else { self.throttle.admit(batch, requests, read_ns) }
    }

    #[inline]
    pub fn has_ready(&self) -> bool {
        !self.requeued.is_empty() || (self.may_have_waiting && self.has_scheduled_or_waiting())
    }

    fn has_scheduled_or_waiting(&self) -> bool {
        self.scheduler.as_ref().is_some_and(|scheduler| scheduler.len() > 0) || self.throttle.has_waiting()
    }

    /// Issues requests until none is ready or the driver is busy.
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
            self.stamp_issued(&batch[..len], cx.clock);
            let taken = self.issue(&batch[..len], disk, stats, cx, |tracer, cx| {
                if let Some(tracer) = tracer {
                    tracer.requests(EventKind::Issue, &batch[..len], cx.requests, cx.clock);
                }
            });
            if self.tracer.is_some() && !self.blocked_by_quiesce {
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
        if let Some(flush) = self.throttle.take_new_flush().filter(|_| self.tracer.is_some()) {
            self.trace(EventKind::Throttle, &[flush], cx);
        }
        self.throttle.note_waiting(self.scheduler.as_ref().map_or(0, |scheduler| scheduler.len()), stats);
        self.update_flags();
    }

    /// Fills `batch` with the requests to offer next, all from one source. Returns their number.
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
        self.scheduler_has_room = room > 0;
        let now_ns = cx.clock.now_ns();
        let passes_limits = self.throttle.is_on() && !disk.is_frozen();
        if !passes_limits {
            self.throttle.unblock();
        }
        while len < batch.len().min(room) {
            let open = if passes_limits && scheduler.len() > 0 { self.throttle.open() } else { [true; 2] };
            let Some(tag) = scheduler.dispatch(cx.requests, open, now_ns) else { break };
            if passes_limits && !self.throttle.admit_scheduled(tag, cx.requests, stats) {
                if let Some(tracer) = &mut self.tracer {
                    tracer.requests(EventKind::Throttle, &[tag], cx.requests, cx.clock);
                }
                continue;
            }
            batch[len] = tag;
            len += 1;
        }
        len
    }

    /// Offers `tags` to the driver, unless the disk is quiesced, and returns how many the driver took.
    /// `trace` is called immediately before the driver.
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
        // Lifting the quiesce kicks the queue, which then offers the requests again.
        self.blocked_by_quiesce = !disk.begin_dispatch();
        if self.blocked_by_quiesce {
            return 0;
        }
        debug_assert!(
            tags.iter().map(|tag| &cx.requests[tag.index()]).all(|request| disk.declares(request)),
            "a request has flags that the driver does not declare"
        );
        trace(&mut self.tracer, cx);
        let taken = self.driver.queue_requests(cx, tags);
        self.driver.commit(cx);
        disk.leave_dispatch();
        stats.count(Counter::DispatchBatches, 1);
        match taken {
            Taken::All => {
                self.started += tags.len() as u32;
                tags.len()
            }
            Taken::First(count, busy) => self.handle_busy(tags.len(), count, busy, stats),
        }
    }

    /// Requeues are counted, and a retry is scheduled if no completion will run the queue. Returns `count`,
    /// the number of requests that the driver took of those `offered`.
    #[cold]
    fn handle_busy(&mut self, offered: usize, count: usize, busy: Busy, stats: &mut StatsWriter) -> usize {
        self.started += count as u32;
        stats.count(Counter::Requeues, (offered - count) as u64);
        // The next completion runs the queue again. If the driver has no request, the timer must do it.
        if busy == Busy::Resource || self.started == 0 {
            self.rerun_at_ns = Some(monotonic_ns() + RESOURCE_DELAY_NS);
        }
        count
    }

    /// Ends the delay after the driver ran out of resources, because requests that complete free theirs.
    #[inline]
    pub fn clear_rerun(&mut self) {
        self.rerun_at_ns = None;
    }

    #[inline]
    fn stamp_issued(&mut self, tags: &[Tag], clock: &mut Clock) {
        if let Some(device_time) = &mut self.device_time
            && !tags.is_empty()
        {
            device_time.issued(tags, clock.now_ns());
        }
    }

    #[cold]
    pub fn count_device_time(
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

    #[cold]
    pub fn notify_scheduler(&mut self, completed: &[(Tag, IoResult)], clock: &mut Clock) {
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.completed(completed, clock.now_ns());
        }
    }

    /// Records that `tags` have failed and are held: they are neither in the driver nor complete.
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

    /// Counts `count` held requests as started again. They are about to complete with an error, and
    /// [`Dispatch::release`] will subtract them a second time.
    pub fn claim(&mut self, count: u32) {
        self.started += count;
    }

    /// Requeues `tags` in this order, after the requests that are requeued already.
    pub fn requeue(&mut self, tags: impl Iterator<Item = Tag>) {
        self.requeued.extend(tags);
    }

    #[inline]
    pub fn release(&mut self, count: u32) {
        self.started -= count;
    }

    /// Removes every request that the driver has not taken, including `plugged`, and returns them. They are
    /// counted as started, so that the caller can complete them like any other.
    pub fn abandon(&mut self, plugged: &[Tag], slots: usize) -> Vec<Tag> {
        self.requeued.extend(plugged);
        self.requeued.extend(self.throttle.drain());
        if let Some(scheduler) = &mut self.scheduler {
            // Removed by tag: `dispatch` may hold requests back until others complete.
            let tags = (0..slots).map(|index| Tag(index as u16));
            self.requeued.extend(tags.filter(|&tag| scheduler.remove(tag)));
        }
        self.started += self.requeued.len() as u32;
        self.requeued.drain(..).collect()
    }

    #[inline]
    pub fn complete_cqe(&mut self, cqe: Cqe, cx: &mut DriverContext<'_>) {
        self.driver.complete_cqe(cx, cqe);
    }

    #[inline]
    pub fn poll(&mut self, cx: &mut DriverContext<'_>) {
        self.driver.poll(cx);
    }

    pub fn reload(&mut self, cx: &mut DriverContext<'_>) {
        self.driver.reload(cx);
    }

    /// The driver's half of the queue. The caller may replace it while no request is in flight.
    pub fn driver_mut(&mut self) -> &mut Box<dyn DriverQueue> {
        &mut self.driver
    }

    pub fn close(&mut self, cx: &mut DriverContext<'_>) {
        self.driver.close(cx);
    }

    pub fn is_scheduled(&self, tag: Tag) -> bool {
        self.scheduler.as_ref().is_some_and(|scheduler| scheduler.holds(tag))
    }

    pub fn is_requeued(&self, tag: Tag) -> bool {
        self.requeued.contains(&tag)
    }

    pub fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        self.driver.state(tag, request)
    }
}
