//! Running cases in turn, and what a run is.

use std::time::{Duration, Instant};

use blkq::StatsSnapshot;

use crate::Result;
use crate::file::{TestFile, Wanted};
use crate::metric::Metric;
use crate::process::Usage;
use crate::progress::Progress;
use crate::result::{Case, Comparison, Figure};

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Length of a run, in seconds.
    pub seconds: f64,
    /// What a run takes besides: starting and ending what it needs, in seconds.
    pub around_seconds: f64,
    /// Runs of each case.
    pub rounds: usize,
    /// Fewer points of curves, fewer cases where there are many.
    pub quick: bool,
}

impl Pace {
    /// The pace of `--quick`, or the usual one.
    pub fn new(quick: bool) -> Pace {
        let (seconds, rounds) = if quick { (0.1, 3) } else { (1.0, 5) };
        Pace { seconds, around_seconds: 0.0, rounds, quick }
    }

    /// Seconds that so many cases take.
    pub fn cost(&self, cases: usize) -> f64 {
        (self.seconds + self.around_seconds) * (self.rounds * cases) as f64
    }
}

/// What tables measure with.
pub struct Bench {
    /// How long and how often.
    pub pace: Pace,
    /// For what takes long besides runs.
    pub progress: Progress,
    pub(crate) file: Option<TestFile>,
    pub(crate) file_wanted: Wanted,
    /// Planned seconds that are over: those of the tables that ended, and within this one.
    pub(crate) over_seconds: f64,
}

impl Bench {
    /// The file to measure on, made and filled when it is first asked for.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn file(&mut self) -> Result<&TestFile> {
        if self.file.is_none() {
            let wanted = &self.file_wanted;
            self.file = Some(self.progress.aside(|progress| TestFile::create(wanted, progress))?);
        }
        Ok(self.file.as_ref().expect("it was made above"))
    }

    /// Runs every case once per round, in turn (A B C A B C ...). A case is told how long
    /// to run.
    ///
    /// # Errors
    /// That of the first case that failed.
    pub fn compare(&mut self, title: &str, cases: Vec<(String, CaseRun<'_>)>) -> Result<Comparison> {
        self.compare_at(self.pace, title, cases)
    }

    /// The same at another pace.
    ///
    /// # Errors
    /// That of the first case that failed.
    pub fn compare_at(
        &mut self,
        pace: Pace,
        title: &str,
        mut cases: Vec<(String, CaseRun<'_>)>,
    ) -> Result<Comparison> {
        let Pace { seconds, rounds, .. } = pace;
        self.progress.begin(title);
        let mut samples: Vec<Vec<(Metric, Vec<f64>)>> = vec![Vec::new(); cases.len()];
        for round in 1..=rounds {
            for ((name, run), samples) in cases.iter_mut().zip(&mut samples) {
                self.progress.say(&format!("{title}: round {round} of {rounds}, {name}"));
                let began = Instant::now();
                let run =
                    run(Duration::from_secs_f64(seconds)).map_err(|e| format!("{title}, {name}: {e}"))?;
                for (metric, value) in run.values {
                    match samples.iter_mut().find(|(of, _)| *of == metric) {
                        Some((_, values)) => values.push(value),
                        None => samples.push((metric, vec![value])),
                    }
                }
                // What a case does besides the run is planned, too.
                self.over_seconds += began.elapsed().as_secs_f64();
                self.progress.over(self.over_seconds);
            }
        }
        let figures = |samples: Vec<(Metric, Vec<f64>)>| {
            samples.into_iter().map(|(metric, values)| Figure::new(metric, values)).collect()
        };
        let cases = cases.into_iter().zip(samples);
        let cases = cases.map(|((name, _), samples)| Case { name, figures: figures(samples) }).collect();
        Ok(Comparison { title: title.to_owned(), rounds, seconds, cases, effects: Vec::new() })
    }
}

/// Runs a case for that long.
pub type CaseRun<'a> = Box<dyn FnMut(Duration) -> Result<Run> + 'a>;

/// A case: its name and how to run it.
pub fn case<'a>(
    name: impl Into<String>,
    run: impl FnMut(Duration) -> Result<Run> + 'a,
) -> (String, CaseRun<'a>) {
    (name.into(), Box::new(run))
}

/// What one run did: a value for each metric that it knows of.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// I/Os done.
    pub ios: u64,
    /// The values, in the order in which they are printed.
    pub values: Vec<(Metric, f64)>,
}

impl Run {
    /// Adds a value.
    #[must_use]
    pub fn with(mut self, metric: Metric, value: f64) -> Run {
        self.values.push((metric, value));
        self
    }

    /// Adds a count divided by the I/Os.
    #[must_use]
    pub fn per_io(self, metric: Metric, count: u64) -> Run {
        let per_io = count as f64 / self.ios as f64;
        self.with(metric, per_io)
    }

    /// Adds what the device's statistics tell: clock reads and merges per I/O.
    #[must_use]
    pub fn with_statistics(self, statistics: &StatsSnapshot) -> Run {
        let merges = statistics.groups.iter().map(|group| group.merges).sum();
        self.per_io(Metric::ClockReadsPerIo, statistics.counter(blkq::Counter::ClockReads))
            .per_io(Metric::MergesPerIo, merges)
    }
}

/// Calls `turn`, which does some I/Os and tells how many, until `length` is over or there
/// was nothing left to do: IOPS, processor time and context switches of this process.
///
/// # Errors
/// Those of `turn`; or if it did nothing at all.
pub fn timed(length: Duration, mut turn: impl FnMut() -> Result<u64>) -> Result<Run> {
    let (began, before) = (Instant::now(), Usage::of_self());
    let mut ios = 0;
    while began.elapsed() < length {
        match turn()? {
            0 => break,
            done => ios += done,
        }
    }
    let (elapsed, used) = (began.elapsed(), Usage::of_self().since(before));
    rate(ios, elapsed, used)
}

/// The run of so many I/Os in that time, at that expense.
///
/// # Errors
/// If there was no I/O.
pub fn rate(ios: u64, elapsed: Duration, used: Usage) -> Result<Run> {
    if ios == 0 {
        return Err(format!("no I/O ended in {elapsed:?}").into());
    }
    Ok(Run { ios, values: Vec::new() }
        .with(Metric::Iops, ios as f64 / elapsed.as_secs_f64())
        .with(Metric::NsPerIo, elapsed.as_nanos() as f64 / ios as f64)
        .with(Metric::CpuNsPerIo, used.cpu.as_nanos() as f64 / ios as f64)
        .per_io(Metric::ContextSwitchesPerIo, used.context_switches))
}
