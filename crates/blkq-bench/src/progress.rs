//! Progress: the current step, how far it is, and the time that is left.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Least time between two lines, so that measuring is not disturbed by talking.
const INTERVAL: Duration = Duration::from_millis(200);

/// Seconds of measuring after which its pace is known.
const KNOWN_AFTER_SECONDS: f64 = 1.0;

/// A line on stderr that is written over while stderr is a terminal; else one line for
/// each comparison.
pub struct Progress {
    terminal: bool,
    began: Instant,
    /// Time that was spent on other things than the planned runs.
    aside: Duration,
    shown: Option<Instant>,
    /// Seconds of measuring that are planned, and those of them that are over.
    planned_seconds: f64,
    over_seconds: f64,
}

impl Progress {
    /// Progress through `planned_seconds` of measuring.
    pub fn new(planned_seconds: f64) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        Progress {
            terminal,
            began: Instant::now(),
            aside: Duration::ZERO,
            shown: None,
            planned_seconds,
            over_seconds: 0.0,
        }
    }

    /// So much of what was planned is over.
    pub fn over(&mut self, seconds: f64) {
        self.over_seconds = seconds.min(self.planned_seconds);
    }

    /// Runs something that is done once and does not count for the estimate of the rest.
    pub fn aside<T>(&mut self, work: impl FnOnce(&mut Progress) -> T) -> T {
        let began = Instant::now();
        let done = work(self);
        self.aside += began.elapsed();
        done
    }

    /// Begins a new step, which is written to files too.
    pub fn begin(&mut self, what: &str) {
        if self.terminal {
            self.shown = None;
            self.show(what);
        } else {
            let _ = writeln!(std::io::stderr(), "{what}{}", self.remaining());
        }
    }

    /// Shows on a terminal what is being done.
    pub fn show(&mut self, what: &str) {
        if !self.terminal || self.shown.is_some_and(|shown| shown.elapsed() < INTERVAL) {
            return;
        }
        self.shown = Some(Instant::now());
        let percent = 100.0 * self.over_seconds / self.planned_seconds.max(f64::MIN_POSITIVE);
        let (percent, remaining) = (format!("[{percent:3.0} %] "), self.remaining());
        // A line that is wider than the terminal could not be written over.
        let columns = match rustix::termios::tcgetwinsize(std::io::stderr()) {
            Ok(size) if size.ws_col > 0 => size.ws_col,
            _ => 80,
        };
        let room = usize::from(columns).saturating_sub(percent.len() + remaining.len() + 1);
        let what: String = what.chars().take(room).collect();
        let _ = write!(std::io::stderr(), "\r\x1b[K{percent}{what}{remaining}");
    }

    /// Takes the line away.
    pub fn clear(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    /// The rest takes as long in proportion as the part that is done.
    fn remaining(&self) -> String {
        let left = self.planned_seconds - self.over_seconds;
        let pace = if self.over_seconds > KNOWN_AFTER_SECONDS {
            self.began.elapsed().saturating_sub(self.aside).as_secs_f64() / self.over_seconds
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
