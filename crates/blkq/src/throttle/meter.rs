//! A meter: one limit as one queue applies it to its requests. A meter prepays a little more than a batch
//! needs, so that most batches far from the limit touch neither the shared word nor the clock.

use std::sync::Arc;

use super::bucket::{NS_PER_S, accrued, clock_ns, cost_ns, scaled, shared_spent_ns, start_of};
use super::group::Member;
use super::limits::{Burst, LimitKey, RateLimit, RateLimits};
use super::{bucket, group};
use crate::bio::Operation;
use crate::request::Request;
use crate::sync::atomic::{AtomicI64, Ordering::Relaxed};
use crate::tags::Tag;

/// The credit of an idle limit without a burst, in nanoseconds of its rate. It makes up for threads that wake
/// late. Together with what one queue may have prepaid, a device can be 2 ms ahead of its rate.
const CREDIT_NS: u64 = 2_000_000 - PREPAID_NS;
/// A queue prepays at most what the limit allows in this time: 0.25 ms.
const PREPAID_NS: u64 = 250_000;
/// A queue prepays at most that number of batches of the size of the last one.
const PREPAID_BATCHES: u64 = 256;
/// A queue prepays at most the room of the limit, divided by this. A limit at which requests wait has no room,
/// so nothing is prepaid there.
const PREPAID_DIVISOR: u64 = 4;
/// The credit of a queue whose requests have waited, in nanoseconds. It is larger, so that the rate is kept
/// however late the thread wakes.
const LATE_CREDIT_NS: u64 = 100_000_000;
/// How far a member that uses what others leave may be ahead of its share, in nanoseconds.
const AHEAD_NS_MAX: u64 = 100_000_000;
/// How much later than the limit would allow a waiting member tries to use what others leave, in nanoseconds.
/// The delay lets the others get what is theirs first.
pub(crate) const SPARE_DELAY_NS: u64 = 500_000;
/// How long the sum of the weights of active members is reused, in nanoseconds.
const WEIGHTS_NS: u64 = 1_000_000;

enum Place {
    Own(Arc<bucket::Buckets>),
    Group(Arc<Member>),
}

/// The quantity that determines the cost of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Counted {
    /// The number of its requests.
    Requests,
    /// The number of bytes that it reads or writes.
    Bytes,
    /// Each request has a cost of its own, or none.
    #[default]
    Each,
}

/// One limit, or the rate of its burst.
pub(crate) struct Meter {
    place: Place,
    key: LimitKey,
    is_peak: bool,
    /// A request counts as one unit for each started block of this number of bytes, or as one if it is 0. Not used
    /// by limits of bytes.
    size_bytes: u64,
    counted: Counted,
    rate: u64,
    credit_ns: u64,
    /// The remainder of the last division.
    rest: u64,
    /// Units that were charged in advance: see the module documentation.
    prepaid: u64,
    /// The weight of the member, and the sum for all active members, valid until `weights_until_ns`.
    weights: (u64, u64),
    weights_until_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Admitted {
    /// The number of requests, from the first on, that may start.
    pub count: usize,
    /// When the next request may start, in nanoseconds of the monotonic clock, if there is one.
    pub next_ns: u64,
}

impl Meter {
    pub fn of_device(limits: &RateLimits, buckets: &Arc<bucket::Buckets>) -> Vec<Meter> {
        Meter::all(limits, || Place::Own(buckets.clone()))
    }

    pub fn of_group(limits: &RateLimits, member: &Arc<Member>) -> Vec<Meter> {
        Meter::all(limits, || Place::Group(member.clone()))
    }

    fn all(limits: &RateLimits, place: impl Fn() -> Place) -> Vec<Meter> {
        let mut all = Vec::new();
        for key in LimitKey::ALL {
            let Some(RateLimit { rate, burst }) = limits.get(key) else { continue };
            let size_bytes = limits.iops_size_bytes();
            let counted = match (key, size_bytes) {
                (LimitKey::Iops, 0) => Counted::Requests,
                (LimitKey::Bps, _) => Counted::Bytes,
                _ => Counted::Each,
            };
            let meter = |rate, is_peak, credit_ns| Meter {
                place: place(),
                key,
                is_peak,
                size_bytes,
                counted,
                rate,
                credit_ns,
                rest: 0,
                prepaid: 0,
                weights: (1, 1),
                weights_until_ns: 0,
            };
            // The credit of a burst, in nanoseconds of the rate: what such a burst may use above the limit.
            let credit_of = |burst: Burst| scaled(burst.length_ns, burst.rate.saturating_sub(rate), rate);
            let credit_ns = burst.map_or(0, credit_of);
            all.push(meter(rate, false, credit_ns.max(CREDIT_NS)));
            all.extend(burst.map(|burst| meter(burst.rate, true, CREDIT_NS)));
        }
        all
    }

    fn word(&self) -> &AtomicI64 {
        let buckets = match &self.place {
            Place::Own(buckets) => buckets,
            Place::Group(member) => member.buckets(),
        };
        if self.is_peak { &buckets.peak[self.key as usize] } else { &buckets.average[self.key as usize] }
    }

    /// When the limit is used up, according to its word. Only the word of a group is bounded: other processes
    /// cannot write a device's own word, and a large request at a low rate may owe more than any bound.
    #[inline]
    fn spent_ns(&self, now_ns: u64) -> i64 {
        match &self.place {
            Place::Own(_) => self.word().load(Relaxed),
            Place::Group(_) => shared_spent_ns(self.word(), now_ns),
        }
    }

    /// The member whose share this meter charges. Bursts have no shares.
    fn member(&self) -> Option<&Arc<Member>> {
        match &self.place {
            Place::Group(member) if !self.is_peak => Some(member),
            _ => None,
        }
    }

    /// The cost of the request in units of the rate. 0 if the limit does not count it.
    #[inline]
    fn cost(&self, request: &Request) -> u64 {
        let bytes = data_bytes(request);
        match self.size_bytes {
            _ if !self.concerns(request.operation() == Operation::Read) => 0,
            _ if self.key.is_bytes() => bytes,
            0 => 1,
            size => bytes.div_ceil(size).max(1),
        }
    }

    /// Whether the limit counts reads, or for `reads == false` all other operations.
    #[inline]
    pub fn concerns(&self, reads: bool) -> bool {
        match self.key {
            LimitKey::Iops | LimitKey::Bps => true,
            LimitKey::ReadIops | LimitKey::ReadBps => reads,
            LimitKey::WriteIops | LimitKey::WriteBps => !reads,
        }
    }

    /// When a request that the limit counts may start. Charges nothing.
    pub fn next_ns(&mut self, now_ns: u64, is_late: bool) -> u64 {
        if self.prepaid > 0 { now_ns } else { self.charge(&[], &[], now_ns, is_late).next_ns }
    }

    pub fn counted(&self) -> Counted {
        self.counted
    }

    #[inline(always)]
    pub fn cost_of_all(&self, batch: &[Tag], requests: &[Request]) -> u64 {
        if self.counted == Counted::Requests {
            batch.len() as u64
        } else {
            self.sum_of_costs(batch, requests)
        }
    }

    #[inline(never)]
    fn sum_of_costs(&self, batch: &[Tag], requests: &[Request]) -> u64 {
        match self.counted {
            Counted::Bytes => batch.iter().map(|tag| data_bytes(&requests[tag.index()])).sum(),
            _ => batch.iter().map(|tag| self.cost(&requests[tag.index()])).sum(),
        }
    }

    /// Pays that number of units from what is prepaid, or returns false and pays nothing.
    #[inline(always)]
    pub fn pay_units(&mut self, units: u64) -> bool {
        let left = self.prepaid.checked_sub(units);
        self.prepaid = left.unwrap_or(self.prepaid);
        left.is_some()
    }

    pub fn pay(&mut self, batch: &[Tag], requests: &[Request]) -> bool {
        self.pay_units(self.cost_of_all(batch, requests))
    }

    /// Returns the payment for a batch that does not start, because another limit has refused it.
    pub fn return_payment(&mut self, batch: &[Tag], requests: &[Request]) {
        self.prepaid += self.cost_of_all(batch, requests);
    }

    /// How much to prepay in addition to a batch of that number of units, for which the limit has `room`.
    #[inline]
    fn prepaid_of(&self, units: u64, room: Option<u64>, is_late: bool) -> u64 {
        let spare = match room {
            Some(room) if !is_late => room.saturating_sub(units) / PREPAID_DIVISOR,
            _ => return 0,
        };
        spare.min(self.rate / (NS_PER_S / PREPAID_NS)).min(units.saturating_mul(PREPAID_BATCHES))
    }

    /// The number of requests of the batch that may start within `room`, and their cost.
    #[inline]
    fn count(&self, batch: &[Tag], requests: &[Request], room: Option<u64>) -> (usize, u64) {
        if self.counted == Counted::Requests {
            // The first request needs only that its time has come.
            let count = room.map_or(0, |room| usize::try_from(room.saturating_add(1)).unwrap_or(usize::MAX));
            let count = count.min(batch.len());
            return (count, count as u64);
        }
        let (mut count, mut units) = (0, 0_u64);
        for tag in batch {
            let cost = self.cost(&requests[tag.index()]);
            if cost > 0 && room.is_none_or(|room| units > room) {
                break;
            }
            (count, units) = (count + 1, units.saturating_add(cost));
        }
        (count, units)
    }

    /// Admits and charges the requests of a batch that conform to the limit, in order. `is_late`: requests of
    /// this queue have waited for the limit.
    pub fn admit(&mut self, batch: &[Tag], requests: &[Request], now_ns: u64, is_late: bool) -> Admitted {
        if self.pay(batch, requests) {
            return Admitted { count: batch.len(), next_ns: now_ns };
        }
        if self.prepaid > 0 {
            self.refund_units(self.prepaid);
            self.prepaid = 0;
        }
        self.charge(batch, requests, now_ns, is_late)
    }

    /// Charges the limit for the requests of a batch that conform, and prepays some for later batches.
    ///
    /// A request of a member of a group may start if the member's share allows it, or if the limit has room, so
    /// that no request waits while there is room. Both are charged: after a member has used more than its share,
    /// others come first until its share has caught up.
    fn charge(&mut self, batch: &[Tag], requests: &[Request], now_ns: u64, is_late: bool) -> Admitted {
        let credit_ns = if is_late { self.credit_ns.max(LATE_CREDIT_NS) } else { self.credit_ns };
        let share_credit_ns = if is_late { LATE_CREDIT_NS } else { CREDIT_NS };
        let member = self.member().cloned();
        if let Some(member) = &member
            && now_ns >= self.weights_until_ns
        {
            self.weights = member.weights(self.key, now_ns);
            self.weights_until_ns = now_ns + WEIGHTS_NS;
        }
        let (weight, all) = self.weights;
        loop {
            let seen_ns = self.spent_ns(now_ns);
            let start_ns = start_of(seen_ns, now_ns, credit_ns);
            let mut room = accrued(start_ns, now_ns, self.rate);
            let (mut count, mut units) = self.count(batch, requests, room);
            let (mut units_of_share, mut share_ns) = (units, 0);
            if let Some(member) = &member {
                share_ns = shared_spent_ns(member.spent_ns(self.key), now_ns);
                let share_left = accrued(start_of(share_ns, now_ns, share_credit_ns), now_ns, NS_PER_S);
                let own_room = share_left.map(|ns| scaled(scaled(ns, weight, all), self.rate, NS_PER_S));
                let (own_count, own_units) = self.count(batch, requests, own_room);
                if own_count > count && all > weight {
                    (room, count, units) = (own_room, own_count, own_units);
                }
                units_of_share = own_units.min(units);
            }
            let prepaid = self.prepaid_of(units, room, is_late);
            let (ns, rest) = cost_ns(units + prepaid, self.rate, self.rest);
            let spent_ns = start_ns.saturating_add_unsigned(ns);
            if units > 0 {
                if self.word().compare_exchange_weak(seen_ns, spent_ns, Relaxed, Relaxed).is_err() {
                    continue;
                }
                (self.rest, self.prepaid) = (rest, prepaid);
            }
            let Some(member) = member else { return Admitted { count, next_ns: clock_ns(spent_ns) } };
            // A member repays in full what was within its share, but only up to [`AHEAD_NS_MAX`] what others
            // had left.
            let due_ns = scaled(cost_ns(units_of_share, self.rate, 0).0, all, weight);
            let ahead_ns = now_ns.cast_signed().saturating_add_unsigned(due_ns.max(AHEAD_NS_MAX));
            let charged_ns = if units > 0 { scaled(ns, all, weight) } else { 0 };
            let charged = |share_ns: i64| {
                let start_ns = start_of(share_ns, now_ns, share_credit_ns);
                start_ns.saturating_add_unsigned(charged_ns).min(ahead_ns.max(start_ns))
            };
            if units > 0 {
                // Another queue of the same device may charge the share concurrently.
                let share = member.spent_ns(self.key);
                let before_ns = share.fetch_update(Relaxed, Relaxed, |share_ns| Some(charged(share_ns)));
                share_ns = before_ns.unwrap_or(share_ns);
            }
            let next_ns = clock_ns(match all > weight {
                true => charged(share_ns).min(spent_ns.saturating_add_unsigned(SPARE_DELAY_NS)),
                false => spent_ns,
            });
            if units > 0 || count < batch.len() {
                member.note_active(self.key, next_ns.max(now_ns));
            }
            return Admitted { count, next_ns };
        }
    }

    /// Refunds the last requests of a batch, which were charged but do not start because of another limit.
    pub fn refund(&mut self, batch: &[Tag], requests: &[Request]) {
        self.refund_units(self.cost_of_all(batch, requests));
    }

    fn refund_units(&self, units: u64) {
        let (ns, _) = cost_ns(units, self.rate, 0);
        let refund = |word: &AtomicI64, ns: u64| {
            let _ =
                word.fetch_update(Relaxed, Relaxed, |spent_ns| Some(spent_ns.saturating_sub_unsigned(ns)));
        };
        refund(self.word(), ns);
        if let Some(member) = self.member() {
            let (weight, all) = self.weights;
            refund(member.spent_ns(self.key), scaled(ns, all, weight));
        }
    }
}

fn data_bytes(request: &Request) -> u64 {
    // Without a branch, because this is computed for each request.
    request.bytes() * u64::from(request.operation().has_data())
}

const _: () = assert!(WEIGHTS_NS < group::ACTIVE_NS);
