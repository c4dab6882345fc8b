mod page;
pub(super) mod report;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use blkq_protocol::control::statistics::Statistics;
use blkq_protocol::control::{Request, ask_if_there, not_accepting};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::state::StateDir;
use blkq_protocol::system::rfc3339;

use crate::devices::{device_names, name_of};
use crate::output::{exit_code, print, print_json};
use crate::usage;

use page::overview;
use report::Report;

/// The I/Os per second, and the MB (10^6 bytes) read and written per second, between two samples.
pub fn rates(before: &Statistics, now: &Statistics) -> (f64, f64) {
    let figures = Report::between("", before, now).figures;
    (figures.groups().map(|(_, group)| group.iops).sum(), figures.read.mb_per_s + figures.write.mb_per_s)
}

#[derive(clap::Args, Debug)]
#[command(
    override_usage = "blkq stat [OPTIONS] [NAME]... [INTERVAL [COUNT]]",
    after_help = "\
Without an interval, a report contains the totals and averages since the device was attached. With
an interval, each report covers one interval; the reports stop after COUNT, when the devices are
detached, or at Ctrl-C. A device whose name is a number can be reported with --interval only.

The report of one device is a page. iops, MB/s and merges/s are rates per second, and MB is 10^6
bytes. Latencies are in microseconds and include queueing. `queue` is the average number of requests
in flight.

The report of several devices, or of all if none is named, has a line per device with the columns of
iostat(1). await is in milliseconds; rMB and wMB are totals. docs/watching.md explains the report.

Examples:
  blkq stat                         # all devices, since they were attached
  blkq stat 1                       # all devices, every second
  blkq stat disk.img
  blkq stat disk.img 1 10 -t        # ten reports of a second each
  blkq stat disk.img --histogram
  blkq stat disk.img 0.5 --json | jq .read.latency_p99_us"
)]
pub struct Args {
    /// The devices, each by its name, image, URI or node in /dev [default: all]; then the seconds between
    /// reports, and the number of reports
    #[arg(add = device_names(), value_name = "NAME|INTERVAL|COUNT")]
    words: Vec<String>,
    /// Report all devices, as without names
    #[arg(long)]
    all: bool,
    /// Print a report every SECONDS
    ///
    /// A number among the arguments then names a device, and is no interval.
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    interval: Option<Duration>,
    /// Stop after N reports; needs an interval
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Print the time before each report
    #[arg(long, short = 't')]
    timestamp: bool,
    /// Print also the lines of operations and mechanisms that did nothing
    #[arg(long, short)]
    verbose: bool,
    /// Print the distribution of latencies; for one device, or with --json
    #[arg(long)]
    histogram: bool,
    /// Print one JSON object per device and report, each on a line
    ///
    /// "fields" contains the 17 fields of /sys/block/X/stat.
    #[arg(long)]
    json: bool,
}

fn parse_interval(text: &str) -> Result<Duration, &'static str> {
    usage::seconds(0.01..=86400.0, "an interval must be 0.01 to 86400 seconds")(text)
}

/// The names of devices (empty for all devices), the interval, and the number of reports.
type Plan = (Vec<String>, Option<Duration>, Option<u64>);

/// If one device is named, fails if it does not exist, or its daemon has died or does not answer. With
/// several devices, such a device is reported on standard error, and makes the exit code 1.
pub fn run(args: Args) -> Outcome<ExitCode> {
    let (names, interval, count) = args.plan().unwrap_or_else(|why| usage::exit::<Args>(why));
    let dir = StateDir::locate()?;
    // A word that matches no device is kept, and is reported below.
    let name = |word: String| Ok(name_of(&dir, &word)?.unwrap_or(word));
    let names = names.into_iter().map(name).collect::<Outcome<_>>()?;
    let mut devices = Devices { dir, names, failed: BTreeMap::new() };
    let mut before = devices.sample()?;
    for name in devices.names.clone() {
        if !before.contains_key(&name) && !devices.failed.contains_key(&name) {
            let failure = not_accepting(&devices.dir, &name);
            devices.fail(name, failure)?;
        }
    }
    let Some(interval) = interval else {
        args.print(before.iter().map(|(name, now)| Report::whole(name, now)).collect(), &devices, false)?;
        return Ok(exit_code(!devices.failed.is_empty()));
    };
    for _ in 0..count.unwrap_or(u64::MAX) {
        std::thread::sleep(interval);
        let now = devices.sample()?;
        // All named devices have been detached.
        if now.is_empty() && !devices.names.is_empty() {
            break;
        }
        let reports = now.iter().map(|(name, now)| match before.get(name) {
            Some(before) => Report::between(name, before, now),
            None => Report::whole(name, now),
        });
        args.print(reports.collect(), &devices, true)?;
        before = now;
    }
    Ok(exit_code(!devices.failed.is_empty()))
}

impl Args {
    /// Names of devices come first; one or two numbers at the end are the interval and the count.
    fn plan(&self) -> Result<Plan, String> {
        let mut names = self.words.clone();
        let (mut interval, mut count) = (self.interval, self.count);
        if interval.is_none() {
            let is_number = |word: &&String| word.parse::<f64>().is_ok_and(f64::is_finite);
            let numbers = names.iter().rev().take(2).take_while(is_number).count();
            let mut numbers = names.split_off(names.len() - numbers).into_iter();
            interval = numbers.next().map(|text| parse_interval(&text)).transpose()?;
            if let Some(text) = numbers.next() {
                let number = text.parse().ok().filter(|number| *number > 0);
                count = Some(number.ok_or("the number of reports must be a whole number from 1")?);
            }
        }
        if count.is_some() && interval.is_none() {
            return Err("--count needs an interval; give INTERVAL, too".to_owned());
        }
        if self.all && !names.is_empty() {
            return Err("--all means all devices; omit the names".to_owned());
        }
        if self.histogram && names.len() != 1 && !self.json {
            return Err("--histogram needs the name of one device, or --json".to_owned());
        }
        names.dedup();
        Ok((names, interval, count))
    }

    fn print(&self, reports: Vec<Report>, devices: &Devices, again: bool) -> Outcome {
        if self.json {
            return reports.into_iter().try_for_each(|report| print_json(&report.json(self.histogram)));
        }
        let mut text = match (&reports[..], &devices.names[..]) {
            ([report], [_]) => report.page(self.histogram, self.verbose),
            _ => overview(&reports, self.verbose),
        };
        if self.timestamp {
            text.insert_str(0, &(rfc3339(SystemTime::now()) + "\n"));
        }
        if again {
            text.push('\n');
        }
        print(&text)
    }
}

struct Devices {
    dir: StateDir,
    /// Empty for all devices that exist when a sample is taken.
    names: Vec<String>,
    /// The devices whose last sample failed, and why.
    failed: BTreeMap<String, Failure>,
}

impl Devices {
    /// Devices that do not exist are missing from the result. Fails only if a single device is named.
    fn sample(&mut self) -> Outcome<BTreeMap<String, Statistics>> {
        let are_all = self.names.is_empty();
        let names = if are_all { self.dir.names()? } else { self.names.clone() };
        let mut samples = BTreeMap::new();
        for name in names {
            if !are_all && self.failed.contains_key(&name) {
                continue;
            }
            match ask_if_there::<Option<Statistics>>(&self.dir, &name, &Request::Stat {}) {
                Ok(statistics) => {
                    self.failed.remove(&name);
                    samples.extend(statistics.flatten().map(|statistics| (name, statistics)));
                }
                Err(failure) => self.fail(name, failure)?,
            }
        }
        Ok(samples)
    }

    /// A failure that repeats in the next samples is reported once.
    fn fail(&mut self, name: String, failure: Failure) -> Outcome {
        if self.names.len() == 1 {
            return Err(failure);
        }
        if self.failed.get(&name) != Some(&failure) {
            print_error(&failure);
            self.failed.insert(name, failure);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn plan(words: &str) -> Result<Plan, String> {
        let line = ["blkq", "stat"].into_iter().chain(words.split_whitespace());
        let super::super::Command::Stat(args) = super::super::Cli::parse_from(line).command else {
            panic!("{words}")
        };
        args.plan()
    }

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(parse_interval(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn numbers_at_the_end_are_interval_and_count() {
        let expect = |words: &str, names: &[&str], seconds: Option<u64>, count: Option<u64>| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let interval = seconds.map(Duration::from_secs);
            assert_eq!(plan(words), Ok((names, interval, count)), "{words}");
        };
        expect("", &[], None, None);
        expect("--all", &[], None, None);
        expect("2", &[], Some(2), None);
        expect("2 3", &[], Some(2), Some(3));
        expect("a", &["a"], None, None);
        expect("a b 2", &["a", "b"], Some(2), None);
        expect("a 2 3", &["a"], Some(2), Some(3));
        expect("7 2 3", &["7"], Some(2), Some(3));
        expect("nan inf", &["nan", "inf"], None, None);
        expect("7 --interval 2", &["7"], Some(2), None);
        expect("a --interval 2 --count 3", &["a"], Some(2), Some(3));
        for bad in ["a 0", "a 1 0", "a 1 1.5", "--count 2", "a --all", "--histogram", "a b --histogram"] {
            assert!(plan(bad).is_err(), "{bad}");
        }
    }
}
