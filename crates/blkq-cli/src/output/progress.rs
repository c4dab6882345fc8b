//! The line on standard error that shows how far a command has come.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use blkq_protocol::failure::{Failure, print_error};

/// No progress is shown before this time: most commands take less.
const AFTER: Duration = Duration::from_secs(2);
/// A log gets fewer lines than a terminal, where each line overwrites the previous one.
const INTERVAL_LOG: Duration = Duration::from_secs(10);
/// CR and EL (ECMA-48) erase the previous line.
const ERASE: &str = "\r\x1b[K";

pub struct Progress {
    interval: Duration,
    next: Instant,
    is_terminal: bool,
    is_shown: bool,
}

impl Progress {
    /// Shows a line per `interval` on a terminal, and fewer lines in a log.
    pub fn new(interval: Duration) -> Progress {
        let is_terminal = std::io::stderr().is_terminal();
        let interval = if is_terminal { interval } else { INTERVAL_LOG };
        Progress { interval, next: Instant::now() + AFTER, is_terminal, is_shown: false }
    }

    /// Shows `line`, if it is time for another one.
    pub fn show(&mut self, line: impl FnOnce() -> Option<String>) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + self.interval;
        let Some(line) = line() else { return };
        match self.is_terminal {
            true => _ = write!(std::io::stderr(), "{ERASE}{line}"),
            false => print_error(&Failure::new(line)),
        }
        self.is_shown = true;
    }

    /// Erases the line from a terminal.
    pub fn clear(&self) {
        if self.is_shown && self.is_terminal {
            let _ = write!(std::io::stderr(), "{ERASE}");
        }
    }
}
