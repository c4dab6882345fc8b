//! Statistics on their way from the daemon to `stat`: the counters since the device was
//! attached, with what is zero left out.

use std::collections::BTreeMap;

use blkq::stats::LATENCY_BUCKETS;
use blkq::{Counter, StatGroup, StatsSnapshot, Status};
use serde::{Deserialize, Serialize};

/// The counters of a device at one time.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Statistics {
    /// Nanoseconds of the monotonic clock when they were read.
    pub time_ns: u64,
    /// Nanoseconds since the device was attached.
    pub uptime_ns: u64,
    /// In the order of [`StatGroup::ALL`].
    groups: Vec<Group>,
    in_flight: [u64; 2],
    in_flight_max: [u64; 2],
    busy_ns: u64,
    counters: BTreeMap<String, u64>,
    /// A daemon of an older version does not send it.
    #[serde(default)]
    clock_age_max_ns: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Group {
    ios: u64,
    merges: u64,
    sectors: u64,
    nanoseconds: u64,
    latency_max_ns: u64,
    /// Number of the bucket, and how many latencies are in it.
    latencies: Vec<(usize, u64)>,
    /// By the name of the status.
    errors: BTreeMap<String, u64>,
}

impl Statistics {
    /// What a snapshot taken at `time_ns` counted.
    pub fn new(snapshot: &StatsSnapshot, time_ns: u64, uptime_ns: u64) -> Statistics {
        let group = |group: &StatGroup| {
            let group = &snapshot[*group];
            let buckets = group.latency.buckets.iter().copied().enumerate();
            let errors =
                Status::ALL.iter().map(|status| (status.name().to_owned(), group.failed_with(*status)));
            Group {
                ios: group.ios,
                merges: group.merges,
                sectors: group.sectors,
                nanoseconds: group.nanoseconds,
                latency_max_ns: group.latency.max_ns,
                latencies: buckets.filter(|(_, count)| *count != 0).collect(),
                errors: errors.filter(|(_, count)| *count != 0).collect(),
            }
        };
        let counters =
            Counter::ALL.iter().map(|counter| (counter.name().to_owned(), snapshot.counter(*counter)));
        Statistics {
            time_ns,
            uptime_ns,
            groups: StatGroup::ALL.iter().map(group).collect(),
            in_flight: snapshot.in_flight,
            in_flight_max: snapshot.in_flight_max,
            busy_ns: snapshot.busy_ns,
            counters: counters.collect(),
            clock_age_max_ns: snapshot.clock_age_max_ns,
        }
    }

    /// The snapshot again. What this version does not know is left out.
    pub fn snapshot(&self) -> StatsSnapshot {
        let mut snapshot = StatsSnapshot {
            in_flight: self.in_flight,
            in_flight_max: self.in_flight_max,
            busy_ns: self.busy_ns,
            clock_age_max_ns: self.clock_age_max_ns,
            ..StatsSnapshot::default()
        };
        for (into, group) in snapshot.groups.iter_mut().zip(&self.groups) {
            into.ios = group.ios;
            into.merges = group.merges;
            into.sectors = group.sectors;
            into.nanoseconds = group.nanoseconds;
            into.latency.max_ns = group.latency_max_ns;
            for (bucket, count) in group.latencies.iter().filter(|(bucket, _)| *bucket < LATENCY_BUCKETS) {
                into.latency.buckets[*bucket] = *count;
            }
            for (status, count) in Status::ALL.iter().zip(&mut into.errors) {
                *count = group.errors.get(status.name()).copied().unwrap_or(0);
            }
        }
        for (counter, count) in Counter::ALL.iter().zip(&mut snapshot.counters) {
            *count = self.counters.get(counter.name()).copied().unwrap_or(0);
        }
        snapshot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_survives_the_way() {
        let mut snapshot =
            StatsSnapshot { in_flight: [1, 2], in_flight_max: [3, 4], busy_ns: 5, ..Default::default() };
        for (i, group) in snapshot.groups.iter_mut().enumerate() {
            let i = i as u64;
            (group.ios, group.merges, group.sectors, group.nanoseconds) = (10 + i, 20 + i, 30 + i, 40 + i);
            group.errors[Status::ALL.len() - 1] = 50 + i;
            (0..10).for_each(|n| group.latency.record(1000 * n + i));
        }
        snapshot.counters[Counter::Splits as usize] = 7;
        snapshot.clock_age_max_ns = 8;
        let sent = serde_json::to_string(&Statistics::new(&snapshot, 1, 2)).unwrap();
        let received: Statistics = serde_json::from_str(&sent).unwrap();
        assert_eq!(received.snapshot(), snapshot);
    }

    #[test]
    fn the_fullest_statistics_fit_the_protocol() {
        let mut snapshot = StatsSnapshot::default();
        for group in &mut snapshot.groups {
            group.latency.buckets.fill(1 << 44);
            group.errors.fill(1 << 44);
            (group.ios, group.nanoseconds) = (1 << 53, u64::MAX);
        }
        let line = serde_json::to_vec(&Statistics::new(&snapshot, u64::MAX, u64::MAX)).unwrap();
        assert!(line.len() < crate::control::LINE_BYTES_MAX / 2, "{}", line.len());
    }
}
