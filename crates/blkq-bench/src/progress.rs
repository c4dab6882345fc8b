//! The progress line: the current step, the share that is done, and the estimated time left.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Minimum time between two updates: printing more often would disturb the measurement.
const INTERVAL: Duration = Duration::from_millis(200);

/// Seconds of measuring after which the estimate is based on the measured pace.
const KNOWN_AFTER_SECONDS: f64 = 1.0;

/// Writes progress to stderr: on a terminal one line that is overwritten, else one line per comparison.
pub struct Progress {
    terminal: bool,
    began: Instant,
    /// Time spent on work that is not part of the planned runs.
    aside: Duration,
    shown: Option<Instant>,
    planned_seconds: f64,
    /// Duration of the finished runs: the planned one in finished tables, the measured one in the current table.
    pub over_seconds: f64,
}

impl Progress {
    pub fn new(planned_seconds: f64) -> Progress {
        Progress {
            terminal: std::io::stderr().is_terminal(),
            began: Instant::now(),
            aside: Duration::ZERO,
            shown: None,
            planned_seconds,
            over_seconds: 0.0,
        }
    }

    /// Runs work whose time does not count for the estimate of the time left.
    pub fn aside<T>(&mut self, work: impl FnOnce(&mut Progress) -> T) -> T {
        let began = Instant::now();
        let done = work(self);
        self.aside += began.elapsed();
        done
    }

    /// Starts a comparison, which is also reported if stderr is not a terminal.
    pub fn begin(&mut self, what: &str) {
        if self.terminal {
            self.shown = None;
            self.show(what);
        } else {
            let _ = writeln!(std::io::stderr(), "{what}{}", self.remaining());
        }
    }

    /// Shows a step on a terminal, unless another step was shown shortly before.
    pub fn show(&mut self, what: &str) {
        if !self.terminal || self.shown.is_some_and(|shown| shown.elapsed() < INTERVAL) {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = 100.0 * self.done_seconds() / self.planned_seconds.max(f64::MIN_POSITIVE);
        let (percent, remaining) = (format!("[{percent:3.0} %] "), self.remaining());
        // A line that wraps could not be overwritten.
        let columns = rustix::termios::tcgetwinsize(std::io::stderr()).map_or(0, |size| size.ws_col);
        let columns = if columns > 0 { columns } else { 80 };
        let room = usize::from(columns).saturating_sub(percent.len() + remaining.len() + 1);
        let what: String = what.chars().take(room).collect();
        let _ = write!(std::io::stderr(), "\r\x1b[K{percent}{what}{remaining}");
    }

    pub fn clear(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    fn done_seconds(&self) -> f64 {
        self.over_seconds.min(self.planned_seconds)
    }

    /// Estimates the time left: scales the remaining planned time by the ratio of actual to planned time so far.
    fn remaining(&self) -> String {
        let done = self.done_seconds();
        let left = self.planned_seconds - done;
        let pace = if done > KNOWN_AFTER_SECONDS {
            self.began.elapsed().saturating_sub(self.aside).as_secs_f64() / done
        } else {
            1.0
        };
        match (left * pace).ceil() as u64 {
            seconds @ 0..90 => format!(", about {seconds} s left"),
            seconds => format!(", about {} min left", seconds.div_ceil(60)),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
