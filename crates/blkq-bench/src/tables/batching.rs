//! Table `batching`: a woken submitter gets up to 32 requests, compared with one.

use std::sync::Arc;
use std::time::Duration;

use blkq::drivers::null::{Null, NullOptions};
use blkq::gate::BATCH_REQUESTS;
use blkq::{Disk, Driver};
use blkq_drivers::r#loop::{DirectIo, LoopDevice, LoopOptions};
use blkq_drivers::model::{Model, ModelCompletion, ModelOptions, SeekModel};

use crate::bench::{Bench, Pace, case};
use crate::load::submitters::{self, WARM_UP};
use crate::load::{Load, Pattern};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::{Comparison, Expected, Published, PublishedRow, Table};
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
/// Time until the last I/Os of a run on the modelled disk complete, in seconds.
const DRAIN_SECONDS: f64 = 0.03;
const DISK_CASES: usize = 10;
const OTHER_CASES: usize = 6;

pub fn planned_seconds(pace: &Pace) -> f64 {
    let disk = disk_pace(*pace);
    let drained = DRAIN_SECONDS * (disk.rounds * DISK_CASES) as f64;
    (disk.cost(DISK_CASES) + pace.cost(OTHER_CASES)) * (1.0 + WARM_UP) + drained
}

fn disk_pace(pace: Pace) -> Pace {
    Pace { seconds: pace.seconds.max(DISK_SECONDS_MIN), ..pace }
}

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

    fn null() -> Result<Devices> {
        let options = NullOptions { zero_reads: false, ..NullOptions::new(DEVICE_BYTES) };
        Devices::new(true, || Ok(Box::new(Null::new(options.clone())?)))
    }

    fn model(merge: bool) -> Result<Devices> {
        Devices::new(merge, || {
            let mut options = ModelOptions::new(DEVICE_BYTES);
            options.completion = ModelCompletion::Disk(disk_model());
            options.zero_reads = false;
            Ok(Box::new(Model::new(options)?))
        })
    }

    fn compare(&self, bench: &mut Bench, title: &str, load: &Load) -> Result<Comparison> {
        let cases = [("off", &self.off), ("on", &self.on)];
        let cases = cases.map(|(name, disk)| case(name, move |length| run_on(disk, load, length)));
        bench.compare(title, cases.into())
    }
}

fn run_on(disk: &Arc<Disk>, load: &Load, length: Duration) -> Result<Run> {
    let before = model_counter(disk, "seeks").zip(model_counter(disk, "requests"));
    let run = submitters::run(disk, SUBMITTERS, load, length)?;
    let after = model_counter(disk, "seeks").zip(model_counter(disk, "requests"));
    Ok(match before.zip(after) {
        Some((before, after)) if after.0 > before.0 => {
            let per_request = (after.0 - before.0) as f64 / (after.1 - before.1) as f64;
            run.with(Metric::SeeksPerRequest, per_request)
        }
        _ => run,
    })
}

/// A counter of the modelled disk; `None` for other devices.
fn model_counter(disk: &Disk, name: &str) -> Option<u64> {
    let facts = disk.driver().describe();
    facts.iter().find(|(of, _)| *of == name).and_then(|(_, value)| value.parse().ok())
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table =
        Table::new(What::Batching, "request batching: up to 32 requests per wake-up of a submitter");
    table.published = Some(published());
    let pace = bench.pace;
    bench.pace = disk_pace(pace);
    let mut all = modelled_disk(bench, &mut table)?;
    bench.pace = pace;
    all.extend(switches(bench, &mut table)?);
    gate_mechanisms(&mut table, &all);
    table.notes = notes();
    Ok(table)
}

/// Compares rate and latency on a disk where the order of requests matters.
fn modelled_disk(bench: &mut Bench, table: &mut Table) -> Result<Vec<Devices>> {
    let mut all = Vec::new();
    for row in &ROWS {
        let devices = Devices::model(false)?;
        let load = row.load();
        let mut comparison =
            devices.compare(bench, &format!("modelled disk, {}, nothing merged", row.name), &load)?;
        let ratio = |(base, feature): (f64, f64)| Some(feature / base);
        let mut effect =
            |metric, published| comparison.effect("batching", "off", "on", metric, ratio(published)).ratio;
        let rate = effect(Metric::MibPerSecond, row.rate);
        effect(Metric::LatencyMeanUs, row.latency_mean_ms);
        effect(Metric::LatencyMaxUs, row.latency_max_ms);
        if (row.pattern, row.write) == (Pattern::Sequential, true) {
            table.target(
                format!("modelled disk, {}, nothing merged: rate", row.name),
                rate,
                Expected::AtLeast(2.5),
            );
            let median = |case, metric| comparison.case(case).median(metric);
            let (off, on) = ("off", "on");
            table.mechanism(
                "off: wake-ups per request",
                median(off, Metric::WakeupsPerIo),
                Expected::AtLeast(0.9),
            );
            table.mechanism(
                "off: seeks per request of sequential streams",
                median(off, Metric::SeeksPerRequest),
                Expected::AtLeast(0.9),
            );
            table.mechanism(
                "on: seeks per request of sequential streams",
                median(on, Metric::SeeksPerRequest),
                Expected::AtMost(0.1),
            );
            table.mechanism(
                "on: wake-ups per request",
                median(on, Metric::WakeupsPerIo),
                Expected::AtMost(0.1),
            );
        }
        table.comparisons.push(comparison);
        all.push(devices);
    }
    let devices = Devices::model(true)?;
    let load = Load::write(Pattern::Sequential, WINDOW);
    let mut comparison =
        devices.compare(bench, "modelled disk, sequential write, adjacent I/Os merge", &load)?;
    comparison.effect("batching", "off", "on", Metric::MibPerSecond, None);
    table.comparisons.push(comparison);
    all.push(devices);
    Ok(all)
}

/// Compares context switches and fairness on devices where the order does not matter.
fn switches(bench: &mut Bench, table: &mut Table) -> Result<Vec<Devices>> {
    let path = bench.file()?.path().to_owned();
    let file = || -> Result<Devices> {
        let options = LoopOptions { direct_io: DirectIo::On, shared: true, ..LoopOptions::new(&path) };
        Devices::new(true, || Ok(Box::new(LoopDevice::open(&options)?)))
    };
    let (read, write) = (Load::read(Pattern::Random, WINDOW), Load::write(Pattern::Random, WINDOW));
    let all = vec![
        ("null, random write", Devices::null()?, write),
        ("loop direct, random read", file()?, read),
        ("loop direct, random write", file()?, write),
    ];
    for (title, devices, load) in &all {
        let mut comparison = devices.compare(bench, title, load)?;
        let switches = Metric::ContextSwitchesPerIo;
        let published = Some(SWITCHES_PER_SECOND.1 / SWITCHES_PER_SECOND.0);
        let ratio = comparison.effect("batching", "off", "on", switches, published).ratio;
        comparison.effect("batching", "off", "on", Metric::Iops, None);
        comparison.effect("batching", "off", "on", Metric::ShareMinByMax, None);
        table.target(format!("{title}: context switches per I/O, on / off"), ratio, Expected::AtMost(0.1));
        table.comparisons.push(comparison);
    }
    Ok(all.into_iter().map(|(_, devices, _)| devices).collect())
}

fn gate_mechanisms(table: &mut Table, all: &[Devices]) {
    let off: Vec<_> = all.iter().map(|devices| devices.off.gate_counters()).collect();
    let on: Vec<_> = all.iter().map(|devices| devices.on.gate_counters()).collect();
    let most = |counters: &[blkq::gate::GateCounters]| {
        let most = counters.iter().flat_map(|counters| counters.largest_in_flight).max();
        f64::from(most.unwrap_or(0)) / f64::from(DEPTH)
    };
    let grants: u64 = off.iter().map(|counters| counters.grants).sum();
    let largest = on.iter().map(|counters| counters.largest_grant).max().unwrap_or(0);
    table.mechanism("off: batches admitted", grants as f64, Expected::Exactly(0.0));
    table.mechanism("off: most in flight / depth", most(&off), Expected::AtMost(1.0));
    table.mechanism(
        "on: largest batch admitted, in requests",
        f64::from(largest),
        Expected::AtMost(f64::from(BATCH_REQUESTS)),
    );
    table.mechanism("on: most in flight / depth", most(&on), Expected::AtMost(1.5));
}

/// A pattern, and the published figures without and with batching.
struct Row {
    name: &'static str,
    pattern: Pattern,
    write: bool,
    rate: (f64, f64),
    latency_mean_ms: (f64, f64),
    latency_max_ms: (f64, f64),
}

const ROWS: [Row; 4] = [
    Row {
        name: "sequential write",
        pattern: Pattern::Sequential,
        write: true,
        rate: (4.85, 14.11),
        latency_mean_ms: (77.80, 10.07),
        latency_max_ms: (99359.39, 22805.47),
    },
    Row {
        name: "sequential read",
        pattern: Pattern::Sequential,
        write: false,
        rate: (11.13, 13.21),
        latency_mean_ms: (46.10, 37.37),
        latency_max_ms: (24668.01, 5691.66),
    },
    Row {
        name: "random write",
        pattern: Pattern::Random,
        write: true,
        rate: (0.46, 0.86),
        latency_mean_ms: (14.48, 24.08),
        latency_max_ms: (6173.90, 8753.66),
    },
    Row {
        name: "random read",
        pattern: Pattern::Random,
        write: false,
        rate: (0.97, 1.01),
        latency_mean_ms: (519.86, 484.59),
        latency_max_ms: (6444.66, 6604.93),
    },
];

/// Context switches per second of 64 threads on eight processors, without and with batching.
const SWITCHES_PER_SECOND: (f64, f64) = (2500.0, 140.0);

impl Row {
    fn load(&self) -> Load {
        if self.write { Load::write(self.pattern, WINDOW) } else { Load::read(self.pattern, WINDOW) }
    }
}

fn published() -> Published {
    let row = |name: String, (base, feature): (f64, f64)| PublishedRow { name, base, feature };
    let mut rows = Vec::new();
    for of in &ROWS {
        rows.push(row(format!("{}, MB/s", of.name), of.rate));
        rows.push(row(format!("{}, average latency, ms", of.name), of.latency_mean_ms));
        rows.push(row(format!("{}, longest latency, ms", of.name), of.latency_max_ms));
    }
    rows.push(row("64 threads, context switches per second".into(), SWITCHES_PER_SECOND));
    Published {
        origin: "request batching, Nick Piggin, 2003".into(),
        setting: "tiobench, one disk; context switches with 64 threads on an 8-way machine".into(),
        unit: "as in each row".into(),
        rows,
    }
}

fn notes() -> Vec<String> {
    [
        format!(
            "{SUBMITTERS} threads, each in a separate region, do I/Os of 4 KiB, each with up to {WINDOW} in flight, on a \
             device with {DEPTH} tags; off: a thread that is woken gets one request, in the order of waiting"
        ),
        format!(
            "the modelled disk has one arm and takes requests in the order of arrival. A request takes a seek that \
             grows with the distance, half a rotation, and the transfer. The model is a disk with 7200 rpm and \
             150 MB/s, {DISK_SPEED} times faster, so multiply its latencies and divide its rates by {DISK_SPEED}. \
             Unlike the disk of 2003, it has no cache, no read-ahead and no elevator, so the ratios of sequential \
             streams are larger here"
        ),
        "nothing merged: neighbours that merge in a submitter's software queue use one request together. A wake-up then \
         carries a whole window even without batching, and batching adds nothing to the rate of sequential streams \
         (see: adjacent I/Os merge)"
            .into(),
        "the latency includes the time for which a thread waits for a request. The longest latency shows the cost of \
         batching: while one thread uses its batch, the others wait"
            .into(),
        "on the modelled disk batching makes random I/O faster, because the requests of a batch are in one region".into(),
        "on the modelled disk each completion causes one more context switch of the engine, with or without batching, \
         so context switches are compared on the other devices only"
            .into(),
    ]
    .into()
}
