//! `blkq stat`: what a device did since it was attached, or did in each interval.

mod histogram;
mod report;

use std::time::Duration;

use crate::control::{Request, ask};
use crate::failure::Outcome;
use crate::state::StateDir;
use crate::statistics::Statistics;
use crate::{print, print_json};

use report::Report;

/// Options of `stat`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Without --interval: the averages since the device was attached. With it: one report per
interval, until interrupted or the device is gone. iops and merges are per second, MB is
10^6 bytes, latencies are in microseconds and include queueing; queue is how many
requests were in flight on average. docs/watching.md explains every line.

Examples:
  blkq stat disk.img
  blkq stat disk.img --interval 1
  blkq stat disk.img --histogram
  blkq stat disk.img --interval 0.5 --json | jq .read.latency_p99_us")]
pub struct Args {
    /// The device, as `blkq list` names it
    name: String,
    /// Report again and again, after so many seconds each
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    interval: Option<Duration>,
    /// Show how latencies are distributed
    #[arg(long)]
    histogram: bool,
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
            return self.print(Report::whole(&self.name, &before));
        };
        loop {
            std::thread::sleep(interval);
            let now = read()?;
            self.print(Report::between(&self.name, &before, &now))?;
            before = now;
        }
    }

    fn print(&self, report: Report) -> Outcome {
        if self.json {
            return print_json(&report.json(self.histogram));
        }
        // Reports that follow each other are parted by an empty line.
        let end = if self.interval.is_some() { "\n" } else { "" };
        print(&(report.page(self.histogram) + end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(parse_interval(bad).is_err(), "{bad}");
        }
    }
}
