//! The output of commands: text, tables and JSON on standard output, the line on standard error that shows how far a
//! command has come, and the exit code of commands that act on several devices.

pub mod columns;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use blkq::text::escaped;
use blkq_protocol::failure::{EXIT_FAILED, Failure, Outcome, print_error};

/// No progress is shown before this time: most commands take less.
const PROGRESS_AFTER: Duration = Duration::from_secs(2);
/// A log gets fewer lines than a terminal, where each line overwrites the previous one.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// CR and EL (ECMA-48) erase the previous line.
const ERASE: &str = "\r\x1b[K";

/// Prints `text` on standard output, without buffering. If the reader of a pipe has closed its end, the
/// process exits with 0 and prints nothing more.
pub fn print(text: &str) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(e) => Err(Failure::new(format!("cannot write to standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// Prints a line on standard output. Control characters in `text` are escaped.
pub fn print_line(text: &str) -> Outcome {
    print(&format!("{}\n", escaped(text)))
}

/// Prints a value on standard output, as one line of JSON.
pub fn print_json(value: &impl serde::Serialize) -> Outcome {
    let line = serde_json::to_string(value).map_err(|e| Failure::new(format!("cannot encode JSON: {e}")))?;
    print(&format!("{line}\n"))
}

/// `1 request`, `2 requests`.
pub fn quantity(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// Prints warnings about the device `name` on standard error.
pub fn warn(name: &str, warnings: &[String]) {
    warnings.iter().for_each(|why| print_error(&Failure::new(format!("{name}: warning: {why}"))));
}

/// Calls `what` for each element, even if it failed for earlier ones. Failures are printed immediately, and
/// only the exit code remains.
pub fn for_each<T>(all: &[T], mut what: impl FnMut(&T) -> Outcome) -> Outcome<ExitCode> {
    let mut has_failed = false;
    for one in all {
        if let Err(failure) = what(one) {
            print_error(&failure);
            has_failed = true;
        }
    }
    Ok(exit_code(has_failed))
}

pub fn exit_code(has_failed: bool) -> ExitCode {
    if has_failed { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    Left,
    Right,
}

impl Align {
    /// Adds spaces up to a width in characters.
    pub fn pad(self, text: &str, width: usize) -> String {
        match self {
            Align::Left => format!("{text:<width$}"),
            Align::Right => format!("{text:>width$}"),
        }
    }
}

/// Renders the rows as lines. Each column is as wide as its widest cell, and two spaces separate the columns.
pub fn render(align: impl AsRef<[Align]>, rows: &[impl AsRef<[String]>]) -> String {
    render_apart(2, align, rows)
}

/// Renders the rows as [`render`] does, with `gap` spaces between the columns. Control characters, which the
/// path of an image may contain, are escaped, so that each row stays on one line.
pub fn render_apart(gap: usize, align: impl AsRef<[Align]>, rows: &[impl AsRef<[String]>]) -> String {
    let rows = rows.iter().map(|row| row.as_ref().iter().map(|cell| escaped(cell)).collect());
    let rows: Vec<Vec<String>> = rows.collect();
    let width_of =
        |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
    let columns = align.as_ref().iter().enumerate();
    let columns: Vec<_> = columns.map(|(at, align)| (align, width_of(at).unwrap_or(0))).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&columns).map(|(cell, (align, width))| align.pad(cell, *width));
        format!("{}\n", cells.collect::<Vec<_>>().join(&" ".repeat(gap)).trim_end())
    };
    rows.iter().map(line).collect()
}

/// Renders the figures of several objects under their `heads`; empty if there are no rows. The first column contains
/// the names of the objects.
pub fn render_figures(heads: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let head = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let mut align = vec![Align::Right; heads.len()];
    align[0] = Align::Left;
    if rows.len() > 1 { render(align, &rows) } else { String::new() }
}

/// The line on standard error that shows how far a command has come.
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
        let interval = if is_terminal { interval } else { LOG_INTERVAL };
        Progress { interval, next: Instant::now() + PROGRESS_AFTER, is_terminal, is_shown: false }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["name", "size"], ["a", "1"], ["long-name", "1000"]].map(|row| row.map(str::to_owned));
        let text = render([Align::Left, Align::Right], &rows);
        assert_eq!(text, "name       size\na             1\nlong-name  1000\n");
        let rows = [["a\nb\x1b[31m".to_owned(), "1".to_owned()]];
        assert_eq!(render([Align::Left, Align::Right], &rows), "a\\x0ab\\x1b[31m  1\n");
    }
}
