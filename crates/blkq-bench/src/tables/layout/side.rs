//! One side of the comparison. Two modules include this file: one with blkq as `library`, and one with a build of the
//! same sources without padding.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blkq::random::Random;

use super::super::{DEPTH, REGION_BYTES, SUBMITTERS, Work, confine};
use super::library::drivers::null::{Null, NullOptions};
use super::library::layout::contended_lines;
use super::library::{Bio, Disk, EngineThread, IoBuffer, LocalQueue, Sector};
use crate::Result;
use crate::load::Offsets;
use crate::measurement::{Run, during};

pub fn disk(queues: usize) -> Result<Arc<Disk>> {
    let options = NullOptions { zero_reads: false, ..NullOptions::new(REGION_BYTES * SUBMITTERS as u64) };
    Ok(Disk::builder(Box::new(Null::new(options)?)).queues(queues).depth(DEPTH).build()?)
}

/// Number of cache lines of the device's structures that contain words of different writers.
pub fn contended(disk: &Disk) -> usize {
    contended_lines(&disk.hot_fields()).len()
}

/// Runs `work` on one thread per queue of the device; each thread owns its queue. The threads share one processor, or
/// run on all.
pub fn owners(disk: &Arc<Disk>, work: &Work, one_processor: bool, length: Duration) -> Result<Run> {
    let prepare = |number| {
        if one_processor {
            confine()?;
        }
        Ok((disk.open_queue(number)?, Stream::new(work, number), buffers()))
    };
    measure(disk.queue_count(), length, prepare, |(mut queue, mut stream, mut free), over| {
        let mut ios = 0;
        while !over.load(Relaxed) {
            ios += turn(&mut queue, &mut stream, &mut free)?;
        }
        Ok(ios)
    })
}

/// Runs `work` on threads that submit through an engine with one queue.
pub fn submitters(disk: &Arc<Disk>, work: &Work, length: Duration) -> Result<Run> {
    let _engine = EngineThread::spawn("bench-engine", vec![(disk.clone(), 0)])?;
    let prepare = |number| Ok((disk.submitter(), Stream::new(work, number), buffers()));
    measure(SUBMITTERS, length, prepare, |(mut submitter, mut stream, mut free), over| {
        let (completed, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (give, back) = std::sync::mpsc::channel();
        while !over.load(Relaxed) {
            let Some(buffer) = free.pop().or_else(|| back.recv().ok()) else { break };
            let (completed, failed, give) = (completed.clone(), failed.clone(), give.clone());
            submitter.submit(stream.next(buffer), move |result, data| {
                completed.fetch_add(1, Relaxed);
                failed.fetch_or(result.is_err(), Relaxed);
                // Sending fails if the submitter has exited.
                let _ = data.into_buffer().map(|buffer| give.send(buffer));
            });
        }
        if failed.load(Relaxed) { Err("an I/O failed".into()) } else { Ok(completed.load(Relaxed)) }
    })
}

fn buffers() -> Vec<IoBuffer> {
    (0..DEPTH).map(|_| IoBuffer::zeroed(4096)).collect()
}

/// The bios of one thread, all in its own region.
struct Stream<'a> {
    work: &'a Work,
    offsets: Offsets,
    region: u64,
    random: Random,
}

impl Stream<'_> {
    fn new(work: &Work, number: usize) -> Stream<'_> {
        let region = number as u64 * REGION_BYTES;
        Stream { work, offsets: work.load.offsets(REGION_BYTES), region, random: Random::new(region + 1) }
    }

    fn next(&mut self, buffer: IoBuffer) -> Bio {
        let sector = Sector((self.region + self.offsets.next_bytes()) >> 9);
        let write = if self.work.mixed { self.random.below(2) == 0 } else { self.work.load.write };
        if write { Bio::write(sector, buffer, 0) } else { Bio::read(sector, buffer, 0) }
    }
}

fn turn(queue: &mut LocalQueue, stream: &mut Stream, free: &mut Vec<IoBuffer>) -> Result<u64> {
    for buffer in free.drain(..) {
        if queue.submit(stream.next(buffer)).is_err() {
            return Err("the queue has no room".into());
        }
    }
    queue.wait(1);
    for completion in queue.completions() {
        completion.result?;
        free.extend(completion.data.into_buffer());
    }
    Ok(free.len() as u64)
}

/// Runs `body`, which returns a number of I/Os, on `count` threads until `length` has passed and the flag is set. Each
/// thread prepares first. Returns the rate of all I/Os.
fn measure<T>(
    count: usize,
    length: Duration,
    prepare: impl Fn(usize) -> Result<T> + Sync,
    body: impl Fn(T, &AtomicBool) -> Result<u64> + Sync,
) -> Result<Run> {
    let (stopwatch, (), ios) = during(0..count, prepare, body, || std::thread::sleep(length))?;
    stopwatch.run_of(ios.into_iter().sum())
}
