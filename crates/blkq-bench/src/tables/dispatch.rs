//! Table `dispatch`: one request at a time, compared with concurrent reads and one writer.

use std::path::Path;
use std::time::Duration;

use blkq::Disk;
use blkq_drivers::r#loop::{DirectIo, Dispatch, DriverOptions, LoopDevice};

use super::{cold_case, driver_counter, notes};
use crate::bench::Bench;
use crate::load::{Load, local, raw};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, AtMost, Exactly};
use crate::result::Table;
use crate::{Result, What};

const DEPTH: usize = 64;
/// Random reads use at most 1 / `READ_SHARE` of the file, so that the rest stays cold.
const READ_SHARE: u64 = 4;
/// Writes use 1 / `WRITE_SHARE` of the file.
const WRITE_SHARE: u64 = 8;
/// Minimum number of blocks that writes use, because a shorter run could not be measured.
const WRITES_MIN: u64 = (64 << 20) / 4096;
/// Metrics that mean nothing in this table.
const OMITTED: [Metric; 4] =
    [Metric::NsPerIo, Metric::ClockReadsPerIo, Metric::SubmissionsPerIo, Metric::CachedMib];
/// Published IOPS: pattern, before, and with concurrent dispatch.
type Row = (&'static str, f64, f64);
const PUBLISHED: [Row; 4] = [
    ("randread", 1740.0, 25_318.0),
    ("read", 42_196.0, 51_771.0),
    ("randwrite", 35_709.0, 34_624.0),
    ("write", 39_137.0, 40_326.0),
];

/// Runs `load` on a loop device of the file, and adds the counters of the driver.
fn on_loop(path: &Path, dispatch: Dispatch, merge: bool, load: &Load, length: Duration) -> Result<Run> {
    let options = DriverOptions { direct_io: DirectIo::Off, dispatch, ..DriverOptions::new(path) };
    let disk = Disk::builder(Box::new(LoopDevice::open(&options)?)).merge(merge).build()?;
    let run = local::run(&disk, load, length)?;
    let counter =
        |name| driver_counter(&disk, name).unwrap_or_else(|| panic!("the loop driver has no counter {name}"));
    Ok(if load.write {
        run.per_io(Metric::JoinedPerIo, counter("writes-joined") as u64)
            .with(Metric::WritersMax, counter("writers-max"))
    } else {
        run.with(Metric::ReadsInFlightMax, counter("reads-in-flight-max"))
            .with(Metric::ReadsInFlightMean, counter("reads-in-flight-mean"))
    })
}

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table =
        Table::new(What::Dispatch, "dispatch: concurrent reads and one writer, on a cold page cache");
    let setting = "file on ext4 on an SSD, 4 KiB, libaio, depth 64, one job";
    table.publish(["loop on blk-mq, Ming Lei, 2014", setting, "IOPS"], PUBLISHED);
    let (path, bytes) = bench.file();
    let blocks = bytes / 4096;
    for row in PUBLISHED {
        pattern(bench, &mut table, &path, blocks, row)?;
    }
    let most = table.comparisons.iter().flat_map(|comparison| &comparison.cases);
    let most = most.map(|case| case.figure(Metric::CachedBeforeMib).max).fold(0.0, f64::max);
    table.mechanism("maximum MiB of the file in the page cache before a run", most, AtMost(1.0));
    curve(bench, &mut table, &path, blocks)?;
    table.notes = notes(include_str!("notes/dispatch.txt"));
    Ok(table)
}

fn pattern(bench: &mut Bench, table: &mut Table, path: &Path, blocks: u64, row: Row) -> Result {
    let (name, base, feature) = row;
    let most = match name {
        "randread" => blocks / READ_SHARE,
        "read" => blocks,
        _ => (blocks / WRITE_SHARE).max(WRITES_MIN),
    };
    let load = Load { ios_max: Some(most), ..Load::new(name, DEPTH) };
    let one = Load { depth: 1, ..load };
    let on = |name: &str, dispatch, merge| {
        cold_case(path, name, &OMITTED, move |length| on_loop(path, dispatch, merge, &load, length))
    };
    let raw = |name: &str, load: Load| {
        cold_case(path, name, &OMITTED, move |length| raw::run(path, false, &load, length))
    };
    let cases = vec![
        cold_case(path, "one thread", &OMITTED, |length| raw::run_workers(path, &one, length)),
        on("serial, unmerged", Dispatch::Serial, false),
        on("serial", Dispatch::Serial, true),
        on("concurrent", Dispatch::Concurrent, true),
        raw("raw io_uring", load),
        raw("raw, one by one", Load { one_by_one: true, ..load }),
    ];
    let title = format!("loop buffered, cold, 4 KiB {name}, depth {DEPTH}");
    let mut comparison = bench.compare(&title, cases)?;
    let mut effect = |name: &str, base, feature, published| {
        comparison.effect(name, base, feature, Metric::Iops, published).ratio
    };
    let dispatch = effect("dispatch", "serial", "concurrent", Some(feature / base));
    effect("dispatch and merging", "serial, unmerged", "concurrent", None);
    let by_raw = effect("block layer", "raw io_uring", "concurrent", None);
    effect("block layer, relative to one call per I/O", "raw, one by one", "concurrent", None);
    effect("serial, relative to blocking calls of a thread", "one thread", "serial, unmerged", None);
    let (serial, concurrent) = (comparison.case("serial"), comparison.case("concurrent"));
    if load.write {
        let writers = serial.figure(Metric::WritersMax).max.max(concurrent.figure(Metric::WritersMax).max);
        table.mechanism(format!("{name}: maximum concurrent writers"), writers, Exactly(1.0));
        table.target(format!("{name}: IOPS, concurrent / serial"), dispatch, AtLeast(0.95));
    }
    match name {
        "randread" => {
            let most = serial.figure(Metric::ReadsInFlightMax).max;
            let mean = concurrent.figure(Metric::ReadsInFlightMean).median;
            let cold = comparison.cases.iter().map(|case| case.figure(Metric::CachedKibPerIo).min);
            let cold = cold.fold(f64::INFINITY, f64::min);
            let mean_expected = AtLeast(DEPTH as f64 / 4.0);
            table.mechanism("randread, serial: maximum reads in flight", most, Exactly(1.0));
            table.mechanism("randread, concurrent: mean reads in flight", mean, mean_expected);
            table.mechanism("randread: minimum KiB read from the file per I/O", cold, AtLeast(3.5));
            table.target("randread: IOPS, concurrent / serial", dispatch, AtLeast(3.0));
            table.target("randread: IOPS, concurrent / raw io_uring", by_raw, AtLeast(0.95));
        }
        "write" => {
            let merges = concurrent.figure(Metric::MergesPerIo).median;
            table.mechanism("write, concurrent: merges per I/O", merges, AtLeast(0.5));
        }
        _ => {}
    }
    table.comparisons.push(comparison);
    Ok(())
}

/// Measures sequential reads of several threads, the case in which the kernel's concurrent loop device was slower.
fn curve(bench: &mut Bench, table: &mut Table, path: &Path, blocks: u64) -> Result {
    const KINDS: [&str; 2] = ["threads", "concurrent"];
    let counts: &[usize] = if bench.pace.quick { &[1, 4, 16] } else { &[1, 2, 4, 8, 16] };
    let name = |kind: &str, count: usize| format!("{kind}, {count}");
    let mut cases = Vec::new();
    for &count in counts {
        let load = Load { ios_max: Some(blocks), ..Load::new("read", count) };
        cases.push(cold_case(path, name(KINDS[0], count), &OMITTED, move |length| {
            raw::run_workers(path, &load, length)
        }));
        cases.push(cold_case(path, name(KINDS[1], count), &OMITTED, move |length| {
            on_loop(path, Dispatch::Concurrent, false, &load, length)
        }));
    }
    let comparison =
        bench.compare("loop buffered, cold, 4 KiB read, unmerged, 1 to N concurrent reads", cases)?;
    for (metric, what) in [(Metric::Iops, "rate"), (Metric::ContextSwitchesPerIo, "context switches")] {
        let plot = format!("1 to N concurrent sequential reads, {what}");
        table.curves.extend(comparison.curves([&plot, "concurrent reads"], metric, &KINDS, counts, name));
    }
    let most = counts[counts.len() - 1];
    let switches = |kind| comparison.median(&name(kind, most), Metric::ContextSwitchesPerIo);
    let claim = format!("{most} concurrent reads: context switches per I/O, concurrent / threads");
    table.mechanism(claim, switches(KINDS[1]) / switches(KINDS[0]), AtMost(0.5));
    Ok(())
}
