//! io_uring with IORING_OP_NOP: the rate of a kernel interface that takes a batch per system call and does nothing.

use std::time::Duration;

use io_uring::opcode;

use crate::Result;
use crate::load::raw;
use crate::measurement::{Run, timed};
use crate::metric::Metric;

/// Submits batches of `batch` operations and reaps their completions, for `length`.
pub fn run(batch: usize, length: Duration) -> Result<Run> {
    let mut ring = raw::ring()?;
    let entries = vec![opcode::Nop::new().build(); batch];
    let mut enters = 0;
    let run = timed(length, || {
        // SAFETY: the operation uses no memory and no file.
        unsafe { ring.submission().push_multiple(&entries)? };
        ring.submit_and_wait(batch)?;
        enters += 1;
        Ok(ring.completion().count() as u64)
    })?;
    Ok(run.per_io(Metric::EntersPerIo, enters))
}
