//! `blkq detach`: ends devices, and is done when they are gone.

use std::process::ExitCode;

use crate::control::{Called, Request, ask, call};
use crate::failure::{EXIT_FAILED, Outcome};
use crate::state::StateDir;
use crate::{complain, print};

/// Options of `detach`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Returns when the data is flushed, the daemon is gone, and its sockets and files are
removed. With clients connected it refuses, unless --force ends their connections.

Examples:
  blkq detach disk.img
  blkq detach --all --force")]
pub struct Args {
    /// The device, as `blkq list` names it
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    name: Option<String>,
    /// Every device; tells of each what became of it
    #[arg(long)]
    all: bool,
    /// Even if clients are connected
    #[arg(long)]
    force: bool,
}

impl Args {
    /// Ends one device, or all.
    ///
    /// # Errors
    /// If it was refused; of `--all`, the reasons are told on the way and only the exit
    /// code remains.
    pub fn run(self) -> Outcome<ExitCode> {
        let dir = StateDir::locate()?;
        if let Some(name) = self.name {
            let request = Request::Detach { force: self.force };
            ask::<()>(&dir, &name, &request).map_err(|e| e.during(format_args!("detach {name}")))?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut code = ExitCode::SUCCESS;
        for name in dir.names()? {
            match end(&dir, &name, self.force) {
                Ok(()) => print(&format!("{name}: detached\n"))?,
                Err(failure) => {
                    complain(&failure);
                    code = ExitCode::from(EXIT_FAILED);
                }
            }
        }
        Ok(code)
    }
}

/// Ends one of all devices: one that died, or was just detached by somebody else, is gone as
/// well.
///
/// # Errors
/// If it was refused, or its last flush failed.
pub fn end(dir: &StateDir, name: &str, force: bool) -> Outcome {
    let ended = match call::<()>(dir, name, &Request::Detach { force }) {
        Ok(Called::Answered(())) => Ok(()),
        Ok(Called::Nobody) => dir.clear_dead(name).map(|_| ()),
        Err(failure) => Err(failure),
    };
    ended.map_err(|e| e.during(format_args!("detach {name}")))
}
