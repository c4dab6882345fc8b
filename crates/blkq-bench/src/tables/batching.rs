//! Table `batching`: a woken submitter gets up to 32 requests, compared with one.

use std::sync::Arc;
use std::time::Duration;

use blkq::gate::{BATCH_REQUESTS, GateCounters};
use blkq::{Disk, Driver};
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};
use blkq_drivers::model::{ModelCompletion, SeekModel};

use super::{driver_counter, model, notes, null};
use crate::bench::{Bench, case};
use crate::load::{Load, submitters};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost, Exactly};
use crate::result::{Comparison, Table};
use crate::{Result, What};

const SUBMITTERS: usize = 64;
/// Tags of the device, per direction.
const DEPTH: u16 = 128;
/// Maximum I/Os in flight of a submitter: twice the largest batch, so that the gate is the limit. All submitters
/// together want 32 times the depth.
const WINDOW: usize = 2 * BATCH_REQUESTS as usize;
/// The modelled disk is this factor faster than a real disk.
const DISK_SPEED: u64 = 100;
/// Size of the modelled disk, and of the null device.
const DEVICE_BYTES: u64 = 64 << 30;
/// Minimum length of a run on the modelled disk, in seconds: twice the time in which each submitter submits one
/// batch.
const DISK_SECONDS_MIN: f64 = 0.3;

/// A disk with 7200 rpm and 150 MB/s, made faster by [`DISK_SPEED`].
fn disk_model() -> SeekModel {
    let real = SeekModel::default();
    SeekModel {
        seek_min_ns: real.seek_min_ns / DISK_SPEED,
        seek_max_ns: real.seek_max_ns / DISK_SPEED,
        rotation_half_ns: real.rotation_half_ns / DISK_SPEED,
        bytes_per_second: real.bytes_per_second * DISK_SPEED,
        command_ns: real.command_ns / DISK_SPEED,
    }
}

struct Devices {
    off: Arc<Disk>,
    on: Arc<Disk>,
}

impl Devices {
    fn new(merge: bool, driver: impl Fn() -> Result<Box<dyn Driver>>) -> Result<Devices> {
        let device = |batching| -> Result<Arc<Disk>> {
            Ok(Disk::builder(driver()?).depth(DEPTH).merge(merge).batching(batching).build()?)
        };
        Ok(Devices { off: device(false)?, on: device(true)? })
    }

    fn model(merge: bool) -> Result<Devices> {
        Devices::new(merge, || model(DEVICE_BYTES, ModelCompletion::Disk(disk_model())))
    }

    /// Compares `load` without and with batching, and adds the ratios of `metrics` to the published ratios.
    fn compare<const N: usize>(
        &self,
        bench: &mut Bench,
        title: &str,
        load: &Load,
        metrics: [(Metric, Option<f64>); N],
    ) -> Result<(Comparison, [f64; N])> {
        let cases = [("off", &self.off), ("on", &self.on)];
        let cases = cases.map(|(name, disk)| case(name, move |length| run_on(disk, load, length)));
        let mut comparison = bench.compare(title, cases.into())?;
        let ratios = comparison.add_effects("batching", "off", "on", metrics);
        Ok((comparison, ratios))
    }
}

fn run_on(disk: &Arc<Disk>, load: &Load, length: Duration) -> Result<Run> {
    // Only the modelled disk has these counters.
    let counters = || driver_counter(disk, "seeks").zip(driver_counter(disk, "requests"));
    let before = counters();
    let run = submitters::run(disk, SUBMITTERS, load, length)?;
    if let Some((before, after)) = before.zip(counters())
        && after.0 > before.0
    {
        return Ok(run.with(Metric::SeeksPerRequest, (after.0 - before.0) / (after.1 - before.1)));
    }
    Ok(run)
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table =
        Table::new(What::Batching, "request batching: up to 32 requests per wake-up of a submitter");
    let published = ROWS.iter().flat_map(|(name, published)| {
        let named = FIGURES.iter().zip(published);
        named.map(move |((_, figure), (base, feature))| (format!("{name}, {figure}"), *base, *feature))
    });
    let (base, feature) = SWITCHES_PER_SECOND;
    let last = ("64 threads, context switches per second".to_owned(), base, feature);
    let setting = "tiobench, one disk; context switches with 64 threads on an 8-way machine";
    let head = ["request batching, Nick Piggin, 2003", setting, "as in each row"];
    table.publish(head, published.chain([last]));
    let pace = bench.pace;
    bench.pace.seconds = pace.seconds.max(DISK_SECONDS_MIN);
    let mut all = modelled_disk(bench, &mut table)?;
    bench.pace = pace;
    all.extend(switches(bench, &mut table)?);
    gate_mechanisms(&mut table, &all);
    table.notes = notes(&format!(
        include_str!("notes/batching.txt"),
        submitters = SUBMITTERS,
        window = WINDOW,
        depth = DEPTH,
        disk_speed = DISK_SPEED
    ));
    Ok(table)
}

/// Compares rate and latency on a disk where the order of requests matters.
fn modelled_disk(bench: &mut Bench, table: &mut Table) -> Result<Vec<Devices>> {
    let mut all = Vec::new();
    for (name, published) in ROWS {
        let devices = Devices::model(false)?;
        let title = format!("modelled disk, {name}, nothing merged");
        let metrics: [_; FIGURES.len()] = std::array::from_fn(|index| {
            let (base, feature) = published[index];
            (FIGURES[index].0, Some(feature / base))
        });
        let load = Load::new(name, WINDOW);
        let (comparison, [rate, ..]) = devices.compare(bench, &title, &load, metrics)?;
        if name == "sequential write" {
            table.target(format!("{title}: rate"), rate, AtLeast(2.5));
            for (claim, case, metric, expected) in [
                ("wake-ups per request", "off", Metric::WakeupsPerIo, AtLeast(0.9)),
                ("seeks per request of sequential streams", "off", Metric::SeeksPerRequest, AtLeast(0.9)),
                ("seeks per request of sequential streams", "on", Metric::SeeksPerRequest, AtMost(0.1)),
                ("wake-ups per request", "on", Metric::WakeupsPerIo, AtMost(0.1)),
            ] {
                table.mechanism(format!("{case}: {claim}"), comparison.median(case, metric), expected);
            }
        }
        table.comparisons.push(comparison);
        all.push(devices);
    }
    let devices = Devices::model(true)?;
    let load = Load::new("write", WINDOW);
    let title = "modelled disk, sequential write, adjacent I/Os merge";
    let (comparison, _) = devices.compare(bench, title, &load, [(Metric::MibPerSecond, None)])?;
    table.comparisons.push(comparison);
    all.push(devices);
    Ok(all)
}

/// Compares context switches and fairness on devices where the order does not matter.
fn switches(bench: &mut Bench, table: &mut Table) -> Result<Vec<Devices>> {
    let (path, _) = bench.file();
    let file = || -> Result<Devices> {
        let options = DriverOptions { direct_io: DirectIo::On, shared: true, ..DriverOptions::new(&path) };
        Devices::new(true, || Ok(Box::new(LoopDevice::open(&options)?)))
    };
    let (read, write) = (Load::new("randread", WINDOW), Load::new("randwrite", WINDOW));
    let all = vec![
        ("null, random write", Devices::new(true, || null(DEVICE_BYTES))?, write),
        ("loop direct, random read", file()?, read),
        ("loop direct, random write", file()?, write),
    ];
    let published = SWITCHES_PER_SECOND.1 / SWITCHES_PER_SECOND.0;
    for (title, devices, load) in &all {
        let metrics = [
            (Metric::ContextSwitchesPerIo, Some(published)),
            (Metric::Iops, None),
            (Metric::ShareMinByMax, None),
        ];
        let (comparison, [ratio, ..]) = devices.compare(bench, title, load, metrics)?;
        table.target(format!("{title}: context switches per I/O, on / off"), ratio, AtMost(0.1));
        table.comparisons.push(comparison);
    }
    Ok(all.into_iter().map(|(_, devices, _)| devices).collect())
}

fn gate_mechanisms(table: &mut Table, all: &[Devices]) {
    let off: Vec<_> = all.iter().map(|devices| devices.off.gate_counters()).collect();
    let on: Vec<_> = all.iter().map(|devices| devices.on.gate_counters()).collect();
    let most = |counters: &[GateCounters]| {
        let most = counters.iter().flat_map(|counters| counters.largest_in_flight).max();
        f64::from(most.unwrap_or(0)) / f64::from(DEPTH)
    };
    let grants: u64 = off.iter().map(|counters| counters.grants).sum();
    let largest = f64::from(on.iter().map(|counters| counters.largest_grant).max().unwrap_or(0));
    let largest_expected = AtMost(f64::from(BATCH_REQUESTS));
    table.mechanism("off: batches admitted", grants as f64, Exactly(0.0));
    table.mechanism("off: most in flight / depth", most(&off), AtMost(1.0));
    table.mechanism("on: largest batch admitted, in requests", largest, largest_expected);
    table.mechanism("on: most in flight / depth", most(&on), AtMost(1.5));
}

/// The compared figures of the modelled disk, and their names in the publication.
const FIGURES: [(Metric, &str); 3] = [
    (Metric::MibPerSecond, "MB/s"),
    (Metric::LatencyMeanUs, "average latency, ms"),
    (Metric::LatencyMaxUs, "longest latency, ms"),
];

/// The loads of the modelled disk, and their published [`FIGURES`] without and with batching.
const ROWS: [(&str, [(f64, f64); FIGURES.len()]); 4] = [
    ("sequential write", [(4.85, 14.11), (77.80, 10.07), (99359.39, 22805.47)]),
    ("sequential read", [(11.13, 13.21), (46.10, 37.37), (24668.01, 5691.66)]),
    ("random write", [(0.46, 0.86), (14.48, 24.08), (6173.90, 8753.66)]),
    ("random read", [(0.97, 1.01), (519.86, 484.59), (6444.66, 6604.93)]),
];

/// Context switches per second of 64 threads on eight processors, without and with batching.
const SWITCHES_PER_SECOND: (f64, f64) = (2500.0, 140.0);
