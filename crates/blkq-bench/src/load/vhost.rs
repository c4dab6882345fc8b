//! The load of a virtual machine: requests to a vhost-user-blk server. Each queue has a thread, which sleeps until the
//! server signals a completion.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::Result;
use crate::load::{Load, Offsets};
use crate::measurement::{Run, Stopwatch, together};
use crate::metric::Metric;
use crate::vhost::{FrontEnd, Options, Queue};

const COMPLETION_WAIT: Duration = Duration::from_secs(30);

struct Done {
    latencies_ns: Vec<u32>,
    kicks: u64,
    waits: u64,
}

/// Connects to `socket`, with `queues` queues that have memory for `load`. Fails if the server offers fewer queues.
pub fn connect(socket: &Path, load: &Load, queues: usize) -> Result<FrontEnd> {
    FrontEnd::connect(socket, &Options { queues, slots: load.depth, data_bytes: load.block_bytes as usize })
}

/// Runs `load` on each queue for `length`, and waits until all requests have completed. `load` must have the depth and the
/// block size that were passed to [`connect`], and no [`Load::ios_max`].
pub fn run(front_end: &mut FrontEnd, load: &Load, length: Duration) -> Result<Run> {
    assert!(load.ios_max.is_none(), "the load of a virtual machine has no maximum number of I/Os");
    let bytes = front_end.bytes;
    let queues = &mut front_end.queues;
    let (stopwatch, done) = together(queues, |queue| run_queue(queue, load, load.offsets(bytes), length))?;
    report(done, &stopwatch)
}

/// Merges the figures of all queues, under the metrics of a client.
fn report(done: Vec<Done>, stopwatch: &Stopwatch) -> Result<Run> {
    let (kicks, waits) = done.iter().fold((0, 0), |(kicks, waits), of| (kicks + of.kicks, waits + of.waits));
    let mut latencies_ns: Vec<u32> = done.into_iter().flat_map(|of| of.latencies_ns).collect();
    let ios = latencies_ns.len() as u64;
    let run = stopwatch.run_of(ios)?;
    let mean_us = latencies_ns.iter().map(|ns| u64::from(*ns)).sum::<u64>() as f64 / ios as f64 / 1e3;
    latencies_ns.sort_unstable();
    let percentile = |share: f64| {
        f64::from(latencies_ns[((ios as f64 * share) as usize).min(latencies_ns.len() - 1)]) / 1e3
    };
    Ok(Run::new(ios)
        .with(Metric::Iops, run.value(Metric::Iops))
        .with(Metric::LatencyMeanUs, mean_us)
        .with(Metric::LatencyP50Us, percentile(0.5))
        .with(Metric::LatencyP99Us, percentile(0.99))
        .with(Metric::LatencyP999Us, percentile(0.999))
        .with(Metric::ClientCpuNsPerIo, run.value(Metric::CpuNsPerIo))
        .with(Metric::ClientSwitchesPerIo, run.value(Metric::ContextSwitchesPerIo))
        .per_io(Metric::KicksPerIo, kicks)
        .per_io(Metric::CallsPerIo, waits))
}

/// Reads the clock once per turn: all completions of a turn complete at that time, and all requests submitted in
/// the next turn start at that time.
fn run_queue(queue: &mut Queue, load: &Load, mut offsets: Offsets, length: Duration) -> Result<Done> {
    let began = Instant::now();
    let mut now = began;
    let mut begun = vec![began; load.depth];
    let mut free: Vec<usize> = (0..load.depth).collect();
    let mut done = Done { latencies_ns: Vec::with_capacity(1 << 20), kicks: 0, waits: 0 };
    loop {
        if now - began < length {
            for slot in free.drain(..) {
                let sector = offsets.next_bytes() / 512;
                queue.submit(slot, load.write, sector);
                begun[slot] = now;
            }
            done.kicks += u64::from(queue.publish()?);
        }
        if free.len() == load.depth {
            return Ok(done);
        }
        done.waits += u64::from(queue.wait(COMPLETION_WAIT)?);
        now = Instant::now();
        let mut failed = None;
        queue.reap(|slot, status| {
            failed = failed.or((status != 0).then_some(status));
            let latency_ns = (now - begun[slot]).as_nanos();
            done.latencies_ns.push(u32::try_from(latency_ns).unwrap_or(u32::MAX));
            free.push(slot);
        })?;
        if let Some(status) = failed {
            return Err(format!("vhost-user-blk: a request completed with status {status}").into());
        }
    }
}
