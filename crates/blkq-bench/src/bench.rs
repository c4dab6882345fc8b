//! Runs the cases of a comparison in turn.

use std::time::{Duration, Instant};

use crate::Result;
use crate::file::{TestFile, Wanted};
use crate::measurement::Run;
use crate::metric::Metric;
use crate::progress::Progress;
use crate::result::{Case, Comparison, Figure};

/// Length and number of the runs.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Length of a run, in seconds.
    pub seconds: f64,
    /// Additional seconds per run, in which its processes start and stop.
    pub around_seconds: f64,
    pub rounds: usize,
    /// Whether to measure fewer points of curves and fewer cases.
    pub quick: bool,
}

impl Pace {
    pub fn new(quick: bool) -> Pace {
        let (seconds, rounds) = if quick { (0.1, 3) } else { (1.0, 5) };
        Pace { seconds, around_seconds: 0.0, rounds, quick }
    }

    /// Seconds that a comparison of `cases` cases takes.
    pub fn cost(&self, cases: usize) -> f64 {
        (self.seconds + self.around_seconds) * (self.rounds * cases) as f64
    }
}

pub struct Bench {
    pub pace: Pace,
    /// Public, so that callers show the progress of long work other than runs.
    pub progress: Progress,
    pub(crate) file: Option<TestFile>,
    pub(crate) file_wanted: Wanted,
}

impl Bench {
    /// The file on which cases do I/O. The first call creates and fills it.
    pub fn file(&mut self) -> Result<&TestFile> {
        if self.file.is_none() {
            let wanted = &self.file_wanted;
            self.file = Some(self.progress.aside(|progress| TestFile::create(wanted, progress))?);
        }
        Ok(self.file.as_ref().expect("created above"))
    }

    /// Runs every case once per round, in turn (A B C A B C ...).
    pub fn compare(&mut self, title: &str, cases: Vec<NamedRun<'_>>) -> Result<Comparison> {
        self.compare_at(self.pace, title, cases)
    }

    /// Like [`Bench::compare`], with another pace.
    pub fn compare_at(
        &mut self,
        pace: Pace,
        title: &str,
        mut cases: Vec<NamedRun<'_>>,
    ) -> Result<Comparison> {
        let Pace { seconds, rounds, .. } = pace;
        self.progress.begin(title);
        let mut samples: Vec<Vec<(Metric, Vec<f64>)>> = vec![Vec::new(); cases.len()];
        for round in 1..=rounds {
            for ((name, run), samples) in cases.iter_mut().zip(&mut samples) {
                self.progress.show(&format!("{title}: round {round} of {rounds}, {name}"));
                let began = Instant::now();
                let run =
                    run(Duration::from_secs_f64(seconds)).map_err(|e| format!("{title}, {name}: {e}"))?;
                for (metric, value) in run.values {
                    match samples.iter_mut().find(|(of, _)| *of == metric) {
                        Some((_, values)) => values.push(value),
                        None => samples.push((metric, vec![value])),
                    }
                }
                // The plan includes the time that a case takes before and after its run.
                self.progress.over_seconds += began.elapsed().as_secs_f64();
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

pub type CaseRun<'a> = Box<dyn FnMut(Duration) -> Result<Run> + 'a>;
/// A case and its name.
pub type NamedRun<'a> = (String, CaseRun<'a>);

pub fn case<'a>(name: impl Into<String>, run: impl FnMut(Duration) -> Result<Run> + 'a) -> NamedRun<'a> {
    (name.into(), Box::new(run))
}
