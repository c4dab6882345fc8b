//! `blkq service`: serves a configured device in this process, for a service manager. blkq@.service uses it.

use std::process::ExitCode;

use blkq_protocol::daemon::{Parent, Serve, Start};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::state::{Fate, Found, StateDir, check_name};

use super::attach::reported;
use super::recover;
use crate::config;
use crate::launch::{take_listeners, unescape_instance};
use crate::output::warn;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
Serves the device of /etc/blkq/NAME.toml in this process, and notifies the service manager when the
device is ready. If there is a block device of this name whose daemon was killed or crashed, this
process serves that device instead, with its options and settings, and reissues the I/O that waited.
A mistake in the file then only causes a warning.

Examples:
  blkq service data")]
pub struct Args {
    /// The name of the device: that of its file, without .toml
    name: String,
}

pub fn run<D: Serve>(args: Args) -> Outcome<ExitCode> {
    // The unit passes its instance name, in which systemd has escaped some characters.
    let name = unescape_instance(&args.name);
    start(&name).map(D::run).map_err(|e| e.during(format_args!("service {name}")))
}

fn start<D: Serve>(name: &str) -> Outcome<D> {
    check_name(name).map_err(|rule| Failure::new(format!("{name:?} is not a valid device name: {rule}")))?;
    // The sockets are the descriptors from 3 on (sd_listen_fds(3)). They must be taken before this process
    // opens files.
    let inherited = take_listeners()?;
    let dir = StateDir::locate()?;
    // A service manager restarts the service when the main thread of the killed daemon has exited. Its other
    // threads may still be running, and hold the lock of the name.
    dir.wait_for_dying(name);
    let before = if let Found::Remains(remains) = dir.inspect(name)? { Some(remains.state) } else { None };
    let options = config::named(name).and_then(config::with_defaults);
    let parent = &mut Parent::none();
    let daemon: D = match (before, options) {
        // The state file contains the attach options, so a mistake in the configuration file does not make
        // I/O wait.
        (Some(Fate::Orphan), options) => {
            if let Err(failure) = options {
                print_error(&failure.during(format_args!("{name}: warning: the next start will fail")));
            }
            recover::take_over(name, false, inherited, parent)?
        }
        // The daemon was killed, or has handed the device to this process, which continues with its settings.
        (Some(Fate::Dead), options) => {
            let (state, options) = (dir.read_state(name), options?);
            // A virtual machine continues with the disk.
            if let Some(state) = &state
                && state.guest_options()?.is_some()
            {
                state.check_image(&options, false)?;
            }
            let settings = state.map(|state| state.settings).unwrap_or_default();
            D::start(Start::Successor { name, options: &options, settings }, inherited, parent)?
        }
        (None, options) => D::start(Start::New(&options?), inherited, parent)?,
    };
    reported(daemon, |info| {
        warn(&info.name, &info.warnings);
        Ok(())
    })
}
