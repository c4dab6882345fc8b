//! Table `limit`: `--limit auto` compared with no limit, on a model of a cloud disk, whose provider limits the
//! rate, and on the file.

use std::sync::Arc;
use std::time::Duration;

use blkq::disk::AutoLimiter;
use blkq::throttle::Ceiling;
use blkq::{Disk, Driver, StatGroup};
use blkq_drivers::model::{ModelCompletion, RateModel};

use super::{direct_reader, model};
use crate::bench::{Bench, case};
use crate::load::{Load, local};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost};
use crate::result::{Comparison, Table};
use crate::{Result, What};

const DEPTH: usize = 32;
/// The modelled disk: 10,000 IOPS, in a token bucket that is refilled every 50 ms.
const MODEL: RateModel =
    RateModel { iops: 10_000, bytes_per_second: 0, refill_ns: 50_000_000, burst_ns: 0, service_ns: 200_000 };
/// Length, and maximum number, of the runs that search for the ceiling of a disk before it is measured.
const SEARCH: Duration = Duration::from_secs(4);
const SEARCHES: usize = 3;
/// Minimum length of a run in seconds: 10 refills of the modelled disk's bucket.
const SECONDS_MIN: f64 = 0.5;

/// Starts a limit that follows the ceiling of `disk`, and runs `load` until the ceiling is found, at most [`SEARCHES`]
/// times. Dropping the result stops the limit.
fn search(disk: &Arc<Disk>, load: &Load) -> Result<AutoLimiter> {
    let limiter = AutoLimiter::start(disk)?;
    for _ in 0..SEARCHES {
        local::run(disk, load, SEARCH)?;
        if has_ceiling(disk) {
            break;
        }
    }
    Ok(limiter)
}

fn has_ceiling(disk: &Disk) -> bool {
    matches!(disk.ceiling(), Ceiling::Found(_))
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    bench.pace.seconds = bench.pace.seconds.max(SECONDS_MIN);
    let mut table = Table::new(
        What::Limit,
        "limit: a limit that finds the device's ceiling and keeps the rate just below it",
    );
    let load = Load::new("randread", DEPTH);
    let (path, _) = bench.file();
    let model = || model(1 << 40, ModelCompletion::RateLimited(MODEL));
    let title = "modelled disk of 10,000 IOPS, 4 KiB random read";
    let (modelled, model_found) = compare(bench, title, &load, model)?;
    let title = "the file, direct, 4 KiB random read";
    let (on_file, file_found) = compare(bench, title, &load, || direct_reader(&path))?;
    let p99 = ratio(&modelled, Metric::LatencyP99Us);
    table.target("modelled disk: 99th percentile, limit / no limit", p99, AtMost(1.0 / 3.0));
    for (device, comparison) in [("modelled disk", &modelled), ("the file", &on_file)] {
        let iops = ratio(comparison, Metric::Iops);
        table.target(format!("{device}: throughput, limit / no limit"), iops, AtLeast(0.97));
    }
    table.comparisons = vec![modelled, on_file];
    let of_model = if model_found {
        "the modelled disk has a token bucket that is refilled every 50 ms: at its ceiling, the disk completes most \
         I/Os directly after a refill, and the others wait for the next refill"
    } else {
        "the ceiling of the modelled disk was not found, so no limit is active; repeat the measurement on a machine with \
         less load"
    };
    let of_file = if file_found {
        "the file: a ceiling was found, because the latency is several times lower at a slightly lower rate, so the \
         limit is active"
    } else {
        "the file: no ceiling was found, so no limit is active"
    };
    table.notes = vec![of_model.to_owned(), of_file.to_owned()];
    Ok(table)
}

/// Compares a disk without and one with a limit; both exist for all rounds. Also returns whether a ceiling was found.
fn compare(
    bench: &mut Bench,
    title: &str,
    load: &Load,
    driver: impl Fn() -> Result<Box<dyn Driver>>,
) -> Result<(Comparison, bool)> {
    let open = || -> Result<Arc<Disk>> { Ok(Disk::builder(driver()?).build()?) };
    let (plain, limited) = (open()?, open()?);
    let _limiter = bench.progress.aside(|_| search(&limited, load))?;
    let on = |disk: Arc<Disk>| {
        move |length| -> Result<Run> {
            let before = disk.stats();
            let run = local::run(&disk, load, length)?;
            let statistics = disk.stats().delta(&before);
            let us = |percent| statistics[StatGroup::Read].latency.percentile_ns(percent) as f64 / 1e3;
            Ok(run.with(Metric::LatencyP50Us, us(50.0)).with(Metric::LatencyP99Us, us(99.0)))
        }
    };
    let cases = vec![case("no limit", on(plain)), case("auto", on(limited.clone()))];
    let mut comparison = bench.compare(title, cases)?;
    let metrics = [Metric::Iops, Metric::LatencyP50Us, Metric::LatencyP99Us];
    comparison.add_effects("limit", "no limit", "auto", metrics.map(|metric| (metric, None)));
    Ok((comparison, has_ceiling(&limited)))
}

fn ratio(comparison: &Comparison, metric: Metric) -> f64 {
    comparison.median("auto", metric) / comparison.median("no limit", metric)
}
