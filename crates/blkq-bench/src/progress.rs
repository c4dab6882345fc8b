//! What is being done, how far it is, and how long it will still take.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Least time between two lines, so that measuring is not disturbed by talking.
const INTERVAL: Duration = Duration::from_millis(200);

/// A line on stderr that is written over while stderr is a terminal; else one line for
/// each comparison.
pub struct Progress {
    terminal: bool,
    began: Instant,
    said: Option<Instant>,
    /// Seconds of measuring that are planned, and those of them that are over.
    planned_seconds: f64,
    over_seconds: f64,
}

impl Progress {
    /// Progress through `planned_seconds` of measuring.
    pub fn new(planned_seconds: f64) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        Progress { terminal, began: Instant::now(), said: None, planned_seconds, over_seconds: 0.0 }
    }

    /// So much of what was planned is over.
    pub fn over(&mut self, seconds: f64) {
        self.over_seconds = seconds.min(self.planned_seconds);
    }

    /// Begins something new, which is told to files too.
    pub fn begin(&mut self, what: &str) {
        if self.terminal {
            self.said = None;
            self.say(what);
        } else {
            let _ = writeln!(std::io::stderr(), "{what}{}", self.remaining());
        }
    }

    /// Tells a terminal what is being done.
    pub fn say(&mut self, what: &str) {
        if !self.terminal || self.said.is_some_and(|said| said.elapsed() < INTERVAL) {
            return;
        }
        self.said = Some(Instant::now());
        let percent = 100.0 * self.over_seconds / self.planned_seconds;
        let _ = write!(std::io::stderr(), "\r\x1b[K[{percent:3.0} %] {what}{}", self.remaining());
    }

    /// Takes the line away.
    pub fn clear(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }

    /// What is left takes as long in proportion as what is over took.
    fn remaining(&self) -> String {
        let left = self.planned_seconds - self.over_seconds;
        let pace = if self.over_seconds > 1.0 {
            self.began.elapsed().as_secs_f64() / self.over_seconds
        } else {
            1.0
        };
        match (left * pace).ceil() as u64 {
            seconds @ 0..90 => format!(", about {seconds} s left"),
            seconds => format!(", about {} min left", seconds.div_ceil(60)),
        }
    }
}
