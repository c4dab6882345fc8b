//! The rate limits as one queue applies them, and the requests that wait for one
//! ([`throttle`](crate::throttle)). Reads and all other requests wait separately, each in order, so that a
//! limit of one direction does not delay the other.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::bio::Operation;
use crate::clock::monotonic_ns;
use crate::disk::Disk;
use crate::request::Request;
use crate::sector::SECTOR_SHIFT;
use crate::stats::{Counter, StatsWriter};
use crate::tags::Tag;
use crate::throttle::{Counted, DeviceTimes, Meter, RateLimits, SPARE_DELAY_NS, Throttle};

/// How often a queue that waits for the limit of a group checks whether the limit was changed, in
/// nanoseconds. Another process may change it without a wake-up.
const CHANGE_NS: u64 = 100_000_000;
/// How long after a wait a queue is still treated as late, in nanoseconds. A late queue may make up for the
/// time in which its clients, or its own thread, did not run.
const LATE_NS: u64 = 50_000_000;
const READ: usize = 0;
const OTHERS: usize = 1;

fn direction_of(operation: Operation) -> usize {
    usize::from(operation != Operation::Read)
}

#[derive(Default)]
struct Waiting {
    /// Waiting requests, and their numbers in the order of arrival over both directions.
    tags: VecDeque<(Tag, u64)>,
    /// Requests of this direction wait in the scheduler.
    is_blocked: bool,
    /// When the first request may start, in nanoseconds of the monotonic clock.
    next_ns: u64,
    /// A flush has started before requests of this direction that waited, and none of them has started since.
    /// The first of them is tried before the next flush.
    is_overtaken: bool,
}

#[derive(Default)]
pub(super) struct QueueThrottle {
    throttle: Throttle,
    /// Whether there are limits, or requests that wait for one.
    pub is_on: bool,
    pub has_waiting: bool,
    /// The quantity that the only limit counts, if the cost of a batch is known without reading each request, no request
    /// waits, and no group can change the limit.
    counted: Counted,
    /// Numbers of the applied changes: of the disk's limits, and of the group's.
    generation: u64,
    group_sequence: Option<u64>,
    /// When to read the limits of the group again after they could not be read.
    group_retry_ns: u64,
    /// The limits of the group that were last read successfully.
    group_limits: RateLimits,
    meters: Vec<Meter>,
    waiting: [Waiting; 2],
    /// The number of requests that have had to wait so far.
    pushed: u64,
    /// A flush that was queued and for which the limits were not checked yet.
    new_flush: Option<Tag>,
    /// A control thread lets all requests pass ([`Disk::bypass_limits`](crate::Disk::bypass_limits)).
    bypassed: bool,
    /// The queue's owner is stopping and lets all requests pass.
    pub closing: bool,
    /// Since when requests have waited without interruption, as far as that time is not in
    /// [`Counter::ThrottledNs`]; 0 if none waits.
    since_ns: u64,
    /// Until when the queue is treated as late: see [`LATE_NS`].
    late_until_ns: u64,
    /// By tag, when the request stopped waiting for a limit; 0 if it did not wait, `u64::MAX` while it waits.
    released_ns: Vec<u64>,
}

impl QueueThrottle {
    pub fn new(disk: &Disk, slots: usize) -> QueueThrottle {
        let (generation, released_ns) = (u64::MAX, vec![0; slots]);
        let mut throttle = QueueThrottle { generation, released_ns, ..QueueThrottle::default() };
        throttle.waiting.iter_mut().for_each(|waiting| waiting.tags.reserve(slots));
        throttle.refresh(disk);
        throttle
    }

    #[cold]
    pub fn refresh(&mut self, disk: &Disk) {
        // Read before the limits, so that the next call notices a change made in between.
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
        // While another process changes the group's limits, and if these are damaged, the previous ones
        // apply.
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

    pub fn device_times(&self, index: usize) -> Option<&Arc<DeviceTimes>> {
        self.throttle.device_times(index)
    }

    pub fn is_waiting(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.is_blocked || !waiting.tags.is_empty())
    }

    pub fn is_blocked(&self, operation: Operation) -> bool {
        self.waiting[direction_of(operation)].is_blocked
    }

    pub fn unblock(&mut self) {
        self.waiting.iter_mut().for_each(|waiting| waiting.is_blocked = false);
    }

    /// When the first waiting request may start: one that waits here, or one in the scheduler if the driver
    /// `has_room` for it.
    pub fn deadline_ns(&self, has_room: bool) -> Option<u64> {
        let may = |waiting: &&Waiting| !waiting.tags.is_empty() || (waiting.is_blocked && has_room);
        let waiting = self.waiting.iter().filter(may);
        waiting.map(|waiting| waiting.next_ns).min()
    }

    pub fn youngest(&self, operation: Operation) -> Option<Tag> {
        self.waiting[direction_of(operation)].tags.back().map(|(tag, _)| *tag)
    }

    pub fn released_ns(&self, tag: Tag) -> u64 {
        self.released_ns[tag.index()]
    }

    /// The directions from which the scheduler may dispatch a request now: reads, all others. Called only if
    /// the scheduler has requests.
    pub fn open(&mut self) -> [bool; 2] {
        let now_ns = monotonic_ns();
        let is_late = now_ns < self.late_until_ns;
        let bypassed = self.bypassed || self.closing;
        self.follow_group(now_ns);
        [READ, OTHERS].map(|direction| {
            let next_ns = self.next_ns(direction, now_ns, is_late);
            let waiting = &mut self.waiting[direction];
            let is_open = bypassed || (next_ns <= now_ns && waiting.tags.is_empty());
            waiting.is_blocked = !is_open && waiting.tags.is_empty();
            if waiting.is_blocked {
                waiting.next_ns = self.throttle.member().map_or(next_ns, |_| next_ns.min(now_ns + CHANGE_NS));
            }
            is_open
        })
    }

    /// When the limits allow the next request of the direction.
    fn next_ns(&mut self, direction: usize, now_ns: u64, is_late: bool) -> u64 {
        let meters = self.meters.iter_mut().filter(|meter| meter.concerns(direction == READ));
        meters.map(|meter| meter.next_ns(now_ns, is_late)).max().unwrap_or(0)
    }

    /// Whether the scheduler must dispatch a request of the direction before the flush that is first here,
    /// because the previous flush has overtaken this request, and the limits allow one now. A request that is a
    /// little too early waits here, and is tried before the flush.
    pub fn yields(&mut self, direction: usize, requests: &[Request]) -> bool {
        let is_flush = |(tag, _): &(Tag, u64)| requests[tag.index()].operation() == Operation::Flush;
        let is_first = self.waiting[OTHERS].tags.front().is_some_and(is_flush);
        let Waiting { tags, is_overtaken, .. } = &self.waiting[direction];
        let has_others = !tags.iter().all(is_flush);
        if !is_overtaken || !is_first || has_others || self.bypassed || self.closing {
            return false;
        }
        let now_ns = monotonic_ns();
        self.follow_group(now_ns);
        // A member of a group may start earlier than the time of its next attempt.
        self.next_ns(direction, now_ns, now_ns < self.late_until_ns) <= now_ns + SPARE_DELAY_NS
    }

    /// The scheduler has dispatched the first request of the direction, or has none.
    pub fn caught_up(&mut self, direction: usize) {
        self.waiting[direction].is_overtaken = false;
    }

    /// Charges a request from the scheduler, whose direction is open. Returns false if another queue or
    /// process has used up the limit meanwhile. Then the request waits here.
    pub fn admit_scheduled(&mut self, tag: Tag, requests: &[Request], stats: &mut StatsWriter) -> bool {
        let (now_ns, waited) = (monotonic_ns(), self.since_ns != 0);
        let admitted = self.admit_at(&[tag], requests, now_ns, now_ns < self.late_until_ns).0 > 0;
        if !admitted {
            self.push(&[tag], requests, stats);
            return false;
        }
        self.caught_up(direction_of(requests[tag.index()].operation()));
        if waited {
            self.released_ns[tag.index()] = now_ns;
            stats.count(Counter::ThrottledRequests, 1);
        }
        true
    }

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

    /// Queues a flush ahead of all requests.
    pub fn push_flush(&mut self, tag: Tag) {
        let waiting = &mut self.waiting[OTHERS];
        waiting.next_ns = 0;
        waiting.tags.push_front((tag, 0));
        self.new_flush = Some(tag);
        self.set_has_waiting(true);
        self.released_ns[tag.index()] = u64::MAX;
    }

    /// Returns a flush that must wait, once.
    pub fn take_new_flush(&mut self) -> Option<Tag> {
        let flush = self.new_flush.take()?;
        (self.released_ns[flush.index()] == u64::MAX).then_some(flush)
    }

    /// [`QueueThrottle::pay`] for a single limit that counts requests or bytes of data. The batch reads and
    /// writes `data_sectors`. Returns false if the limits are of another kind.
    #[inline(always)]
    pub fn pay_at_once(&mut self, batch: &[Tag], data_sectors: u64, requests: &[Request]) -> bool {
        let units = match self.counted {
            Counted::Requests => batch.len() as u64,
            Counted::Bytes => data_sectors << SECTOR_SHIFT,
            Counted::Each => return false,
        };
        let is_paid = self.meters.first_mut().is_some_and(|meter| meter.pay_units(units));
        debug_assert!(!is_paid || self.meters[0].cost_of_all(batch, requests) == units);
        #[cfg(simulation)]
        if is_paid {
            crate::throttle::note_admitted(batch, requests);
        }
        is_paid
    }

    /// Pays for the whole batch at all limits from what is prepaid, or returns false and pays nothing. Reads neither the
    /// clock nor the shared words of the limits.
    #[inline(never)]
    pub fn pay(&mut self, batch: &[Tag], requests: &[Request]) -> bool {
        if self.has_waiting || self.group_has_changed() {
            return false;
        }
        for at in 0..self.meters.len() {
            if !self.meters[at].pay(batch, requests) {
                self.meters[..at].iter_mut().for_each(|meter| meter.return_payment(batch, requests));
                return false;
            }
        }
        #[cfg(simulation)]
        crate::throttle::note_admitted(batch, requests);
        true
    }

    /// The number of requests, from the beginning of `batch`, that may start now: those before the first one
    /// that must wait, or none if others wait. `read_ns` is the last reading of the queue's clock.
    pub fn admit(&mut self, batch: &[Tag], requests: &[Request], read_ns: u64) -> usize {
        let Some(last) = batch.last().filter(|_| !self.has_waiting) else { return 0 };
        // The time stamp of the last request saves a clock reading if it is from the latest reading. It is
        // slightly old, and so lets through no more than the present time would. An older stamp is of a
        // request that has waited for a tag: with it, everything that arrived while the device was slow would
        // start at once. A late queue needs the present time, too.
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

    /// [`QueueThrottle::admit`] at `now_ns`, without a check for waiting requests. Also returns when the next
    /// request may start.
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
        #[cfg(simulation)]
        crate::throttle::note_admitted(&batch[..count], requests);
        (count, next_ns)
    }

    /// Applies the limits of the group, if they have changed. If they could not be read, only every
    /// [`CHANGE_NS`], because each attempt also retries the waiting requests.
    fn follow_group(&mut self, now_ns: u64) {
        if self.group_has_changed() && (self.group_sequence.is_some() || self.group_retry_ns <= now_ns) {
            self.reload(now_ns);
        }
    }

    fn group_has_changed(&self) -> bool {
        let member = self.throttle.member();
        member.is_some_and(|member| self.group_sequence != Some(member.group().sequence()))
    }

    /// Moves waiting requests that may start now to `batch`, or all of them, uncharged, if `all`. Returns how
    /// many. `has_scheduled`: others wait in the scheduler.
    pub fn take(&mut self, batch: &mut [Tag], requests: &[Request], all: bool, has_scheduled: bool) -> usize {
        let mut len = 0;
        let now_ns = monotonic_ns();
        let all = all || self.bypassed || self.closing;
        // Requests of this queue may not have waited at all: a new flush is queued here first.
        let is_late = self.since_ns != 0 || now_ns < self.late_until_ns;
        // Before the loop: a change of the limits resets `next_ns`, and a direction that was refused must not
        // be retried in this loop.
        self.follow_group(now_ns);
        self.try_oldest_first(now_ns);
        while len < batch.len() {
            let Some(direction) = self.next_direction(now_ns, all) else { break };
            let Some(&(tag, _)) = self.waiting[direction].tags.front() else { break };
            let is_flush = requests[tag.index()].operation() == Operation::Flush && !all;
            if is_flush && let Some(overtaken) = self.take_overtaken(requests, now_ns, is_late) {
                batch[len] = overtaken;
                len += 1;
                continue;
            }
            let (count, next_ns) =
                if all { (1, 0) } else { self.admit_at(&[tag], requests, now_ns, is_late) };
            let waiting = &mut self.waiting[direction];
            if count == 0 {
                waiting.next_ns = self.throttle.member().map_or(next_ns, |_| next_ns.min(now_ns + CHANGE_NS));
                // Later than now, so that this loop does not try the direction again.
                waiting.next_ns = waiting.next_ns.max(now_ns + 1);
                continue;
            }
            waiting.tags.pop_front();
            waiting.is_overtaken = false;
            if is_flush {
                for waiting in &mut self.waiting {
                    waiting.is_overtaken = has_scheduled || !waiting.tags.is_empty();
                }
            }
            self.released_ns[tag.index()] = now_ns;
            batch[len] = tag;
            len += 1;
        }
        self.set_has_waiting(self.waiting.iter().any(|waiting| !waiting.tags.is_empty()));
        len
    }

    /// If a request may be tried at `now_ns`, lets an older one of the other direction be tried before, unless
    /// no limit counts both. A member of a group tries a refused request again later than the limit would allow,
    /// so requests that arrive meanwhile would overtake it repeatedly.
    fn try_oldest_first(&mut self, now_ns: u64) {
        let is_common = self.meters.iter().any(|meter| meter.concerns(true) && meter.concerns(false));
        if is_common
            && self.next_direction(now_ns, false).is_some()
            && let Some(oldest) = self.next_direction(now_ns, true)
        {
            let waiting = &mut self.waiting[oldest];
            waiting.next_ns = waiting.next_ns.min(now_ns);
        }
    }

    /// Removes and returns a request that the previous flush has overtaken, and that may start now. The next
    /// flush is the first of those that are not reads. Without this attempt, clients that always have a flush in
    /// flight would use up the limit.
    fn take_overtaken(&mut self, requests: &[Request], now_ns: u64, is_late: bool) -> Option<Tag> {
        for (direction, at) in [(READ, 0), (OTHERS, 1)] {
            let waiting = &self.waiting[direction];
            let Some(&(tag, _)) = waiting.tags.get(at).filter(|_| waiting.is_overtaken) else { continue };
            if self.admit_at(&[tag], requests, now_ns, is_late).0 > 0 {
                self.waiting[direction].tags.remove(at);
                self.caught_up(direction);
                self.released_ns[tag.index()] = now_ns;
                return Some(tag);
            }
        }
        None
    }

    /// The direction of the oldest request that may be tried at `now_ns`.
    fn next_direction(&self, now_ns: u64, all: bool) -> Option<usize> {
        let may = |direction: &usize| all || self.waiting[*direction].next_ns <= now_ns;
        let oldest =
            |direction: usize| self.waiting[direction].tags.front().map(|(_, number)| (*number, direction));
        [READ, OTHERS].into_iter().filter(may).filter_map(oldest).min().map(|(_, direction)| direction)
    }

    /// Counts the time in which requests waited, and the number of waiting requests. The scheduler has
    /// `scheduled` requests.
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

    pub fn drain(&mut self) -> impl Iterator<Item = Tag> + '_ {
        self.set_has_waiting(false);
        self.waiting.iter_mut().flat_map(|waiting| waiting.tags.drain(..).map(|(tag, _)| tag))
    }
}
