//! The standard output of commands, and the exit code of those that act on several devices.

pub mod columns;
mod progress;
mod table;

use std::io::Write;
use std::process::ExitCode;

use blkq_protocol::failure::{EXIT_FAILED, Failure, Outcome, print_error};

pub use progress::Progress;
pub use table::{Align, render, render_apart, render_figures};

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
    print(&format!("{}\n", blkq::text::escaped(text)))
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
