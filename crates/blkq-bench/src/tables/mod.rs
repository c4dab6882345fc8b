//! The tables, one module each, and their common parts: devices, notes, and runs on a cold page cache.

use std::path::Path;
use std::time::Duration;

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Disk, Driver};
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};
use blkq_drivers::model::{Model, ModelCompletion, ModelOptions};

use crate::Result;
use crate::bench::{NamedRun, case};
use crate::file::cold;
use crate::measurement::Run;
use crate::metric::Metric;

pub mod batching;
pub mod clock;
pub mod direct;
pub mod dispatch;
pub mod layout;
pub mod limit;
pub mod peak;
pub mod peers;

/// A null device that completes immediately: a run measures nothing but the block layer.
pub fn null(bytes: u64) -> Result<Box<dyn Driver>> {
    let options = NullOptions { zero_reads: false, ..NullOptions::new(bytes) };
    Ok(Box::new(Null::new(options)?))
}

pub fn model(bytes: u64, completion: ModelCompletion) -> Result<Box<dyn Driver>> {
    let options = ModelOptions { completion, zero_reads: false, ..ModelOptions::new(bytes) };
    Ok(Box::new(Model::new(options)?))
}

/// A loop device that reads the file at `path` with direct I/O.
pub fn direct_reader(path: &Path) -> Result<Box<dyn Driver>> {
    let options = DriverOptions { direct_io: DirectIo::On, read_only: true, ..DriverOptions::new(path) };
    Ok(Box::new(LoopDevice::open(&options)?))
}

/// A counter of the driver of `disk`, if the driver has it.
pub fn driver_counter(disk: &Disk, name: &str) -> Option<f64> {
    let facts = disk.driver().describe();
    facts.iter().find(|(of, _)| *of == name).and_then(|(_, value)| value.parse().ok())
}

/// The notes of a table: the paragraphs of `text`, each in one line.
pub fn notes(text: &str) -> Vec<String> {
    text.split("\n\n").map(|note| note.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// A case whose runs begin with a cold page cache of the file at `path`, without the metrics that mean nothing in its
/// table.
pub fn cold_case<'a>(
    path: &'a Path,
    name: impl Into<String>,
    omitted: &'a [Metric],
    mut run: impl FnMut(Duration) -> Result<Run> + 'a,
) -> NamedRun<'a> {
    case(name, move |length| {
        let mut run = cold(path, || run(length))?;
        run.values.retain(|(metric, _)| !omitted.contains(metric));
        Ok(run)
    })
}
