//! The tables, one module each, and what several of them use: devices, notes, and runs on a cold page cache.

use std::path::Path;
use std::time::Duration;

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Disk, Driver};
use blkq_drivers::r#loop::{DirectIo, LoopDevice, LoopOptions};
use blkq_drivers::model::{Model, ModelCompletion, ModelOptions};

use crate::bench::{Bench, NamedRun, case};
use crate::cache::cold;
use crate::measurement::Run;
use crate::metric::Metric;
use crate::result::Table;
use crate::{Result, What};

mod batching;
mod clock;
mod direct;
mod dispatch;
mod layout;
mod limit;
mod peak;
mod peers;

pub struct Measure {
    pub name: What,
    /// Approximate duration in seconds of a quick run and of a full run, with the default file size and all peers.
    /// Does not include work in [`Progress::aside`](crate::progress::Progress::aside).
    seconds: [f64; 2],
    pub run: fn(&mut Bench) -> Result<Table>,
}

impl Measure {
    pub fn planned_seconds(&self, quick: bool) -> f64 {
        let is_left_out = self.name == What::Peers && peers::lacks().is_some();
        if is_left_out { 0.0 } else { self.seconds[usize::from(!quick)] }
    }
}

/// All tables, in the order of `bench all`.
pub const TABLES: [Measure; 8] = [
    Measure { name: What::Dispatch, seconds: [9.0, 170.0], run: dispatch::run },
    Measure { name: What::Direct, seconds: [7.0, 120.0], run: direct::run },
    Measure { name: What::Batching, seconds: [14.0, 101.0], run: batching::run },
    Measure { name: What::Clock, seconds: [3.0, 45.0], run: clock::run },
    Measure { name: What::Layout, seconds: [5.0, 80.0], run: layout::run },
    Measure { name: What::Limit, seconds: [6.0, 20.0], run: limit::run },
    Measure { name: What::Peak, seconds: [6.0, 100.0], run: peak::run },
    Measure { name: What::Peers, seconds: [75.0, 496.0], run: peers::run },
];

/// A null device that completes immediately: a run measures nothing but the block layer.
fn null(bytes: u64) -> Result<Box<dyn Driver>> {
    let options = NullOptions { zero_reads: false, ..NullOptions::new(bytes) };
    Ok(Box::new(Null::new(options)?))
}

fn model(bytes: u64, completion: ModelCompletion) -> Result<Box<dyn Driver>> {
    let options = ModelOptions { completion, zero_reads: false, ..ModelOptions::new(bytes) };
    Ok(Box::new(Model::new(options)?))
}

/// A loop device that reads the file at `path` with direct I/O.
fn direct_reader(path: &Path) -> Result<Box<dyn Driver>> {
    let options = LoopOptions { direct_io: DirectIo::On, read_only: true, ..LoopOptions::new(path) };
    Ok(Box::new(LoopDevice::open(&options)?))
}

/// A counter of the driver of `disk`, if the driver has it.
fn driver_counter(disk: &Disk, name: &str) -> Option<f64> {
    let facts = disk.driver().describe();
    facts.iter().find(|(of, _)| *of == name).and_then(|(_, value)| value.parse().ok())
}

/// The notes of a table: the paragraphs of `text`, each in one line.
fn notes(text: &str) -> Vec<String> {
    text.split("\n\n").map(|note| note.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// A case whose runs begin with a cold page cache of the file at `path`, without the metrics that mean nothing in its
/// table.
fn cold_case<'a>(
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
