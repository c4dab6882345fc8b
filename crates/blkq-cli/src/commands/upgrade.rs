//! `blkq upgrade`: hands a block device in use from its daemon to a new one, of this program.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::recover::attach_options;
use crate::completion;
use crate::control::{Called, Request, ask, call};
use crate::devices::named;
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::launch::{Launched, Program, report};
use crate::options::{AttachOptions, Export};
use crate::serve::{check_successor, check_take_over};
use crate::state::{StateDir, read_state};

/// How long a service manager may take to start the next daemon.
const RESTART_WAIT: Duration = Duration::from_secs(60);
const RESTART_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `upgrade`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Install the new blkq, and run it: the daemon that serves the device exits, and a new one of the
program that you run takes over. I/O in flight is reissued; what comes meanwhile waits, and
nothing fails. Options, image and certificates are checked first: if the new program could not
serve them, the old one keeps running; if it does not start, one of the old program takes over. The
options are those of `blkq attach`, the settings and the size those of the old daemon. A virtual
machine connects to the new one by itself, if its front end reconnects and keeps a record of
requests in flight, as QEMU with reconnect-ms does.

Examples:
  blkq upgrade disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device: its name, its image, its URI or its node in /dev
    #[arg(add = completion::devices(), value_name = "DEVICE")]
    name: String,
    /// A service manager has started the daemon, and starts the new one: the old one exits with code 3, for
    /// which the service is to be restarted, as blkq@.service is
    #[arg(long)]
    service: bool,
}

impl Args {
    /// Stops the old daemon and starts a new one.
    ///
    /// # Errors
    /// Why a new one could not serve the device, or the old one does not release it: that keeps running
    /// then. Why the new one did not start: one of the old program serves the device again then, if it can. Or, the
    /// device being an orphan, why the new one cannot take it over.
    pub fn run(self) -> Outcome<ExitCode> {
        let during = |e: Failure| e.during(format_args!("upgrade {}", self.name));
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.name)?;
        self.upgrade(&dir, &name).map_err(during)
    }

    fn upgrade(&self, dir: &StateDir, name: &str) -> Outcome<ExitCode> {
        let _lock = dir.lock_upgrade(name)?;
        let guest = of_guest(dir, name)?;
        if guest.is_none() {
            check(dir, name)?;
        }
        let before: DeviceInfo = ask(dir, name, &Request::Show {})?;
        if let Some(options) = &guest {
            check_successor(dir, options, before.size)?;
        }
        match self.service {
            true => restarted(dir, name, &before),
            false => hand_over(dir, name, &before, guest),
        }
    }
}

/// Has the daemon exit, and waits for the one that its service manager starts.
fn restarted(dir: &StateDir, name: &str, before: &DeviceInfo) -> Outcome<ExitCode> {
    ask::<()>(dir, name, &Request::Leave {})?;
    let until = Instant::now() + RESTART_WAIT;
    loop {
        if let Ok(Called::Answered(info)) = call::<DeviceInfo>(dir, name, &Request::Show {})
            && info.pid != before.pid
        {
            return report(&info).map(|()| ExitCode::SUCCESS);
        }
        if Instant::now() > until {
            return Err(Failure::new(
                "its service has started no new daemon; if it is a block device, its I/O waits: blkq recover starts one",
            ));
        }
        std::thread::sleep(RESTART_POLL_INTERVAL);
    }
}

/// How the device `name` was attached, if it is served to a virtual machine and is no block device: its
/// front end connects to the next daemon by itself, and has the requests in flight.
fn of_guest(dir: &StateDir, name: &str) -> Outcome<Option<AttachOptions>> {
    let Some(state) = read_state(&dir.file(name, ".json")) else { return Ok(None) };
    let (None, Some(record)) = (&state.ublk, &state.attach_options) else { return Ok(None) };
    let mut options = record.read()?;
    options.name = Some(name.to_owned());
    Ok(options.exports.contains(&Export::VhostUserBlk).then_some(options))
}

/// Has a new daemon serve `name` as the old one did: a block device, or the disk of a `guest`. If it does not start,
/// one of the old program is to serve it again.
fn hand_over(
    dir: &StateDir,
    name: &str,
    before: &DeviceInfo,
    guest: Option<AttachOptions>,
) -> Outcome<ExitCode> {
    let old = Program::of_process(before.pid);
    ask::<()>(dir, name, &Request::Leave {})?;
    // With what was set last: from here on the old daemon changes nothing.
    let settings = read_state(&dir.file(name, ".json")).map(|state| state.settings).unwrap_or_default();
    let launch = |program: &Program| match &guest {
        Some(options) => program.launch_attach(options, settings.clone(), false),
        None => program.launch_recover(name),
    };
    let Launched { info, .. } = launch(&Program::This).map_err(|failure| {
        let again =
            old.map_err(|e| Failure::new(format!("the old program: {e}"))).and_then(|old| launch(&old));
        match (again, &guest) {
            (Ok(_), _) => failure.during("the old program serves it again, as the new one did not start"),
            (Err(e), Some(_)) => Failure::new(format!(
                "{failure}; it is detached now, as the old one did not start again: {e}"
            )),
            (Err(e), None) => Failure::new(format!(
                "{failure}; its I/O waits for blkq recover, as the old one did not start again: {e}"
            )),
        }
    })?;
    report(&info)?;
    Ok(ExitCode::SUCCESS)
}

/// Checks whether this program could serve the device `name`, if that is one of the kernel. Whether
/// there is one, its daemon reports.
fn check(dir: &StateDir, name: &str) -> Outcome {
    let Some(state) = read_state(&dir.file(name, ".json")) else { return Ok(()) };
    let Some(block_device) = &state.ublk else { return Ok(()) };
    check_take_over(&attach_options(&state)?, block_device)
}
