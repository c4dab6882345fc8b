//! What one core does: the block layer alone, and the loop driver against raw io_uring.

use std::sync::Arc;

use blkq::drivers::r#loop::{DirectIo, LoopDevice, LoopOptions};
use blkq::{ClockMode, Disk};

use crate::bench::{Bench, Pace, case};
use crate::load::{Load, Pattern, local, raw};
use crate::metric::Metric;
use crate::result::{Expected, Table};
use crate::tables::clock::null_disk;
use crate::{Result, What};

/// About how long its runs take.
pub fn planned_seconds(pace: &Pace) -> f64 {
    pace.cost(8)
}

/// Measures it.
///
/// # Errors
/// If a device cannot be made or used.
pub fn run(bench: &mut Bench) -> Result<Table> {
    let mut table = Table::new(What::Peak, "peak: I/O per second in process, against raw io_uring");
    let disk = null_disk(ClockMode::Cached, true)?;
    let load = Load::read(Pattern::Random, 32).batch(32);
    let null = bench.compare(
        "null, 4 KiB random read",
        vec![case("batches of 32", |length| local::run(&disk, &load, length))],
    )?;
    let rate = null.case("batches of 32").median(Metric::Iops) / 1e6;
    table.target("null, one core, batches of 32, iostats on, M IOPS", rate, Expected::AtLeast(50.0));
    table.comparisons.push(null);

    let path = bench.file()?.path().to_owned();
    let options = LoopOptions { direct_io: DirectIo::On, read_only: true, ..LoopOptions::new(&path) };
    let disk: Arc<Disk> = Disk::builder(Box::new(LoopDevice::open(&options)?)).build()?;
    let random = Load::read(Pattern::Random, 64).registered();
    let mut comparison = bench.compare(
        "loop direct, 4 KiB random read, depth 64",
        vec![
            case("raw io_uring", |length| raw::run(&path, true, &random.batch(16), length)),
            case("loop", |length| local::run(&disk, &random, length)),
        ],
    )?;
    let ratio = comparison.effect("block layer", "raw io_uring", "loop", Metric::Iops, None).ratio;
    table.target("loop direct, random read, by raw io_uring", ratio, Expected::AtLeast(0.98));
    table.comparisons.push(comparison);
    Ok(table)
}
