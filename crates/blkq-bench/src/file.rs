//! The loop driver with direct I/O, and raw io_uring, on the same file.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use blkq::drivers::r#loop::{DirectIo, LoopDevice, LoopOptions};
use blkq::{Bio, Disk, IoBuffer, Sector};
use io_uring::{IoUring, opcode, types};

use crate::Result;
use crate::measure::{Row, Run, compare, timed};
use crate::peak::Random;

const BLOCK: u64 = 4096;
const DEPTH: usize = 64;

/// Where the next I/O goes.
#[derive(Clone, Copy, PartialEq)]
enum Pattern {
    Random,
    Sequential,
}

struct Positions {
    pattern: Pattern,
    blocks: u64,
    next: u64,
    random: Random,
}

impl Positions {
    fn new(pattern: Pattern, blocks: u64) -> Positions {
        let seed = u64::from(std::process::id()) ^ cpu_seed();
        Positions { pattern, blocks, next: 0, random: Random(seed) }
    }

    fn next(&mut self) -> u64 {
        match self.pattern {
            Pattern::Random => self.random.below(self.blocks),
            Pattern::Sequential => {
                self.next = (self.next + 1) % self.blocks;
                self.next
            }
        }
    }
}

fn cpu_seed() -> u64 {
    crate::measure::cpu_time().as_nanos() as u64
}

/// Random and sequential reads, and random writes are left to fio.
pub fn run(path: &Path, seconds: f64, rounds: usize) -> Result<()> {
    let blocks = std::fs::metadata(path)?.len() / BLOCK;
    let open = || -> Result<Arc<Disk>> {
        let options = LoopOptions { direct_io: DirectIo::On, read_only: true, ..LoopOptions::new(path) };
        Ok(Disk::builder(Box::new(LoopDevice::open(&options)?)).build()?)
    };
    let disk = open()?;
    let raw = |pattern, batch, fixed| {
        move || raw_run(path, seconds, Positions::new(pattern, blocks), DEPTH, batch, fixed)
    };
    let own = |pattern, depth, batch, fixed| {
        let disk = disk.clone();
        move || loop_run(&disk, seconds, Positions::new(pattern, blocks), depth, batch, fixed)
    };
    let mut rows: Vec<Row<'_>> = vec![
        ("raw io_uring, registered buffers".into(), Box::new(raw(Pattern::Random, 16, true))),
        ("raw io_uring, plain buffers".into(), Box::new(raw(Pattern::Random, 16, false))),
        ("blkq loop direct, registered buffers".into(), Box::new(own(Pattern::Random, DEPTH, 1, true))),
        ("blkq loop direct, plain buffers".into(), Box::new(own(Pattern::Random, DEPTH, 1, false))),
    ];
    compare("random read 4 KiB, depth 64", &mut rows, rounds)?;
    let mut rows: Vec<Row<'_>> = vec![
        (
            "raw io_uring".into(),
            Box::new(move || raw_run(path, seconds, Positions::new(Pattern::Random, blocks), 1, 1, false)),
        ),
        ("blkq loop direct".into(), Box::new(own(Pattern::Random, 1, 1, false))),
    ];
    compare("random read 4 KiB, depth 1", &mut rows, rounds)?;
    let mut rows: Vec<Row<'_>> = vec![
        ("raw io_uring, one by one".into(), Box::new(raw(Pattern::Sequential, 1, false))),
        ("raw io_uring, batches of 32".into(), Box::new(raw(Pattern::Sequential, 32, false))),
        ("blkq loop direct, merging".into(), Box::new(own(Pattern::Sequential, DEPTH, 32, false))),
    ];
    compare("sequential read 4 KiB, depth 64", &mut rows, rounds)
}

/// Raw io_uring, set up as blkq sets up its own: submits whenever `batch` slots are free.
fn raw_run(
    path: &Path,
    seconds: f64,
    mut at: Positions,
    depth: usize,
    batch: usize,
    fixed: bool,
) -> Result<Run> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(256)?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    let mut buffers: Vec<IoBuffer> = (0..depth).map(|_| IoBuffer::zeroed(BLOCK as usize)).collect();
    if fixed {
        let iovecs: Vec<libc::iovec> = buffers
            .iter_mut()
            .map(|b| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() })
            .collect();
        // SAFETY: the buffers outlive the ring's use of them.
        unsafe { ring.submitter().register_buffers(&iovecs)? };
    }
    let mut free: Vec<usize> = (0..depth).collect();
    let (mut enters, mut submissions) = (0u64, 0u64);
    let mut run = timed(seconds, || {
        while free.len() >= batch {
            for slot in free.drain(free.len() - batch..) {
                let offset = at.next() * BLOCK;
                let buffer = buffers[slot].as_mut_ptr();
                let entry = if fixed {
                    opcode::ReadFixed::new(types::Fixed(0), buffer, BLOCK as u32, slot as u16)
                        .offset(offset)
                        .build()
                } else {
                    opcode::Read::new(types::Fixed(0), buffer, BLOCK as u32).offset(offset).build()
                };
                // SAFETY: each buffer is in flight once, and outlives the ring's use of it.
                unsafe { ring.submission().push(&entry.user_data(slot as u64))? };
                submissions += 1;
            }
            if batch == 1 {
                ring.submit()?;
                enters += 1;
            }
            if batch > 1 {
                break;
            }
        }
        ring.submit_and_wait(1)?;
        enters += 1;
        let mut ended = 0;
        for cqe in ring.completion() {
            if cqe.result() != BLOCK as i32 {
                return Err(format!("read: {}", cqe.result()).into());
            }
            free.push(cqe.user_data() as usize);
            ended += 1;
        }
        Ok(ended)
    })?;
    while free.len() < depth {
        ring.submit_and_wait(1)?;
        free.extend(ring.completion().map(|cqe| cqe.user_data() as usize));
    }
    (run.enters, run.submissions) = (enters, submissions);
    Ok(run)
}

/// The loop driver through a queue of this thread: submits whenever `batch` bios are free.
fn loop_run(
    disk: &Arc<Disk>,
    seconds: f64,
    mut at: Positions,
    depth: usize,
    batch: usize,
    fixed: bool,
) -> Result<Run> {
    let mut queue = disk.open_queue(0)?;
    let mut free: Vec<IoBuffer> = (0..depth).map(|_| IoBuffer::zeroed(BLOCK as usize)).collect();
    if let (true, Some(ring)) = (fixed, queue.ring()) {
        free.iter_mut().for_each(|buffer| ring.register_buffer(buffer));
    }
    let before = queue.ring_counters();
    let mut run = timed(seconds, || {
        if free.len() >= batch {
            for buffer in free.drain(..) {
                let sector = Sector::from_bytes(at.next() * BLOCK).expect("blocks are whole sectors");
                if queue.submit(Bio::read(sector, buffer, 0)).is_err() {
                    return Err("the queue has no room".into());
                }
            }
        }
        queue.wait(1);
        let mut ended = 0;
        for completion in queue.completions() {
            completion.result?;
            free.extend(completion.data.into_buffer());
            ended += 1;
        }
        Ok(ended)
    })?;
    let after = queue.ring_counters();
    run.enters = after.enters - before.enters;
    run.submissions = after.submissions - before.submissions;
    while queue.in_flight() > 0 {
        queue.wait(1);
        free.extend(queue.completions().filter_map(|completion| completion.data.into_buffer()));
    }
    if let Some(ring) = queue.ring() {
        free.iter_mut().for_each(|buffer| ring.unregister_buffer(buffer));
    }
    Ok(run)
}
