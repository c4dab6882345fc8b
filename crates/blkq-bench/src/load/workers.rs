//! Threads that each do one blocking call on the file at a time, like the workers of a loop device. A single thread is the
//! fastest way to do requests one after another.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkq::IoBuffer;

use crate::Result;
use crate::load::Load;
use crate::measurement::{Run, rate};
use crate::process::Usage;

/// Runs `load` through the page cache, with `load.depth` threads that share its offsets. The load must have
/// [`Load::ios_max`] set.
pub fn run(path: &Path, load: &Load, length: Duration) -> Result<Run> {
    let file = OpenOptions::new().read(true).write(load.write).open(path)?;
    let offsets = load.offsets(file.metadata()?.len());
    let next = AtomicU64::new(0);
    let worker = || {
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
    };
    together((0..load.depth).map(|_| worker).collect())
}

/// Runs each of `jobs` on its own thread, and waits for all. A job returns its number of I/Os.
pub fn together<J: FnOnce() -> Result<u64> + Send>(jobs: Vec<J>) -> Result<Run> {
    let start = Barrier::new(jobs.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = jobs
            .into_iter()
            .map(|job| {
                scope.spawn(|| {
                    start.wait();
                    start.wait();
                    job()
                })
            })
            .collect();
        // All threads have started, and none begins its job before this thread reaches the barrier again.
        start.wait();
        let (began, before) = (Instant::now(), Usage::of_self());
        start.wait();
        let counts: Vec<Result<u64>> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a measuring thread panicked".into())))
            .collect();
        let (elapsed, used) = (began.elapsed(), Usage::of_self().since(before));
        rate(counts.into_iter().sum::<Result<u64>>()?, elapsed, used)
    })
}
