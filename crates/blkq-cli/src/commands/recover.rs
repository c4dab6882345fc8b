//! `blkq recover`: starts a new daemon for a block device or a virtual machine's disk whose daemon has died.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use blkq_protocol::control::{Request, call, no_such_device};
use blkq_protocol::daemon::{Parent, Serve, Start};
use blkq_protocol::failure::{Failure, Outcome, print_error};
use blkq_protocol::info::StateFile;
use blkq_protocol::options::AttachOptions;
use blkq_protocol::state::{Fate, Found, StateDir, check_name};

use super::attach;
use crate::devices::{device_names, device_parser, named};
use crate::launch::{Launched, Program, report};
use crate::output::for_each;
use blkq_drivers::DriverSpec;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
A ublk device outlives its daemon: its I/O waits, and is reissued when a new daemon serves the
device. The front end of a virtual machine's disk (vhost-user-blk) waits too, and connects to the
new daemon. NBD clients have lost their connections and must connect again. The new daemon has
the options of `blkq attach` and the settings of the old one; a ublk device also keeps its size.

A device in memory (ram:SIZE) cannot be recovered: its data was in the daemon.

Examples:
  blkq list                     # the mode of the device is `orphan` or `dead`
  blkq recover disk.img
      /dev/ublkb0
  blkq recover --all")]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev
    #[arg(
        value_parser = device_parser(), add = device_names(), value_name = "DEVICE",
        required_unless_present = "all"
    )]
    name: Option<String>,
    /// Recover all devices whose daemons were killed or crashed
    #[arg(long, conflicts_with = "name")]
    all: bool,
    /// Serve the files that are at their paths now, even if they replaced the image or its backing files
    ///
    /// The files must have the contents of the files that they replaced, as a copy or a restored backing file has.
    #[arg(long, conflicts_with = "all")]
    allow_replaced: bool,
}

pub fn run(args: Args) -> Outcome<ExitCode> {
    let dir = StateDir::locate()?;
    if let Some(word) = &args.name {
        return recover(&dir, &named(&dir, word)?, args.allow_replaced).map(|()| ExitCode::SUCCESS);
    }
    for_each(&dir.names()?, |name| {
        dir.wait_for_dying(name);
        match dir.inspect(name)? {
            Found::Remains(remains) if remains.recoverable => recover(&dir, name, false),
            _ => Ok(()),
        }
    })
}

fn recover(dir: &StateDir, name: &str, allow_replaced: bool) -> Outcome {
    let during = |e: Failure| e.during(format_args!("recover {name}"));
    // While an upgrade is running, the upgrade itself starts the next daemon.
    let _lock = dir.lock_upgrade(name, true).map_err(during)?;
    // Read before the clients of the new daemon can change the headers of the images, and recorded when the program
    // that cannot read the record is no longer needed.
    let unrecorded = dir.unrecorded_backing_files(name);
    let Launched { info, .. } = Program::This.launch_recover(name, allow_replaced).map_err(during)?;
    if let Err(failure) = dir.record_backing_files(name, &unrecorded) {
        print_error(&during(failure.during("warning: cannot record the backing files")));
    }
    report(&info)
}

/// Serves the device `name` again in this process. If `inherited` contains sockets, the daemon listens on
/// these instead of creating its own. If this fails, the device still waits for a daemon. Unless `allow_replaced` is
/// set, this fails if another file is at the path of the image or of a backing file.
pub fn take_over<D: Serve>(
    name: &str,
    allow_replaced: bool,
    inherited: Vec<OwnedFd>,
    parent: &mut Parent,
) -> Outcome<D> {
    let dir = StateDir::locate()?;
    if check_name(name).is_err() {
        return Err(no_such_device(name));
    }
    dir.wait_for_dying(name);
    if call::<()>(&dir, name, &Request::Ping {})?.is_some() {
        return Err(Failure::new(format!("the daemon is running; to replace it, run `blkq upgrade {name}`")));
    }
    let check_files = |state: &StateFile, options: &AttachOptions| match allow_replaced {
        true => dir.accept_backing_files(state),
        false => state.check_image(options, false),
    };
    match dir.inspect(name)? {
        Found::Remains(remains) if remains.state == Fate::Dead => {
            let Some(state) = dir.read_state(name) else { return Err(remains.failure()) };
            let Some(options) = state.recoverable_options()? else { return Err(remains.failure()) };
            check_files(&state, &options)?;
            let start = Start::Successor { name, options: &options, settings: state.settings };
            return D::start(start, inherited, parent);
        }
        Found::Remains(_) => {}
        Found::Busy(busy) => return Err(Failure::new(format!("the device is {busy}"))),
        Found::Nothing => return Err(no_such_device(name)),
    }
    let orphan = dir.take_orphan(name)?;
    let orphan = orphan.ok_or_else(|| Failure::new("another process has locked the device; try again"))?;
    let options = attach_options(&orphan.state)?;
    check_files(&orphan.state, &options)?;
    D::start(Start::Recovery { options: &options, orphan: Box::new(orphan) }, inherited, parent)
}

/// State files of early versions contain the words of the command line instead of a record. Fails if the
/// device has no block device, or if this version does not understand its options.
pub fn attach_options(state: &StateFile) -> Outcome<AttachOptions> {
    let Some(ublk) = &state.ublk else { return Err(no_such_device(&state.name)) };
    if let Some(record) = &state.attach_options {
        return record.read();
    }
    if ublk.words.is_empty() {
        return Err(Failure::new(format!(
            "the state file of the device is damaged; `blkq detach {}` removes the block device",
            state.name
        )));
    }
    let words: Vec<OsString> = ublk.words.iter().map(Into::into).collect();
    let options = attach::Args::options_from_words(&words).and_then(|mut options| {
        // The words may name a symbolic link, which may point to another file today. `image` is the resolved
        // path.
        if let DriverSpec::Image(path) = &mut options.image {
            *path = state.image.clone().into();
        }
        options.absolute(&ublk.directory)
    });
    options.map_err(|e| e.during("this version of blkq does not understand the options of the device"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use blkq_protocol::info::BlockDevice;
    use blkq_protocol::options::{Address, Copying, Export, Record, Tls};
    use blkq_protocol::state::parse_state;

    use super::*;

    /// The state files were written by the last version that stored the words of the command line.
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
        assert_eq!((options.copy, options.scheduler), (Copying::User, blkq::SchedulerKind::MqDeadline));
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
            backing: None,
        };
        let options = attach_options(&state(&["a.img", "--queues", "2", "--run", "true"])).unwrap();
        assert_eq!((&options.image, options.queues), (&DriverSpec::Image("/images/a.img".into()), 2));
        let why = attach_options(&state(&[])).unwrap_err().to_string();
        assert!(why.contains("damaged; `blkq detach a`"), "{why}");
        for words in [&["a.img", "--gone"][..], &["a.img", "--depth", "x"], &["--help"]] {
            let why = attach_options(&state(words)).unwrap_err().to_string();
            assert!(why.starts_with("this version of blkq does not understand the options"), "{why}");
            assert!(why.len() < 200 && !why.contains("Usage"), "{why}");
        }
        // State files of this version have a record and no words.
        let mut with_record = state(&[]);
        with_record.attach_options = Some(Record::new(&options).unwrap());
        assert_eq!(attach_options(&with_record), Ok(options));
        let later = serde_json::to_string(&with_record).unwrap().replace(r#""version":1"#, r#""version":2"#);
        let why = attach_options(&parse_state(later.as_bytes()).unwrap()).unwrap_err().to_string();
        assert!(why.contains("have format 2"), "{why}");
    }
}
