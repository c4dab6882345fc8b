//! `blkq recover`: a new daemon for a block device, or a virtual machine's disk, after its own died.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use super::attach;
use crate::completion;
use crate::control::{Called, Request, call, no_such_device};
use crate::daemon::{Daemon, Parent};
use crate::devices::{device_parser, named};
use crate::failure::{Failure, Outcome};
use crate::info::StateFile;
use crate::launch::{Launched, Program, report};
use crate::options::AttachOptions;
use crate::state::{Fate, Found, StateDir, check_name};
use blkq::drivers::DriverSpec;

/// Options of `recover`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A ublk device outlives its daemon: its I/O waits, and is reissued when a new daemon serves the
device. The front end of a virtual machine's disk (vhost-user-blk) waits too, and connects to the
new daemon. The new daemon has the options of `blkq attach`, the settings and the size of the old
one.

Examples:
  blkq list                     # the mode of the device is `orphan`
  blkq recover disk.img
      /dev/ublkb0")]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev
    #[arg(value_parser = device_parser(), add = completion::devices(), value_name = "DEVICE")]
    name: String,
}

impl Args {
    /// Starts the new daemon.
    ///
    /// # Errors
    /// Why the device cannot be taken over; it stays as it was.
    pub fn run(self) -> Outcome<ExitCode> {
        let dir = StateDir::locate()?;
        let name = named(&dir, &self.name)?;
        let during = |e: Failure| e.during(format_args!("recover {name}"));
        // An upgrade that is at work starts a daemon itself.
        let _lock = dir.lock_upgrade(&name, true).map_err(during)?;
        let Launched { info, .. } = Program::This.launch_recover(&name).map_err(during)?;
        report(&info)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Takes the orphan or the virtual machine's disk `name` over, as its new daemon, which listens on the sockets `inherited` as the one before did
/// on its own.
///
/// # Errors
/// Why it cannot be; it stays as it was.
pub fn take_over(name: &str, inherited: Vec<OwnedFd>, parent: &mut Parent) -> Outcome<Daemon> {
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
        Found::Remains(remains) if remains.state == Fate::Dead => {
            let Some(state) = dir.read_state(name) else { return Err(remains.failure()) };
            let Some(options) = state.guest_options()? else { return Err(remains.failure()) };
            return Daemon::succeed(name, &options, state.settings, inherited, parent);
        }
        Found::Remains(_) => {}
        Found::Busy(busy) => return Err(Failure::new(format!("it is {}", busy.describe()))),
        Found::Nothing => return Err(no_such_device(name)),
    }
    let orphan = dir.take_orphan(name)?.ok_or_else(busy)?;
    let options = attach_options(&orphan.state)?;
    Daemon::recover(&options, orphan, inherited, parent)
}

/// How the block device of a state file was attached.
///
/// # Errors
/// If there is none, or this program does not understand its options.
pub fn attach_options(state: &StateFile) -> Outcome<AttachOptions> {
    let Some(ublk) = &state.ublk else { return Err(no_such_device(&state.name)) };
    if let Some(record) = &state.attach_options {
        return record.read();
    }
    if ublk.words.is_empty() {
        return Err(Failure::new(format!(
            "its state file is damaged; blkq detach {} removes the block device",
            state.name
        )));
    }
    let words: Vec<OsString> = ublk.words.iter().map(Into::into).collect();
    let options = attach::Args::options_from_words(&words).and_then(|mut options| {
        // The link that the image was found by may lead elsewhere by now.
        if let DriverSpec::Image(path) = &mut options.image {
            *path = state.image.clone().into();
        }
        options.absolute(&ublk.directory)
    });
    options.map_err(|e| e.during("its options are not understood any more"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::info::BlockDevice;
    use crate::options::{Address, Copying, Export, Record, Scheduler, Tls};
    use crate::state::parse_state;

    /// Written by the last program that did not know [`AttachOptions`].
    #[test]
    fn state_files_with_words_are_understood() {
        let nbd = parse_state(include_bytes!("../../tests/data/state-words-nbd.json")).unwrap();
        assert_eq!((nbd.name.as_str(), nbd.image.as_str()), ("simple", "/images/disk.img"));
        assert_eq!((&nbd.ublk, &nbd.attach_options, &nbd.settings[..]), (&None, &None, &[][..]));
        assert!(attach_options(&nbd).unwrap_err().to_string().contains("no such device"));

        let state = parse_state(include_bytes!("../../tests/data/state-words-ublk.json")).unwrap();
        let setting = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(state.settings, [setting("depth", "32"), setting("hang-warning", "5")]);
        let options = attach_options(&state).unwrap();
        assert_eq!(options.image, DriverSpec::Image("/srv/images/disk.img".into()));
        assert_eq!(options.exports, [Export::Ublk, Export::Nbd]);
        let socket = Address::Unix("/srv/images/nbd.sock".into());
        assert_eq!(options.listen, [socket, Address::Tcp("127.0.0.1".to_owned(), 10809)]);
        assert_eq!((options.socket_mode, options.tls), (Some(0o660), Some(Tls::Require)));
        let path = |path: &str| Some(PathBuf::from(path));
        assert_eq!(options.tls_certificates, path("/srv/images/../tls"));
        assert_eq!(options.pid_file, path("/srv/images/blkq.pid"));
        assert_eq!((options.max_connections, options.handshake_timeout), (Some(8), Some(20)));
        assert_eq!((options.copy, options.scheduler), (Copying::User, Scheduler::MqDeadline));
        assert!(options.autoclear && options.insecure);
        assert!(options.partscan.refused && options.merge && options.sandbox);
        assert_eq!(options.fault.unwrap().to_string(), "delay=1ms,op=write,rate=50%");
    }

    #[test]
    fn options_that_are_not_understood_are_one_short_line() {
        let state = |words: &[&str]| StateFile {
            name: "a".into(),
            pid: 1,
            image: "/images/a.img".into(),
            exports: vec!["/dev/ublkb0".into()],
            attach_options: None,
            ublk: Some(BlockDevice {
                id: 0,
                cookie: 1,
                words: words.iter().map(|word| (*word).to_owned()).collect(),
                directory: "/".into(),
            }),
            owner: None,
            settings: Vec::new(),
            number: None,
            file: None,
        };
        let options = attach_options(&state(&["a.img", "--queues", "2", "--run", "true"])).unwrap();
        assert_eq!((&options.image, options.queues), (&DriverSpec::Image("/images/a.img".into()), 2));
        let why = attach_options(&state(&[])).unwrap_err().to_string();
        assert!(why.contains("damaged; blkq detach a"), "{why}");
        for words in [&["a.img", "--gone"][..], &["a.img", "--depth", "x"], &["--help"]] {
            let why = attach_options(&state(words)).unwrap_err().to_string();
            assert!(why.starts_with("its options are not understood any more: "), "{why}");
            assert!(why.len() < 200 && !why.contains("Usage"), "{why}");
        }
        // A new state file has no words.
        let mut anew = state(&[]);
        anew.attach_options = Some(Record::new(&options).unwrap());
        assert_eq!(attach_options(&anew), Ok(options));
        let later = serde_json::to_string(&anew).unwrap().replace(r#""version":1"#, r#""version":2"#);
        let why = attach_options(&parse_state(later.as_bytes()).unwrap()).unwrap_err().to_string();
        assert!(why.contains("have format 2"), "{why}");
    }
}
