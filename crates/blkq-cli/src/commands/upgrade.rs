//! `blkq upgrade`: hands a block device in use from its daemon to a new one, of this program.

use std::process::ExitCode;

use super::recover::recover;
use crate::control::{Request, ask};
use crate::failure::Outcome;
use crate::state::StateDir;

/// Options of `upgrade`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Install the new blkq, and run it: the daemon that serves the device ends, and a new one of the
program that you run takes over. I/O in flight is issued again; what comes meanwhile waits, and
nothing fails. The options are those of `blkq attach`, the settings and the size those of the old
daemon.

Example:
  blkq upgrade disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device, as `blkq list` names it
    name: String,
}

impl Args {
    /// Ends the old daemon and starts a new one.
    ///
    /// # Errors
    /// If the old one does not let go of it; or, the device being an orphan then, why the new one
    /// cannot take it over.
    pub fn run(self) -> Outcome<ExitCode> {
        let during = |e: crate::failure::Failure| e.during(format_args!("upgrade {}", self.name));
        ask::<()>(&StateDir::locate()?, &self.name, &Request::Leave {}).map_err(during)?;
        recover(&self.name).map_err(during)
    }
}
