//! The figures of one run, and the threads that do its I/O.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::metric::Metric;
use crate::process::Usage;
use crate::{Result, ensure};

#[derive(Clone, Debug, Default)]
pub struct Run {
    pub ios: u64,
    /// The values, in the order in which they are printed.
    pub values: Vec<(Metric, f64)>,
}

impl Run {
    /// A run of `ios` I/Os without values.
    pub fn new(ios: u64) -> Run {
        Run { ios, values: Vec::new() }
    }

    #[must_use]
    pub fn with(mut self, metric: Metric, value: f64) -> Run {
        self.values.push((metric, value));
        self
    }

    /// Adds `count` divided by the number of I/Os.
    #[must_use]
    pub fn per_io(self, metric: Metric, count: u64) -> Run {
        let per_io = count as f64 / self.ios as f64;
        self.with(metric, per_io)
    }

    /// The value of `metric`; 0 if the run has none.
    pub fn value(&self, metric: Metric) -> f64 {
        self.values.iter().find(|(of, _)| *of == metric).map_or(0.0, |(_, value)| *value)
    }

    /// This run under the metrics of a client. The mean latency follows from the rate, because `depth` I/Os were always
    /// in flight.
    #[must_use]
    pub fn of_client(&self, depth: usize) -> Run {
        Run::new(self.ios)
            .with(Metric::Iops, self.value(Metric::Iops))
            .with(Metric::LatencyMeanUs, self.value(Metric::NsPerIo) * depth as f64 / 1e3)
            .with(Metric::ClientCpuNsPerIo, self.value(Metric::CpuNsPerIo))
            .with(Metric::ClientSwitchesPerIo, self.value(Metric::ContextSwitchesPerIo))
    }
}

/// The start of a measured time, and what this process had used by then.
pub struct Stopwatch {
    began: Instant,
    used: Usage,
}

impl Stopwatch {
    pub fn start() -> Stopwatch {
        Stopwatch { began: Instant::now(), used: Usage::of_self() }
    }

    /// A run of `ios` I/Os since the start, with the processor time and the context switches of this process. Fails if
    /// `ios` is 0.
    pub fn run_of(&self, ios: u64) -> Result<Run> {
        let (elapsed, used) = (self.began.elapsed(), Usage::of_self().since(self.used));
        ensure(ios > 0, || format!("no I/O completed in {elapsed:?}"))?;
        Ok(Run::new(ios)
            .with(Metric::Iops, ios as f64 / elapsed.as_secs_f64())
            .with(Metric::NsPerIo, elapsed.as_nanos() as f64 / ios as f64)
            .per_io(Metric::CpuNsPerIo, used.cpu.as_nanos() as u64)
            .per_io(Metric::ContextSwitchesPerIo, used.context_switches))
    }
}

/// Calls `turn`, which does some I/Os and returns their number, until `length` has passed or `turn` returns
/// 0. Returns the rate, and the processor time and context switches of this process. Fails if there was no
/// I/O.
pub fn timed(length: Duration, mut turn: impl FnMut() -> Result<u64>) -> Result<Run> {
    let stopwatch = Stopwatch::start();
    let mut ios = 0;
    while stopwatch.began.elapsed() < length {
        match turn()? {
            0 => break,
            done => ios += done,
        }
    }
    stopwatch.run_of(ios)
}

/// Runs `job` on a thread for each of `inputs`. All begin together; the stopwatch is started directly before. Fails
/// if a job fails or panics.
pub fn together<I: Send, T: Send>(
    inputs: impl IntoIterator<Item = I>,
    job: impl Fn(I) -> Result<T> + Sync,
) -> Result<(Stopwatch, Vec<T>)> {
    let (stopwatch, (), results) = during(inputs, Ok, |input, _| job(input), || ())?;
    Ok((stopwatch, results))
}

/// Like [`together`], but each thread prepares its job first, and the jobs receive a flag that is set when `action`,
/// which runs on this thread meanwhile, returns.
pub fn during<I: Send, P, T: Send, A>(
    inputs: impl IntoIterator<Item = I>,
    prepare: impl Fn(I) -> Result<P> + Sync,
    job: impl Fn(P, &AtomicBool) -> Result<T> + Sync,
    action: impl FnOnce() -> A,
) -> Result<(Stopwatch, A, Vec<T>)> {
    let inputs: Vec<I> = inputs.into_iter().collect();
    let (start, over) = (&Barrier::new(inputs.len() + 1), &AtomicBool::new(false));
    let (prepare, job) = (&prepare, &job);
    std::thread::scope(|scope| {
        let threads: Vec<_> = inputs
            .into_iter()
            .map(|input| {
                scope.spawn(move || {
                    let prepared = prepare(input);
                    // The other threads wait for this thread, even if it failed.
                    start.wait();
                    start.wait();
                    job(prepared?, over)
                })
            })
            .collect();
        // All threads are ready, and none begins its job before this thread reaches the barrier again.
        start.wait();
        let stopwatch = Stopwatch::start();
        start.wait();
        let done = action();
        over.store(true, Relaxed);
        let joined = threads.into_iter().map(|thread| thread.join());
        let results: Vec<Result<T>> = joined
            .map(|result| result.unwrap_or_else(|_| Err("a measuring thread panicked".into())))
            .collect();
        Ok((stopwatch, done, results.into_iter().collect::<Result<_>>()?))
    })
}

pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
