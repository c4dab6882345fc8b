//! Table `layout`: the cost of false sharing. Compares blkq with a build without padding to cache lines.

use std::sync::Arc;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::common::notes;
use crate::bench::{Bench, NamedRun, Pace, case};
use crate::load::Load;
use crate::metric::Metric;
use crate::result::Expected::{AtLeast, Exactly};
use crate::result::Table;
use crate::{Result, What};

mod padded;
mod shared;

const SUBMITTERS: usize = 4;
/// I/Os in flight of each thread.
const DEPTH: u16 = 1024;
/// Size of each thread's region, as in the published measurement.
const REGION_BYTES: u64 = 8 << 30;
const CASES: usize = 16;

pub fn planned_seconds(pace: &Pace) -> f64 {
    pace.cost(CASES)
}

/// The I/Os of each thread.
pub struct Work {
    load: Load,
    write_percent: u64,
}

/// The processors on which the threads of a run may run.
#[derive(Clone, Copy)]
pub enum Processors {
    All,
    One,
}

impl Processors {
    fn confine(self) -> Result {
        let Processors::One = self else { return Ok(()) };
        let allowed = sched_getaffinity(None)?;
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|&number| allowed.is_set(number)).unwrap_or(0));
        Ok(sched_setaffinity(None, &one)?)
    }
}

/// A workload: its name, the share of writes in percent, and the published IOPS before and after alignment to cache lines.
type Row = (&'static str, u64, f64, f64);

const RANDOM_READ: Row = ("randread", 0, 170_866.0, 266_359.0);
const ROWS: [Row; 6] = [
    ("write", 100, 187_130.0, 217_838.0),
    ("read", 0, 172_653.0, 354_639.0),
    ("randwrite", 100, 179_101.0, 184_242.0),
    RANDOM_READ,
    ("readwrite", 50, 188_789.0, 328_945.0),
    ("randrw", 50, 177_886.0, 245_988.0),
];

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(What::Layout, "cache lines: counters on lines that no other thread writes");
    let setting = "4 processes, depth 1024, 4 KiB, asynchronous direct I/O, 8 GiB each";
    let rows = ROWS.map(|(name, _, base, feature)| (name, base, feature));
    table.publish(["cache-line aligned block_device, Jeff Moyer, 2012", setting, "IOPS"], rows);
    let disks = (shared::side::disk(SUBMITTERS)?, padded::side::disk(SUBMITTERS)?);
    for row in ROWS {
        owners(bench, &mut table, row, &disks, Processors::All)?;
    }
    owners(bench, &mut table, RANDOM_READ, &disks, Processors::One)?;
    submitters(bench, &mut table)?;
    let padded = padded::side::contended(&disks.1) as f64;
    let shared = shared::side::contended(&disks.0) as f64;
    table.mechanism("padded: cache lines with words that different threads write", padded, Exactly(0.0));
    table.mechanism("shared: cache lines with words that different threads write", shared, AtLeast(1.0));
    table.left_out.push(
        "cache lines that move between processors (perf c2c): counting them needs hardware counters, which virtual \
         machines rarely have; the time per I/O is measured instead"
            .into(),
    );
    table.notes = notes(&format!(include_str!("notes/layout.txt"), submitters = SUBMITTERS, depth = DEPTH));
    Ok(table)
}

/// Compares both layouts, with threads that own their queues.
fn owners(
    bench: &mut Bench,
    table: &mut Table,
    (name, write_percent, base, feature): Row,
    (shared, padded): &(Arc<blkq_shared_layout::Disk>, Arc<blkq::Disk>),
    processors: Processors,
) -> Result {
    let work = Work { load: Load::named(name, DEPTH.into()), write_percent };
    let cases = vec![
        case("shared", |length| shared::side::owners(shared, &work, processors, length)),
        case("padded", |length| padded::side::owners(padded, &work, processors, length)),
    ];
    let (place, published) = match processors {
        Processors::All => ("", Some(feature / base)),
        Processors::One => (", on one processor", None),
    };
    let title = format!("null, {name}, {SUBMITTERS} queues and owners{place}");
    compare(bench, table, &title, cases, [(Metric::Iops, published), (Metric::CpuNsPerIo, None)])
}

/// Compares both layouts, with threads that submit through an engine.
fn submitters(bench: &mut Bench, table: &mut Table) -> Result {
    let (shared, padded) = (shared::side::disk(1)?, padded::side::disk(1)?);
    let work = Work { load: Load::named("randread", DEPTH.into()), write_percent: 0 };
    let cases = vec![
        case("shared", |length| shared::side::submitters(&shared, &work, Processors::All, length)),
        case("padded", |length| padded::side::submitters(&padded, &work, Processors::All, length)),
    ];
    let title = format!("null, randread, {SUBMITTERS} submitters to one engine");
    compare(bench, table, &title, cases, [(Metric::Iops, None)])
}

/// Compares the cases, and adds the ratios of `metrics` to the published ratios.
fn compare<const N: usize>(
    bench: &mut Bench,
    table: &mut Table,
    title: &str,
    cases: Vec<NamedRun<'_>>,
    metrics: [(Metric, Option<f64>); N],
) -> Result {
    let mut comparison = bench.compare(title, cases)?;
    comparison.add_effects("layout", "shared", "padded", metrics);
    table.comparisons.push(comparison);
    Ok(())
}
