//! Threads that each do one blocking call on the file at a time, like the workers of a loop device. A single thread is the
//! fastest way to do requests one after another.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkq::IoBuffer;

use crate::Result;
use crate::load::Load;
use crate::measurement::Run;
use crate::threads::together;

/// Runs `load` through the page cache, with `load.depth` threads that share its offsets. The load must have
/// [`Load::ios_max`] set.
pub fn run(path: &Path, load: &Load, length: Duration) -> Result<Run> {
    let file = OpenOptions::new().read(true).write(load.write).open(path)?;
    let offsets = load.offsets(file.metadata()?.len());
    let next = AtomicU64::new(0);
    let (stopwatch, counts) = together(0..load.depth, |_| {
        let began = Instant::now();
        let mut buffer = IoBuffer::zeroed(load.block_bytes as usize);
        let mut ios = 0;
        while began.elapsed() < length
            && let Some(offset) = offsets.nth_bytes(next.fetch_add(1, Relaxed))
        {
            if load.write {
                file.write_all_at(&buffer, offset)?;
            } else {
                file.read_exact_at(&mut buffer, offset)?;
            }
            ios += 1;
        }
        Ok(ios)
    })?;
    stopwatch.run_of(counts.into_iter().sum())
}
