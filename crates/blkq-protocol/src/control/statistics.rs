//! The statistics that a daemon sends to `blkq stat`: the counters since the device was attached, without
//! those that are zero.

use std::collections::BTreeMap;

use blkq::stats::LATENCY_BUCKETS;
use blkq::{Counter, StatGroup, StatsSnapshot, Status};
use blkq_export::nbd::NbdCounters;
use blkq_export::vhost_user::VhostUserCounters;
use serde::{Deserialize, Serialize};

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Statistics {
    /// Time of the monotonic clock at which the counters were read, in nanoseconds.
    pub time_ns: u64,
    pub uptime_ns: u64,
    /// In the order of [`StatGroup::ALL`].
    groups: Vec<Group>,
    in_flight: [u64; 2],
    in_flight_max: [u64; 2],
    busy_ns: u64,
    counters: BTreeMap<String, u64>,
    // Daemons of older versions do not send the following fields.
    #[serde(default)]
    clock_age_max_ns: u64,
    #[serde(default)]
    hung: u64,
    #[serde(default)]
    throttled: u64,
    #[serde(default)]
    held: u64,
    #[serde(default)]
    pub throttle: Throttle,
    /// How often a queue's thread did not answer for longer than `--hang-warning`.
    #[serde(default)]
    pub stalls: u64,
    /// The value of `--hang-warning` in nanoseconds; 0 if it is off.
    #[serde(default)]
    pub hang_warning_ns: u64,
    #[serde(default)]
    pub gate: Gate,
    /// The counters of the NBD servers, or `None` if there is none.
    #[serde(default)]
    pub nbd: Option<Nbd>,
    /// The counters of vhost-user-blk, or `None` if the device is not served to virtual machines.
    #[serde(default)]
    pub vhost_user: Option<VhostUser>,
    #[serde(default)]
    pub queues: Vec<QueueSums>,
}

/// The work of one queue, summed up over all operations.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct QueueSums {
    pub ios: u64,
    /// Number of sectors of 512 bytes in these requests.
    pub sectors: u64,
    /// Sum of their latencies in nanoseconds.
    pub nanoseconds: u64,
    pub in_flight: u64,
    /// Time with requests in flight, in nanoseconds.
    pub busy_ns: u64,
    /// Number of hung requests in the last scan.
    pub hung: u64,
}

impl QueueSums {
    pub fn new(queue: &StatsSnapshot) -> QueueSums {
        QueueSums {
            ios: queue.groups.iter().map(|group| group.ios).sum(),
            sectors: queue.groups.iter().map(|group| group.sectors).sum(),
            nanoseconds: queue.groups.iter().map(|group| group.nanoseconds).sum(),
            in_flight: queue.in_flight.iter().sum(),
            busy_ns: queue.busy_ns,
            hung: queue.hung,
        }
    }

    /// The difference to `earlier`. `in_flight` and `hung` keep their current values.
    pub fn since(&self, earlier: &QueueSums) -> QueueSums {
        QueueSums {
            ios: self.ios.saturating_sub(earlier.ios),
            sectors: self.sectors.saturating_sub(earlier.sectors),
            nanoseconds: self.nanoseconds.saturating_sub(earlier.nanoseconds),
            busy_ns: self.busy_ns.saturating_sub(earlier.busy_ns),
            ..self.clone()
        }
    }
}

/// The counters of the request gate ([`blkq::gate::GateCounters`]), and its waiting threads.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Gate {
    /// Number of threads that wait now: for reads, and for all other operations.
    pub waiting: [u32; 2],
    /// How often a thread had to wait and was woken.
    pub waits: u64,
    pub wakeups: u64,
    pub grants: u64,
    pub largest_grant: u32,
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Throttle {
    /// The limits of the device itself, as `blkq set` parses them; empty if it has none. With `limit=auto`
    /// this is `auto`, or `auto (iops=9850)` with the limit just below the ceiling once that was found.
    pub limits: String,
    pub group: Option<String>,
    /// The limits of the group; empty if it has none, or there is no group.
    pub group_limits: String,
    pub weight: u32,
}

/// The clients of an export, summed up over all its servers.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Clients<C> {
    /// How many are connected now; of vhost-user-blk, 0 or 1.
    pub connected: u64,
    #[serde(flatten)]
    pub counters: C,
}

pub type Nbd = Clients<NbdCounters>;
pub type VhostUser = Clients<VhostUserCounters>;

impl<C: Clone> Clients<C> {
    /// The difference to `earlier`, by `since` of the counters.
    pub fn since(&self, earlier: Option<&Clients<C>>, since: fn(&C, &C) -> C) -> Clients<C> {
        let counters = earlier.map(|earlier| since(&self.counters, &earlier.counters));
        Clients { counters: counters.unwrap_or_else(|| self.counters.clone()), connected: self.connected }
    }
}

impl Gate {
    /// The difference to `earlier`. `waiting` and `largest_grant` keep their current values.
    pub fn since(&self, earlier: &Gate) -> Gate {
        Gate {
            waits: self.waits.saturating_sub(earlier.waits),
            wakeups: self.wakeups.saturating_sub(earlier.wakeups),
            grants: self.grants.saturating_sub(earlier.grants),
            ..self.clone()
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Group {
    ios: u64,
    merges: u64,
    sectors: u64,
    nanoseconds: u64,
    latency_max_ns: u64,
    /// Pairs of a bucket's number and the count of latencies in it.
    latencies: Vec<(usize, u64)>,
    /// By name of the status.
    errors: BTreeMap<String, u64>,
    /// Counts of I/Os that failed before they became requests, by name of the status.
    #[serde(default)]
    refused: BTreeMap<String, u64>,
}

impl Statistics {
    /// Converts a snapshot taken at `time_ns`.
    pub fn new(snapshot: &StatsSnapshot, time_ns: u64, uptime_ns: u64) -> Statistics {
        let group = |group: &StatGroup| {
            let group = &snapshot[*group];
            let buckets = group.latency.buckets.iter().copied().enumerate();
            let by_status = |count: &dyn Fn(Status) -> u64| {
                let all = Status::ALL.iter().map(|status| (status.name().to_owned(), count(*status)));
                all.filter(|(_, count)| *count != 0).collect()
            };
            Group {
                ios: group.ios,
                merges: group.merges,
                sectors: group.sectors,
                nanoseconds: group.nanoseconds,
                latency_max_ns: group.latency.max_ns,
                latencies: buckets.filter(|(_, count)| *count != 0).collect(),
                errors: by_status(&|status| group.failed_with(status)),
                refused: by_status(&|status| group.refused_with(status)),
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
            hung: snapshot.hung,
            throttled: snapshot.throttled,
            held: snapshot.held,
            ..Statistics::default()
        }
    }

    /// Converts back to a snapshot. Names that this version does not know are ignored.
    pub fn snapshot(&self) -> StatsSnapshot {
        let mut snapshot = StatsSnapshot {
            in_flight: self.in_flight,
            in_flight_max: self.in_flight_max,
            busy_ns: self.busy_ns,
            clock_age_max_ns: self.clock_age_max_ns,
            hung: self.hung,
            throttled: self.throttled,
            held: self.held,
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
            for (i, status) in Status::ALL.iter().enumerate() {
                into.errors[i] = group.errors.get(status.name()).copied().unwrap_or(0);
                into.refused[i] = group.refused.get(status.name()).copied().unwrap_or(0);
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
    fn a_snapshot_survives_a_round_trip() {
        let mut snapshot =
            StatsSnapshot { in_flight: [1, 2], in_flight_max: [3, 4], busy_ns: 5, ..Default::default() };
        for (i, group) in snapshot.groups.iter_mut().enumerate() {
            let i = i as u64;
            (group.ios, group.merges, group.sectors, group.nanoseconds) = (10 + i, 20 + i, 30 + i, 40 + i);
            group.errors[Status::ALL.len() - 1] = 50 + i;
            group.refused[0] = 60 + i;
            (0..10).for_each(|n| group.latency.record(1000 * n + i));
        }
        snapshot.counters[Counter::Splits as usize] = 7;
        (snapshot.clock_age_max_ns, snapshot.hung, snapshot.throttled, snapshot.held) = (8, 9, 10, 11);
        let sent = serde_json::to_string(&Statistics::new(&snapshot, 1, 2)).unwrap();
        let received: Statistics = serde_json::from_str(&sent).unwrap();
        assert_eq!(received.snapshot(), snapshot);
    }

    #[test]
    fn the_counters_of_nbd_are_not_nested_in_json() {
        let counters = NbdCounters {
            connections: 2,
            refused_connections: 3,
            violations: 4,
            timeouts: 5,
            requests: 6,
            errors: 7,
            refused_requests: 8,
            read_bytes: 9,
            written_bytes: u64::MAX,
            split_reads: 16,
            receive_backoffs: 13,
            receives: 14,
            sends: 15,
        };
        let nbd = Nbd { connected: 1, counters };
        let text = r#"{"connected":1,"connections":2,"refused_connections":3,"violations":4,"timeouts":5,"requests":6,"errors":7,"refused_requests":8,"read_bytes":9,"written_bytes":18446744073709551615,"split_reads":16,"receive_backoffs":13,"receives":14,"sends":15}"#;
        assert_eq!(serde_json::to_string(&nbd).unwrap(), text);
        assert_eq!(serde_json::from_str::<Nbd>(text).unwrap(), nbd);
    }

    #[test]
    fn the_fullest_statistics_fit_the_protocol() {
        let mut snapshot = StatsSnapshot::default();
        for group in &mut snapshot.groups {
            group.latency.buckets.fill(1 << 44);
            group.errors.fill(1 << 44);
            group.refused.fill(1 << 44);
            (group.ios, group.nanoseconds) = (1 << 53, u64::MAX);
        }
        let line = serde_json::to_vec(&Statistics::new(&snapshot, u64::MAX, u64::MAX)).unwrap();
        assert!(line.len() < crate::control::LINE_BYTES_MAX / 2, "{}", line.len());
    }
}
