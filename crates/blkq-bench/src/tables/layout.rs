//! Table `layout`: the cost of false sharing. Compares blkq with a build without padding to cache lines.

use std::sync::Arc;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::notes;
use crate::bench::{Bench, case};
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

/// The I/Os of each thread.
pub struct Work {
    load: Load,
    /// Whether each I/O is a read or a write with equal probability. If not, [`Load::write`] decides for all I/Os.
    mixed: bool,
}

impl Work {
    fn new(rw: &str) -> Work {
        Work { load: Load::new(rw, DEPTH.into()), mixed: ["readwrite", "randrw"].contains(&rw) }
    }
}

/// Confines this thread to the first of its processors.
fn confine() -> Result {
    let allowed = sched_getaffinity(None)?;
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&number| allowed.is_set(number)).unwrap_or(0));
    Ok(sched_setaffinity(None, &one)?)
}

/// A workload: its name, and the published IOPS before and after alignment to cache lines.
type Row = (&'static str, f64, f64);

const RANDOM_READ: Row = ("randread", 170_866.0, 266_359.0);
const ROWS: [Row; 6] = [
    ("write", 187_130.0, 217_838.0),
    ("read", 172_653.0, 354_639.0),
    ("randwrite", 179_101.0, 184_242.0),
    RANDOM_READ,
    ("readwrite", 188_789.0, 328_945.0),
    ("randrw", 177_886.0, 245_988.0),
];

pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(What::Layout, "cache lines: counters on lines that no other thread writes");
    let setting = "4 processes, depth 1024, 4 KiB, asynchronous direct I/O, 8 GiB each";
    table.publish(["cache-line aligned block_device, Jeff Moyer, 2012", setting, "IOPS"], ROWS);
    let disks = (shared::side::disk(SUBMITTERS)?, padded::side::disk(SUBMITTERS)?);
    for row in ROWS {
        owners(bench, &mut table, row, &disks, false)?;
    }
    owners(bench, &mut table, RANDOM_READ, &disks, true)?;
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

/// Compares both layouts, with threads that own their queues, on one processor or on all.
fn owners(
    bench: &mut Bench,
    table: &mut Table,
    (name, base, feature): Row,
    (shared, padded): &(Arc<blkq_shared_layout::Disk>, Arc<blkq::Disk>),
    one_processor: bool,
) -> Result {
    let work = Work::new(name);
    let cases = vec![
        case("shared", |length| shared::side::owners(shared, &work, one_processor, length)),
        case("padded", |length| padded::side::owners(padded, &work, one_processor, length)),
    ];
    let (place, published) =
        if one_processor { (", on one processor", None) } else { ("", Some(feature / base)) };
    let title = format!("null, {name}, {SUBMITTERS} queues and owners{place}");
    let mut comparison = bench.compare(&title, cases)?;
    let metrics = [(Metric::Iops, published), (Metric::CpuNsPerIo, None)];
    comparison.add_effects("layout", "shared", "padded", metrics);
    table.comparisons.push(comparison);
    Ok(())
}

/// Compares both layouts, with threads that submit through an engine.
fn submitters(bench: &mut Bench, table: &mut Table) -> Result {
    let (shared, padded) = (shared::side::disk(1)?, padded::side::disk(1)?);
    let work = Work::new(RANDOM_READ.0);
    let cases = vec![
        case("shared", |length| shared::side::submitters(&shared, &work, length)),
        case("padded", |length| padded::side::submitters(&padded, &work, length)),
    ];
    let title = format!("null, randread, {SUBMITTERS} submitters to one engine");
    let mut comparison = bench.compare(&title, cases)?;
    comparison.effect("layout", "shared", "padded", Metric::Iops, None);
    table.comparisons.push(comparison);
    Ok(())
}
