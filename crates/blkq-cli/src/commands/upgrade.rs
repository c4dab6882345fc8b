//! `blkq upgrade`: hands a block device in use from its daemon to a new one, of this program.

use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::recover::attach_options;
use crate::completion;
use crate::control::{Called, Request, ask, call, daemon_of};
use crate::devices::{device_parser, named};
use crate::failure::{Failure, Outcome};
use crate::info::{DeviceInfo, StateFile};
use crate::launch::{Launched, Program, report};
use crate::options::AttachOptions;
use crate::serve::{check_successor, check_take_over};
use crate::session::in_own_session;
use crate::state::StateDir;

const RESTART_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `upgrade`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Install the new blkq, and run this command with it. The daemon that serves the device exits, and a
daemon of the new program replaces it. Requests in flight are reissued, new ones wait, and none
fails. The new daemon has the options of `blkq attach`, the settings and the size of the old one.

Options, image and certificates are checked first: if the new program cannot serve the device, the
old daemon keeps running. If the new daemon does not start, a daemon of the old program serves the
device again. An interrupted upgrade (Ctrl-C, a closed session) completes in the background.

A virtual machine reconnects by itself if its front end reconnects and tracks requests in flight, as
QEMU does with reconnect-ms.

With --service, if the service does not start, a daemon of the old program serves the device
outside of the service. The service keeps trying to start; once it can, run upgrade --service
again to hand the device to it.

Examples:
  blkq upgrade disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = completion::devices(), value_name = "DEVICE")]
    name: String,
    /// Let the service manager that started the daemon start the new one
    ///
    /// The old daemon exits with code 3. The service must be configured to restart after it, as blkq@.service is.
    #[arg(long)]
    service: bool,
    /// Limit the time in which the service must start the new daemon
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "service",
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    start_timeout: u64,
}

impl Args {
    /// Stops the old daemon and starts a new one.
    ///
    /// # Errors
    /// Why a new one could not serve the device, the old one does not release it, or another upgrade of it
    /// runs: the old one keeps running then. Why the new one did not start: one of the old program serves
    /// the device again then, if it can.
    pub fn run(self) -> Outcome<ExitCode> {
        let during = |e: Failure| e.during(format_args!("upgrade {}", self.name));
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.name)?;
        let info = in_own_session(|| self.hand_over(&dir, &name)).map_err(during)?;
        report(&info)?;
        Ok(ExitCode::SUCCESS)
    }

    fn hand_over(&self, dir: &StateDir, name: &str) -> Outcome<DeviceInfo> {
        // The service may start a daemon that does not know of this one.
        let _lock = dir.lock_upgrade(name, !self.service)?;
        let before: DeviceInfo = ask(dir, name, &Request::Show {})?;
        check(dir, name)?;
        // As it is now: the daemon may have started just before it answered.
        let state = dir.read_state(name).filter(StateFile::has_options).ok_or_else(|| lost(name))?;
        let guest = state.guest_options()?;
        if let Some(options) = &guest {
            check_successor(dir, options, before.size)?;
        }
        let left = LeftDevice::of(dir, name, guest)?;
        match self.service {
            true => left.started_by_service(dir, &before, Duration::from_secs(self.start_timeout)),
            false => left.start(),
        }
    }
}

/// A device that its daemon has left to the next one.
struct LeftDevice<'a> {
    name: &'a str,
    /// How it is attached, if it is the disk of a virtual machine, and no block device.
    guest: Option<AttachOptions>,
    /// With what was set last.
    settings: Vec<(String, String)>,
    /// The program of the old daemon.
    old: io::Result<Program>,
}

impl LeftDevice<'_> {
    /// Has the daemon of `name` exit.
    fn of<'a>(dir: &StateDir, name: &'a str, guest: Option<AttachOptions>) -> Outcome<LeftDevice<'a>> {
        // The kernel's record of its process: the daemon may have been taken over, and name another.
        let old = daemon_of(dir, name).and_then(Program::of_process);
        ask::<()>(dir, name, &Request::Leave {})?;
        // From here on the old daemon changes nothing, and no other command removes its files.
        let state = dir.read_state(name);
        // Before, a snapshot or a commit may have given it another image. The virtual machine waits: if nothing can be
        // read any more, it gets the image that it had.
        let now = state.as_ref().and_then(|state| state.guest_options().ok().flatten());
        let guest = guest.map(|before| now.unwrap_or(before));
        let settings = state.map(|state| state.settings).unwrap_or_default();
        Ok(LeftDevice { name, guest, settings, old })
    }

    fn launch(&self, program: &Program) -> Outcome<DeviceInfo> {
        let launched = match &self.guest {
            Some(options) => program.launch_successor(options, self.settings.clone()),
            None => program.launch_recover(self.name),
        };
        launched.map(|Launched { info, .. }| info)
    }

    /// Has a daemon of this program serve the device as the old one did. If it does not start, one of the old
    /// program is to serve it again.
    fn start(&self) -> Outcome<DeviceInfo> {
        self.launch(&Program::This).map_err(|failure| match self.launch_old() {
            Ok(_) => failure.during("the old program serves it again, as the new one did not start"),
            Err(e) => self.not_served(&failure, &e),
        })
    }

    /// Waits for the daemon that the service manager starts. If none is there in time, one of the old program is to
    /// serve the device again.
    fn started_by_service(
        &self,
        dir: &StateDir,
        before: &DeviceInfo,
        timeout: Duration,
    ) -> Outcome<DeviceInfo> {
        let started = || match call::<DeviceInfo>(dir, self.name, &Request::Show {}) {
            Ok(Called::Answered(info)) if info.pid != before.pid => Some(info),
            _ => None,
        };
        let until = Instant::now() + timeout;
        while Instant::now() < until {
            if let Some(info) = started() {
                return Ok(info);
            }
            std::thread::sleep(RESTART_POLL_INTERVAL);
        }
        let failure = Failure::new(format!(
            "its service has started no new daemon in {} s (its journal may have the reason)",
            timeout.as_secs()
        ));
        match self.launch_old() {
            Ok(_) => Err(failure.during(format_args!(
                "the old program serves it again, outside of the service, which takes over at the next \
                 blkq upgrade --service {} once it can start",
                self.name
            ))),
            // Or it has just been started, and so the old one was not.
            Err(e) => started().ok_or_else(|| {
                let failure = self.not_served(&failure, &e);
                Failure::new(format!("{failure}; blkq list shows whether its service has started since"))
            }),
        }
    }

    fn launch_old(&self) -> Outcome<DeviceInfo> {
        match &self.old {
            Ok(old) => self.launch(old),
            Err(e) => Err(Failure::new(format!("the old program: {e}"))),
        }
    }

    /// Neither program serves the device.
    fn not_served(&self, failure: &Failure, old: &Failure) -> Failure {
        let name = self.name;
        Failure::new(format!(
            "{failure}; its I/O waits for blkq recover {name}, as the old program did not start again: {old}"
        ))
    }
}

/// It cannot be attached as it was.
fn lost(name: &str) -> Failure {
    Failure::new(format!("the state file of {name} cannot be read; detach it, and attach it again"))
}

/// Checks whether this program could serve the device `name`, if it is a block device.
fn check(dir: &StateDir, name: &str) -> Outcome {
    let Some(state) = dir.read_state(name) else { return Ok(()) };
    let Some(block_device) = &state.ublk else { return Ok(()) };
    check_take_over(&attach_options(&state)?, block_device)
}
