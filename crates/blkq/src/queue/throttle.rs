//! Requests that wait for a limit ([`throttle`](crate::throttle)): in order, reads apart from all
//! others, so that a limit of one does not delay the other.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bio::Operation;
use crate::clock::monotonic_ns;
use crate::disk::Disk;
use crate::request::Request;
use crate::sector::SECTOR_SHIFT;
use crate::stats::{Counter, StatsWriter};
use crate::tags::Tag;
use crate::throttle::{Counted, DeviceTimes, Meter, RateLimits, Throttle, admissions};

/// How soon a queue that waits for the limit of a group sees that this was changed.
const CHANGE_NS: u64 = 100_000_000;
/// How long after its requests waited a queue may make up for what its clients, or its own thread, were late.
const LATE_NS: u64 = 50_000_000;
const READ: usize = 0;
const OTHERS: usize = 1;

fn direction_of(operation: Operation) -> usize {
    usize::from(operation != Operation::Read)
}

/// The requests of one direction that wait.
#[derive(Default)]
struct Waiting {
    /// And their numbers, in the order in which they came.
    tags: VecDeque<(Tag, u64)>,
    /// The scheduler has some.
    is_blocked: bool,
    /// When the first may begin.
    next_ns: u64,
}

impl Waiting {
    fn is_waiting(&self) -> bool {
        self.is_blocked || !self.tags.is_empty()
    }
}

/// The limits as one queue applies them.
pub(super) struct QueueThrottle {
    throttle: Throttle,
    /// Whether there are limits, or requests that wait for one.
    is_on: bool,
    has_waiting: bool,
    /// The kind of cost of the only limit, if it is known without a look at each request, nobody waits,
    /// and no group can change it.
    counted: Counted,
    /// Of the disk's limits, and of the group's.
    generation: u64,
    group_sequence: Option<u64>,
    /// When limits that could not be read are tried again.
    group_retry_ns: u64,
    /// The last that could be read.
    group_limits: RateLimits,
    meters: Vec<Meter>,
    waiting: [Waiting; 2],
    /// How many had to wait so far.
    pushed: u64,
    /// A flush that is among those that wait, and was not tried before.
    new_flush: Option<Tag>,
    /// The disk, or the queue's owner, wants everything to go on.
    bypassed: bool,
    closing: bool,
    /// Since when requests wait without a break, as far as that was counted; 0 if none does.
    since_ns: u64,
    /// Until when it may make up for that.
    late_until_ns: u64,
    /// For each tag when it was let through, if it had to wait; `u64::MAX` as long as it does.
    released_ns: Vec<u64>,
}

impl QueueThrottle {
    /// The limits of `disk`, for a queue with so many slots.
    pub fn new(disk: &Disk, slots: usize) -> QueueThrottle {
        let mut throttle = QueueThrottle {
            throttle: disk.throttle.get(),
            is_on: false,
            has_waiting: false,
            counted: Counted::Each,
            generation: u64::MAX,
            group_sequence: None,
            group_retry_ns: 0,
            group_limits: RateLimits::default(),
            pushed: 0,
            new_flush: None,
            meters: Vec::new(),
            waiting: Default::default(),
            bypassed: false,
            closing: false,
            since_ns: 0,
            late_until_ns: 0,
            released_ns: vec![0; slots],
        };
        throttle.waiting.iter_mut().for_each(|waiting| waiting.tags.reserve(slots));
        throttle.refresh(disk);
        throttle
    }

    /// Takes over the limits of the disk, if they have changed.
    #[cold]
    pub fn refresh(&mut self, disk: &Disk) {
        // Before all that it is about: a change that comes in between is then seen the next time.
        let generation = disk.throttle.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.throttle = disk.throttle.get();
        self.bypassed = disk.throttle.is_bypassed();
        self.reload(monotonic_ns());
    }

    fn reload(&mut self, now_ns: u64) {
        self.group_sequence = None;
        self.group_retry_ns = now_ns + CHANGE_NS;
        // While they change, and if they are damaged, those from before count.
        if let Some((sequence, limits)) = self.throttle.member().and_then(|member| member.group().limits()) {
            (self.group_sequence, self.group_limits) = (Some(sequence), limits);
        }
        self.meters = self.throttle.meters(&self.group_limits);
        self.is_on = self.throttle.is_on() || self.is_waiting();
        self.set_has_waiting(self.has_waiting);
        self.waiting.iter_mut().for_each(|waiting| waiting.next_ns = 0);
    }

    fn set_has_waiting(&mut self, has_waiting: bool) {
        self.has_waiting = has_waiting;
        self.counted = match &self.meters[..] {
            [meter] if !has_waiting && self.throttle.member().is_none() => meter.counted(),
            _ => Counted::Each,
        };
    }

    /// Where queue `index` counts how long the device has requests, if it is to.
    pub fn device_times(&self, index: usize) -> Option<&Arc<DeviceTimes>> {
        self.throttle.device_times(index)
    }

    /// Whether requests are to pass the limits.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.is_on
    }

    #[inline]
    pub fn has_waiting(&self) -> bool {
        self.has_waiting
    }

    /// The owner stops: nothing waits any more.
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether requests wait, here or in the scheduler.
    pub fn is_waiting(&self) -> bool {
        self.waiting.iter().any(Waiting::is_waiting)
    }

    /// Whether those of this operation's direction that the scheduler has wait for a limit.
    pub fn is_blocked(&self, operation: Operation) -> bool {
        self.waiting[direction_of(operation)].is_blocked
    }

    /// The requests that the scheduler has wait for no limit now.
    pub fn unblock(&mut self) {
        self.waiting.iter_mut().for_each(|waiting| waiting.is_blocked = false);
    }

    /// When the first request that waits may begin: here, or, if it `has_room` for one, in the scheduler.
    pub fn deadline_ns(&self, has_room: bool) -> Option<u64> {
        let may = |waiting: &&Waiting| !waiting.tags.is_empty() || (waiting.is_blocked && has_room);
        let waiting = self.waiting.iter().filter(may);
        waiting.map(|waiting| waiting.next_ns).min()
    }

    /// The youngest request of this operation's direction that waits.
    pub fn youngest(&self, operation: Operation) -> Option<Tag> {
        self.waiting[direction_of(operation)].tags.back().map(|(tag, _)| *tag)
    }

    /// When the request was let through, if it had to wait; `u64::MAX` while it does.
    pub fn released_ns(&self, tag: Tag) -> u64 {
        self.released_ns[tag.index()]
    }

    /// The directions from which the scheduler may give a request now: reads, all others. It has some.
    pub fn open(&mut self) -> [bool; 2] {
        let now_ns = monotonic_ns();
        let is_late = now_ns < self.late_until_ns;
        let bypassed = self.bypassed || self.closing;
        self.follow_group(now_ns);
        [READ, OTHERS].map(|direction| {
            let waiting = &mut self.waiting[direction];
            let mut next_ns = 0;
            for meter in self.meters.iter_mut().filter(|meter| meter.concerns(direction == READ)) {
                next_ns = next_ns.max(meter.next_ns(now_ns, is_late));
            }
            let is_open = bypassed || (next_ns <= now_ns && waiting.tags.is_empty());
            waiting.is_blocked = !is_open && waiting.tags.is_empty();
            if waiting.is_blocked {
                waiting.next_ns = self.throttle.member().map_or(next_ns, |_| next_ns.min(now_ns + CHANGE_NS));
            }
            is_open
        })
    }

    /// Charges a request of the scheduler, in a direction that is open. False if another queue or process was
    /// faster: then it waits.
    pub fn admit_scheduled(&mut self, tag: Tag, requests: &[Request], stats: &mut StatsWriter) -> bool {
        let (now_ns, waited) = (monotonic_ns(), self.since_ns != 0);
        let admitted = self.admit_at(&[tag], requests, now_ns, now_ns < self.late_until_ns).0 > 0;
        if !admitted {
            self.push(&[tag], requests, stats);
        } else if waited {
            self.released_ns[tag.index()] = now_ns;
            stats.count(Counter::ThrottledRequests, 1);
        }
        admitted
    }

    /// Has requests wait behind those that do.
    pub fn push(&mut self, tags: &[Tag], requests: &[Request], stats: &mut StatsWriter) {
        for &tag in tags {
            let waiting = &mut self.waiting[direction_of(requests[tag.index()].operation())];
            if waiting.tags.is_empty() {
                waiting.next_ns = 0;
            }
            self.pushed += 1;
            waiting.tags.push_back((tag, self.pushed));
            self.released_ns[tag.index()] = u64::MAX;
        }
        self.set_has_waiting(self.has_waiting || !tags.is_empty());
        stats.count(Counter::ThrottledRequests, tags.len() as u64);
    }

    /// Has a flush wait before all other writes.
    pub fn push_first(&mut self, tag: Tag) {
        let waiting = &mut self.waiting[OTHERS];
        waiting.next_ns = 0;
        waiting.tags.push_front((tag, 0));
        self.new_flush = Some(tag);
        self.set_has_waiting(true);
        self.released_ns[tag.index()] = u64::MAX;
    }

    /// A flush that has to wait, once.
    pub fn take_new_flush(&mut self) -> Option<Tag> {
        let flush = self.new_flush.take()?;
        (self.released_ns[flush.index()] == u64::MAX).then_some(flush)
    }

    /// [`QueueThrottle::pay`] for one limit that counts requests or the bytes of their data, which are of
    /// `data_sectors`; false with any other.
    #[inline(always)]
    pub fn pay_at_once(&mut self, batch: &[Tag], data_sectors: u64, requests: &[Request]) -> bool {
        let units = match self.counted {
            Counted::Requests => batch.len() as u64,
            Counted::Bytes => data_sectors << SECTOR_SHIFT,
            Counted::Each => return false,
        };
        let is_paid = self.meters.first_mut().is_some_and(|meter| meter.pay_units(units));
        debug_assert!(!is_paid || self.meters[0].cost_of_all(batch, requests) == units);
        if is_paid {
            admissions::admitted(batch, requests);
        }
        is_paid
    }

    /// Whether all of a batch is prepaid, and may begin: without a look at the time, or at the limits' words.
    #[inline(never)]
    pub fn pay(&mut self, batch: &[Tag], requests: &[Request]) -> bool {
        if self.has_waiting || self.group_has_changed() {
            return false;
        }
        let is_paid = match &mut self.meters[..] {
            [meter] => meter.pay(batch, requests),
            meters => pay_all(meters, batch, requests),
        };
        if is_paid {
            admissions::admitted(batch, requests);
        }
        is_paid
    }

    /// How many requests of a batch may begin now: those before the first that has to wait; none if others
    /// wait already. `read_ns` is when the queue's clock was last read.
    #[inline]
    pub fn admit(&mut self, batch: &[Tag], requests: &[Request], read_ns: u64) -> usize {
        let Some(last) = batch.last().filter(|_| !self.has_waiting) else { return 0 };
        // The time stamp of the last, if it is of that reading, is a little old, which lets through no more than
        // the time would. An older one is of a request that waited for a tag: all that came while the device was
        // slow would begin at once. It counts for no queue that makes up for being late.
        let stamp_ns = requests[last.index()].start_ns;
        let mut count = 0;
        if stamp_ns == read_ns && stamp_ns > self.late_until_ns {
            self.follow_group(stamp_ns);
            count = self.admit_at(batch, requests, stamp_ns, false).0;
        }
        if count < batch.len() {
            let now_ns = monotonic_ns();
            self.follow_group(now_ns);
            count += self.admit_at(&batch[count..], requests, now_ns, now_ns < self.late_until_ns).0;
        }
        count
    }

    /// The same at `now_ns`, and when the next may begin.
    fn admit_at(&mut self, batch: &[Tag], requests: &[Request], now_ns: u64, is_late: bool) -> (usize, u64) {
        if self.bypassed || self.closing {
            return (batch.len(), now_ns);
        }
        let (mut count, mut next_ns) = (batch.len(), 0);
        for at in 0..self.meters.len() {
            let admitted = self.meters[at].admit(&batch[..count], requests, now_ns, is_late);
            if admitted.count < count {
                next_ns = next_ns.max(admitted.next_ns);
                let unused = &batch[admitted.count..count];
                self.meters[..at].iter_mut().for_each(|meter| meter.refund(unused, requests));
                count = admitted.count;
            }
        }
        admissions::admitted(&batch[..count], requests);
        (count, next_ns)
    }

    /// Takes over the limits of the group, if they have changed. Once in a while if they cannot be read, as each
    /// attempt lets requests be tried anew.
    #[inline]
    fn follow_group(&mut self, now_ns: u64) {
        if self.group_has_changed() && (self.group_sequence.is_some() || self.group_retry_ns <= now_ns) {
            self.reload(now_ns);
        }
    }

    #[inline]
    fn group_has_changed(&self) -> bool {
        let member = self.throttle.member();
        member.is_some_and(|member| self.group_sequence != Some(member.group().sequence()))
    }

    /// Moves requests that waited and may begin now to `batch`: all, if `all`, which no limit counts. Returns
    /// how many.
    pub fn take(&mut self, batch: &mut [Tag], requests: &[Request], all: bool) -> usize {
        let mut len = 0;
        let now_ns = monotonic_ns();
        let all = all || self.bypassed || self.closing;
        // A flush may be here that has not waited yet.
        let is_late = self.since_ns != 0 || now_ns < self.late_until_ns;
        // Before the loop, in which a direction that was refused is not to be tried again.
        self.follow_group(now_ns);
        while len < batch.len() {
            let Some(direction) = self.next_direction(now_ns, all) else { break };
            let Some(&(tag, _)) = self.waiting[direction].tags.front() else { break };
            let (count, next_ns) =
                if all { (1, 0) } else { self.admit_at(&[tag], requests, now_ns, is_late) };
            let waiting = &mut self.waiting[direction];
            if count == 0 {
                waiting.next_ns = self.throttle.member().map_or(next_ns, |_| next_ns.min(now_ns + CHANGE_NS));
                // A limit may be read a moment before its time.
                waiting.next_ns = waiting.next_ns.max(now_ns + 1);
                continue;
            }
            waiting.tags.pop_front();
            self.released_ns[tag.index()] = now_ns;
            batch[len] = tag;
            len += 1;
        }
        self.set_has_waiting(self.waiting.iter().any(|waiting| !waiting.tags.is_empty()));
        len
    }

    /// The direction of the oldest request that may be tried at `now_ns`.
    fn next_direction(&self, now_ns: u64, all: bool) -> Option<usize> {
        let may = |direction: &usize| all || self.waiting[*direction].next_ns <= now_ns;
        let oldest =
            |direction: usize| self.waiting[direction].tags.front().map(|(_, number)| (*number, direction));
        [READ, OTHERS].into_iter().filter(may).filter_map(oldest).min().map(|(_, direction)| direction)
    }

    /// Counts the time in which requests waited, and how many do, of so many `scheduled`.
    pub fn note_waiting(&mut self, scheduled: usize, stats: &mut StatsWriter) {
        if scheduled == 0 {
            self.unblock();
        }
        let mut count = self.waiting.iter().map(|waiting| waiting.tags.len()).sum::<usize>();
        if self.waiting.iter().any(|waiting| waiting.is_blocked) {
            count += scheduled;
        }
        if count == 0 && self.since_ns == 0 {
            self.is_on = self.throttle.is_on();
            return;
        }
        let now_ns = monotonic_ns();
        if self.since_ns != 0 {
            stats.count(Counter::ThrottledNs, now_ns.saturating_sub(self.since_ns));
        }
        self.late_until_ns = now_ns + LATE_NS;
        self.since_ns = if count > 0 { now_ns } else { 0 };
        stats.throttled(count as u64);
        self.is_on = count > 0 || self.throttle.is_on();
    }

    /// Takes out all that waits.
    pub fn drain(&mut self) -> impl Iterator<Item = Tag> + '_ {
        self.set_has_waiting(false);
        self.waiting.iter_mut().flat_map(|waiting| waiting.tags.drain(..).map(|(tag, _)| tag))
    }
}

/// Pays a batch at all limits, or at none.
#[inline(never)]
fn pay_all(meters: &mut [Meter], batch: &[Tag], requests: &[Request]) -> bool {
    for at in 0..meters.len() {
        if !meters[at].pay(batch, requests) {
            for meter in &mut meters[..at] {
                meter.unpay(batch, requests);
            }
            return false;
        }
    }
    true
}
