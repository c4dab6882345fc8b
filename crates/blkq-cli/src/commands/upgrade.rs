//! `blkq upgrade`: hands a device in use from its daemon to a new daemon, which runs this program. The device
//! must survive without a daemon for a moment: a ublk device, or a vhost-user disk whose front end tracks
//! requests in flight.

use std::path::Path;
use std::time::{Duration, Instant};

use blkq_export::retry::retry;
use blkq_protocol::control::{Request, ask, call, daemon_of};
use blkq_protocol::daemon::Serve;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{DeviceInfo, StateFile};
use blkq_protocol::options::{AttachOptions, with_write_access};
use blkq_protocol::state::StateDir;

use super::recover::attach_options;
use crate::config;
use crate::devices::DeviceArg;
use crate::launch::{Program, in_own_session, report};

const RESTART_POLL_INTERVAL: Duration = Duration::from_millis(20);

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
    #[command(flatten)]
    device: DeviceArg,
    /// Let the service manager that started the daemon start the new one
    ///
    /// The old daemon exits with code 3. The service must be configured to restart after it, as blkq@.service
    /// is.
    #[arg(long)]
    service: bool,
    /// Limit the time in which the service must start the new daemon
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "service",
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    start_timeout: u64,
}

/// If this program cannot serve the device, the old daemon refuses to leave it, or another upgrade of it
/// is running, the old daemon keeps running. If the new daemon does not start, one of the old program
/// does.
pub fn run<D: Serve>(args: Args) -> Outcome {
    let hand_over = |dir: &StateDir, name: &str| in_own_session(|| args.hand_over::<D>(dir, name));
    report(&args.device.act("upgrade", hand_over)?)
}

impl Args {
    fn hand_over<D: Serve>(&self, dir: &StateDir, name: &str) -> Outcome<DeviceInfo> {
        // With --service, the name is not reserved for a successor: the command of the service may be one
        // that attaches the device as a new one.
        let _lock = dir.lock_upgrade(name, !self.service)?;
        let before: DeviceInfo = ask(dir, name, &Request::Show {})?;
        // The state file is read after the answer: a daemon that has just started writes it before it
        // answers.
        let state = dir.read_state(name).filter(StateFile::has_options).ok_or_else(|| {
            Failure::new("cannot read the state file of the device; detach the device and attach it again")
        })?;
        if let Some(block_device) = &state.ublk {
            let options = attach_options(&state)?;
            state.check_image(&options, true)?;
            D::check_take_over(&with_write_access(&options, &state.settings), block_device)?;
        }
        let guest = state.guest_options()?;
        if let Some(options) = &guest {
            state.check_image(options, true)?;
            D::check_successor(dir, &with_write_access(options, &state.settings), before.size)?;
            if self.service {
                check_configuration(dir, &state)?;
            }
        }
        let device = DeviceWithoutDaemon::stop_daemon(dir, &state, guest)?;
        match self.service {
            true => device.started_by_service(dir, before.pid, Duration::from_secs(self.start_timeout)),
            false => device.start(),
        }
    }
}

/// Checks that the service of a virtual machine's disk, if it has a configuration file, would serve the same disk:
/// else the machine would wait until the service has failed to start.
fn check_configuration(dir: &StateDir, state: &StateFile) -> Outcome {
    if !config::is_configured(&state.name) {
        return Ok(());
    }
    let mut options = config::named(&state.name).and_then(config::with_defaults)?;
    options = with_write_access(&options, &state.settings).absolute(Path::new("/"))?;
    // The command or the environment of the service may give these.
    let recorded = state.guest_options()?;
    options.ceph_conf = options.ceph_conf.or_else(|| recorded.as_ref()?.ceph_conf.clone());
    options.vhost_socket = options.vhost_socket.or_else(|| recorded?.vhost_socket);
    if state.is_continued_by(dir, &options) {
        return state.check_image(&options, true);
    }
    Err(Failure::new(format!(
        "{} describes another disk than the device serves; correct image, offset, size-limit, sector-size, read-only, \
         export, vhost-socket and the files of Ceph, or upgrade without --service",
        config::path_of(&state.name).display()
    )))
}

/// A device that its daemon has left. Its I/O waits for the next daemon.
struct DeviceWithoutDaemon<'a> {
    name: &'a str,
    /// The attach options of a virtual machine's disk. `None` for a block device, whose next daemon reads the
    /// state file instead.
    guest: Option<AttachOptions>,
    /// The settings that `blkq set` changed, for the next daemon.
    settings: Vec<(String, String)>,
    old: Outcome<Program>,
}

impl<'a> DeviceWithoutDaemon<'a> {
    /// `before` is the state of the device, and `guest` are its options if it is a virtual machine's disk. Fails if
    /// the daemon refuses to leave, or if the next daemon would open other files than `before` records.
    fn stop_daemon(dir: &StateDir, before: &'a StateFile, guest: Option<AttachOptions>) -> Outcome<Self> {
        let name = &before.name;
        // The kernel says which process the daemon is. The daemon itself is not asked: a client may have
        // taken it over, and would then choose the program that this command starts.
        let old = daemon_of(dir, name).and_then(Program::of_process);
        let old = old.map_err(|e| Failure::new(format!("cannot find the old program: {e}")));
        ask::<()>(dir, name, &Request::Leave {})?;
        // The old daemon no longer changes the state file, and no other command removes it while the name is
        // reserved.
        let now = dir.read_state(name);
        // A snapshot or a commit may have changed the image since `guest` was read. If the state file has
        // become unreadable, the disk gets the image that it had then, because the virtual machine waits for
        // it.
        let of_state = |state| StateFile::guest_options(state).ok().flatten().map(|guest| (state, guest));
        let guest = guest.map(|then| now.as_ref().and_then(of_state).unwrap_or((before, then)));
        if let Some((state, guest)) = &guest {
            // A daemon that was taken over may have changed the header of the image before it left.
            state.check_image(guest, true).map_err(|failure| {
                let hint = format!("the I/O of the device waits until `blkq recover {name}` serves it again");
                Failure::new(format!("{failure}; {hint}"))
            })?;
        }
        let guest = guest.map(|(_, guest)| guest);
        let settings = now.map(|state| state.settings).unwrap_or_default();
        Ok(DeviceWithoutDaemon { name, guest, settings, old })
    }

    fn launch(&self, program: &Program) -> Outcome<DeviceInfo> {
        let launched = match &self.guest {
            Some(options) => program.launch_successor(self.name, options, self.settings.clone()),
            None => program.launch_recover(self.name, false),
        };
        launched.map(|launched| launched.info)
    }

    /// If the daemon does not start, starts a daemon of the old program.
    fn start(&self) -> Outcome<DeviceInfo> {
        self.launch(&Program::This).map_err(|failure| match self.launch_old() {
            Ok(_) => {
                failure.during("the new daemon did not start, so the old program serves the device again")
            }
            Err(e) => self.not_served(&failure, &e),
        })
    }

    /// Starts a daemon of the old program if no other daemon serves the device after `timeout`.
    fn started_by_service(&self, dir: &StateDir, old_pid: u32, timeout: Duration) -> Outcome<DeviceInfo> {
        let started = || match call::<DeviceInfo>(dir, self.name, &Request::Show {}) {
            Ok(Some(info)) if info.pid != old_pid => Some(info),
            _ => None,
        };
        let until = Instant::now() + timeout;
        if let Ok(info) = retry(until, RESTART_POLL_INTERVAL, || started().ok_or(()), |()| true) {
            return Ok(info);
        }
        let failure = Failure::new(format!(
            "the service did not start a new daemon within {} s (see the journal of the service)",
            timeout.as_secs()
        ));
        match self.launch_old() {
            Ok(_) => Err(Failure::new(format!(
                "{failure}, so the old program serves the device again, outside of the service; when the service can \
                 start, run `blkq upgrade --service {}`",
                self.name
            ))),
            // The old program also fails if the service has started its daemon in the meantime.
            Err(e) => started().ok_or_else(|| {
                let failure = self.not_served(&failure, &e);
                Failure::new(format!(
                    "{failure}; `blkq list` shows whether the service has started a daemon since"
                ))
            }),
        }
    }

    fn launch_old(&self) -> Outcome<DeviceInfo> {
        self.launch(self.old.as_ref().map_err(Failure::clone)?)
    }

    fn not_served(&self, failure: &Failure, old: &Failure) -> Failure {
        let why = format!("the old program did not start again either ({old})");
        let hint = format!("so the I/O of the device waits: run `blkq recover {}`", self.name);
        Failure::new(format!("{failure}; {why}, {hint}"))
    }
}
