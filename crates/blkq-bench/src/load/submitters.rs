//! A load of many threads that own no queue. Each has more to submit than the device accepts, as writers to a page cache
//! do, so each submits until the request gate blocks it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use blkq::clock::monotonic_ns;
use blkq::stats::Histogram;
use blkq::sync::lock;
use blkq::{Bio, Data, Disk, EngineThread, IoBuffer, IoResult, Sector, Status};

use crate::Result;
use crate::load::Load;
use crate::measurement::{Run, Stopwatch, during, mib};
use crate::metric::Metric;

/// Warm-up before the measured time, as a share of it: the gate must be full first.
const WARM_UP: f64 = 0.25;

/// The I/Os of one submitter. Each submitter has a separate window, so that submitters share nothing but the gate.
struct Window {
    completed: Mutex<Completed>,
    /// Signals that enough buffers are free for the waiting submitter.
    refilled: Condvar,
    size: usize,
}

#[derive(Default)]
struct Completed {
    buffers: Vec<IoBuffer>,
    waits: bool,
    latency_ns: u64,
    latencies: Histogram,
    failed: Option<Status>,
}

impl Window {
    fn new(load: &Load) -> Window {
        let buffers = (0..load.depth).map(|_| IoBuffer::zeroed(load.block_bytes as usize)).collect();
        let completed = Mutex::new(Completed { buffers, ..Completed::default() });
        Window { completed, refilled: Condvar::new(), size: load.depth }
    }

    /// Returns the free buffers. If there are none, waits until half of the window is free, so that one wake-up serves
    /// many I/Os.
    fn take(&self) -> Vec<IoBuffer> {
        let mut completed = lock(&self.completed);
        if completed.buffers.is_empty() {
            completed.waits = true;
            while completed.waits {
                completed = self.refilled.wait(completed).unwrap_or_else(PoisonError::into_inner);
            }
        }
        std::mem::take(&mut completed.buffers)
    }

    /// Records the completion of an I/O that was submitted at `asked_ns`. Runs on the engine's thread.
    fn complete(&self, result: IoResult, data: Data, asked_ns: u64) {
        let latency_ns = monotonic_ns().saturating_sub(asked_ns);
        let mut completed = lock(&self.completed);
        completed.failed = completed.failed.or(result.err());
        completed.latency_ns += latency_ns;
        completed.latencies.record(latency_ns);
        completed.buffers.extend(data.into_buffer());
        if completed.waits && completed.buffers.len() >= self.size / 2 {
            completed.waits = false;
            self.refilled.notify_one();
        }
    }

    fn reap(&self) -> Completed {
        let mut completed = lock(&self.completed);
        let buffers = std::mem::take(&mut completed.buffers);
        let waits = completed.waits;
        std::mem::replace(&mut *completed, Completed { buffers, waits, ..Completed::default() })
    }
}

/// Runs `load` on `submitters` threads for `length`. Each thread uses its own region of the device; one
/// engine serves all of them. `load.depth` limits the I/Os in flight of a submitter, and must exceed the
/// largest batch, so that the gate is the limit.
pub fn run(disk: &Arc<Disk>, submitters: usize, load: &Load, length: Duration) -> Result<Run> {
    let _engine = EngineThread::spawn("bench-engine", vec![(disk.clone(), 0)])?;
    let region_bytes = disk.limits().capacity_bytes / submitters as u64;
    let windows: Vec<Arc<Window>> = (0..submitters).map(|_| Arc::new(Window::new(load))).collect();
    let submit = |(number, window): (usize, &Arc<Window>), stop: &AtomicBool| {
        let (mut submitter, mut offsets) = (disk.submitter(), load.offsets(region_bytes));
        let mut free = Vec::new();
        while !stop.load(Relaxed) {
            let Some(buffer) = free.pop() else {
                free = window.take();
                continue;
            };
            let sector = Sector((number as u64 * region_bytes + offsets.next_bytes()) >> 9);
            let bio = if load.write { Bio::write(sector, buffer, 0) } else { Bio::read(sector, buffer, 0) };
            let (window, asked_ns) = (window.clone(), monotonic_ns());
            submitter.submit(bio, move |result, data| window.complete(result, data, asked_ns));
        }
        Ok(())
    };
    let measure = || -> Result<Run> {
        std::thread::sleep(length.mul_f64(WARM_UP));
        windows.iter().for_each(|window| drop(window.reap()));
        let (stopwatch, statistics, gate) = (Stopwatch::start(), disk.stats(), disk.gate_counters());
        std::thread::sleep(length);
        let completed: Vec<Completed> = windows.iter().map(|window| window.reap()).collect();
        let statistics = disk.stats().delta(&statistics);
        let wakeups = disk.gate_counters().wakeups - gate.wakeups;
        let requests = &statistics.groups[usize::from(load.write)];
        let request_kib = requests.sectors as f64 / 2.0 / requests.ios as f64;
        Ok(summary(load, &completed, &stopwatch)?
            .per_io(Metric::WakeupsPerIo, wakeups)
            .with(Metric::RequestKib, request_kib))
    };
    let (_, run, _) = during(windows.iter().enumerate(), Ok, submit, measure)?;
    run
}

/// The rate, latencies and fairness of the I/Os that completed since the start of `stopwatch`.
fn summary(load: &Load, completed: &[Completed], stopwatch: &Stopwatch) -> Result<Run> {
    if let Some(status) = completed.iter().find_map(|completed| completed.failed) {
        return Err(format!("an I/O completed with {status:?}").into());
    }
    let counts = completed.iter().map(|completed| completed.latencies.count());
    let ios = counts.clone().sum();
    let run = stopwatch.run_of(ios)?;
    let latency_ns: u64 = completed.iter().map(|completed| completed.latency_ns).sum();
    let latencies = completed.iter().fold(Histogram::default(), |mut all, completed| {
        all.add(&completed.latencies);
        all
    });
    let mib_per_second = run.value(Metric::Iops) * mib(load.block_bytes.into());
    let (least, most) = (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0));
    Ok(run
        .with(Metric::MibPerSecond, mib_per_second)
        .with(Metric::LatencyMeanUs, latency_ns as f64 / ios as f64 / 1e3)
        .with(Metric::LatencyP99Us, latencies.percentile_ns(99.0) as f64 / 1e3)
        .with(Metric::LatencyMaxUs, latencies.max_ns as f64 / 1e3)
        .with(Metric::ShareMinByMax, least as f64 / most as f64))
}

#[cfg(test)]
mod tests {
    use blkq::drivers::null::{Null, NullOptions};
    use blkq_drivers::model::{Model, ModelCompletion, ModelOptions};

    use super::*;

    #[test]
    fn submitters_fill_the_gate_and_their_ios_are_counted() {
        for batching in [false, true] {
            let mut options = ModelOptions::new(1 << 30);
            options.completion = ModelCompletion::Timer(100_000);
            let disk = Disk::builder(Box::new(Model::new(options).expect("valid limits")));
            let disk = disk.depth(8).batching(batching).build().expect("valid settings");
            // On a busy machine a submitter may get no I/O in a short run, and a run without I/O fails: repeats the run
            // until each got one.
            let done = (0..100).find_map(|_| {
                let load = Load::new("randwrite", 32);
                let run = match run(&disk, 4, &load, Duration::from_millis(40)) {
                    Err(error) if error.to_string().starts_with("no I/O completed") => return None,
                    run => run.expect("the run succeeds"),
                };
                let value = |of| run.values.iter().find(|(metric, _)| *metric == of).map(|(_, value)| *value);
                let share = value(Metric::ShareMinByMax).expect("measured");
                (share > 0.0).then_some((value(Metric::RequestKib), value(Metric::WakeupsPerIo)))
            });
            let (request_kib, wakeups) = done.expect("each submitter gets I/Os in one of the runs");
            assert!(request_kib >= Some(4.0), "{request_kib:?}");
            assert!(wakeups > Some(0.0), "submitters wait for requests: {wakeups:?}");
            let gate = disk.gate_counters();
            assert_eq!(gate.grants > 0, batching, "{gate:?}");
            assert!(gate.largest_in_flight[1] <= if batching { 12 } else { 8 }, "{gate:?}");
            assert!(gate.largest_grant <= 32 && gate.waits == gate.wakeups, "{gate:?}");
            assert_eq!(disk.stats().in_flight, [0, 0], "all I/Os completed");
        }
    }

    #[test]
    fn an_error_of_the_device_is_returned() {
        let mut options = NullOptions::new(1 << 30);
        options.limits.read_only = true;
        let disk = Disk::builder(Box::new(Null::new(options).expect("valid limits"))).build();
        let load = Load::new("randwrite", 4);
        let run = run(&disk.expect("valid settings"), 2, &load, Duration::from_millis(20));
        assert!(run.is_err());
    }
}
