//! io_uring directly on the file: the upper limit for a block layer on the file; io_uring operations without effect; and
//! threads with blocking calls on the file. The ring has the same flags as the rings of blkq.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use blkq::IoBuffer;
use io_uring::{IoUring, opcode, squeue, types};

use crate::load::Load;
use crate::measurement::{Run, timed, together};
use crate::metric::Metric;
use crate::{Result, ensure};

/// Entries of the submission queue.
const ENTRIES: u32 = 256;

/// Runs `load` on the file for `length`, with O_DIRECT or through the page cache.
pub fn run(path: &Path, direct: bool, load: &Load, length: Duration) -> Result<Run> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(load.write)
        .custom_flags(if direct { libc::O_DIRECT } else { 0 })
        .open(path)?;
    // Metadata would report a length of 0 for a block device.
    let bytes = file.seek(SeekFrom::End(0))?;
    let (name, block_bytes) = (path.display(), load.block_bytes);
    ensure(bytes >= u64::from(block_bytes), || {
        format!("{name}: a file of {bytes} bytes is too small for I/Os of {block_bytes} bytes")
    })?;
    let mut offsets = load.offsets(bytes);
    let mut ring = ring()?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    let mut buffers: Vec<IoBuffer> =
        (0..load.depth).map(|_| IoBuffer::zeroed(load.block_bytes as usize)).collect();
    if load.registered {
        let iovecs: Vec<libc::iovec> = buffers
            .iter_mut()
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() })
            .collect();
        // SAFETY: the buffers outlive the ring's use of them, because all I/O completes below.
        unsafe { ring.submitter().register_buffers(&iovecs)? };
    }
    let mut free: Vec<usize> = (0..load.depth).collect();
    let (mut enters, mut submissions) = (0, 0);
    let run = timed(length, || {
        if free.len() >= load.batch && offsets.left > 0 {
            let now = offsets.left.min(free.len() as u64) as usize;
            for slot in free.drain(..now) {
                let entry = entry(load, slot, buffers[slot].as_mut_ptr(), offsets.next_bytes());
                // SAFETY: a buffer is in flight at most once, and outlives the ring's use of it.
                unsafe { ring.submission().push(&entry)? };
                submissions += 1;
                if load.one_by_one {
                    ring.submit()?;
                    enters += 1;
                }
            }
        }
        if free.len() == load.depth {
            return Ok(0);
        }
        ring.submit_and_wait(1)?;
        enters += 1;
        let mut completed = 0;
        for cqe in ring.completion() {
            // The slot is free whatever the result: the loop below must not wait for it.
            free.push(cqe.user_data() as usize);
            let result = cqe.result();
            ensure(result == block_bytes as i32, || {
                format!("io_uring: an I/O of {block_bytes} bytes completed with {result}")
            })?;
            completed += 1;
        }
        Ok(completed)
    });
    // Also waits after an error: a buffer must not be freed before the I/O on it completes.
    let mut in_flight = load.depth - free.len();
    while in_flight > 0 {
        ring.submit_and_wait(1)?;
        in_flight -= ring.completion().count();
    }
    let run = run?;
    Ok(run.per_io(Metric::EntersPerIo, enters).per_io(Metric::SubmissionsPerIo, submissions))
}

/// Submits batches of `batch` operations IORING_OP_NOP and reaps their completions, for `length`: the rate of a kernel
/// interface that takes a batch per system call and does nothing.
pub fn run_nops(batch: usize, length: Duration) -> Result<Run> {
    let mut ring = ring()?;
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

/// Runs `load` through the page cache, with `load.depth` threads that share its offsets and do one blocking call at a time,
/// like the workers of a loop device. A single thread is the fastest way to do requests one after another. The load must
/// have [`Load::ios_max`] set.
pub fn run_workers(path: &Path, load: &Load, length: Duration) -> Result<Run> {
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

/// Creates a ring with the flags that blkq uses.
fn ring() -> Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_coop_taskrun().setup_taskrun_flag();
    Ok(builder.build(ENTRIES)?)
}

fn entry(load: &Load, slot: usize, buffer: *mut u8, offset: u64) -> squeue::Entry {
    let (file, length) = (types::Fixed(0), load.block_bytes);
    let entry = match (load.write, load.registered) {
        (false, false) => opcode::Read::new(file, buffer, length).offset(offset).build(),
        (false, true) => opcode::ReadFixed::new(file, buffer, length, slot as u16).offset(offset).build(),
        (true, false) => opcode::Write::new(file, buffer, length).offset(offset).build(),
        (true, true) => opcode::WriteFixed::new(file, buffer, length, slot as u16).offset(offset).build(),
    };
    entry.user_data(slot as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_io_stops_the_run() {
        let path = std::env::temp_dir().join(format!("blkq-bench-raw-{}", std::process::id()));
        std::fs::write(&path, [0; 4096]).expect("written");
        // Reading a directory fails with EISDIR, for each of the I/Os in flight.
        let load = Load::new("randread", 4);
        let error = |path: &Path| run(path, false, &load, Duration::from_millis(50)).map(|_| ()).unwrap_err();
        assert!(error(&std::env::temp_dir()).to_string().contains("completed with -21"));
        let empty = path.with_extension("empty");
        std::fs::write(&empty, []).expect("written");
        assert!(error(&empty).to_string().contains("is too small"));
        std::fs::remove_file(&empty).expect("removed");
        assert!(run(&path, false, &load, Duration::from_millis(50)).is_ok());
        std::fs::remove_file(&path).expect("removed");
    }
}
