//! The devices that `top` shows, with their figures of the last interval and earlier latencies.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::failure::Outcome;

use super::row::Row;
use crate::commands::stat::report::Report;

const SILENT_AFTER_S: u64 = 1;
/// The number of intervals whose latencies are stored for the heat map: the width of a wide terminal.
const COLUMNS_MAX: usize = 512;
/// Range `n` of the heat map ends at 2^n nanoseconds; the last one also counts everything above.
pub const POWERS: usize = 41;

/// The number of latencies in each range, in one interval. `None` if the daemon did not answer.
pub type Column = Option<[u32; POWERS]>;

#[derive(Default)]
pub struct Device {
    last: Option<Statistics>,
    report: Option<Report>,
    trouble: Option<String>,
    /// When the request was sent that the daemon has not answered yet.
    asked: Option<Instant>,
    silent_seconds: Option<u64>,
    /// Columns of the heat map, the latest first.
    pub columns: VecDeque<Column>,
}

impl Device {
    pub fn report(&self) -> Option<&Report> {
        self.report.as_ref().filter(|_| self.trouble().is_none())
    }

    pub fn trouble(&self) -> Option<String> {
        let silent = |seconds| format!("the daemon has not answered for {seconds} s");
        self.silent_seconds.map(silent).or_else(|| self.trouble.clone())
    }

    fn push(&mut self, column: Column) {
        self.columns.truncate(COLUMNS_MAX - 1);
        self.columns.push_front(column);
    }

    fn measured(&mut self, name: &str, now: Statistics) {
        self.trouble = None;
        // The first sample of a device ends no interval.
        let Some(before) = self.last.replace(now) else { return };
        let Some(now) = &self.last else { return };
        let report = Report::between(name, &before, now);
        let counts = report.latencies().below_powers(0, POWERS as u32 - 1);
        let mut column = [0; POWERS];
        let mut below = 0;
        for (cell, (_, count)) in column.iter_mut().zip(counts) {
            *cell = u32::try_from(count - below).unwrap_or(u32::MAX);
            below = count;
        }
        self.push(Some(column));
        self.report = Some(report);
    }
}

#[derive(Default)]
pub struct Devices(BTreeMap<String, Device>);

impl Devices {
    /// The daemons of the devices `names` were asked at `now`. All other devices have been detached.
    pub fn asked(&mut self, names: Vec<String>, now: Instant) {
        self.0.retain(|name, _| names.contains(name));
        for name in names {
            let device = self.0.entry(name).or_default();
            match device.asked {
                None => device.asked = Some(now),
                Some(_) => device.push(None),
            }
        }
    }

    pub fn answered(&mut self, name: &str, outcome: Outcome<Option<Statistics>>) {
        let Some(device) = self.0.get_mut(name) else { return };
        (device.asked, device.silent_seconds) = (None, None);
        match outcome {
            Ok(Some(statistics)) => device.measured(name, statistics),
            Ok(None) => {
                *device = Device { trouble: Some("starting or stopping".to_owned()), ..Device::default() }
            }
            Err(failure) => {
                device.trouble = Some(failure.without_object(name).to_owned());
                device.push(None);
            }
        }
    }

    pub fn mark_silent(&mut self, now: Instant) {
        for device in self.0.values_mut() {
            let waited = device.asked.map(|asked| now.saturating_duration_since(asked).as_secs());
            device.silent_seconds = waited.filter(|seconds| *seconds >= SILENT_AFTER_S);
        }
    }

    pub fn get(&self, name: &str) -> Option<&Device> {
        self.0.get(name)
    }

    pub fn rows(&self) -> Vec<Row> {
        self.0.iter().map(|(name, device)| Row::new(name, device.report(), device.trouble())).collect()
    }
}

#[cfg(test)]
pub mod tests {
    use std::time::Duration;

    use blkq::{Counter, StatGroup, StatsSnapshot};
    use blkq_protocol::control::statistics::{Nbd, QueueSums};
    use blkq_protocol::failure::Failure;

    use super::*;

    /// The counters of a device `second` seconds after its attach, with `ios` reads of 4 KiB.
    pub fn statistics(second: u64, ios: u64, latency_ns: u64) -> Statistics {
        let mut snapshot =
            StatsSnapshot { in_flight: [3, 0], busy_ns: second * 500_000_000, ..Default::default() };
        let read = &mut snapshot.groups[StatGroup::Read as usize];
        (read.ios, read.merges, read.sectors) = (ios, ios / 2, ios * 8);
        read.nanoseconds = ios * latency_ns;
        (0..ios).for_each(|_| read.latency.record(latency_ns));
        let ns = second * 1_000_000_000;
        let mut statistics = Statistics::new(&snapshot, 1_000_000_000_000 + ns, 3_600_000_000_000 + ns);
        statistics.nbd = Some(Nbd { connected: 2, ..Nbd::default() });
        statistics.queues = [6, 4]
            .map(|tenths| QueueSums {
                ios: ios * tenths / 10,
                sectors: ios * tenths / 10 * 8,
                nanoseconds: ios * tenths / 10 * latency_ns,
                ..QueueSums::default()
            })
            .into();
        statistics
    }

    #[test]
    fn rates_are_computed_between_two_samples() {
        let mut devices = Devices::default();
        let now = Instant::now();
        devices.asked(vec!["a".to_owned()], now);
        devices.answered("a", Ok(Some(statistics(0, 1000, 1_000))));
        assert!(
            devices.get("a").is_some_and(|device| device.report().is_none() && device.trouble().is_none())
        );
        devices.asked(vec!["a".to_owned()], now);
        let later = statistics(2, 1000, 1_000);
        let later = {
            // 100 more reads in two seconds, each with a latency of 1 ms.
            let mut snapshot = later.snapshot();
            let read = &mut snapshot.groups[StatGroup::Read as usize];
            read.ios += 100;
            (0..100).for_each(|_| read.latency.record(1_000_000));
            // One of the two queues waited for a limit for one of the two seconds.
            snapshot.counters[Counter::ThrottledNs as usize] = 1_000_000_000;
            let mut now = Statistics::new(&snapshot, later.time_ns, later.uptime_ns);
            now.queues = later.queues;
            now
        };
        devices.answered("a", Ok(Some(later)));
        let row = &devices.rows()[0];
        assert_eq!((row.iops, row.in_flight), (Some(50.0), Some(3)));
        assert_eq!(row.throttled_percent, Some(25.0));
        let p50 = row.latency_p50_us.unwrap();
        assert!((1_000.0..1_125.0).contains(&p50), "earlier latencies must not count: {p50}");
        let column = devices.get("a").unwrap().columns[0].unwrap();
        assert_eq!(column.iter().sum::<u32>(), 100);
        assert_eq!(column[20], 100, "below 2^20 ns, and not below 2^19");
    }

    #[test]
    fn detached_silent_and_dead_devices_are_shown_as_such() {
        let mut devices = Devices::default();
        let begin = Instant::now();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for second in 0..2 {
            devices.asked(names(&["a", "b", "c"]), begin);
            for name in ["a", "b", "c"] {
                devices.answered(name, Ok(Some(statistics(second, second * 100, 1_000))));
            }
        }
        let later = begin + Duration::from_secs(3);
        devices.asked(names(&["a", "b"]), begin);
        assert!(devices.get("c").is_none());
        devices.answered("c", Ok(None));
        devices.answered("b", Err(Failure::new("b: the daemon was killed or crashed; attach it again")));
        devices.mark_silent(later);
        let rows = devices.rows();
        assert_eq!(rows[0].error.as_deref(), Some("the daemon has not answered for 3 s"));
        assert_eq!(rows[0].iops, None, "the figures of the previous interval must not be shown");
        assert_eq!(rows[1].error.as_deref(), Some("the daemon was killed or crashed; attach it again"));
        // An interval without an answer is a gap in the map. A late answer covers the time since the last
        // sample.
        devices.asked(names(&["a", "b"]), later);
        assert_eq!(devices.get("a").unwrap().columns[0], None);
        devices.answered("a", Ok(Some(statistics(5, 500, 1_000))));
        assert_eq!(devices.rows()[0].iops, Some(100.0));
    }

    #[test]
    fn a_device_that_was_attached_again_starts_at_zero() {
        let mut devices = Devices::default();
        let mut again = statistics(9, 50, 1_000);
        for statistics in [statistics(0, 100, 1_000), {
            again.uptime_ns = 2_000_000_000;
            again
        }] {
            devices.asked(vec!["a".to_owned()], Instant::now());
            devices.answered("a", Ok(Some(statistics)));
        }
        assert_eq!(devices.rows()[0].iops, Some(25.0), "50 reads in the two seconds since the second attach");
    }
}
