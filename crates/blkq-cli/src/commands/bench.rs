//! `blkq bench`: what the ideas are worth on this machine.

use crate::failure::{Failure, Outcome};

/// Options of `bench`.
pub type Args = blkq_bench::Arguments;

/// Measures what was asked for.
///
/// # Errors
/// The measurement that failed.
pub fn run(args: &Args) -> Outcome {
    blkq_bench::run(args).map(drop).map_err(|e| Failure::new(e.to_string()).during("bench"))
}
