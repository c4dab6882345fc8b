//! `blkq daemon`: serves a device for the command that started this process, and stays. Hidden.

use std::ffi::OsString;
use std::process::ExitCode;

use super::recover;
use crate::control::reply_line;
use crate::daemon::{Daemon, Parent};
use crate::failure::{EXIT_FAILED, Failure, Outcome};
use crate::launch::LaunchMessage;
use crate::parent;

/// Options of `daemon`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The name of the device, or the name that is made unique, for lists of processes
    name: OsString,
    /// Serve the device of this name, whose daemon has died
    ///
    /// Without this option, the options of the device are read from standard input.
    #[arg(long)]
    recover: bool,
    /// Detach when the parent process exits
    #[arg(long)]
    exit_with_parent: bool,
}

impl Args {
    /// Serves the device, and reports to the process that started this one when it is usable.
    ///
    /// # Errors
    /// If that process has exited.
    pub fn run(self) -> Outcome<ExitCode> {
        let mut parent = Parent::new()?;
        match self.start(&mut parent) {
            Ok(daemon) => Ok(daemon.run()),
            Err(failure) => {
                // The process that started this one reports it to the user.
                parent.notify(&reply_line::<()>(Err(failure)))?;
                Ok(ExitCode::from(EXIT_FAILED))
            }
        }
    }

    fn start(&self, parent: &mut Parent) -> Outcome<Daemon> {
        if self.exit_with_parent {
            parent::exit_with_it()?;
        }
        if self.recover {
            return recover::take_over(&self.name.to_string_lossy(), Vec::new(), parent);
        }
        let message = serde_json::from_reader(std::io::stdin().lock());
        let LaunchMessage { options, settings, succeeds } =
            message.map_err(|e| Failure::new(format!("the options on standard input: {e}")))?;
        let options = options.read()?;
        match &options.name {
            // An older blkq that starts this program again sends nothing else.
            Some(name) if succeeds || !settings.is_empty() => {
                Daemon::succeed(name, &options, settings, Vec::new(), parent)
            }
            _ => Daemon::start(&options, Vec::new(), parent),
        }
    }
}
