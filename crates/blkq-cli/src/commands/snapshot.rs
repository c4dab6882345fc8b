//! `blkq snapshot`: takes external snapshots. Each device switches to a new qcow2 overlay. Its old image
//! becomes the backing file of the overlay and does not change from then on.
//!
//! The snapshots of several devices are taken at the same moment, in three steps over their control sockets:
//! each daemon flushes its device (`Begun::new`); each freezes its device and prepares the overlay
//! (`Begun::stop`); when all have done so, each continues with its overlay (`change_over`). If this command
//! is killed or a step fails, each device whose daemon has not received the last step keeps its old image.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use blkq::text::shell_word;
use blkq_drivers::DriverSpec;
use blkq_drivers::r#loop::Dispatch;
use blkq_protocol::control::{Dialogue, Request, Snapshotted, ask};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::{Backing, DeviceInfo, FileId, RecordedBacking, shown_path};
use blkq_protocol::options::{AttachOptions, Backing as BackingChain, Format, Record};
use blkq_protocol::state::StateDir;

use super::attach::create::{FileGuard, directory_of};
use crate::config;
use crate::devices::{device_names, named};
use crate::output::{for_each, print_line, warn};

#[derive(clap::Args, Debug)]
#[command(after_help = "\
The image of the device stays as it is now, and becomes the backing file of a new qcow2 image, the
overlay, which gets all writes from now on. Clients notice a short pause. From then on, attach the
overlay (with --format qcow2), and do not write to the old image.

The snapshots of several devices are taken at the same moment. If one of them fails, none is taken.

Examples:
  blkq snapshot disk.img --to disk.2.qcow2
  blkq snapshot data=data.2.qcow2 log=log.2.qcow2")]
pub struct Args {
    /// The device, by its name, image, URI or node in /dev; several devices as DEVICE=FILE
    #[arg(required = true, value_name = "DEVICE[=FILE]", add = device_names())]
    devices: Vec<String>,
    /// Create the overlay of a single device as FILE, which must not exist
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Choose which backing files the overlay may name
    ///
    /// With `allow`, the image may be outside of the overlay's directory.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory")]
    backing_chain: BackingChain,
}

/// Ends the path of a deleted file in the `backing-file` fact, as the kernel shows it in /proc/PID/fd.
const DELETED: &str = " (deleted)";

const SYSFS: &str = "/sys";
/// Maximum nesting of block devices. Real stacks are much less deep.
const NESTING_MAX: u32 = 16;

/// A snapshot that was requested and has passed the checks of this command.
#[derive(Debug)]
struct Wanted {
    name: String,
    /// The number of the image that was checked.
    current: Option<u64>,
    path: PathBuf,
    /// The attach options of the device with the overlay as its image.
    options: Record,
    /// The image of the device, which becomes the backing file, and its own backing files.
    backing: Vec<RecordedBacking>,
}

impl Wanted {
    fn failed(&self, failure: Failure) -> Failure {
        failure.during(format_args!("snapshot {}", self.name))
    }
}

/// A snapshot in progress. Dropping closes the control socket, so that the device keeps its old image, and
/// removes the file of the overlay.
struct Begun<'a> {
    wanted: &'a Wanted,
    dialogue: Dialogue,
    file: FileGuard,
    recorded: RecordedImage<'a>,
}

pub fn run(args: Args) -> Outcome<ExitCode> {
    let dir = StateDir::locate()?;
    let mut wanted = Vec::new();
    for (device, file) in args.pairs()? {
        let of = |e: Failure| e.during(format_args!("snapshot {device}"));
        wanted.push(args.wanted(&dir, &device, &file).map_err(of)?);
    }
    // The order by name keeps two such commands from freezing one device each and waiting for the
    // other's.
    wanted.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(twice) = wanted.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(twice[0].failed(Failure::new("the device is given twice; give it once")));
    }
    let begin = |wanted| Begun::new(&dir, wanted).map_err(|e| wanted.failed(e));
    let done = change_over(&dir, wanted.iter().map(begin).collect::<Outcome<Vec<_>>>()?)?;
    // Nothing is printed before all devices have switched: printing may block.
    for_each(&done, |(wanted, done)| {
        let warnings = done.clone().map_err(|e| wanted.failed(e))?;
        warn(&wanted.name, &warnings);
        print_line(&wanted.path.display().to_string())
    })
}

impl Args {
    fn pairs(&self) -> Outcome<Vec<(String, PathBuf)>> {
        if let Some(file) = &self.to {
            let why = "snapshot: --to takes one device; write several devices as DEVICE=FILE";
            let [device] = &self.devices[..] else { return Err(Failure::new(why)) };
            return Ok(vec![(device.clone(), file.clone())]);
        }
        let pair = |device: &String| match device.rsplit_once('=') {
            Some((device, file)) if !device.is_empty() && !file.is_empty() => {
                Ok((device.to_owned(), PathBuf::from(file)))
            }
            _ => Err(Failure::new(format!(
                "snapshot {device}: the file for the overlay is missing; add --to FILE, or write DEVICE=FILE"
            ))),
        };
        self.devices.iter().map(pair).collect()
    }

    fn wanted(&self, dir: &StateDir, device: &str, file: &Path) -> Outcome<Wanted> {
        let name = named(dir, device)?;
        let mut info: DeviceInfo = ask(dir, &name, &Request::Show {})?;
        // Image and options come from the state file, not from the daemon, which a client may have taken
        // over: the next daemon of the device trusts the options that are derived from them.
        let state = dir.read_state(&name);
        let options = state.as_ref().and_then(|state| state.attach_options.as_ref());
        let (Some(state), Some(options)) = (&state, options.map(Record::read).transpose()?) else {
            return Err(Failure::new(
                "cannot read the state file of the device; detach the device and attach it again",
            ));
        };
        info.image.clone_from(&state.image);
        // A path that is not UTF-8 is read from the options.
        info.attach_options.clone_from(&state.attach_options);
        let DriverSpec::Image(_) = &options.image else {
            let image = info.image;
            return Err(Failure::new(format!("only an image file can become a backing file, not {image}")));
        };
        let Some(last) = file.file_name() else {
            return Err(Failure::new(format!("{} is not the path of a file", file.display())));
        };
        if info.read_only {
            return Err(Failure::new("the device is read-only, so there is nothing to take a snapshot of"));
        }
        if options.fault.is_some() {
            return Err(Failure::new(
                "a device with --fault cannot switch to another image; detach the device and attach it without --fault",
            ));
        }
        let directory = directory_of(file).canonicalize().map_err(|e| {
            Failure::new(format!("cannot use the directory {}: {e}", directory_of(file).display()))
        })?;
        let path = directory.join(last);
        check_in_place(&info)?;
        check_not_on_device(&info, &directory)?;
        let allow = self.backing_chain == BackingChain::Allow;
        if !allow && !info.image_path().starts_with(&directory) {
            return Err(Failure::new(format!(
                "the image {} is not in the directory of the overlay {}; choose another directory for the overlay, or \
                 add --backing-chain allow",
                info.image,
                path.display()
            )));
        }
        check_configuration(&name, &info.image_path(), &path)?;
        check_fits_qcow2(&options)?;
        let qcow2 = options.format == Some(Format::Qcow2);
        let options = AttachOptions {
            image: DriverSpec::Image(path.clone()),
            format: Some(Format::Qcow2),
            backing_chain: if allow { BackingChain::Allow } else { options.backing_chain },
            sector_size: options.sector_size.keep(info.sector_size),
            ..options
        };
        options.check()?;
        let image = FileId::of(info.image_path()).map(|file| RecordedBacking { file, qcow2 });
        let backing = image.into_iter().chain(state.backing.iter().flatten().copied()).collect();
        Ok(Wanted { name, current: state.number, path, options: Record::new(&options)?, backing })
    }
}

/// Refuses a device that was attached with options that a qcow2 image does not support.
fn check_fits_qcow2(options: &AttachOptions) -> Outcome {
    let AttachOptions { queues, threads_per_queue: threads, offset, size_limit, dispatch, .. } = options;
    let (one, whole) =
        ("but a qcow2 image is served with one", "of its image, but an overlay covers a whole image");
    let limit = size_limit.unwrap_or(0);
    let serial = "uses --dispatch serial, which qcow2 images do not support".to_owned();
    let obstacles = [
        (*queues > 1, format!("has {queues} queues, {one}"), "with --queues 1"),
        (*threads > 1, format!("has {threads} threads per queue, {one}"), "with --threads-per-queue 1"),
        (*offset != 0, format!("begins at offset {offset} {whole}"), "without --offset"),
        (size_limit.is_some(), format!("is limited to {limit} bytes {whole}"), "without --size-limit"),
        (*dispatch == Dispatch::Serial, serial, "with --dispatch concurrent"),
    ];
    obstacles.into_iter().find(|(is_given, ..)| *is_given).map_or(Ok(()), |(_, what, hint)| {
        Err(Failure::new(format!("the device {what}; detach the device and attach it {hint}")))
    })
}

/// Refuses an image that was moved, deleted or replaced while the device was attached: the overlay would name
/// a backing file that does not exist, or another file.
fn check_in_place(info: &DeviceInfo) -> Outcome {
    let file_at_path = FileId::of(info.image_path());
    if file_at_path.is_some() && file_at_path == Backing::of(info).map(|backing| backing.file) {
        return Ok(());
    }
    let now_at = shown_path(info);
    if now_at.ends_with(DELETED) {
        let uri = info.exports.iter().find(|export| export.starts_with("nbd"));
        let how = uri.map(|uri| format!(" with `nbdcopy {} NEW_IMAGE`", shell_word(uri))).unwrap_or_default();
        return Err(Failure::new(format!(
            "the image file {} was deleted; copy the data out of the device{how} before you detach the device",
            info.image
        )));
    }
    Err(Failure::new(format!(
        "the image file {} was moved to {now_at}; move it back, or detach the device and attach {}",
        info.image,
        shell_word(&now_at)
    )))
}

/// Refuses to create the overlay on a file system that is on the device itself: creating the file durably
/// would write to the device, which is frozen at that time.
fn check_not_on_device(info: &DeviceInfo, directory: &Path) -> Outcome {
    let Some(FileId { device, .. }) = FileId::of(directory) else { return Ok(()) };
    let is_device = |disk: &String| {
        let node = Path::new("/dev").join(disk);
        // The kernel's NBD client names the process that made the connection, which is a client of the
        // device.
        let client = fs::read_to_string(format!("{SYSFS}/block/{disk}/pid")).unwrap_or_default();
        info.exports.iter().any(|export| Path::new(export) == node)
            || !client.is_empty() && info.clients.iter().any(|other| is_process(&other.peer, client.trim()))
    };
    match disks_under(Path::new(SYSFS), device).into_iter().find(is_device) {
        None => Ok(()),
        Some(disk) => Err(Failure::new(format!(
            "{} is on the device itself (/dev/{disk}), which is frozen during a snapshot; choose another directory",
            directory.display()
        ))),
    }
}

/// The names of the disks under the block device with these major and minor numbers, starting with its own.
/// For a partition this is its disk; for a mapped device, an array or a loop device, the underlying devices
/// follow. Empty if sysfs has no such device, for example for file systems with anonymous device numbers.
fn disks_under(sysfs: &Path, (major, minor): (u32, u32)) -> Vec<String> {
    let mut names = Vec::new();
    if let Ok(path) = sysfs.join(format!("dev/block/{major}:{minor}")).canonicalize() {
        add_disk(&path, &mut names, NESTING_MAX);
    }
    names
}

fn add_disk(device: &Path, names: &mut Vec<String>, depth: u32) {
    let disk = device.parent().filter(|_| device.join("partition").exists()).unwrap_or(device);
    let name = disk.file_name().map(|name| name.to_string_lossy().into_owned());
    names.extend(name.filter(|name| !names.contains(name)));
    if depth == 0 {
        return;
    }
    let slaves = fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten();
    let slaves = slaves.filter_map(|slave| slave.path().canonicalize().ok());
    slaves.for_each(|slave| add_disk(&slave, names, depth - 1));
}

/// `peer` is a client as a daemon describes it: `pid 123, uid 0`.
fn is_process(peer: &str, pid: &str) -> bool {
    let mut words = peer.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| word == "pid") && words.next() == Some(pid)
}

/// Refuses a device whose configuration file names the old image, or cannot be read. A restart by the service
/// manager would write to the backing file of the overlay, which corrupts the overlay.
fn check_configuration(name: &str, image: &Path, new: &Path) -> Outcome {
    let is_named = config::names_image(name, image).map_err(|mistake| {
        Failure::new(format!(
            "the configuration file of the device has a mistake, so its service might later write to {}; correct the file \
             first: {mistake}",
            image.display()
        ))
    })?;
    if !is_named {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{} names {}; first change it to image = {new:?} and format = \"qcow2\"",
        config::path_of(name).display(),
        image.display()
    )))
}

/// A device with the warnings about its overlay, or the reason why it has no overlay.
type Done<'a> = (&'a Wanted, Outcome<Vec<String>>);

impl<'a> Begun<'a> {
    /// Creates the file of the overlay, and lets the daemon flush the device, which still serves I/O.
    fn new(dir: &'a StateDir, wanted: &'a Wanted) -> Outcome<Begun<'a>> {
        let Wanted { name, path, options, backing, .. } = wanted;
        let there = "already exists and is never overwritten; choose another name";
        let file = FileGuard::create(path, there, |_| Ok(())).map_err(|e| e.during(path.display()))?;
        // The overlay must be recorded before the request: this command may be killed while the daemon
        // switches to the overlay, and the next daemon needs its options.
        let number = dir.next_image(name);
        let recorded =
            RecordedImage::add(dir, name, number, &path.display().to_string(), options, backing.clone())?;
        let request = Request::Snapshot { options: options.clone(), image: number };
        Ok(Begun { wanted, dialogue: Dialogue::begin(dir, name, &request)?, file, recorded })
    }

    /// Lets the daemon freeze the device and write the header and tables of the overlay.
    fn stop(&self) -> Outcome {
        self.dialogue.step(&[self.file.file().as_fd()])?
    }

    /// Checks that the daemon still waits for the last step (it cancels if the other devices take too long), and that no
    /// other command has switched the device since it was checked: the backing files are recorded already.
    fn check(&self, dir: &StateDir) -> Outcome {
        if dir.read_state(&self.wanted.name).is_some_and(|state| state.number != self.wanted.current) {
            return Err(Failure::new("another command has switched the device to another image; try again"));
        }
        if self.dialogue.is_waiting() {
            return Ok(());
        }
        self.dialogue.reply::<()>()??;
        Err(Failure::new("the daemon sent an unexpected answer"))
    }
}

/// Freezes the devices one after the other, then lets all of them continue with their overlays. Fails if a
/// device cannot be frozen; then all devices keep their old images.
fn change_over<'a>(dir: &StateDir, begun: Vec<Begun<'a>>) -> Outcome<Vec<Done<'a>>> {
    begun.iter().try_for_each(|one| one.stop().map_err(|e| one.wanted.failed(e)))?;
    begun.iter().try_for_each(|one| one.check(dir).map_err(|e| one.wanted.failed(e)))?;
    // The last step is sent to all devices before any reply is read. Killing this command in between would
    // leave some devices with their old images, so the time in between is kept short.
    let sent: Vec<Outcome> = begun.iter().map(|one| one.dialogue.go_on(&[])).collect();
    let done = begun.into_iter().zip(sent).map(|(Begun { wanted, dialogue, file, recorded }, sent)| {
        // A daemon of an earlier version replies without warnings.
        let done = sent.and_then(|()| dialogue.reply::<Option<Snapshotted>>());
        match &done {
            Ok(Err(_)) => drop(file),
            // If no reply arrived, the device may already use the overlay, so the file must stay.
            Ok(Ok(_)) | Err(_) => {
                file.keep();
                recorded.keep();
            }
        }
        let warnings = |done: Option<Snapshotted>| done.map(|done| done.warnings).unwrap_or_default();
        (wanted, done.and_then(|done| done.map(warnings)))
    });
    Ok(done.collect())
}

/// The record of the image that a device is about to switch to, an entry of `NAME.options`. If the daemon is killed during
/// a snapshot or a commit, `blkq recover` needs the attach options for the new image as well as those for the old one.
/// Dropping removes the entry, unless [`RecordedImage::keep`] was called.
#[derive(Debug)]
pub(super) struct RecordedImage<'a> {
    dir: &'a StateDir,
    name: &'a str,
    /// `None` if there is no entry to remove.
    number: Option<u64>,
}

impl<'a> RecordedImage<'a> {
    /// Records the image at `path`, the `options` with which the next daemon attaches it, and the backing files
    /// of the image. `number` is `None` for daemons of earlier versions, which have no file `NAME.options`:
    /// then nothing is recorded.
    pub(super) fn add(
        dir: &'a StateDir,
        name: &'a str,
        number: Option<u64>,
        path: &str,
        options: &Record,
        backing: Vec<RecordedBacking>,
    ) -> Outcome<RecordedImage<'a>> {
        number.map_or(Ok(()), |number| dir.add_image(name, number, path, options, backing))?;
        Ok(RecordedImage { dir, name, number })
    }

    /// Called if the daemon has switched to the image, or may have done so.
    pub(super) fn keep(mut self) {
        self.number = None;
    }
}

impl Drop for RecordedImage<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.dir.remove_image(self.name, number);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    use blkq_protocol::harness::{options, scratch};
    use blkq_protocol::info::DaemonState;

    use super::*;

    /// Plays a daemon: answers the request and the file, then calls `last` with the connection.
    fn daemon<T: Send + 'static>(
        dir: &StateDir,
        name: &str,
        last: impl FnOnce(UnixStream) -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let listener = UnixListener::bind(dir.control_socket(name)).unwrap();
        thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut request = String::new();
            BufReader::new(&stream).read_line(&mut request).unwrap();
            assert!(request.contains("snapshot"), "{request}");
            writeln!(stream, "{{\"ok\":null}}").unwrap();
            stream.read_exact(&mut [0]).unwrap();
            writeln!(stream, "{{\"ok\":null}}").unwrap();
            last(stream)
        })
    }

    fn wanted(dir: &StateDir, name: &str) -> Wanted {
        let path = dir.file(name, ".new");
        let options = options(&[path.to_str().unwrap(), "--format", "qcow2"]);
        let options = Record::new(&options).unwrap();
        Wanted { name: name.to_owned(), current: None, path, options, backing: Vec::new() }
    }

    #[test]
    fn a_client_is_recognized_by_its_process_number() {
        assert!(is_process("pid 123, uid 0", "123"));
        assert!(!is_process("pid 1234, uid 123", "123") && !is_process("127.0.0.1:123", "123"));
    }

    #[test]
    fn a_device_that_has_switched_meanwhile_gets_no_overlay() {
        let dir = scratch("snapshot-switched");
        let mut claim = dir.claim("a").unwrap();
        let first = Record::new(&options(&["/first"])).unwrap();
        let image = claim.write_options("/first", &first, None).unwrap();
        let serve = |image| {
            claim.write_state(&DaemonState { pid: 1, number: image, ..DaemonState::default() }).unwrap()
        };
        serve(image);
        let wanted = Wanted { current: Some(image), ..wanted(&dir, "a") };
        // The image that was checked is no longer that of the device when the daemon is ready.
        dir.add_image("a", image + 1, "/second", &first, Vec::new()).unwrap();
        serve(image + 1);
        let answer = daemon(&dir, "a", |mut stream| stream.read(&mut [0]).unwrap());
        let begun = vec![Begun::new(&dir, &wanted).unwrap()];
        let failure = change_over(&dir, begun).unwrap_err().to_string();
        assert!(failure.starts_with("snapshot a: another command has switched the device"), "{failure}");
        assert_eq!(answer.join().unwrap(), 0, "the device keeps its image");
        assert!(!wanted.path.exists());
        claim.keep(false);
        drop(claim);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn if_one_device_cancels_no_device_switches_its_image() {
        let dir = scratch("snapshot-cancelled");
        dir.create().unwrap();
        let (cancelled, waits) = std::sync::mpsc::channel();
        let first = daemon(&dir, "a", move |mut stream| {
            writeln!(stream, "{{\"error\":\"the snapshot was cancelled\"}}").unwrap();
            drop(stream);
            cancelled.send(()).unwrap();
        });
        // The second daemon answers the file only after the first daemon has cancelled.
        let listener = UnixListener::bind(dir.control_socket("b")).unwrap();
        let second = thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            writeln!(stream, "{{\"ok\":null}}").unwrap();
            stream.read_exact(&mut [0]).unwrap();
            waits.recv().unwrap();
            writeln!(stream, "{{\"ok\":null}}").unwrap();
            stream.read(&mut [0]).unwrap()
        });
        let wanted = ["a", "b"].map(|name| wanted(&dir, name));
        let begun = wanted.iter().map(|one| Begun::new(&dir, one)).collect::<Outcome<Vec<_>>>().unwrap();
        let failure = change_over(&dir, begun).unwrap_err().to_string();
        assert!(failure.starts_with("snapshot a: "), "{failure}");
        assert_eq!(second.join().unwrap(), 0, "the connection is closed, and the device keeps its image");
        first.join().unwrap();
        assert!(wanted.iter().all(|one| !one.path.exists()));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn an_overlay_is_removed_only_if_the_daemon_refused_it() {
        let dir = scratch("snapshot-done");
        dir.create().unwrap();
        let reply = |text: &'static str| {
            move |mut stream: UnixStream| {
                stream.read_exact(&mut [0]).unwrap();
                stream.write_all(text.as_bytes()).unwrap();
            }
        };
        let daemons = [
            daemon(&dir, "done", reply("{\"ok\":null}\n")),
            daemon(&dir, "dead", reply("")),
            daemon(&dir, "refused", reply("{\"error\":\"why\"}\n")),
        ];
        let wanted = ["done", "dead", "refused"].map(|name| wanted(&dir, name));
        let begun = wanted.iter().map(|one| Begun::new(&dir, one)).collect::<Outcome<Vec<_>>>().unwrap();
        let done = change_over(&dir, begun).unwrap();
        daemons.into_iter().for_each(|daemon| daemon.join().unwrap());
        assert_eq!([0, 1, 2].map(|at| done[at].1.is_ok()), [true, false, false]);
        assert_eq!([0, 1, 2].map(|at| wanted[at].path.exists()), [true, true, false]);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_mapped_device_is_on_the_disk_of_its_partition() {
        let root = std::env::temp_dir().join(format!("blkq-disks-{}", std::process::id()));
        let block = root.join("devices/block");
        fs::create_dir_all(block.join("ublkb0/ublkb0p1")).unwrap();
        fs::write(block.join("ublkb0/ublkb0p1/partition"), "1\n").unwrap();
        fs::create_dir_all(block.join("dm-0/slaves")).unwrap();
        symlink(block.join("ublkb0/ublkb0p1"), block.join("dm-0/slaves/ublkb0p1")).unwrap();
        fs::create_dir_all(root.join("dev/block")).unwrap();
        symlink(block.join("dm-0"), root.join("dev/block/253:0")).unwrap();
        assert_eq!(disks_under(&root, (253, 0)), ["dm-0", "ublkb0"]);
        assert_eq!(disks_under(&root, (0, 40)), Vec::<String>::new());
        fs::remove_dir_all(root).unwrap();
    }
}
