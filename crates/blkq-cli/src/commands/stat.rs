//! `blkq stat`: what a device did since it was attached, or did in each interval.

use std::time::Duration;

use blkq::StatGroup;
use blkq::stats::GroupSnapshot;
use blkq::{Counter, StatsSnapshot, Status};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::control::{Request, ask};
use crate::failure::Outcome;
use crate::state::StateDir;
use crate::statistics::Statistics;
use crate::table::{Align, render};
use crate::{print, print_json};

/// Options of `stat`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Without --interval: the averages since the device was attached. With it: one report per
interval, until interrupted or the device is gone. iops and merges are per second, MB is
10^6 bytes, latencies are in microseconds and include queueing; queue is how many
requests were in flight on average, in-flight how many are now.

Examples:
  blkq stat disk.img
  blkq stat disk.img --interval 1
  blkq stat disk.img --interval 0.5 --json | jq .read.latency_p99_us")]
pub struct Args {
    /// The device, as `blkq list` names it
    name: String,
    /// Report again and again, after so many seconds each
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    interval: Option<Duration>,
    /// One JSON object per report and line; "fields" are the 17 of /sys/block/X/stat
    #[arg(long)]
    json: bool,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=86400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "an interval is from 0.01 to 86400 seconds".to_owned())
}

impl Args {
    /// Prints one report, or one per interval.
    ///
    /// # Errors
    /// If there is no such device, or it goes away.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let read = || ask::<Statistics>(&dir, &self.name, &Request::Stat {});
        let mut before = read()?;
        let Some(interval) = self.interval else {
            let snapshot = before.snapshot();
            return self.print(&Report::new(&self.name, &snapshot, &snapshot, before.uptime_ns));
        };
        let mut totals = before.snapshot();
        loop {
            std::thread::sleep(interval);
            let now = read()?;
            let snapshot = now.snapshot();
            let elapsed_ns = now.time_ns.saturating_sub(before.time_ns);
            self.print(&Report::new(&self.name, &snapshot.delta(&totals), &snapshot, elapsed_ns))?;
            (before, totals) = (now, snapshot);
        }
    }

    fn print(&self, report: &Report) -> Outcome {
        if self.json {
            return print_json(report);
        }
        // Reports that follow each other are parted by an empty line.
        let end = if self.interval.is_some() { "\n" } else { "" };
        print(&(report.page() + end))
    }
}

/// One report.
#[derive(Serialize)]
struct Report {
    name: String,
    /// The time that it covers.
    seconds: f64,
    read: GroupReport,
    write: GroupReport,
    discard: GroupReport,
    flush: GroupReport,
    /// Requests in flight now.
    in_flight: u64,
    /// The most that ever were in flight: reads, and all others.
    in_flight_max: [u64; 2],
    /// Requests in flight on average.
    queue: f64,
    /// Part of the time with anything in flight, in percent.
    busy_percent: f64,
    /// Counted in the time that the report covers.
    counters: Map<String, Value>,
    /// The longest that a cached reading of the clock was used since the device was attached.
    clock_age_max_us: f64,
    /// Counted since the device was attached: the fields of /sys/block/X/stat.
    fields: [u64; 17],
}

/// What a report says of one kind of operation.
#[derive(Serialize)]
struct GroupReport {
    iops: f64,
    mb_per_s: f64,
    merges_per_s: f64,
    latency_average_us: f64,
    latency_p99_us: f64,
    latency_max_us: f64,
    /// Failed in the time that the report covers, by the name of the status.
    errors: Map<String, Value>,
}

impl Report {
    /// `during` is what was counted in `elapsed_ns`, `totals` what was counted so far.
    fn new(name: &str, during: &StatsSnapshot, totals: &StatsSnapshot, elapsed_ns: u64) -> Report {
        // Nothing divides by zero below; a report of no time shows no rates.
        let seconds = elapsed_ns as f64 / 1e9;
        let group = |group| GroupReport::new(&during[group], seconds);
        let waited_ns: u64 = during.groups.iter().map(|group| group.nanoseconds).sum();
        let counters =
            Counter::ALL.iter().map(|counter| (counter.name().into(), during.counter(*counter).into()));
        Report {
            name: name.to_owned(),
            seconds: round(seconds, 1e6),
            read: group(StatGroup::Read),
            write: group(StatGroup::Write),
            discard: group(StatGroup::Discard),
            flush: group(StatGroup::Flush),
            in_flight: totals.in_flight.iter().sum(),
            in_flight_max: totals.in_flight_max,
            queue: rate(waited_ns as f64 / 1e9, seconds),
            busy_percent: rate(during.busy_ns as f64 / 1e7, seconds).min(100.0),
            counters: counters.collect(),
            clock_age_max_us: totals.clock_age_max_ns as f64 / 1e3,
            fields: totals.fields(),
        }
    }

    fn page(&self) -> String {
        let heads = ["", "iops", "MB/s", "merges/s", "avg us", "p99 us", "max us", "errors"];
        let mut rows = vec![heads.map(str::to_owned)];
        rows[0][0] = self.name.clone();
        let groups = [&self.read, &self.write, &self.discard, &self.flush];
        for (name, group) in StatGroup::ALL.iter().zip(groups) {
            let errors: Vec<String> =
                group.errors.iter().map(|(name, count)| format!("{name}:{count}")).collect();
            // Wide enough that the columns of most reports stand below each other.
            rows.push([
                format!("{:8}", name.name()),
                format!("{:8.0}", group.iops),
                format!("{:8.2}", group.mb_per_s),
                format!("{:8.0}", group.merges_per_s),
                format!("{:8.1}", group.latency_average_us),
                format!("{:8.1}", group.latency_p99_us),
                format!("{:8.1}", group.latency_max_us),
                if errors.is_empty() { "0".to_owned() } else { errors.join(",") },
            ]);
        }
        use Align::{Left, Right};
        let table = render([Left, Right, Right, Right, Right, Right, Right, Right], &rows);
        let (in_flight, queue, busy, seconds) = (self.in_flight, self.queue, self.busy_percent, self.seconds);
        format!("{table}in-flight {in_flight}  queue {queue:.2}  busy {busy:.1}%  over {seconds:.1} s\n")
    }
}

impl GroupReport {
    fn new(group: &GroupSnapshot, seconds: f64) -> GroupReport {
        let errors = Status::ALL.iter().map(|status| (status.name(), group.failed_with(*status)));
        GroupReport {
            iops: rate(group.ios as f64, seconds),
            mb_per_s: rate(group.sectors as f64 * 512.0 / 1e6, seconds),
            merges_per_s: rate(group.merges as f64, seconds),
            latency_average_us: group.mean_ns() as f64 / 1e3,
            latency_p99_us: group.latency.percentile_ns(99.0) as f64 / 1e3,
            latency_max_us: group.latency.max_ns as f64 / 1e3,
            errors: errors.filter(|(_, n)| *n != 0).map(|(name, n)| (name.to_owned(), n.into())).collect(),
        }
    }
}

fn rate(count: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { round(count / seconds, 1e3) } else { 0.0 }
}

fn round(value: f64, steps: f64) -> f64 {
    (value * steps).round() / steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_in_units_per_second() {
        let mut snapshot = StatsSnapshot { in_flight: [3, 1], busy_ns: 500_000_000, ..Default::default() };
        let read = &mut snapshot.groups[StatGroup::Read as usize];
        (read.ios, read.merges, read.sectors, read.nanoseconds) = (100, 50, 800, 1_000_000_000);
        (0..99).for_each(|_| read.latency.record(1_000));
        read.latency.record(1_000_000);
        let report = Report::new("a", &snapshot, &snapshot, 2_000_000_000);
        assert_eq!((report.read.iops, report.read.merges_per_s), (50.0, 25.0));
        assert_eq!(report.read.mb_per_s, 0.205);
        assert_eq!(report.read.latency_average_us, 10_000.0);
        assert!((1.0..1.2).contains(&report.read.latency_p99_us));
        assert_eq!((report.queue, report.busy_percent, report.in_flight), (0.5, 25.0, 4));
        let page = report.page();
        let lines: Vec<&str> = page.lines().collect();
        assert_eq!(lines.len(), 6);
        assert!(lines[..5].iter().all(|line| line.len() == lines[0].len()), "{page}");
        let none = Report::new("a", &StatsSnapshot::default(), &StatsSnapshot::default(), 0);
        assert_eq!((none.read.iops, none.queue), (0.0, 0.0));
    }

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(parse_interval(bad).is_err(), "{bad}");
        }
    }
}
