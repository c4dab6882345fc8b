//! `blkq detach`: detaches devices, and returns when their daemons have exited. Also removes the stale files
//! of daemons that were killed.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use blkq::{Error, ErrorKind};
use blkq_export::retry::retry;
use blkq_export::ublk::{self, SetupProcess};
use blkq_protocol::control::{Request, call, no_such_device};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::state::{Dead, Found, Orphan, StateDir, check_name};

use crate::devices::{device_names, device_parser, named};
use crate::output::{for_each, print};

/// The longest wait for a device that is starting, stopping or being handed over to a new daemon.
const SETTLE_WAIT: Duration = Duration::from_secs(2);
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(10);

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Returns when the data is flushed, the daemon has exited, and its sockets and files are removed.

Refuses to detach a device while clients are connected, or while its block device is mounted or
open. With --force, requests in flight are completed and answered, then the connections are closed;
a client that does not accept a reply within a second is disconnected. Later I/O fails.

After 2 seconds the command prints what it waits for. With --force it stops waiting after a minute;
the device then detaches as soon as its storage responds.

If the daemon was killed or crashed, the command removes its stale files and its ublk device.

Examples:
  blkq detach disk.img
  blkq detach ./images/a.img /dev/ublkb1
  blkq detach --all --force")]
pub struct Args {
    /// The devices, each by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = device_names(), value_name = "DEVICE", required_unless_present = "all", conflicts_with = "all")]
    devices: Vec<String>,
    /// Detach all devices, and print the result for each
    #[arg(long)]
    all: bool,
    /// Detach even if clients are connected or the block device is in use
    #[arg(long)]
    force: bool,
}

pub fn run(args: Args) -> Outcome<ExitCode> {
    let dir = StateDir::locate()?;
    if args.all {
        return for_each(&dir.names()?, |name| {
            detach(&dir, name, args.force)?;
            print(&format!("{name}: detached\n"))
        });
    }
    for_each(&args.devices, |device| match detach(&dir, &named(&dir, device)?, args.force)? {
        Detached::Done | Detached::WasDead(_) => Ok(()),
        Detached::NotThere => Err(no_such_device(device)),
    })
}

pub enum Detached {
    /// The daemon has detached the device, or the block device of a dead daemon was removed.
    Done,
    /// The daemon had died before, and its stale files were removed. The value warns that the
    /// daemon may not have flushed its data.
    WasDead(Failure),
    NotThere,
}

/// Fails with a busy [`Failure`] if the device is starting, stopping or being handed over.
fn stop_or_clear(dir: &StateDir, name: &str, force: bool) -> Outcome<Detached> {
    // The name becomes part of a path, and must not contain a slash, for example.
    if check_name(name).is_err() {
        return Ok(Detached::NotThere);
    }
    dir.wait_for_dying(name);
    if !force && let Some(info) = call(dir, name, &Request::Show {})? {
        check_unopened(&info)?;
    }
    if call::<()>(dir, name, &Request::Detach { force })?.is_some() {
        return Ok(Detached::Done);
    }
    match clear(dir, name, force)? {
        Detached::NotThere => {}
        detached => return Ok(detached),
    }
    let busy = match dir.inspect(name)? {
        Found::Busy(busy) => busy,
        _ if dir.is_handed_over(name) => "being handed over to a new daemon; try again".to_owned(),
        _ => return Ok(Detached::NotThere),
    };
    Err(Error::new(ErrorKind::Busy, format!("the device is {busy}")).into())
}

/// Removes the stale files of a dead daemon, and its block device.
fn clear(dir: &StateDir, name: &str, force: bool) -> Outcome<Detached> {
    // Read now, because the state file is removed below. A daemon that has not published its process has the
    // number 0.
    let pid = dir.read_state(name).map(|state| state.pid).filter(|pid| *pid != 0);
    match dir.clear_dead(name)? {
        Dead::Cleared(last_line) => {
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            let log =
                if last_line.is_empty() { String::new() } else { format!(" (last log line: {last_line})") };
            let notice = format!("{name}: the daemon{pid} was killed; removed its sockets and state{log}");
            Ok(Detached::WasDead(Failure::new(notice)))
        }
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

/// Does nothing if a running daemon has the name, which another device may have taken in the meantime.
pub fn clear_dead(dir: &StateDir, name: &str) -> Outcome {
    clear(dir, name, true).map(|_| ()).map_err(|e| during(e, name))
}

/// Refuses a block device that a process has open. The daemon only checks whether the block device is
/// mounted: it is confined and does not see other processes in /proc.
pub fn check_unopened(info: &DeviceInfo) -> Outcome {
    let mut nodes = info.exports.iter().filter(|export| export.starts_with("/dev/"));
    nodes.try_for_each(|node| ublk::check_unopened(node, info.pid).map_err(Failure::unless_forced))
}

/// Fails if the device is in use and `force` is false, or if the last flush of the device failed.
pub fn detach(dir: &StateDir, name: &str, force: bool) -> Outcome<Detached> {
    let until = Instant::now() + SETTLE_WAIT;
    let detach = || stop_or_clear(dir, name, force);
    let detached =
        retry(until, SETTLE_POLL_INTERVAL, detach, Failure::is_busy).map_err(|e| during(e, name))?;
    if let Detached::WasDead(notice) = &detached {
        print_error(notice);
    }
    Ok(detached)
}

fn during(failure: Failure, name: &str) -> Failure {
    failure.during(format_args!("detach {name}"))
}
