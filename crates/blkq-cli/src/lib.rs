//! The `blkq` command: attaches images as block devices and manages them.
//!
//! `attach` starts one daemon per device. The other commands find the daemon by the name of the device in the state
//! directory ([`blkq_protocol::state`]), and send it requests over its control socket ([`blkq_protocol::control`]).

// Nothing outside of this workspace uses this library. Its items are documented where that helps a
// maintainer.
#![allow(missing_docs)]

use std::process::ExitCode;

use blkq_protocol::daemon::Serve;
use blkq_protocol::failure::{EXIT_FAILED, Outcome, print_error};
use clap::{CommandFactory, Parser};
use clap_complete::CompleteEnv;

pub mod commands;
pub mod config;
pub mod devices;
pub mod launch;
pub mod output;
pub mod trace;
pub mod usage;

use commands::Cli;
use commands::generate::COMPLETION_VARIABLE;

/// Runs the command line of this process. `D` is the daemon that some commands start in this process. Returns the exit
/// code: 0 for success, 1 if the command was refused or failed (one line on standard error says why). Wrong usage exits
/// with 2, as clap does.
pub fn main<D: Serve>() -> ExitCode {
    launch::note_parent();
    if std::env::var_os(COMPLETION_VARIABLE).is_some() {
        // A shell asks for completions. This prints them and exits.
        CompleteEnv::with_factory(Cli::command).var(COMPLETION_VARIABLE).complete();
    }
    run::<D>().unwrap_or_else(|failure| {
        print_error(&failure);
        ExitCode::from(EXIT_FAILED)
    })
}

fn run<D: Serve>() -> Outcome<ExitCode> {
    let subcommand = std::env::args_os().nth(1).and_then(|word| word.into_string().ok());
    let cli = Cli::try_parse_from(config::expand(std::env::args_os().collect(), Cli::command)?)
        .unwrap_or_else(|error| usage::explain(error, Cli::command, subcommand.as_deref()).exit());
    cli.command.run::<D>()
}
