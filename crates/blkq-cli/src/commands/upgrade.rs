//! `blkq upgrade`: hands a block device in use from its daemon to a new one, of this program.

use std::process::ExitCode;

use super::recover::{attach_options, recover};
use crate::completion;
use crate::control::{Request, ask};
use crate::devices::named;
use crate::failure::Outcome;
use crate::serve::check_take_over;
use crate::state::{StateDir, read_state};

/// Options of `upgrade`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Install the new blkq, and run it: the daemon that serves the device exits, and a new one of the
program that you run takes over. I/O in flight is reissued; what comes meanwhile waits, and
nothing fails. Options, image and certificates are checked first: if the new program could not
serve them, the old one keeps running. The options are those of `blkq attach`, the settings and the size those of the old
daemon.

Example:
  blkq upgrade disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device: its name, its image, its URI or its node in /dev
    #[arg(add = completion::devices(), value_name = "DEVICE")]
    name: String,
}

impl Args {
    /// Stops the old daemon and starts a new one.
    ///
    /// # Errors
    /// Why a new one could not serve the device, or the old one does not release it: that keeps running
    /// then. Or, the device being an orphan, why the new one cannot take it over.
    pub fn run(self) -> Outcome<ExitCode> {
        let during = |e: crate::failure::Failure| e.during(format_args!("upgrade {}", self.name));
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.name)?;
        check(&dir, &name).map_err(during)?;
        ask::<()>(&dir, &name, &Request::Leave {}).map_err(during)?;
        recover(&name).map_err(during)
    }
}

/// Checks whether this program could serve the device `name`, if that is one of the kernel. Whether
/// there is one, its daemon reports.
fn check(dir: &StateDir, name: &str) -> Outcome {
    let Some(state) = read_state(&dir.file(name, ".json")) else { return Ok(()) };
    let Some(block_device) = &state.ublk else { return Ok(()) };
    check_take_over(&attach_options(&state)?, block_device)
}
