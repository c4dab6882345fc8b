//! The `blkq` command: attaches images as block devices and manages them.
//!
//! `attach` turns into one daemon per device ([`daemon`]); the other commands find it by
//! its name in the state directory ([`state`]) and talk to it over its control socket
//! ([`control`]). [`serve`] is where a daemon meets the block layer and its attachments.

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;

pub mod access;
pub mod autoclear;
pub mod backing;
pub mod bitmaps;
pub mod columns;
pub mod commands;
pub mod completion;
pub mod config;
pub mod confine;
pub mod control;
pub mod daemon;
pub mod descriptors;
pub mod devices;
pub mod disks;
pub mod elsewhere;
pub mod failure;
mod file_id;
pub mod group;
pub mod hangs;
pub mod info;
pub mod launch;
pub mod log;
pub mod metrics;
pub mod operations;
pub mod options;
pub mod parent;
pub mod pid_file;
mod record_lock;
pub mod serve;
mod session;
pub mod settings;
pub mod signals;
pub mod state;
pub mod statistics;
pub mod systemd;
pub mod table;
pub mod timestamp;
pub mod trace;
pub mod usage;

use commands::Cli;
use failure::{EXIT_FAILED, Failure, Outcome};

/// Runs the command line of this process: 0 if it was done, 1 if it was refused or
/// failed (one line on stderr has the reason), 2 if it was not understood.
pub fn main() -> ExitCode {
    parent::note();
    complete();
    let subcommand = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
    let words = match config::expand(std::env::args_os().collect(), Cli::command) {
        Ok(words) => words,
        Err(failure) => {
            complain(&failure);
            return ExitCode::from(EXIT_FAILED);
        }
    };
    let cli = Cli::try_parse_from(words)
        .unwrap_or_else(|error| usage::explain(error, Cli::command, subcommand.as_deref()).exit());
    match cli.command.run() {
        Ok(code) => code,
        Err(failure) => {
            complain(&failure);
            ExitCode::from(EXIT_FAILED)
        }
    }
}

/// Answers a shell that asks for completions, and exits; returns if none does.
fn complete() {
    if std::env::var_os(completion::VARIABLE).is_some() {
        CompleteEnv::with_factory(Cli::command).var(completion::VARIABLE).complete();
    }
}

/// Puts a failure on stderr.
pub fn complain(failure: &Failure) {
    // Not eprintln!, which panics where stderr is closed.
    let _ = writeln!(std::io::stderr(), "blkq: {failure}");
}

/// Puts `text` on stdout, at once.
///
/// # Errors
/// If it cannot be written. A reader that has closed its end makes the
/// process exit quietly.
pub fn print(text: &str) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(e) => Err(Failure::new(format!("standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// Puts a line on stdout, in which control characters are escaped.
///
/// # Errors
/// As [`print()`].
pub fn print_line(text: &str) -> Outcome {
    print(&format!("{}\n", blkq::text::escaped(text)))
}

/// Puts a value on stdout as one line of JSON.
///
/// # Errors
/// As [`print()`].
pub fn print_json(value: &impl serde::Serialize) -> Outcome {
    let line = serde_json::to_string(value).map_err(|e| Failure::new(format!("JSON: {e}")))?;
    print(&format!("{line}\n"))
}
