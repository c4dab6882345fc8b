//! `blkq daemon`: the daemon of a device. A hidden subcommand, which `attach`, `recover` and `upgrade` start.

use std::ffi::OsString;
use std::process::ExitCode;

use blkq_protocol::control::reply_line;
use blkq_protocol::daemon::{LaunchMessage, Parent, Serve, Start};
use blkq_protocol::failure::{EXIT_FAILED, Failure, Outcome};

use super::recover;
use crate::launch::exit_with_parent;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// The name of the device, or the name that is made unique, for lists of processes
    name: OsString,
    /// Serve the device of this name, whose daemon has died
    ///
    /// Without this option, the options of the device are read from standard input.
    #[arg(long)]
    recover: bool,
    /// Serve the files that are at their paths now, even if they replaced the files of the device
    #[arg(long, requires = "recover")]
    allow_replaced: bool,
    /// Detach when the parent process exits
    #[arg(long)]
    exit_with_parent: bool,
}

/// Notifies the process that started this one of the outcome. Fails if that process has exited.
pub fn run<D: Serve>(args: Args) -> Outcome<ExitCode> {
    let mut parent = Parent::new()?;
    match args.start::<D>(&mut parent) {
        Ok(daemon) => Ok(daemon.run()),
        Err(failure) => {
            // The parent prints the failure. This process does not, or the user would see it twice.
            parent.notify(&reply_line::<()>(Err(failure)))?;
            Ok(ExitCode::from(EXIT_FAILED))
        }
    }
}

impl Args {
    fn start<D: Serve>(&self, parent: &mut Parent) -> Outcome<D> {
        if self.exit_with_parent {
            exit_with_parent()?;
        }
        if self.recover {
            return recover::take_over(&self.name.to_string_lossy(), self.allow_replaced, Vec::new(), parent);
        }
        let message = serde_json::from_reader(std::io::stdin().lock());
        let LaunchMessage { options, settings, succeeds } =
            message.map_err(|e| Failure::new(format!("cannot read the options from standard input: {e}")))?;
        let options = options.read()?;
        match &options.name {
            // `succeeds` is newer than `settings`: if an upgrade by an earlier version starts this program
            // again, only the settings show that the device already exists.
            Some(name) if succeeds || !settings.is_empty() => {
                D::start(Start::Successor { name, options: &options, settings }, Vec::new(), parent)
            }
            _ => D::start(Start::New(&options), Vec::new(), parent),
        }
    }
}
