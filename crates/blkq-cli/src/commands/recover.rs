//! `blkq recover`: a new daemon for a block device whose own died.

use std::process::ExitCode;

use blkq::drivers::DriverSpec;
use clap::Parser;

use super::{Cli, Command};
use crate::control::{Called, Request, call, died, no_such_device};
use crate::daemon::{Daemon, Parent};
use crate::failure::{Failure, Outcome};
use crate::launch::{be_daemon, launch, report};
use crate::state::{Dead, Orphan, StateDir, check_name};

/// Options of `recover`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A ublk device outlives its daemon: I/O on it waits, and is issued again when a new daemon
serves it. The options are those of `blkq attach`; changes of `blkq set` are not kept.

Examples:
  blkq list                     its mode is `orphan`
  blkq recover disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device, as `blkq list` names it
    name: String,
    /// Be the daemon
    #[arg(long, hide = true)]
    daemon: bool,
}

impl Args {
    /// Starts the new daemon, or is it.
    ///
    /// # Errors
    /// Why the device cannot be taken over; it stays as it was.
    pub fn run(self) -> Outcome<ExitCode> {
        if self.daemon {
            return be_daemon(|parent| take_over(&self.name, parent).map_err(|e| self.failed(e)));
        }
        recover(&self.name).map_err(|e| self.failed(e))
    }

    fn failed(&self, failure: Failure) -> Failure {
        failure.during(format_args!("recover {}", self.name))
    }
}

/// Starts a new daemon for the orphan `name`, and says where it is.
///
/// # Errors
/// What the daemon says.
pub fn recover(name: &str) -> Outcome<ExitCode> {
    let info = launch("recover", [name.into()])?;
    report(&info)?;
    Ok(ExitCode::SUCCESS)
}

/// Becomes the daemon of the orphan `name`.
fn take_over(name: &str, parent: &mut Parent) -> Outcome<Daemon> {
    let dir = StateDir::locate()?;
    if check_name(name).is_err() {
        return Err(no_such_device(name));
    }
    if let Called::Answered(()) = call::<()>(&dir, name, &Request::Ping {})? {
        return Err(Failure::new("its daemon lives; blkq upgrade hands the device to a new one"));
    }
    let orphan = match dir.clear_dead(name)? {
        Dead::Orphan(orphan) => orphan,
        Dead::Cleared(last_words) => return Err(died(name, &last_words)),
        Dead::No => return Err(no_such_device(name)),
    };
    let args = attach_args(&orphan)?;
    Daemon::recover(&args, orphan, parent)
}

/// What `attach` was told.
fn attach_args(orphan: &Orphan) -> Outcome<super::attach::Args> {
    let Some(ublk) = &orphan.state.ublk else { return Err(no_such_device(&orphan.state.name)) };
    // For other paths than the image's, which is known without it.
    let _ = std::env::set_current_dir(&ublk.directory);
    let words = ["blkq", "attach"].into_iter().chain(ublk.words.iter().map(String::as_str));
    let refuse = |why: String| Failure::new(format!("its options are not understood any more: {why}"));
    let cli = Cli::try_parse_from(words).map_err(|e| refuse(e.to_string()))?;
    let Command::Attach(mut args) = cli.command else { return Err(refuse("no attach".into())) };
    if let DriverSpec::Image(path) = &mut args.image {
        *path = orphan.state.image.clone().into();
    }
    Ok(args)
}
