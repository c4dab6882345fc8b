//! The null driver: submission, tags, plug, statistics and completion, and nothing else.

use blkq::drivers::null::{Null, NullOptions};
use blkq::{Bio, ClockMode, Counter, Disk, IoBuffer, LocalQueue, Sector};

use crate::Result;
use crate::measure::{Row, Run, compare, timed};

/// The peak for several batch sizes, with the clock cached and precise, and without iostats.
pub fn run(seconds: f64, rounds: usize) -> Result<()> {
    let cases = [
        ("batch 32", 32, ClockMode::Cached, true),
        ("batch 32, clock precise", 32, ClockMode::Precise, true),
        ("batch 32, no iostats", 32, ClockMode::Cached, false),
        ("batch 8", 8, ClockMode::Cached, true),
        ("batch 1", 1, ClockMode::Cached, true),
    ];
    let mut rows: Vec<Row<'_>> = Vec::new();
    for (name, batch, clock, iostats) in cases {
        rows.push((name.to_string(), Box::new(move || null_run(seconds, batch, clock, iostats))));
    }
    compare("null driver, 4 KiB random read, one core", &mut rows, rounds)
}

fn null_run(seconds: f64, batch: usize, clock: ClockMode, iostats: bool) -> Result<Run> {
    let mut options = NullOptions::new(1 << 40);
    options.zero_reads = false;
    let disk = Disk::builder(Box::new(Null::new(options)?)).clock(clock).iostats(iostats).build()?;
    let mut queue = disk.open_queue(0)?;
    let mut buffers: Vec<IoBuffer> = (0..batch).map(|_| IoBuffer::zeroed(4096)).collect();
    let mut random = Random(1);
    let mut run = timed(seconds, || {
        for _ in 0..1024 {
            turn(&mut queue, &mut buffers, &mut random)?;
        }
        Ok(1024 * batch as u64)
    })?;
    run.clock_reads = disk.stats().counter(Counter::ClockReads);
    Ok(run)
}

#[inline]
fn turn(queue: &mut LocalQueue, buffers: &mut Vec<IoBuffer>, random: &mut Random) -> Result<()> {
    for buffer in buffers.drain(..) {
        let sector = Sector(random.below(1 << 28) << 3);
        if queue.submit(Bio::read(sector, buffer, 0)).is_err() {
            return Err("the queue has no room".into());
        }
    }
    queue.poll();
    buffers.extend(queue.completions().filter_map(|completion| completion.data.into_buffer()));
    Ok(())
}

/// A small fast generator of positions (a linear congruential one).
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0) * u128::from(limit)) >> 64) as u64
    }
}
