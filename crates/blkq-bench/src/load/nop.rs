//! io_uring with operations that do nothing: what an interface of the kernel can do that
//! takes a batch with one system call.

use std::time::Duration;

use io_uring::opcode;

use crate::Result;
use crate::load::raw;
use crate::measurement::{Run, timed};
use crate::metric::Metric;

/// Submits `batch` operations at once and takes their completions, for `length`.
///
/// # Errors
/// If the kernel gives no ring.
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
