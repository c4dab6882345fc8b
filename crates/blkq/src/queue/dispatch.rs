//! Dispatch: offers requests to the driver. Requeued requests go first, then requests that waited for a
//! limit, then those of the scheduler (block/blk-mq-sched.c). A busy driver is not an error. It takes the
//! first requests of a batch, and the others are requeued.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::bitmap::Bitmap;
use crate::clock::monotonic_ns;
use crate::driver::{Busy, DriverContext, DriverQueue, OpenContext, Taken};
use crate::error::{Error, IoResult, Status};
use crate::request::Request;
use crate::ring::{Registrar, Ring};
use crate::sched::Scheduler;
use crate::sector::SECTOR_SHIFT;
use crate::stats::Counter;
use crate::tags::Tag;
use crate::throttle::DeviceTimes;
use crate::trace::EventKind;

use super::disk_view::DiskView;
use super::io::Io;
use super::plug::PLUG_REQUESTS;
use super::throttle::QueueThrottle;
use super::tracer::Tracer;

/// Delay before a driver that is out of resources is offered requests again (BLK_MQ_RESOURCE_DELAY).
const RESOURCE_DELAY_NS: u64 = 3_000_000;

/// How the requests of a plug reach the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DispatchPath {
    /// There is no scheduler, no tracer and no limit: `Dispatch::issue_directly`.
    Direct,
    /// There are limits and nothing else. If the queue has prepaid for the whole plug
    /// (`Dispatch::pay_limits`), `Dispatch::issue_directly`; otherwise `Dispatch::issue_limited`.
    Limited,
    /// There is a tracer and nothing else: `Dispatch::issue_traced`.
    Traced,
    /// Everything else, and whenever requeued requests must go first: `Dispatch::insert`, then
    /// `Dispatch::run`.
    Queued,
}

/// Opens the driver's half of a queue with `slots` requests.
pub(super) fn open_driver(
    view: &DiskView,
    slots: usize,
    ring: Option<&mut Ring>,
) -> Result<Box<dyn DriverQueue>, Error> {
    let (ring, wake) = (ring.map(Registrar::new), view.shared.kick.clone());
    view.driver.open_queue(OpenContext { index: view.index as u16, tags: slots, ring, wake })
}

/// Replaces a queue that a new driver could not open while the disk was in use
/// ([`Exchange::replace`](crate::disk::Exchange::replace)).
struct BrokenQueue;

// SAFETY: each request completes immediately, and its memory is not used.
unsafe impl DriverQueue for BrokenQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        tags.iter().for_each(|tag| cx.complete(*tag, Err(Status::Io)));
        Taken::All
    }
}

/// Measures how long the driver has each request. Used only while the disk's ceiling is searched
/// ([`CeilingSearch`](crate::disk::CeilingSearch)).
struct DeviceTime {
    times: Arc<DeviceTimes>,
    /// The time of dispatch by tag; 0 if the request was dispatched before the measurement started.
    issued_ns: Vec<u64>,
}

impl DeviceTime {
    fn new(times: Arc<DeviceTimes>, slots: usize) -> DeviceTime {
        DeviceTime { times, issued_ns: vec![0; slots] }
    }

    fn issued(&mut self, tags: &[Tag], now_ns: u64) {
        tags.iter().for_each(|tag| self.issued_ns[tag.index()] = now_ns);
    }

    /// Forgets requests that have failed and are held. The driver has `left` other requests.
    fn held(&mut self, tags: &[Tag], left: u64) {
        let issued = tags.iter().filter(|tag| std::mem::take(&mut self.issued_ns[tag.index()]) != 0).count();
        self.times.completed(issued as u64, left);
    }

    /// Counts requests that the driver has completed. The driver has `left` other requests.
    fn completed(&mut self, completed: &[(Tag, IoResult)], requests: &[Request], now_ns: u64, left: u64) {
        let mut issued = 0;
        for (tag, _) in completed {
            let issued_ns = std::mem::take(&mut self.issued_ns[tag.index()]);
            let request = &requests[tag.index()];
            issued += u64::from(issued_ns != 0);
            if issued_ns != 0 && request.operation().has_data() {
                self.times.timed(now_ns.saturating_sub(issued_ns), request.bytes());
            }
        }
        self.times.completed(issued, left);
    }
}

/// The driver's half of a queue, and the requests between the plug and the driver.
pub(super) struct Dispatch {
    /// Marks this queue's submissions on the ring, which several queues may share.
    owner: u16,
    driver: Box<dyn DriverQueue>,
    pub scheduler: Option<Box<dyn Scheduler>>,
    /// Requests to offer to the driver before all others, as in the kernel's `hctx->dispatch`: the queue's
    /// flush, requests that a busy driver did not take, held requests that are reissued, and plugged requests
    /// that must not overtake these.
    pub requeued: VecDeque<Tag>,
    pub throttle: QueueThrottle,
    /// Requests that the driver has taken and not completed. If the driver panics in a call that passes
    /// requests to it, they are not counted, but those that it has completed before still complete.
    pub started: u32,
    /// The driver is out of resources: nothing is offered to it before this time.
    pub rerun_at_ns: Option<u64>,
    /// Fewer than `depth` requests were started when the scheduler was last asked for a request.
    scheduler_has_room: bool,
    /// The disk was quiesced when requests were last offered to the driver, so they were requeued.
    pub blocked_by_quiesce: bool,
    device_time: Option<Box<DeviceTime>>,
    /// Dirty bitmaps in which writes are marked before the driver gets them.
    bitmaps: Vec<Arc<Bitmap>>,
    /// The path of a plug while no request is requeued. Only [`Dispatch::update`] sets this field and the next two.
    path: DispatchPath,
    /// A scheduler, or a tracer that records each bio: no bio may take the plug's fast path.
    pub sees_bios: bool,
    /// A scheduler, a tracer or the measurement of device time, each of which is notified of completions.
    pub sees_completions: bool,
    /// The scheduler or the throttle may have requests. This may be true when neither has any, but must never
    /// be false when one of them has.
    may_have_waiting: bool,
}

impl Dispatch {
    pub fn new(owner: u16, driver: Box<dyn DriverQueue>, io: &Io) -> Dispatch {
        let slots = io.in_flight.requests().len();
        let mut dispatch = Dispatch {
            owner,
            driver,
            scheduler: io.disk.settings.scheduler.open(slots),
            requeued: VecDeque::with_capacity(slots),
            throttle: QueueThrottle::new(&io.disk.disk, slots),
            started: 0,
            rerun_at_ns: None,
            scheduler_has_room: true,
            blocked_by_quiesce: false,
            device_time: None,
            bitmaps: io.disk.disk.bitmaps.recording(),
            path: DispatchPath::Queued,
            sees_bios: false,
            sees_completions: false,
            may_have_waiting: false,
        };
        dispatch.update_device_time(io);
        dispatch
    }

    /// Decides again on the path, and on what observes bios and completions. Must be called after each change
    /// of the scheduler, the limits or the measurement of device time, and of the queue's `tracer`.
    pub fn update(&mut self, tracer: Option<&Tracer>) {
        let (has_scheduler, is_traced) = (self.scheduler.is_some(), tracer.is_some());
        // Device time is measured only while there are limits.
        self.path = match (has_scheduler, is_traced, self.throttle.is_on) {
            (false, false, false) => DispatchPath::Direct,
            (false, false, true) => DispatchPath::Limited,
            (false, true, false) => DispatchPath::Traced,
            _ => DispatchPath::Queued,
        };
        self.sees_bios = has_scheduler || tracer.is_some_and(|tracer| !tracer.allows_fast_path());
        self.sees_completions = has_scheduler || is_traced || self.device_time.is_some();
    }

    fn update_device_time(&mut self, io: &Io) {
        let times = self.throttle.device_times(io.disk.index);
        match (times, &self.device_time) {
            // The measurement goes into the same counters as before: keep it.
            (Some(times), Some(device_time)) if Arc::ptr_eq(&device_time.times, times) => {}
            (times, _) => {
                let slots = io.in_flight.requests().len();
                self.device_time = times.map(|times| Box::new(DeviceTime::new(times.clone(), slots)));
            }
        }
        self.update(io.tracer.as_deref());
    }

    #[cold]
    pub fn refresh_limits(&mut self, io: &Io) {
        self.throttle.refresh(&io.disk.disk);
        self.update_device_time(io);
    }

    #[inline(always)]
    fn context<'a>(&self, io: &'a mut Io, ring: Option<&'a mut Ring>) -> DriverContext<'a> {
        DriverContext {
            in_flight: &mut io.in_flight,
            completed: &mut io.completions.requests,
            clock: &mut io.clock,
            ring,
            owner: self.owner,
            early_submission: io.disk.settings.early_submission,
            limits_changed: &mut io.completions.limits_changed,
        }
    }

    /// Replaces the scheduler. The old one must be empty: a scheduler is changed under a freeze.
    pub fn reload_scheduler(&mut self, io: &Io) {
        self.scheduler = io.disk.settings.scheduler.open(io.in_flight.requests().len());
        self.update(io.tracer.as_deref());
    }

    /// The latest time at which the queue must run again: for the driver's own deadline, to retry a driver
    /// that is out of resources, or to issue a request that waits for a limit. `None`: no such time.
    pub fn deadline_ns(&self) -> Option<u64> {
        let deadlines = [self.driver.deadline_ns(), self.rerun_at_ns, self.throttled_deadline_ns()];
        deadlines.into_iter().flatten().min()
    }

    pub fn throttled_deadline_ns(&self) -> Option<u64> {
        // While the driver is busy, no request after the requeued ones is issued, and the deadline of a
        // limit would wake the thread for nothing.
        let is_stopped = self.rerun_at_ns.is_some() || !self.requeued.is_empty();
        if is_stopped { None } else { self.throttle.deadline_ns(self.scheduler_has_room) }
    }

    /// The path of the requests that are flushed from the plug now.
    #[inline(always)]
    pub fn path(&self) -> DispatchPath {
        if self.requeued.is_empty() { self.path } else { DispatchPath::Queued }
    }

    /// Queues `tag`, the queue's flush, ahead of all other requests. If there are limits, the flush obeys
    /// them, and waits ahead of all others; those that the previous flush has overtaken are tried first.
    pub fn push_flush(&mut self, tag: Tag) {
        if self.throttle.is_on {
            self.throttle.push_flush(tag);
            self.may_have_waiting = true;
        } else {
            self.requeued.push_front(tag);
        }
    }

    /// Queues the requests of a plug for [`Dispatch::run`]: in the scheduler if there is one, else after the
    /// requeued requests. Without a scheduler, requests beyond a limit wait in the throttle.
    pub fn insert(&mut self, batch: &[Tag], io: &mut Io) {
        io.trace(|tracer, in_flight, clock| tracer.unplugged(batch, in_flight.requests(), clock));
        if self.scheduler.is_some() {
            io.trace_requests(EventKind::Insert, batch);
        }
        if let Some(scheduler) = &mut self.scheduler {
            let now_ns = io.clock.now_ns();
            batch.iter().for_each(|&tag| scheduler.insert(tag, io.in_flight.requests(), now_ns));
            self.may_have_waiting = true;
        } else if self.throttle.is_on {
            let (admitted, delayed) = batch.split_at(self.admit(batch, io));
            self.requeued.extend(admitted);
            io.trace_requests(EventKind::Throttle, delayed);
            self.throttle.push(delayed, io.in_flight.requests(), &mut io.stats);
            self.may_have_waiting = true;
        } else {
            self.requeued.extend(batch);
        }
    }

    /// Offers `batch` to the driver. Requests that the driver does not take are requeued.
    #[inline(always)]
    pub fn issue_directly(&mut self, batch: &[Tag], io: &mut Io, ring: Option<&mut Ring>) {
        let taken = self.issue(batch, io, ring, |_| {});
        if taken < batch.len() {
            self.requeued.extend(&batch[taken..]);
        }
    }

    /// Whether the queue has prepaid for all of `batch`, on [`DispatchPath::Limited`]. If so, `batch` is
    /// charged and may be issued directly. `data_sectors` are those of the plug. Out of line, so that it costs queues
    /// without limits nothing.
    #[inline(never)]
    pub fn pay_limits(&mut self, batch: &[Tag], data_sectors: u64, requests: &[Request]) -> bool {
        if self.sees_completions {
            return false;
        }
        // `pay_at_once` covers the usual case of one limit, and spills no registers.
        self.throttle.pay_at_once(batch, data_sectors, requests) || self.throttle.pay(batch, requests)
    }

    /// Issues the requests of `batch` that the limits admit now. The others wait in the throttle.
    #[inline(never)]
    pub fn issue_limited(&mut self, batch: &[Tag], io: &mut Io, mut ring: Option<&mut Ring>) {
        let (batch, delayed) = batch.split_at(self.admit(batch, io));
        self.stamp_issued(batch, io);
        self.issue_directly(batch, io, ring.as_deref_mut());
        if !delayed.is_empty() {
            self.throttle.push(delayed, io.in_flight.requests(), &mut io.stats);
            self.may_have_waiting = true;
            // `admit` stops at the first request that must wait. `run` issues later ones whose own limit
            // has room, such as reads behind a write, and starts to count the waiting time.
            self.run(io, ring);
        }
    }

    /// [`Dispatch::issue_directly`] for a traced queue. `plug` must be the requests of a whole plug, so that
    /// its events fit into one record.
    #[inline(never)]
    pub fn issue_traced(&mut self, plug: &[Tag], io: &mut Io, ring: Option<&mut Ring>) {
        let taken = self.issue(plug, io, ring, |io| {
            io.trace(|tracer, in_flight, clock| tracer.issued(plug, in_flight.requests(), clock));
        });
        let left = &plug[taken..];
        if left.is_empty() {
            return;
        }
        if self.blocked_by_quiesce {
            io.trace(|tracer, in_flight, clock| tracer.unplugged(plug, in_flight.requests(), clock));
        } else {
            io.trace_requests(EventKind::Requeue, left);
        }
        self.requeued.extend(left);
    }

    /// The number of requests of `batch`, from its beginning, that the limits admit now. A frozen disk has no
    /// limits, because the freeze waits for these requests.
    #[inline(never)]
    fn admit(&mut self, batch: &[Tag], io: &Io) -> usize {
        if io.disk.is_frozen() {
            return batch.len();
        }
        self.throttle.admit(batch, io.in_flight.requests(), io.clock.last_read_ns())
    }

    pub fn has_ready(&self) -> bool {
        !self.requeued.is_empty() || (self.may_have_waiting && self.has_scheduled_or_waiting())
    }

    fn has_scheduled_or_waiting(&self) -> bool {
        self.scheduled() > 0 || self.throttle.has_waiting
    }

    fn scheduled(&self) -> usize {
        self.scheduler.as_ref().map_or(0, |scheduler| scheduler.len())
    }

    /// Issues requests until none is ready or the driver is busy.
    pub fn run(&mut self, io: &mut Io, mut ring: Option<&mut Ring>) {
        if let Some(at_ns) = self.rerun_at_ns {
            if monotonic_ns() < at_ns {
                return;
            }
            self.rerun_at_ns = None;
        }
        let mut batch = [Tag(0); PLUG_REQUESTS];
        loop {
            let len = self.next_batch(&mut batch, io);
            let offered = &batch[..len];
            self.stamp_issued(offered, io);
            let trace = |io: &mut Io| io.trace_requests(EventKind::Issue, offered);
            let left = &offered[self.issue(offered, io, ring.as_deref_mut(), trace)..];
            if !self.blocked_by_quiesce {
                io.trace_requests(EventKind::Requeue, left);
            }
            left.iter().rev().for_each(|&tag| self.requeued.push_front(tag));
            if !left.is_empty() || len == 0 {
                break;
            }
        }
        self.may_have_waiting = self.has_scheduled_or_waiting();
        if !self.throttle.is_on {
            return;
        }
        if let Some(flush) = self.throttle.take_new_flush() {
            io.trace_requests(EventKind::Throttle, &[flush]);
        }
        self.throttle.note_waiting(self.scheduled(), &mut io.stats);
        self.update(io.tracer.as_deref());
    }

    /// Fills `batch` with the requests to offer next, all from one source. Returns their number.
    fn next_batch(&mut self, batch: &mut [Tag], io: &mut Io) -> usize {
        let mut len = self.requeued.len().min(batch.len());
        batch.iter_mut().zip(self.requeued.drain(..len)).for_each(|(place, tag)| *place = tag);
        if len == 0 && self.throttle.has_waiting {
            len = self.take_overtaken(batch, io);
            if len == 0 {
                let (all, has_scheduled) = (io.disk.is_frozen(), self.scheduled() > 0);
                len = self.throttle.take(batch, io.in_flight.requests(), all, has_scheduled);
            }
        }
        if len > 0 {
            return len;
        }
        let Some(scheduler) = &mut self.scheduler else { return 0 };
        let room = u32::from(io.disk.settings.depth).saturating_sub(self.started) as usize;
        self.scheduler_has_room = room > 0;
        let now_ns = io.clock.now_ns();
        let passes_limits = self.throttle.is_on && !io.disk.is_frozen();
        if !passes_limits {
            self.throttle.unblock();
        }
        while len < batch.len().min(room) {
            let requests = io.in_flight.requests();
            let open = if passes_limits && scheduler.len() > 0 { self.throttle.open() } else { [true; 2] };
            let Some(tag) = scheduler.dispatch(requests, open, now_ns) else { break };
            if passes_limits && !self.throttle.admit_scheduled(tag, requests, &mut io.stats) {
                io.trace_requests(EventKind::Throttle, &[tag]);
                continue;
            }
            batch[len] = tag;
            len += 1;
        }
        len
    }

    /// Fills `batch` with the requests of the scheduler that go before a flush that waits for a limit. Returns
    /// their number.
    fn take_overtaken(&mut self, batch: &mut [Tag], io: &mut Io) -> usize {
        let mut len = 0;
        let Some(scheduler) = self.scheduler.as_mut().filter(|_| !io.disk.is_frozen()) else { return 0 };
        for direction in 0..2 {
            let has_room = self.started + (len as u32) < u32::from(io.disk.settings.depth);
            let requests = io.in_flight.requests();
            if !has_room || !self.throttle.yields(direction, requests) {
                continue;
            }
            let now_ns = io.clock.now_ns();
            let open = [direction == 0, direction == 1];
            let Some(tag) = scheduler.dispatch(requests, open, now_ns) else {
                self.throttle.caught_up(direction);
                continue;
            };
            if self.throttle.admit_scheduled(tag, requests, &mut io.stats) {
                batch[len] = tag;
                len += 1;
            } else {
                io.trace_requests(EventKind::Throttle, &[tag]);
            }
        }
        len
    }

    /// Offers `tags` to the driver, unless the disk is quiesced, and returns how many the driver took.
    /// `trace` is called immediately before the driver.
    #[inline(always)]
    fn issue(
        &mut self,
        tags: &[Tag],
        io: &mut Io,
        ring: Option<&mut Ring>,
        trace: impl FnOnce(&mut Io),
    ) -> usize {
        if tags.is_empty() {
            return 0;
        }
        // Lifting the quiesce kicks the queue, which then offers the requests again.
        self.blocked_by_quiesce = !io.disk.control().begin_dispatch(io.disk.index);
        if self.blocked_by_quiesce {
            return 0;
        }
        let is_declared = |&tag: &Tag| {
            let Request { operation, flags, .. } = io.in_flight[tag];
            io.disk.limits.declares(operation, flags)
        };
        debug_assert!(tags.iter().all(is_declared), "a request has flags that the driver does not declare");
        if !self.bitmaps.is_empty() {
            self.mark_written(tags, io.in_flight.requests());
        }
        trace(io);
        let mut cx = self.context(io, ring);
        let taken = self.driver.queue_requests(&mut cx, tags);
        self.driver.commit(&mut cx);
        io.disk.control().leave_dispatch(io.disk.index);
        io.stats.count(Counter::DispatchBatches, 1);
        match taken {
            Taken::All => {
                self.started += tags.len() as u32;
                tags.len()
            }
            Taken::First(count, busy) => self.handle_busy(tags.len(), count, busy, io),
        }
    }

    /// Sets the bits of writes in the dirty bitmaps. Done before the writes are issued: a bitmap may mark too
    /// much, but never too little.
    #[cold]
    fn mark_written(&self, tags: &[Tag], requests: &[Request]) {
        for request in tags.iter().map(|tag| &requests[tag.index()]) {
            if request.operation.is_write() && request.sectors > 0 {
                let start = request.offset();
                let range = start..start + (request.sectors << SECTOR_SHIFT);
                self.bitmaps.iter().for_each(|bitmap| bitmap.mark(range.clone()));
            }
        }
    }

    /// Requeues are counted, and a retry is scheduled if no completion will run the queue. Returns `count`,
    /// the number of requests that the driver took of those `offered`.
    #[cold]
    fn handle_busy(&mut self, offered: usize, count: usize, busy: Busy, io: &mut Io) -> usize {
        self.started += count as u32;
        io.stats.count(Counter::Requeues, (offered - count) as u64);
        // The next completion runs the queue again. If the driver has no request, the timer must do it.
        if busy == Busy::Resource || self.started == 0 {
            self.rerun_at_ns = Some(monotonic_ns() + RESOURCE_DELAY_NS);
        }
        count
    }

    fn stamp_issued(&mut self, tags: &[Tag], io: &mut Io) {
        if let Some(device_time) = &mut self.device_time
            && !tags.is_empty()
        {
            device_time.issued(tags, io.clock.now_ns());
        }
    }

    /// Notifies the scheduler and the measurement of device time of completed requests.
    #[cold]
    pub fn note_completed(&mut self, completed: &[(Tag, IoResult)], io: &mut Io) {
        if let Some(device_time) = &mut self.device_time {
            let left = u64::from(self.started).saturating_sub(completed.len() as u64);
            device_time.completed(completed, io.in_flight.requests(), io.clock.now_ns(), left);
        }
        if let Some(scheduler) = &mut self.scheduler {
            scheduler.completed(completed, io.clock.now_ns());
        }
    }

    /// Records that `tags` have failed and are held: they are neither in the driver nor complete.
    #[cold]
    pub fn hold(&mut self, tags: &[Tag]) {
        self.started = self.started.saturating_sub(tags.len() as u32);
        if let Some(scheduler) = &mut self.scheduler {
            tags.iter().for_each(|&tag| scheduler.requeued(tag));
        }
        if let Some(device_time) = &mut self.device_time {
            device_time.held(tags, u64::from(self.started));
        }
    }

    /// Counts `count` requests as no longer started. After a panic of the driver, requests complete that were not
    /// counted.
    pub fn release(&mut self, count: u32) {
        self.started = self.started.saturating_sub(count);
    }

    /// Removes every request that the driver has not taken, including `plugged`, and returns them. They are
    /// counted as started, so that the caller can complete them like any other.
    pub fn abandon(&mut self, plugged: &[Tag], slots: usize) -> impl Iterator<Item = Tag> + '_ {
        self.requeued.extend(plugged);
        self.requeued.extend(self.throttle.drain());
        if let Some(scheduler) = &mut self.scheduler {
            // Removed by tag: `dispatch` may hold requests back until others complete.
            let tags = (0..slots).map(|index| Tag(index as u16));
            self.requeued.extend(tags.filter(|&tag| scheduler.remove(tag)));
        }
        self.started += self.requeued.len() as u32;
        self.requeued.drain(..)
    }

    /// Calls the driver with its view of the queue.
    pub fn call(
        &mut self,
        io: &mut Io,
        ring: Option<&mut Ring>,
        call: impl FnOnce(&mut dyn DriverQueue, &mut DriverContext<'_>),
    ) {
        let mut cx = self.context(io, ring);
        call(&mut *self.driver, &mut cx);
    }

    /// Applies a change of the driver's settings, or of the bitmaps. No request is in flight.
    pub fn reload(&mut self, io: &mut Io, ring: Option<&mut Ring>) {
        self.bitmaps = io.disk.disk.bitmaps.recording();
        self.call(io, ring, |driver, cx| driver.reload(cx));
    }

    /// Exchanges the driver's half of the queue, while no request is in flight. If the new driver cannot open a queue,
    /// all requests fail.
    pub fn exchange_driver(&mut self, io: &mut Io, mut ring: Option<&mut Ring>) {
        // The old queue unregisters its files first, so that those of the new one find room on the ring.
        self.call(io, ring.as_deref_mut(), |driver, cx| driver.close(cx));
        self.bitmaps = io.disk.disk.bitmaps.recording();
        let opened = open_driver(&io.disk, io.in_flight.requests().len(), ring);
        self.driver = opened.unwrap_or_else(|why| {
            io.disk.disk.set_broken(Some(format!("queue {}: {why}", io.disk.index)));
            Box::new(BrokenQueue)
        });
    }

    pub fn is_scheduled(&self, tag: Tag) -> bool {
        self.scheduler.as_ref().is_some_and(|scheduler| scheduler.holds(tag))
    }

    pub fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        self.driver.state(tag, request)
    }
}
