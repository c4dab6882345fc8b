//! `blkq upgrade`: hands a block device in use from its daemon to a new one, of this program.

use std::process::ExitCode;

use super::recover::recover;
use crate::control::{Request, ask};
use crate::devices::named;
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
    /// The device: its name, its image, its URI or its node in /dev
    #[arg(value_name = "DEVICE")]
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
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.name).map_err(during)?;
        ask::<()>(&dir, &name, &Request::Leave {}).map_err(during)?;
        recover(&name).map_err(during)
    }
}
