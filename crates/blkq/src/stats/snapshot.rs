//! Statistics at one time, of a queue or of several.

use std::ops::{AddAssign, Index};

use super::{Counter, Histogram, StatGroup, error_index};
use crate::error::Status;

const NS_PER_MS: u64 = 1_000_000;

/// The counts of one group of operations.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct GroupSnapshot {
    /// Requests completed, with or without an error.
    pub ios: u64,
    /// Bios that joined a request, and requests that joined another.
    pub merges: u64,
    /// 512-byte sectors of the completed requests.
    pub sectors: u64,
    /// The sum of their latencies.
    pub nanoseconds: u64,
    /// Their latencies.
    pub latency: Histogram,
    /// How many completed with each status, in the order of [`Status::ALL`].
    pub errors: [u64; Status::ALL.len()],
    /// Bios that completed with each status and never became requests: the queue rejected them.
    pub refused: [u64; Status::ALL.len()],
}

impl GroupSnapshot {
    /// Mean latency in nanoseconds; 0 if nothing completed.
    pub fn mean_ns(&self) -> u64 {
        self.nanoseconds.checked_div(self.ios).unwrap_or(0)
    }

    /// Requests that completed with an error.
    pub fn failed(&self) -> u64 {
        self.errors.iter().sum()
    }

    /// Requests that completed with `status`.
    pub fn failed_with(&self, status: Status) -> u64 {
        self.errors[error_index(status)]
    }

    /// Bios that never became requests and completed with `status`.
    pub fn refused_with(&self, status: Status) -> u64 {
        self.refused[error_index(status)]
    }
}

/// The statistics of a queue, or the sum over several, at one time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StatsSnapshot {
    /// By the number of [`StatGroup`]; `snapshot[group]` is one of them.
    pub groups: [GroupSnapshot; StatGroup::COUNT],
    /// Requests in flight: reads, and all others.
    pub in_flight: [u64; 2],
    /// The most that ever were in flight, of a single queue.
    pub in_flight_max: [u64; 2],
    /// Time with anything in flight, in nanoseconds. Over several queues that of the
    /// busiest: no less can be true, and it never runs faster than the clock.
    pub busy_ns: u64,
    /// By the number of [`Counter`].
    pub counters: [u64; Counter::COUNT],
    /// The longest that a cached reading of the clock was used, of a single queue, in nanoseconds, as
    /// far as it shows without another reading: one after which the queue rested is left out, and
    /// what the thread did in between is part of the time.
    pub clock_age_max_ns: u64,
    /// Requests, and bios without one, that were in flight for too long when that was last
    /// scanned: see [`hang`](crate::queue::hang).
    pub hung: u64,
    /// Requests that wait for a limit now: see [`throttle`](crate::throttle).
    pub throttled: u64,
    /// Requests that are held after errors now: see [`ErrorPolicy`](crate::ErrorPolicy).
    pub held: u64,
}

impl StatsSnapshot {
    /// The value of `counter`.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.counters[counter as usize]
    }

    /// The 17 fields of /sys/block/X/stat: for reads and for writes I/Os, merges,
    /// sectors, milliseconds; requests in flight, busy milliseconds, the sum of all
    /// milliseconds; the same four for discards; I/Os and milliseconds of flushes.
    pub fn fields(&self) -> [u64; 17] {
        let four = |group: StatGroup| {
            let group = &self[group];
            [group.ios, group.merges, group.sectors, group.nanoseconds / NS_PER_MS]
        };
        let [r, w, d, f] = StatGroup::ALL.map(four);
        [
            r[0],
            r[1],
            r[2],
            r[3],
            w[0],
            w[1],
            w[2],
            w[3],
            self.in_flight.iter().sum(),
            self.busy_ns / NS_PER_MS,
            r[3] + w[3] + d[3] + f[3],
            d[0],
            d[1],
            d[2],
            d[3],
            f[0],
            f[3],
        ]
    }

    /// The fields as the kernel prints them: right-aligned in eight columns.
    pub fn sysfs_line(&self) -> String {
        self.fields().map(|field| format!("{field:8}")).join(" ")
    }

    /// The counts since `earlier`. The requests in flight, their greatest number, the hangs, and
    /// the oldest reading of the clock stay as they are now.
    #[must_use]
    pub fn delta(&self, earlier: &StatsSnapshot) -> StatsSnapshot {
        let mut delta = self.clone();
        let since = |now: &mut u64, then: &u64| *now = now.saturating_sub(*then);
        for (now, then) in delta.groups.iter_mut().zip(&earlier.groups) {
            since(&mut now.ios, &then.ios);
            since(&mut now.merges, &then.merges);
            since(&mut now.sectors, &then.sectors);
            since(&mut now.nanoseconds, &then.nanoseconds);
            now.latency = now.latency.delta(&then.latency);
            now.errors.iter_mut().zip(&then.errors).for_each(|(n, t)| since(n, t));
            now.refused.iter_mut().zip(&then.refused).for_each(|(n, t)| since(n, t));
        }
        since(&mut delta.busy_ns, &earlier.busy_ns);
        delta.counters.iter_mut().zip(&earlier.counters).for_each(|(n, t)| since(n, t));
        delta
    }
}

impl Index<StatGroup> for StatsSnapshot {
    type Output = GroupSnapshot;
    fn index(&self, group: StatGroup) -> &GroupSnapshot {
        &self.groups[group as usize]
    }
}

impl AddAssign<&StatsSnapshot> for StatsSnapshot {
    /// Adds another queue of the same disk.
    fn add_assign(&mut self, other: &StatsSnapshot) {
        for (mine, theirs) in self.groups.iter_mut().zip(&other.groups) {
            mine.ios += theirs.ios;
            mine.merges += theirs.merges;
            mine.sectors += theirs.sectors;
            mine.nanoseconds += theirs.nanoseconds;
            mine.latency.add(&theirs.latency);
            mine.errors.iter_mut().zip(theirs.errors).for_each(|(m, t)| *m += t);
            mine.refused.iter_mut().zip(theirs.refused).for_each(|(m, t)| *m += t);
        }
        self.in_flight.iter_mut().zip(other.in_flight).for_each(|(m, t)| *m += t);
        self.in_flight_max.iter_mut().zip(other.in_flight_max).for_each(|(m, t)| *m = (*m).max(t));
        self.busy_ns = self.busy_ns.max(other.busy_ns);
        self.clock_age_max_ns = self.clock_age_max_ns.max(other.clock_age_max_ns);
        self.hung += other.hung;
        self.throttled += other.throttled;
        self.held += other.held;
        self.counters.iter_mut().zip(other.counters).for_each(|(m, t)| *m += t);
    }
}

impl<'a> std::iter::Sum<&'a StatsSnapshot> for StatsSnapshot {
    fn sum<I: Iterator<Item = &'a StatsSnapshot>>(queues: I) -> StatsSnapshot {
        queues.fold(StatsSnapshot::default(), |mut sum, queue| {
            sum += queue;
            sum
        })
    }
}
