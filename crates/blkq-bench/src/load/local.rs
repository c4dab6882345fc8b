//! A load on a queue that the measuring thread owns: without other threads and without locks.

use std::sync::Arc;
use std::time::Duration;

use blkq::{Bio, Counter, Disk, IoBuffer, LocalQueue, Sector};

use crate::Result;
use crate::load::{Load, Offsets};
use crate::measurement::{Run, timed};
use crate::metric::Metric;

/// Runs `load` on queue 0 of `disk` for `length`.
pub fn run(disk: &Arc<Disk>, load: &Load, length: Duration) -> Result<Run> {
    let mut queue = disk.open_queue(0)?;
    let before = queue.ring_counters();
    let statistics = disk.stats();
    let run = on(&mut queue, load, disk.limits().capacity_bytes, length)?;
    let (after, statistics) = (queue.ring_counters(), disk.stats().delta(&statistics));
    Ok(run
        .per_io(Metric::EntersPerIo, after.enters - before.enters)
        .per_io(Metric::SubmissionsPerIo, after.submissions - before.submissions)
        .per_io(Metric::ClockReadsPerIo, statistics.counter(Counter::ClockReads))
        .per_io(Metric::MergesPerIo, statistics.groups.iter().map(|group| group.merges).sum()))
}

pub fn on(queue: &mut LocalQueue, load: &Load, bytes: u64, length: Duration) -> Result<Run> {
    let mut offsets = load.offsets(bytes);
    let mut free: Vec<IoBuffer> =
        (0..load.depth).map(|_| IoBuffer::zeroed(load.block_bytes as usize)).collect();
    if let (true, Some(mut ring)) = (load.registered, queue.registrar()) {
        free.iter_mut().for_each(|buffer| ring.register_buffer(buffer));
    }
    let run = timed(length, || turn(queue, load, &mut offsets, &mut free));
    while queue.in_flight() > 0 {
        queue.wait(1);
        free.extend(queue.completions().filter_map(|completion| completion.data.into_buffer()));
    }
    if let (true, Some(mut ring)) = (load.registered, queue.registrar()) {
        free.iter_mut().for_each(|buffer| ring.unregister_buffer(buffer));
    }
    run
}

/// Submits all free buffers if they are a batch, waits, and reaps completions. Returns their number, which is 0 when the
/// load is done.
fn turn(queue: &mut LocalQueue, load: &Load, offsets: &mut Offsets, free: &mut Vec<IoBuffer>) -> Result<u64> {
    if free.len() >= load.batch {
        let now = offsets.left.min(free.len() as u64) as usize;
        for buffer in free.drain(..now) {
            let sector = Sector(offsets.next_bytes() >> 9);
            let bio = if load.write { Bio::write(sector, buffer, 0) } else { Bio::read(sector, buffer, 0) };
            if queue.submit(bio).is_err() {
                return Err("the queue has no room".into());
            }
            if load.one_by_one {
                queue.poll();
            }
        }
    }
    queue.wait(1);
    let before = free.len();
    for completion in queue.completions() {
        completion.result?;
        free.extend(completion.data.into_buffer());
    }
    Ok((free.len() - before) as u64)
}
