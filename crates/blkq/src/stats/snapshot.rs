use std::ops::{AddAssign, Index};

use super::{Counter, Histogram, StatGroup, error_index};
use crate::error::Status;

const NS_PER_MS: u64 = 1_000_000;

/// The counts of one group of operations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct GroupSnapshot {
    /// Requests that completed, with or without an error.
    pub ios: u64,
    /// Bios that joined a request, and requests that joined another request.
    pub merges: u64,
    /// The sectors of 512 bytes of the completed requests.
    pub sectors: u64,
    /// The sum of the latencies of the completed requests.
    pub nanoseconds: u64,
    /// The distribution of these latencies.
    pub latency: Histogram,
    /// The number of requests that completed with each status, in the order of [`Status::ALL`].
    pub errors: [u64; Status::ALL.len()],
    /// The number of bios that the queue rejected with each status before they became requests.
    pub refused: [u64; Status::ALL.len()],
}

impl GroupSnapshot {
    /// The mean latency in nanoseconds; 0 if no request completed.
    pub fn mean_ns(&self) -> u64 {
        self.nanoseconds.checked_div(self.ios).unwrap_or(0)
    }

    /// The number of requests that completed with an error.
    pub fn failed(&self) -> u64 {
        self.errors.iter().sum()
    }

    /// The number of requests that completed with `status`.
    pub fn failed_with(&self, status: Status) -> u64 {
        self.errors[error_index(status)]
    }

    /// The number of bios that were rejected with `status` before they became requests.
    pub fn refused_with(&self, status: Status) -> u64 {
        self.refused[error_index(status)]
    }
}

/// The statistics of a queue, or the sum over several queues, at one point in time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StatsSnapshot {
    /// Indexed by [`StatGroup`]; `snapshot[group]` is a shorthand.
    pub groups: [GroupSnapshot; StatGroup::COUNT],
    /// The requests in flight: reads, then all others.
    pub in_flight: [u64; 2],
    /// The largest number of requests that were in flight in a single queue: reads, then all others.
    pub in_flight_max: [u64; 2],
    /// The time in which requests were in flight, in nanoseconds. For several queues, the value of the
    /// busiest queue: a lower bound that never runs faster than the clock.
    pub busy_ns: u64,
    /// The values of the counters, indexed by [`Counter`].
    pub counters: [u64; Counter::COUNT],
    /// The longest time for which a cached reading of the clock was used in a single queue, in nanoseconds.
    /// Measured up to the next reading of the clock. So a reading after which the queue was idle is not
    /// measured, and other work of the thread in between counts.
    pub clock_age_max_ns: u64,
    /// The requests, and bios without a request, that had been in flight for too long at the last scan: see
    /// [`hang`](crate::queue::hang).
    pub hung: u64,
    /// The requests that wait for a limit: see [`throttle`](crate::throttle).
    pub throttled: u64,
    /// The requests that are held after errors: see [`ErrorPolicy`](crate::ErrorPolicy).
    pub held: u64,
}

impl StatsSnapshot {
    /// The value of `counter` at this time.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize]
    }

    /// The 17 fields of /sys/block/X/stat. For reads and then for writes: I/Os, merges, sectors,
    /// milliseconds. Then requests in flight, busy milliseconds, the sum of all milliseconds. Then the first
    /// four fields for discards, and I/Os and milliseconds of flushes.
    pub fn fields(&self) -> [u64; 17] {
        let four = |group: StatGroup| {
            let group = &self[group];
            [group.ios, group.merges, group.sectors, group.nanoseconds / NS_PER_MS]
        };
        let [r, w, d, f] = StatGroup::ALL.map(four);
        let mut fields = [0; 17];
        fields[..4].copy_from_slice(&r);
        fields[4..8].copy_from_slice(&w);
        fields[8] = self.in_flight.iter().sum();
        fields[9] = self.busy_ns / NS_PER_MS;
        fields[10] = r[3] + w[3] + d[3] + f[3];
        fields[11..15].copy_from_slice(&d);
        (fields[15], fields[16]) = (f[0], f[3]);
        fields
    }

    /// The counts since `earlier`. Values that are not counters stay as in `self`: requests in flight and
    /// their maximum, hangs, and the longest use of a clock reading.
    #[must_use]
    pub fn delta(&self, earlier: &StatsSnapshot) -> StatsSnapshot {
        let mut delta = self.clone();
        delta.change_counts(earlier, |now, then| *now = now.saturating_sub(then));
        for (now, then) in delta.groups.iter_mut().zip(&earlier.groups) {
            now.latency = now.latency.delta(&then.latency);
        }
        delta.busy_ns = delta.busy_ns.saturating_sub(earlier.busy_ns);
        delta
    }

    /// Calls `change` with each count of `self`, and that of `other`.
    fn change_counts(&mut self, other: &StatsSnapshot, change: impl Fn(&mut u64, u64)) {
        let all =
            |own: &mut [u64], others: &[u64]| own.iter_mut().zip(others).for_each(|(a, b)| change(a, *b));
        for (own, other) in self.groups.iter_mut().zip(&other.groups) {
            change(&mut own.ios, other.ios);
            change(&mut own.merges, other.merges);
            change(&mut own.sectors, other.sectors);
            change(&mut own.nanoseconds, other.nanoseconds);
            all(&mut own.errors, &other.errors);
            all(&mut own.refused, &other.refused);
        }
        all(&mut self.counters, &other.counters);
    }
}

impl Index<StatGroup> for StatsSnapshot {
    type Output = GroupSnapshot;
    fn index(&self, group: StatGroup) -> &GroupSnapshot {
        &self.groups[group as usize]
    }
}

impl AddAssign<&StatsSnapshot> for StatsSnapshot {
    fn add_assign(&mut self, other: &StatsSnapshot) {
        self.change_counts(other, |own, more| *own += more);
        for (own, other) in self.groups.iter_mut().zip(&other.groups) {
            own.latency.add(&other.latency);
        }
        self.in_flight.iter_mut().zip(other.in_flight).for_each(|(m, t)| *m += t);
        self.in_flight_max.iter_mut().zip(other.in_flight_max).for_each(|(m, t)| *m = (*m).max(t));
        self.busy_ns = self.busy_ns.max(other.busy_ns);
        self.clock_age_max_ns = self.clock_age_max_ns.max(other.clock_age_max_ns);
        self.hung += other.hung;
        self.throttled += other.throttled;
        self.held += other.held;
    }
}
