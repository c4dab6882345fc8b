//! `blkq recover`: a new daemon for a block device whose own died.

use std::ffi::OsString;
use std::process::ExitCode;

use super::attach;
use crate::completion;
use crate::control::{Called, Request, call, no_such_device};
use crate::daemon::{Daemon, Parent};
use crate::devices::named;
use crate::failure::{Failure, Outcome};
use crate::info::StateFile;
use crate::launch::{Launched, be_daemon, launch, report};
use crate::state::{Dead, Fate, Found, StateDir, check_name};
use blkq::drivers::DriverSpec;

/// Options of `recover`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A ublk device outlives its daemon: I/O on it waits, and is issued again when a new daemon
serves it. The options are those of `blkq attach`, the settings and the size those of the old
daemon.

Examples:
  blkq list                     its mode is `orphan`
  blkq recover disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device: its name, its image, its URI or its node in /dev
    #[arg(add = completion::devices(), value_name = "DEVICE")]
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
        // The daemon is given the name.
        recover(&named(&StateDir::locate()?, &self.name)?)
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
    let Launched { info, .. } = launch("recover", [name.into()])?;
    report(&info)?;
    Ok(ExitCode::SUCCESS)
}

/// Becomes the daemon of the orphan `name`.
fn take_over(name: &str, parent: &mut Parent) -> Outcome<Daemon> {
    let dir = StateDir::locate()?;
    if check_name(name).is_err() {
        return Err(no_such_device(name));
    }
    dir.wait_for_dying(name);
    if let Called::Answered(()) = call::<()>(&dir, name, &Request::Ping {})? {
        return Err(Failure::new("its daemon lives; blkq upgrade hands the device to a new one"));
    }
    let busy = || Failure::new("another process has the device just now; try again");
    match dir.inspect(name)? {
        Found::Remains(remains) if remains.state == Fate::Dead => return Err(remains.failure()),
        Found::Remains(_) => {}
        Found::Busy => return Err(busy()),
        Found::Nothing => return Err(no_such_device(name)),
    }
    let Dead::Orphan(orphan) = dir.clear_dead(name)? else { return Err(busy()) };
    let orphan = *orphan;
    let args = attach_args(&orphan.state)?;
    if let Some(ublk) = &orphan.state.ublk {
        // For other paths than the image's, which is known without it.
        let _ = std::env::set_current_dir(&ublk.directory);
    }
    Daemon::recover(&args, orphan, parent)
}

/// What `attach` was told, by what its daemon left written.
///
/// # Errors
/// That it was no block device, or what of it is not understood any more.
pub fn attach_args(state: &StateFile) -> Outcome<attach::Args> {
    let Some(ublk) = &state.ublk else { return Err(no_such_device(&state.name)) };
    let words: Vec<OsString> = ublk.words.iter().map(Into::into).collect();
    let mut args =
        attach::Args::from_words(&words).map_err(|e| e.during("its options are not understood any more"))?;
    if let DriverSpec::Image(path) = &mut args.image {
        *path = state.image.clone().into();
    }
    Ok(args)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::BlockDevice;

    #[test]
    fn what_is_not_understood_any_more_is_one_short_line() {
        let state = |words: &[&str]| StateFile {
            name: "a".into(),
            pid: 1,
            image: "/images/a.img".into(),
            exports: vec!["/dev/ublkb0".into()],
            ublk: Some(BlockDevice {
                id: 0,
                cookie: 1,
                words: words.iter().map(|word| (*word).to_owned()).collect(),
                directory: "/".into(),
            }),
            settings: Vec::new(),
        };
        let args = attach_args(&state(&["a.img", "--queues", "2"])).unwrap();
        assert_eq!((args.image, args.queues), (DriverSpec::Image("/images/a.img".into()), 2));
        for words in [&["a.img", "--gone"][..], &["a.img", "--depth", "x"], &["--help"], &[]] {
            let why = attach_args(&state(words)).unwrap_err().to_string();
            assert!(why.starts_with("its options are not understood any more: "), "{why}");
            assert!(why.len() < 200 && !why.contains("Usage"), "{why}");
        }
    }
}
