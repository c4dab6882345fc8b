//! `blkq bench`: measures the five ideas that blkq combines, each switched off and on, on the user's machine,
//! with the counters that explain the result; the peak rate of the block layer; and blkq next to other servers.
//!
//! Each table (`tables/`) is a function that runs its cases in turn (A B A B ...) through a `Bench`
//! (`bench.rs`) and returns a [`result::Table`]. The results are printed (`print.rs`) and written as JSON and
//! as a report ([`report`]).

// Nothing outside of this workspace uses this library. Its items are documented where that helps a
// maintainer.
#![allow(missing_docs)]

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

mod bench;
mod client;
mod file;
mod interrupt;
mod load;
mod measurement;
mod metric;
mod print;
mod process;
mod progress;
pub mod report;
pub mod result;
mod run;
#[cfg(test)]
mod schema_tests;
mod summary;
mod tables;

pub use run::run;

/// An error with a message of one line.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T = ()> = std::result::Result<T, Error>;

/// Fails with `message` unless `holds`.
fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result {
    if holds { Ok(()) } else { Err(message().into()) }
}

#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Each table compares blkq with a mechanism off and on, or blkq with other programs. The cases run
in turn, for several rounds. The table has the median, the spread of the rounds, the counters that
explain the result, and the published result for comparison. ~ marks an effect that is not larger
than its spread: measure longer, or on a machine with less load.

Examples:
  blkq bench all --quick             # all tables, in two to three minutes
  blkq bench clock                   # the gain from reading the clock once per batch
  blkq bench peers --file /data/x    # a comparison with other servers, on this file system
  blkq bench all --report out        # writes out/index.html, with plots, and the raw figures
  blkq bench clock --json - | jq .   # the figures of each round (schema.json of blkq-bench)")]
pub struct Arguments {
    /// The table to measure
    #[arg(value_enum)]
    pub what: What,
    /// Measure fewer and shorter rounds: all tables take two to three minutes
    #[arg(long)]
    pub quick: bool,
    /// Write the figures to FILE as JSON; - is standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with plots, and the raw figures, to DIR
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// Measure on this file [default: a temporary file in the current directory]
    ///
    /// If the file does not exist, it is created, and removed afterwards.
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Overwrite the content of --file
    #[arg(long, requires = "file")]
    pub overwrite: bool,
    /// Set the size of the file [default: 1G, or 256M with --quick]
    #[arg(long, value_name = "BYTES", value_parser = blkq::units::parse_bytes)]
    pub size: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum What {
    /// Loop driver, cold page cache: one request at a time vs concurrent reads and one writer
    Dispatch,
    /// Loop driver: the page cache vs direct, asynchronous I/O
    Direct,
    /// 64 submitters, 128 tags: one request per wake-up vs up to 32
    Batching,
    /// Null driver: the clock read once per time stamp vs once per batch
    Clock,
    /// Counters and limits: in shared cache lines vs separate cache lines
    Layout,
    /// A modelled disk of limited rate, and the file: no limit vs a limit just below the ceiling
    Limit,
    /// The I/O rate of one core and of several, vs raw io_uring
    Peak,
    /// blkq vs the kernel's loop device, qemu-nbd, qemu-storage-daemon and nbdkit
    Peers,
    /// All tables
    #[default]
    All,
}

impl What {
    fn needs_file(self) -> bool {
        !matches!(self, What::Clock | What::Layout)
    }
}
