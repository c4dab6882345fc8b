//! `blkq bench`: the benchmarks are in the crate `blkq_bench`.

use blkq_protocol::failure::{Failure, Outcome};

pub type Args = blkq_bench::Arguments;

pub fn run(args: &Args) -> Outcome {
    blkq_bench::run(args).map_err(|e| Failure::new(e.to_string()).during("bench"))
}
