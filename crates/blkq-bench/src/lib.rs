//! `blkq bench`: the five ideas that blkq unites, each switched off and on, on the user's
//! machine, with the counter that shows by which mechanism; the peak of the block layer;
//! and blkq beside its peers.
//!
//! A table (`tables/`) is a function that runs its cases in turn (A B A B ...) through a
//! `Bench` (`bench.rs`) and states what it found ([`result`]). The result is printed (`print.rs`),
//! and written as JSON and as a report.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

mod bench;
mod cache;
mod client;
mod file;
mod interrupt;
mod load;
mod machine;
mod measurement;
mod metric;
mod print;
mod process;
mod progress;
pub mod report;
pub mod result;
mod run;
#[cfg(test)]
mod schema;
mod shuffle;
mod summary;
mod tables;
pub mod vhost;

pub use run::run;

/// A failure: one line.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
/// The outcome of a measurement.
pub type Result<T = ()> = std::result::Result<T, Error>;

/// Options of `bench`.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = "\
Each table switches one idea off and on, in turn, and prints the median of several rounds, how far
the rounds lie apart, and the counters that explain the figure, beside what was published for the
idea. A ratio marked with ~ is no larger than its spread: measure longer, or on a quieter machine.

Examples:
  blkq bench all --quick             everything, in under two minutes
  blkq bench clock                   what reading the clock once per batch is worth
  blkq bench peers --file /data/x    beside qemu-nbd, nbdkit, the kernel, on that file system
  blkq bench all --report out        out/index.html: a page with plots, and the raw figures
  blkq bench clock --json - | jq .   the figures of every round, as in schema.json of blkq-bench")]
pub struct Arguments {
    /// Which table
    #[arg(value_enum)]
    pub what: What,
    /// Fewer and shorter rounds: under two minutes for all
    #[arg(long)]
    pub quick: bool,
    /// Write the figures to a file as JSON; - is the standard output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with plots, and the raw figures, into a directory
    #[arg(long, value_name = "DIR")]
    pub report: Option<PathBuf>,
    /// The file to measure on. If it is not there, it is made, and removed afterwards
    /// [default: a temporary file in the current directory]
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
    /// Take a file that has content, and overwrite that
    #[arg(long, requires = "file")]
    pub overwrite: bool,
    /// Size of that file [default: 1G, with --quick 256M]
    #[arg(long, value_name = "BYTES", value_parser = blkq::units::parse_bytes)]
    pub size: Option<u64>,
}

/// The tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum What {
    /// Loop driver, cold page cache: one request at a time against concurrent reads and one writer
    Dispatch,
    /// Loop driver: through the page cache against direct, asynchronous I/O
    Direct,
    /// 64 submitters, 128 tags: one request per wake-up against up to 32
    Batching,
    /// Null driver: a clock reading per time stamp against one per batch
    Clock,
    /// Counters and limits: in shared cache lines against lines of their own
    Layout,
    /// A modelled disk of limited rate, and the file: no limit against one just under the ceiling
    Limit,
    /// The work that one core and several do, against raw io_uring
    Peak,
    /// blkq beside the kernel's loop device, qemu-nbd, qemu-storage-daemon and nbdkit
    Peers,
    /// All of them
    All,
}

impl What {
    /// Whether a file is measured on.
    fn needs_file(self) -> bool {
        !matches!(self, What::Clock | What::Layout)
    }
}
