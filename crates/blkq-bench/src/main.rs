//! Measures the block layer in process: the peak of a core with the null driver, and the
//! loop driver against raw io_uring on the same file, interleaved in one run.

mod file;
mod measure;
mod peak;

use std::path::PathBuf;

use clap::Parser;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Measures blkq in process against what the kernel gives without it.
#[derive(Parser)]
enum Arguments {
    /// I/O per second of one core with the null driver: nothing but the block layer.
    Peak {
        /// Length of each run, in seconds.
        #[arg(long, default_value_t = 1.0)]
        seconds: f64,
        /// Runs of each row; the median counts.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
    /// The loop driver with direct I/O against raw io_uring on the same file.
    File {
        /// A file of at least 64 MiB, filled with data.
        path: PathBuf,
        /// Length of each run, in seconds.
        #[arg(long, default_value_t = 2.0)]
        seconds: f64,
        /// Runs of each row; the median counts.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
    },
}

fn main() -> Result<()> {
    match Arguments::parse() {
        Arguments::Peak { seconds, rounds } => peak::run(seconds, rounds),
        Arguments::File { path, seconds, rounds } => file::run(&path, seconds, rounds),
    }
}
