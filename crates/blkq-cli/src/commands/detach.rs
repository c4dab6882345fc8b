//! `blkq detach`: detaches devices, and returns when their daemons have exited.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use blkq_export::ublk::{self, SetupProcess};

use crate::completion;
use crate::control::{Called, Request, call, no_such_device};
use crate::devices::{device_parser, named};
use crate::failure::{Failure, Outcome, for_each};
use crate::info::DeviceInfo;
use crate::state::{Dead, Found, Orphan, StateDir, check_name};
use crate::{complain, print};

/// How long a device is waited for that is just starting, stopping or handed over.
const SETTLE_WAIT: Duration = Duration::from_secs(2);
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Options of `detach`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Returns when the data is flushed, the daemon has exited, and its sockets and files are removed.

Refuses to detach a device while clients are connected, or while its block device is mounted or
open. With --force, requests in flight are completed and answered, then the connections are closed;
a client that does not accept a reply within a second is disconnected. Later I/O fails.

After 2 seconds the command prints what it waits for. With --force it stops waiting after a minute;
the device then detaches as soon as its storage responds.

If the daemon has died, its stale files are removed, and its ublk device (an orphan) as well.

Examples:
  blkq detach disk.img
  blkq detach ./images/a.img /dev/ublkb1
  blkq detach --all --force")]
pub struct Args {
    /// The devices, each by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = completion::devices(), value_name = "DEVICE", required_unless_present = "all", conflicts_with = "all")]
    devices: Vec<String>,
    /// Detach all devices, and print the result for each
    #[arg(long)]
    all: bool,
    /// Detach even if clients are connected or the block device is in use
    #[arg(long)]
    force: bool,
}

impl Args {
    /// Detaches devices, or all. The reasons of those that are refused are reported on the way and
    /// only the exit code remains.
    ///
    /// # Errors
    /// If the state directory cannot be read.
    pub fn run(self) -> Outcome<ExitCode> {
        let dir = StateDir::locate()?;
        if self.all {
            return for_each(&dir.names()?, |name| {
                detach(&dir, name, self.force)?;
                print(&format!("{name}: detached\n"))
            });
        }
        for_each(&self.devices, |device| {
            let name = named(&dir, device)?;
            match detach(&dir, &name, self.force)? {
                Detached::Done | Detached::Died(_) => Ok(()),
                Detached::NotThere => Err(no_such_device(device)),
            }
        })
    }
}

/// How a device was found that is detached now.
pub enum Detached {
    /// With a daemon, or as an orphan.
    Done,
    /// Its daemon had died before; the last line of its log.
    Died(String),
    /// It was not.
    NotThere,
}

fn stop_or_clear(dir: &StateDir, name: &str, force: bool) -> Outcome<Detached> {
    // Only what could be a device's name becomes part of a path.
    if check_name(name).is_err() {
        return Ok(Detached::NotThere);
    }
    let until = Instant::now() + SETTLE_WAIT;
    loop {
        dir.wait_for_dying(name);
        if !force && let Called::Answered(info) = call(dir, name, &Request::Show {})? {
            check_unopened(&info)?;
        }
        if let Called::Answered(()) = call::<()>(dir, name, &Request::Detach { force })? {
            return Ok(Detached::Done);
        }
        match clear(dir, name, force)? {
            Detached::NotThere => {}
            detached => return Ok(detached),
        }
        let busy = match dir.inspect(name)? {
            Found::Busy(busy) => busy.describe(),
            _ if dir.is_handed_over(name) => "being handed over to a new daemon; try again".to_owned(),
            _ => return Ok(Detached::NotThere),
        };
        if Instant::now() >= until {
            return Err(Failure::new(format!("it is {busy}")));
        }
        std::thread::sleep(SETTLE_POLL_INTERVAL);
    }
}

/// Removes what a daemon that died has left.
fn clear(dir: &StateDir, name: &str, force: bool) -> Outcome<Detached> {
    match dir.clear_dead(name)? {
        Dead::Cleared(last_line) => Ok(Detached::Died(last_line)),
        Dead::No => Ok(Detached::NotThere),
        Dead::Orphan(orphan) => {
            let Orphan { mut claim, state } = *orphan;
            if let Some(ublk) = state.ublk {
                // SAFETY: this command has no threads.
                let setup = unsafe { SetupProcess::fork(|| true) }?;
                ublk.identity().remove(force, setup).map_err(Failure::unless_forced)?;
            }
            claim.keep(false);
            Ok(Detached::Done)
        }
    }
}

/// Removes what the daemon of `name`, which died, has left: never a device that is served, which is
/// another one by now.
///
/// # Errors
/// If it cannot be removed.
pub fn clear_dead(dir: &StateDir, name: &str) -> Outcome {
    clear(dir, name, true).map(|_| ()).map_err(|e| during(e, name))
}

/// Refuses if a process has the block device open: the daemon, which checks whether it is mounted, is
/// confined and sees no other processes.
///
/// # Errors
/// The processes that have it open.
pub fn check_unopened(info: &DeviceInfo) -> Outcome {
    for device in info.exports.iter().filter(|export| export.starts_with("/dev/")) {
        ublk::check_unopened(device, info.pid).map_err(Failure::unless_forced)?;
    }
    Ok(())
}

/// Detaches one device and reports if its daemon had died. One that another command has just detached
/// counts as detached. Returns how it was found.
///
/// # Errors
/// If it was refused, or its last flush failed.
pub fn detach(dir: &StateDir, name: &str, force: bool) -> Outcome<Detached> {
    let detached = stop_or_clear(dir, name, force).map_err(|e| during(e, name))?;
    if let Detached::Died(last_line) = &detached {
        complain(&remains_removed(name, last_line));
    }
    Ok(detached)
}

/// A note for the user: it was not this command that stopped the device.
fn remains_removed(name: &str, last_line: &str) -> Failure {
    let last_line = if last_line.is_empty() { String::new() } else { format!(" ({last_line})") };
    Failure::new(format!("{name}: its daemon had died{last_line}; its remains were removed"))
}

fn during(failure: Failure, name: &str) -> Failure {
    failure.during(format_args!("detach {name}"))
}
