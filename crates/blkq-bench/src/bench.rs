//! Runs the cases of a comparison in turn.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::Result;
use crate::file::TestFile;
use crate::measurement::Run;
use crate::progress::Progress;
use crate::result::{Case, Comparison};

/// Length and number of the runs.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Length of a run, in seconds.
    pub seconds: f64,
    pub rounds: usize,
    /// Whether to measure fewer points of curves and fewer cases.
    pub quick: bool,
}

pub struct Bench {
    /// The pace of the next comparison. Each table begins with the pace of the whole run.
    pub pace: Pace,
    /// Public, so that callers show the progress of long work other than runs.
    pub progress: Progress,
    pub(crate) file: Option<TestFile>,
}

impl Bench {
    /// Path and size of the file on which cases do I/O. Panics if [`crate::What::needs_file`] does not hold for the
    /// table, which is a bug.
    pub fn file(&self) -> (PathBuf, u64) {
        let file = self.file.as_ref().expect("the file is created before the tables that need it");
        (file.path.clone(), file.bytes)
    }

    /// Runs every case once per round, in turn (A B C A B C ...).
    pub fn compare(&mut self, title: &str, cases: Vec<NamedRun<'_>>) -> Result<Comparison> {
        let Pace { seconds, rounds, .. } = self.pace;
        self.progress.begin(title);
        let mut cases: Vec<_> =
            cases.into_iter().map(|(name, run)| (Case { name, figures: Vec::new() }, run)).collect();
        for round in 1..=rounds {
            for (case, run) in &mut cases {
                let name = &case.name;
                self.progress.show(&format!("{title}: round {round} of {rounds}, {name}"));
                let began = Instant::now();
                let run =
                    run(Duration::from_secs_f64(seconds)).map_err(|e| format!("{title}, {name}: {e}"))?;
                for (metric, value) in run.values {
                    case.add(metric, &[value]);
                }
                // Counts the whole case, with the start and stop of its processes. The end of the table corrects the sum.
                self.progress.over_seconds += began.elapsed().as_secs_f64();
            }
        }
        let cases = cases.into_iter().map(|(case, _)| case).collect();
        Ok(Comparison { title: title.to_owned(), rounds, seconds, cases, effects: Vec::new() })
    }
}

pub type CaseRun<'a> = Box<dyn FnMut(Duration) -> Result<Run> + 'a>;
/// A case and its name.
pub type NamedRun<'a> = (String, CaseRun<'a>);

pub fn case<'a>(name: impl Into<String>, run: impl FnMut(Duration) -> Result<Run> + 'a) -> NamedRun<'a> {
    (name.into(), Box::new(run))
}
