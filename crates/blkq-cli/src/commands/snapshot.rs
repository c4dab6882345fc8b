//! `blkq snapshot`: devices go on in new images, and what they had stays as it was.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use blkq::drivers::DriverSpec;
use blkq::drivers::r#loop::Dispatch;

use super::attach::create::{NewImage, directory_of};
use super::recorded_image::RecordedImage;
use crate::backing::{Backing, FileId, shown_path};
use crate::completion;
use crate::config;
use crate::control::{Dialogue, Request, Snapshotted, ask};
use crate::devices::named;
use crate::disks::{SYSFS, disks_under};
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::options::{AttachOptions, Backing as BackingChain, Format, Record};
use crate::state::StateDir;
use crate::{complain, print_line};

/// Options of `snapshot`.
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
    #[arg(required = true, value_name = "DEVICE[=FILE]", add = completion::devices())]
    devices: Vec<String>,
    /// Create the overlay of a single device as FILE, which must not exist
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    /// Choose which backing files the overlay may name
    ///
    /// With `allow`, the overlay may be created in another directory than that of the image.
    #[arg(long, value_enum, value_name = "WHICH", default_value = "own-directory")]
    backing_chain: BackingChain,
}

/// A device, and the image that it is to get.
#[derive(Debug)]
struct Wanted {
    name: String,
    image: String,
    path: PathBuf,
    options: Record,
}

/// One whose data is durable, but for what is written since. If this is dropped it goes on as it was, and its new image
/// is removed.
struct Begun<'a> {
    wanted: &'a Wanted,
    dialogue: Dialogue,
    file: NewImage,
    recorded: RecordedImage<'a>,
}

impl Args {
    /// Makes the snapshots, and prints the new images.
    ///
    /// # Errors
    /// The device that has none, and why.
    pub fn run(self) -> Outcome {
        let dir = StateDir::locate()?;
        let mut wanted = Vec::new();
        for (device, file) in self.pairs()? {
            let of = |e: Failure| e.during(format_args!("snapshot {device}"));
            wanted.push(self.wanted(&dir, &device, &file).map_err(of)?);
        }
        // Two commands that stop the same devices do it in one order.
        wanted.sort_by(|a, b| a.name.cmp(&b.name));
        if let Some(twice) = wanted.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(Failure::new(format!("snapshot {}: it is named twice; name it once", twice[0].name)));
        }
        let begun = wanted.iter().map(|wanted| Begun::new(&dir, wanted)).collect::<Outcome<Vec<_>>>()?;
        let done = change_over(begun)?;
        // Not before all have changed over: nobody may read what is printed.
        let mut failures = Vec::new();
        for (wanted, done) in done {
            match done {
                Ok(warnings) => {
                    warnings.iter().for_each(|why| {
                        complain(&Failure::new(format!("{}: warning: {why}", wanted.name)));
                    });
                    print_line(&wanted.path.display().to_string())?;
                }
                Err(failure) => failures.push(failure.during(format_args!("snapshot {}", wanted.name))),
            }
        }
        let last = failures.pop();
        failures.iter().for_each(complain);
        last.map_or(Ok(()), Err)
    }

    /// The devices as they were named, and the new images.
    fn pairs(&self) -> Outcome<Vec<(String, PathBuf)>> {
        if let Some(file) = &self.to {
            return match &self.devices[..] {
                [device] => Ok(vec![(device.clone(), file.clone())]),
                _ => Err(Failure::new("snapshot: --to is for one device; name several as DEVICE=FILE")),
            };
        }
        let pair = |device: &String| match device.rsplit_once('=') {
            Some((device, file)) if !device.is_empty() && !file.is_empty() => {
                Ok((device.to_owned(), PathBuf::from(file)))
            }
            _ => Err(Failure::new(format!(
                "snapshot {device}: there is no new image; give it with --to FILE, or as DEVICE=FILE"
            ))),
        };
        self.devices.iter().map(pair).collect()
    }

    fn wanted(&self, dir: &StateDir, device: &str, file: &Path) -> Outcome<Wanted> {
        let name = named(dir, device)?;
        let mut info: DeviceInfo = ask(dir, &name, &Request::Show {})?;
        // Not as its daemon says, which may have been taken over: the next daemon gets what is made of this.
        let state = dir.read_state(&name);
        let options = state.as_ref().and_then(|state| state.attach_options.as_ref());
        let (Some(state), Some(options)) = (&state, options.map(Record::read).transpose()?) else {
            return Err(Failure::new("its state file cannot be read; detach it, and attach it again"));
        };
        info.image.clone_from(&state.image);
        let (Some(last), DriverSpec::Image(_)) = (file.file_name(), &options.image) else {
            return Err(Failure::new(format!(
                "{} is no image that another could have behind it",
                info.image
            )));
        };
        if options.fault.is_some() {
            return Err(Failure::new("its faults are those of one image; attach it without --fault"));
        }
        let directory = directory_of(file)
            .canonicalize()
            .map_err(|e| Failure::new(format!("{}: {e}", directory_of(file).display())))?;
        let path = directory.join(last);
        check_in_place(&info)?;
        check_not_on_device(&info, &directory)?;
        if self.backing_chain == BackingChain::OwnDirectory && !info.image_path().starts_with(&directory) {
            return Err(Failure::new(format!(
                "{} is not in the directory of {}; choose another, or allow it with --backing-chain allow",
                info.image,
                path.display()
            )));
        }
        check_configuration(&name, &info.image_path(), &path)?;
        check_fits_qcow2(&options)?;
        let backing_chain = match self.backing_chain {
            BackingChain::OwnDirectory => options.backing_chain,
            BackingChain::Allow => BackingChain::Allow,
        };
        let options = AttachOptions {
            image: DriverSpec::Image(path.clone()),
            format: Some(Format::Qcow2),
            backing_chain,
            sector_size: options.sector_size.keep(info.sector_size),
            ..options
        };
        options.check()?;
        Ok(Wanted { name, image: info.image, path, options: Record::new(&options)? })
    }
}

/// Refuses a device with options that its new image could not have.
fn check_fits_qcow2(options: &AttachOptions) -> Outcome {
    let unfit = [
        (options.queues > 1, "several queues", "--queues"),
        (options.threads_per_queue > 1, "several threads for each queue", "--threads-per-queue"),
        (options.offset != 0, "an offset", "--offset"),
        (options.size_limit.is_some(), "a size limit", "--size-limit"),
        (options.dispatch == Dispatch::Serial, "serial dispatch", "--dispatch serial"),
    ];
    match unfit.iter().find(|(has, ..)| *has) {
        Some((_, what, option)) => Err(Failure::new(format!(
            "the device has {what}, and its new image, in qcow2, cannot have that; detach it and attach it without {option}"
        ))),
        None => Ok(()),
    }
}

/// Refuses an image that is no longer where it was attached: the new one would name another file, or none.
fn check_in_place(info: &DeviceInfo) -> Outcome {
    let there = FileId::of(info.image_path());
    if there.is_some() && there == Backing::of(info).map(|backing| backing.file) {
        return Ok(());
    }
    Err(Failure::new(format!(
        "{} is not the file that the device has, which is {} now; move that back, or detach the device and attach it \
         where it is",
        info.image,
        shown_path(info)
    )))
}

/// Refuses a new image on a file system that is on the device: to be made durable it would wait for itself.
fn check_not_on_device(info: &DeviceInfo, directory: &Path) -> Outcome {
    let Some(FileId { device, .. }) = FileId::of(directory) else { return Ok(()) };
    let is_device = |disk: &String| {
        let node = Path::new("/dev").join(disk);
        // Of the kernel's NBD client: the process that connected it.
        let client = std::fs::read_to_string(format!("{SYSFS}/block/{disk}/pid")).unwrap_or_default();
        info.exports.iter().any(|export| Path::new(export) == node)
            || !client.is_empty() && info.clients.iter().any(|other| is_process(&other.peer, client.trim()))
    };
    match disks_under(Path::new(SYSFS), device).into_iter().find(is_device) {
        None => Ok(()),
        Some(disk) => Err(Failure::new(format!(
            "{} is on a file system of the device itself (/dev/{disk}), and would wait for itself; choose another place",
            directory.display()
        ))),
    }
}

/// Whether `peer` is the process with that number.
fn is_process(peer: &str, pid: &str) -> bool {
    let mut words = peer.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| word == "pid") && words.next() == Some(pid)
}

/// Refuses a device whose configuration has the old image: a service manager that starts it again, perhaps because its
/// daemon was killed, would have that written to. Refuses one, too, whose configuration cannot be read.
fn check_configuration(name: &str, image: &Path, new: &Path) -> Outcome {
    let configured = config::image_of(name).map_err(|mistake| {
        Failure::new(format!(
            "the configuration file of the device has a mistake, and its service might later write to {}; correct the \
             file first: {mistake}",
            image.display()
        ))
    })?;
    let Some(configured) = configured else { return Ok(()) };
    if configured.canonicalize().is_ok_and(|configured| configured == image) {
        return Err(Failure::new(format!(
            "{} names {}; first change it to image = {new:?} and format = \"qcow2\"",
            config::path_of(name).display(),
            image.display()
        )));
    }
    Ok(())
}

/// A device, and the warnings of its new image.
type Done<'a> = (&'a Wanted, Outcome<Vec<String>>);

impl<'a> Begun<'a> {
    /// Makes the file, and has the daemon flush the device.
    fn new(dir: &'a StateDir, wanted: &'a Wanted) -> Outcome<Begun<'a>> {
        let Wanted { name, path, options, .. } = wanted;
        let of = |e: Failure| e.during(format_args!("snapshot {name}"));
        let there = "already exists and is never overwritten; choose another name";
        let file = NewImage::make(path, there, |_| Ok(())).map_err(|e| of(e.during(path.display())))?;
        // Before the request, because this command may be killed while the daemon continues with the new image.
        let number = dir.next_image(name);
        let recorded =
            RecordedImage::add(dir, name, number, &path.display().to_string(), options).map_err(of)?;
        let request = Request::Snapshot { options: options.clone(), image: number };
        let dialogue = Dialogue::begin(dir, name, &request).map_err(of)?;
        Ok(Begun { wanted, dialogue, file, recorded })
    }

    fn failed(&self, failure: Failure) -> Failure {
        failure.during(&self.wanted.image).during(format_args!("snapshot {}", self.wanted.name))
    }

    /// Has the daemon stop the device's I/O and make the new image.
    fn stop(&self) -> Outcome {
        let file: Vec<_> = self.file.file().map(AsFd::as_fd).into_iter().collect();
        self.dialogue.step(&file).and_then(|done| done).map_err(|e| self.failed(e))
    }

    /// Whether the device still waits: the others may have taken too long.
    fn check(&self) -> Outcome {
        if self.dialogue.is_waiting() {
            return Ok(());
        }
        let why = match self.dialogue.reply() {
            Ok(Err(failure)) | Err(failure) => failure,
            Ok(Ok(())) => Failure::new("its daemon gave an answer that is none"),
        };
        Err(self.failed(why))
    }
}

/// Freezes the devices one after the other, then lets all of them continue with their new images. Returns the
/// warnings of each.
///
/// # Errors
/// That of the first which cannot: then none has another image.
fn change_over(begun: Vec<Begun<'_>>) -> Outcome<Vec<Done<'_>>> {
    begun.iter().try_for_each(Begun::stop)?;
    begun.iter().try_for_each(Begun::check)?;
    // Without a reply in between: a command that is killed here leaves some as they were.
    let sent: Vec<Outcome> = begun.iter().map(|one| one.dialogue.go_on(&[])).collect();
    let done = begun.into_iter().zip(sent).map(|(Begun { wanted, dialogue, file, recorded }, sent)| {
        // An older daemon replies without warnings.
        let done = sent.and_then(|()| dialogue.reply::<Option<Snapshotted>>());
        match &done {
            Ok(Err(_)) => drop(file),
            // Without a reply it may be the image by now.
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

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    use super::*;
    use crate::options::tests::options;
    use crate::state::tests::scratch;

    /// Takes the request and the file, with a reply to each, then calls `last`.
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
        Wanted { name: name.to_owned(), image: format!("/{name}.img"), path, options }
    }

    #[test]
    fn a_client_is_known_by_the_number_of_its_process() {
        assert!(is_process("pid 123, uid 0", "123"));
        assert!(!is_process("pid 1234, uid 123", "123") && !is_process("127.0.0.1:123", "123"));
    }

    #[test]
    fn one_device_that_gave_up_keeps_the_others_from_changing_over() {
        let dir = scratch("snapshot-given-up");
        dir.create().unwrap();
        let (given_up, waits) = std::sync::mpsc::channel();
        let first = daemon(&dir, "a", move |mut stream| {
            writeln!(stream, "{{\"error\":\"the snapshot was given up\"}}").unwrap();
            drop(stream);
            given_up.send(()).unwrap();
        });
        // The reply to its file comes later than that.
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
        let failure = change_over(begun).unwrap_err().to_string();
        assert!(failure.starts_with("snapshot a: "), "{failure}");
        assert_eq!(second.join().unwrap(), 0, "it goes on as it was");
        first.join().unwrap();
        assert!(wanted.iter().all(|one| !one.path.exists()));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_new_image_stays_unless_its_daemon_says_that_it_is_none() {
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
        let done = change_over(begun).unwrap();
        daemons.into_iter().for_each(|daemon| daemon.join().unwrap());
        assert_eq!([0, 1, 2].map(|at| done[at].1.is_ok()), [true, false, false]);
        assert_eq!([0, 1, 2].map(|at| wanted[at].path.exists()), [true, true, false]);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
