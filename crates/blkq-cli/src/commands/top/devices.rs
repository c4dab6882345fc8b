//! The devices of a view: what each did between its last two samples, and before.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::row::Row;
use crate::commands::stat::report::Report;
use crate::failure::Outcome;
use crate::statistics::Statistics;

/// A daemon that has not answered for so long is marked as silent.
pub const SILENT_AFTER: Duration = Duration::from_secs(1);
/// So many samples of a device are kept for its heat map: the width of a wide terminal.
const COLUMNS_MAX: usize = 512;
/// Powers of two of nanoseconds by which latencies are counted there.
pub const POWERS: usize = 41;

/// How many latencies of an interval were below each power of two and not below the one before;
/// `None` without a sample.
pub type Column = Option<[u32; POWERS]>;

/// One device.
#[derive(Default)]
pub struct Device {
    last: Option<Statistics>,
    /// Of the time between the last two samples.
    report: Option<Report>,
    /// Why there is none.
    trouble: Option<String>,
    /// When its daemon was asked what it has not answered.
    asked: Option<Instant>,
    silent_seconds: Option<u64>,
    columns: VecDeque<Column>,
}

impl Device {
    /// The figures of the last interval, unless they are not known.
    pub fn report(&self) -> Option<&Report> {
        self.report.as_ref().filter(|_| self.trouble().is_none())
    }

    /// Why they are not.
    pub fn trouble(&self) -> Option<String> {
        let silent = |seconds| format!("its daemon has not answered for {seconds} s");
        self.silent_seconds.map(silent).or_else(|| self.trouble.clone())
    }

    /// The latencies of its intervals, the latest first.
    pub fn columns(&self) -> &VecDeque<Column> {
        &self.columns
    }

    fn push(&mut self, column: Column) {
        self.columns.truncate(COLUMNS_MAX - 1);
        self.columns.push_front(column);
    }

    fn measured(&mut self, name: &str, now: Statistics) {
        self.trouble = None;
        // Of one that was there before, there is no interval yet.
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

/// All devices, by name.
#[derive(Default)]
pub struct Devices(BTreeMap<String, Device>);

impl Devices {
    /// Their daemons were asked at `now`. Those that are not among the `names` are detached.
    pub fn asked(&mut self, names: Vec<String>, now: Instant) {
        self.0.retain(|name, _| names.contains(name));
        for name in names {
            let device = self.0.entry(name).or_default();
            match device.asked {
                None => device.asked = Some(now),
                Some(_) => device.push(None),
            }
        }
        self.mark_silent(now);
    }

    /// A daemon answered.
    pub fn answered(&mut self, name: &str, outcome: Outcome<Option<Statistics>>) {
        let Some(device) = self.0.get_mut(name) else { return };
        (device.asked, device.silent_seconds) = (None, None);
        match outcome {
            Ok(Some(statistics)) => device.measured(name, statistics),
            Ok(None) => {
                *device = Device { trouble: Some("starting or stopping".to_owned()), ..Device::default() }
            }
            Err(failure) => {
                let text = failure.to_string();
                let own = text.strip_prefix(name).and_then(|text| text.strip_prefix(": "));
                device.trouble = Some(own.unwrap_or(&text).to_owned());
                device.push(None);
            }
        }
    }

    /// Marks those whose answers are late at `now`.
    pub fn mark_silent(&mut self, now: Instant) {
        for device in self.0.values_mut() {
            let waited = device.asked.map(|asked| now.saturating_duration_since(asked));
            device.silent_seconds =
                waited.filter(|waited| *waited >= SILENT_AFTER).map(|waited| waited.as_secs());
        }
    }

    /// The device `name`, if it is there.
    pub fn get(&self, name: &str) -> Option<&Device> {
        self.0.get(name)
    }

    /// A row for each device, by name.
    pub fn rows(&self) -> Vec<Row> {
        self.0.iter().map(|(name, device)| Row::new(name, device.report(), device.trouble())).collect()
    }
}

#[cfg(test)]
pub mod tests {
    use blkq::{Counter, StatGroup, StatsSnapshot};

    use super::*;
    use crate::failure::Failure;
    use crate::statistics::{Nbd, QueueSums};

    /// A device at `second` of its life that did `ios` reads of 4 KiB so far, each of `latency_ns`.
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
    fn a_first_sample_has_no_rates_and_the_second_those_between() {
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
            // 100 more in two seconds, of a millisecond.
            let mut snapshot = later.snapshot();
            let read = &mut snapshot.groups[StatGroup::Read as usize];
            read.ios += 100;
            (0..100).for_each(|_| read.latency.record(1_000_000));
            // One of its two queues waited for a second of them.
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
        assert!((1_000.0..1_125.0).contains(&p50), "not of the time before: {p50}");
        let column = devices.get("a").unwrap().columns()[0].unwrap();
        assert_eq!(column.iter().sum::<u32>(), 100);
        assert_eq!(column[20], 100, "below 2^20 ns, and not below 2^19");
    }

    #[test]
    fn devices_come_go_are_silent_and_die() {
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
        devices.answered("b", Err(Failure::new("b: its daemon died (killed); attach it again")));
        devices.mark_silent(later);
        let rows = devices.rows();
        assert_eq!(rows[0].error.as_deref(), Some("its daemon has not answered for 3 s"));
        assert_eq!(rows[0].iops, None, "not those of before");
        assert_eq!(rows[1].error.as_deref(), Some("its daemon died (killed); attach it again"));
        // The time without samples is a gap, and a late answer covers all of it.
        devices.asked(names(&["a", "b"]), later);
        assert_eq!(devices.get("a").unwrap().columns()[0], None);
        devices.answered("a", Ok(Some(statistics(5, 500, 1_000))));
        assert_eq!(devices.rows()[0].iops, Some(100.0));
    }

    #[test]
    fn a_device_attached_anew_begins_anew() {
        let mut devices = Devices::default();
        let mut again = statistics(9, 50, 1_000);
        for statistics in [statistics(0, 100, 1_000), {
            again.uptime_ns = 2_000_000_000;
            again
        }] {
            devices.asked(vec!["a".to_owned()], Instant::now());
            devices.answered("a", Ok(Some(statistics)));
        }
        assert_eq!(devices.rows()[0].iops, Some(25.0), "of its two seconds");
    }
}
