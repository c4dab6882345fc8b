//! The two files from which the next daemon of a device learns how that was attached.
//!
//! `NAME.options` is trusted. It has the options of the device with each image that it may have: commands write it, and
//! a daemon before it has clients. The daemon does not keep it open, and may not open it once it is confined. A command
//! that gives the device another image appends that before it asks the daemon for the change, so the next daemon finds
//! the image wherever the command is killed.
//!
//! `NAME.json` is the daemon's: which of these images it serves, and its settings. The daemon has it open for writing,
//! so an engine that was taken over writes what it likes there. It is read as a hostile input: it can choose only among
//! the images of `NAME.options`, and a setting that a user could set.
//!
//! A daemon cannot pass its `NAME.json` off as one of an older program, which has the options too: that has another mode,
//! and a confined daemon can neither change a mode nor make a file there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use blkq_export::ublk::Identity;
use rustix::fs::{CWD, FallocateFlags, FlockOperation, RenameFlags, fallocate, flock, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{StateDir, remove};
use crate::failure::{Failure, Outcome};
use crate::file_id::FileId;
use crate::info::{BlockDevice, DaemonState, StateFile};
use crate::options::Record;

/// The format of `NAME.options` that this program writes.
const VERSION: u32 = 1;
/// Images that `NAME.options` records: more than the commands that a daemon answers at a time.
const IMAGES_MAX: usize = 64;
/// Longest `NAME.options`, and longest `NAME.json` of an older program.
const OPTIONS_BYTES_MAX: u64 = 16 << 20;
/// Longest `NAME.json`.
const STATE_BYTES_MAX: usize = 64 << 10;
/// Most exports and settings in a `NAME.json`.
const LIST_MAX: usize = 64;
/// The mode of a `NAME.json`. That of an older program is 0600.
const STATE_MODE: u32 = 0o400;

/// The contents of `NAME.options`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptionsFile {
    version: u32,
    /// By which the kernel's block device is found, if the device has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ublk: Option<u64>,
    images: Vec<ImageEntry>,
}

/// An image that the device has, had, or may have soon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageEntry {
    /// It has no other meaning than to be found.
    number: u64,
    /// Its path, or `null:SIZE`, `ram:SIZE`.
    path: String,
    /// The file, which may be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<FileId>,
    /// How the device is attached to it.
    options: Record,
}

impl ImageEntry {
    fn new(number: u64, path: &str, options: &Record) -> ImageEntry {
        ImageEntry { number, path: path.to_owned(), file: FileId::of(path), options: options.clone() }
    }
}

impl OptionsFile {
    /// Parses `NAME.options`.
    ///
    /// # Errors
    /// Why this program cannot read it.
    pub fn parse(text: &[u8]) -> Outcome<OptionsFile> {
        let file: OptionsFile = serde_json::from_slice(text).map_err(|e| Failure::new(e.to_string()))?;
        match file.version {
            VERSION => Ok(file),
            version => Err(Failure::new(format!(
                "its format is {version}, and this blkq reads format {VERSION}; use the blkq that attached the device, \
                 or a later one"
            ))),
        }
    }

    /// The number that no image has yet.
    fn next_number(&self) -> u64 {
        self.images.iter().map(|image| image.number).max().map_or(0, |last| last + 1)
    }

    /// Adds an image; `current` is the one that the device has.
    fn add(&mut self, entry: ImageEntry, current: Option<u64>) {
        self.images.push(entry);
        while self.images.len() > IMAGES_MAX {
            // Of a command that was killed, or an image of the past.
            let oldest = self.images.iter().position(|image| Some(image.number) != current);
            self.images.remove(oldest.unwrap_or(0));
        }
    }

    /// The device of these options whose daemon has written `state`.
    pub fn with_state(self, name: &str, state: Option<DaemonState>) -> StateFile {
        let (pid, number, exports, owner, settings) = match state {
            Some(state) => (state.pid, Some(state.image), state.exports, state.owner, state.settings),
            None => (0, None, Vec::new(), None, Vec::new()),
        };
        let image = self.images.into_iter().find(|image| Some(image.number) == number);
        let file = image.as_ref().and_then(|image| image.file);
        let (image, attach_options) = image.map(|image| (image.path, image.options)).unzip();
        StateFile {
            name: name.to_owned(),
            pid,
            image: image.unwrap_or_default(),
            exports,
            attach_options,
            // The kernel knows which number the device has.
            ublk: self.ublk.map(|cookie| BlockDevice::new(Identity { id: u32::MAX, cookie })),
            owner,
            settings,
            number,
            file,
        }
    }
}

/// Parses the `NAME.json` of a daemon; `None` if it is none.
pub fn parse_daemon_state(text: &[u8]) -> Option<DaemonState> {
    let state: DaemonState = serde_json::from_slice(text).ok()?;
    let is_bounded = state.exports.len() <= LIST_MAX && state.settings.len() <= LIST_MAX;
    is_bounded.then_some(state)
}

/// Parses the `NAME.json` of a program that wrote the options there too; `None` if it is none.
pub fn parse_state(text: &[u8]) -> Option<StateFile> {
    serde_json::from_slice(text).ok()
}

impl StateDir {
    /// The device `name` as its last daemon, and the commands that changed it, have left it; `None` if there is none, or
    /// it cannot be read.
    pub fn read_state(&self, name: &str) -> Option<StateFile> {
        let state = match File::open(self.file(name, ".json")) {
            Ok(file) if file.metadata().ok()?.mode() & 0o777 != STATE_MODE => {
                let state = parse_state(&read_bounded(file, OPTIONS_BYTES_MAX).ok()?)?;
                return Some(StateFile { name: name.to_owned(), number: None, ..state });
            }
            Ok(file) => parse_daemon_state(&read_bounded(file, STATE_BYTES_MAX as u64).ok()?),
            Err(_) => None,
        };
        let options = self.read_options(name).ok()?;
        // Without a block device there is nothing of a daemon that was killed before it wrote its state.
        (state.is_some() || options.ublk.is_some()).then(|| options.with_state(name, state))
    }

    fn read_options(&self, name: &str) -> Outcome<OptionsFile> {
        let failed = |e: io::Error| Failure::new(e.to_string());
        let file = File::open(self.file(name, ".options")).map_err(failed)?;
        OptionsFile::parse(&read_bounded(file, OPTIONS_BYTES_MAX).map_err(failed)?)
    }

    /// The number that the next image of the device gets; `None` if its daemon is of an older program, and keeps the
    /// options itself.
    pub fn next_image(&self, name: &str) -> Option<u64> {
        let state = self.read_state(name)?;
        state.number?;
        Some(self.read_options(name).ok()?.next_number())
    }

    /// Records the image at `path` as one that the device `name` may have soon, with `options`, under `number`.
    ///
    /// # Errors
    /// If another command does the same, or the file cannot be written.
    pub fn add_image(&self, name: &str, number: u64, path: &str, options: &Record) -> Outcome {
        let current = self.read_state(name).and_then(|state| state.number);
        self.change_options(name, |file| {
            if file.next_number() > number {
                return Err(Failure::new("another command gives it a new image just now; try again"));
            }
            file.add(ImageEntry::new(number, path, options), current);
            Ok(())
        })
    }

    /// Removes the image `number`, which the daemon has refused.
    pub fn remove_image(&self, name: &str, number: u64) {
        // If that fails it is only one among others.
        let _ = self.change_options(name, |file| {
            file.images.retain(|image| image.number != number);
            Ok(())
        });
    }

    /// Opens `NAME.options` and waits until no other process changes it; `None` if there is no such file. The lock is
    /// released with the file.
    fn lock_options(&self, name: &str) -> io::Result<Option<File>> {
        let path = self.file(name, ".options");
        loop {
            let file = match File::open(&path) {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(e),
            };
            flock(&file, FlockOperation::LockExclusive)?;
            let open = file.metadata()?;
            // The process that had the lock may have replaced the file.
            if fs::symlink_metadata(&path).is_ok_and(|there| is_same_file(&there, &open)) {
                return Ok(Some(file));
            }
        }
    }

    /// Changes `NAME.options`: one process at a time, and as a whole or not at all.
    fn change_options(&self, name: &str, change: impl FnOnce(&mut OptionsFile) -> Outcome) -> Outcome {
        let path = self.file(name, ".options");
        let new = self.file(name, ".options.new");
        let failure = |e: io::Error| Failure::new(format!("{}: {e}", path.display()));
        let file = self.lock_options(name).and_then(|file| file.ok_or(io::ErrorKind::NotFound.into()));
        let file = file.map_err(failure)?;
        let text = read_bounded(file.try_clone().map_err(failure)?, OPTIONS_BYTES_MAX).map_err(failure)?;
        let mut options = OptionsFile::parse(&text).map_err(|e| e.during(path.display()))?;
        change(&mut options)?;
        // Locked before it is at the path: the next process waits until what this one has replaced is removed.
        let _replacement = write_new(&new, &options).map_err(failure)?;
        match renameat_with(CWD, &new, CWD, &path, RenameFlags::EXCHANGE) {
            Ok(()) => {
                let replaced = fs::symlink_metadata(&new)
                    .and_then(|old| file.metadata().map(|ours| is_same_file(&old, &ours)));
                if !replaced.map_err(failure)? {
                    // The device was detached meanwhile, and the name attached again.
                    let _ = renameat_with(CWD, &new, CWD, &path, RenameFlags::EXCHANGE);
                    remove(&new).map_err(failure)?;
                    return Err(Failure::new(format!("{name} was detached just now")));
                }
                remove(&new).map_err(failure)
            }
            // Some file systems cannot exchange.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&new, &path).map_err(failure),
            Err(e) => {
                let _ = remove(&new);
                Err(failure(e.into()))
            }
        }
    }

    /// Records how the device `name` is attached: with `options` to the image at `path`, and with the kernel's block device
    /// `ublk`. Returns the number of the image. For its daemon, before that has clients.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub(super) fn write_options(
        &self,
        name: &str,
        path: &str,
        options: &Record,
        ublk: Option<u64>,
    ) -> Outcome<u64> {
        let failure = |e: io::Error| Failure::new(format!("{}: {e}", self.file(name, ".options").display()));
        // A command may add an image just now.
        let _lock = self.lock_options(name).map_err(failure)?;
        // Of a daemon before, or of the program before that wrote no such file: then it is another device's.
        let current = self.read_state(name).and_then(|state| state.number);
        let before = current.and_then(|_| self.read_options(name).ok());
        if let Some(before) = &before
            && before.ublk == ublk
            && let Some(same) = before.images.iter().find(|image| Some(image.number) == current)
            && *same == ImageEntry::new(same.number, path, options)
        {
            return Ok(same.number);
        }
        let mut file = before.unwrap_or(OptionsFile { version: VERSION, ublk: None, images: Vec::new() });
        file.ublk = ublk;
        let number = file.next_number();
        file.add(ImageEntry::new(number, path, options), current);
        let new = self.file(name, ".options.new");
        let written = write_new(&new, &file).and_then(|_| fs::rename(&new, self.file(name, ".options")));
        written.map_err(failure)?;
        Ok(number)
    }

    /// Writes a device's state file, as a whole or not at all, and returns it open for writing. For its daemon alone,
    /// one at a time.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_state(&self, name: &str, state: &impl Serialize) -> Outcome<File> {
        let path = self.file(name, ".json");
        let new = self.file(name, ".json.new");
        let failure = |e: io::Error| Failure::new(format!("state file {}: {e}", path.display()));
        let text = line(state).map_err(failure)?;
        remove(&new).map_err(failure)?;
        let file = OpenOptions::new().write(true).create_new(true).mode(STATE_MODE).open(&new);
        let mut file = file.map_err(failure)?;
        file.write_all(&text).map_err(failure)?;
        fs::rename(&new, &path).map_err(failure)?;
        Ok(file)
    }
}

fn read_bounded(file: File, most: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    Ok(text)
}

/// A value as a line of JSON.
fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(text)
}

fn is_same_file(one: &fs::Metadata, other: &fs::Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Writes a file that is put in another's place, and locks it.
fn write_new(path: &Path, value: &impl Serialize) -> io::Result<File> {
    let text = line(value)?;
    remove(path)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| {
        file.write_all(&text)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    });
    if written.is_err() {
        let _ = remove(path);
    }
    written
}

/// Writes a state file anew that is open, for a daemon that may write to no directory: in one piece, and not shorter,
/// so that there is a whole one whenever this process is killed. Its space is reserved before, so that a full file
/// system leaves the old one.
///
/// # Errors
/// If there is no space for it, or it cannot be written.
pub fn overwrite_state(file: &File, state: &impl Serialize) -> Outcome {
    let failure = |e: io::Error| Failure::new(format!("state file: {e}"));
    let mut text = line(state).map_err(failure)?;
    if text.len() > STATE_BYTES_MAX {
        return Err(Failure::new(format!("state file: longer than {STATE_BYTES_MAX} bytes")));
    }
    let before = file.metadata().map_err(failure)?.len() as usize;
    text.pop();
    text.resize(before.max(text.len() + 1) - 1, b' ');
    text.push(b'\n');
    match fallocate(file, FallocateFlags::KEEP_SIZE, 0, text.len() as u64) {
        // Not every file system can.
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(e) => return Err(failure(e.into())),
    }
    file.write_all_at(&text, 0).map_err(failure)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::options::tests::options;
    use crate::state::tests::scratch;

    fn record(image: &str) -> Record {
        Record::new(&options(&[image, "--export", "vhost-user-blk"])).unwrap()
    }

    fn daemon_state(image: u64) -> DaemonState {
        DaemonState { pid: 7, image, exports: Vec::new(), owner: None, settings: Vec::new() }
    }

    #[test]
    fn a_state_file_is_whole_when_it_becomes_shorter() {
        let dir = scratch("overwrite");
        let file = dir.write_state("a", &"a long one").unwrap();
        let path = dir.file("a", ".json");
        for state in ["short", "one that is longer than the first"] {
            overwrite_state(&file, &state).unwrap();
            assert_eq!(serde_json::from_slice::<String>(&fs::read(&path).unwrap()).unwrap(), state);
        }
        assert!(overwrite_state(&file, &"x".repeat(STATE_BYTES_MAX)).is_err());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn an_image_is_found_by_its_number() {
        let dir = scratch("options");
        assert_eq!(dir.read_state("a"), None);
        let (first, second) = (record("/first"), record("/second"));
        assert_eq!(dir.write_options("a", "/first", &first, None), Ok(0));
        assert_eq!(dir.read_state("a"), None, "its daemon was killed early");
        let file = dir.write_state("a", &daemon_state(0)).unwrap();
        assert_eq!(dir.write_options("a", "/first", &first, None), Ok(0), "it is there");
        assert_eq!(dir.next_image("a"), Some(1));
        dir.add_image("a", 1, "/second", &second).unwrap();
        assert!(dir.add_image("a", 1, "/second", &second).unwrap_err().to_string().contains("try again"));
        let image = || dir.read_state("a").map(|state| (state.image, state.attach_options));
        assert_eq!(image(), Some(("/first".to_owned(), Some(first))), "the daemon was not asked yet");
        overwrite_state(&file, &daemon_state(1)).unwrap();
        assert_eq!(image(), Some(("/second".to_owned(), Some(second.clone()))));
        // The one that the device has stays, however many commands are killed.
        for number in 2..200 {
            dir.add_image("a", number, "/other", &record("/other")).unwrap();
        }
        assert_eq!(image(), Some(("/second".to_owned(), Some(second))));
        assert_eq!(dir.read_options("a").unwrap().images.len(), IMAGES_MAX);
        dir.remove_image("a", 199);
        assert_eq!(dir.next_image("a"), Some(199));
        overwrite_state(&file, &daemon_state(199)).unwrap();
        assert_eq!(image(), Some((String::new(), None)));
        assert!(!dir.file("a", ".options.new").exists());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    /// The next daemon takes a device over while commands give it new images.
    #[test]
    fn no_image_is_lost_and_no_number_is_given_twice() {
        let dir = scratch("options-race");
        let first = record("/first");
        dir.write_options("a", "/first", &first, None).unwrap();
        dir.write_state("a", &daemon_state(0)).unwrap();
        let mut added: Vec<u64> = std::thread::scope(|scope| {
            let commands = [0; 2].map(|_| {
                scope.spawn(|| {
                    let add = |_| {
                        let number = dir.next_image("a").unwrap();
                        let added = dir.add_image("a", number, "/second", &first);
                        let refused = |failure: &Failure| failure.to_string().contains("try again");
                        assert!(added.as_ref().err().is_none_or(refused), "{added:?}");
                        added.is_ok().then_some(number)
                    };
                    (0..20).filter_map(add).collect::<Vec<_>>()
                })
            });
            let daemons = (0..20).map(|_| dir.write_options("a", "/third", &first, None).unwrap());
            let of_daemons: Vec<_> = daemons.collect();
            commands.into_iter().flat_map(|command| command.join().unwrap()).chain(of_daemons).collect()
        });
        // Fewer than are kept.
        let file = dir.read_options("a").unwrap();
        added.sort_unstable();
        assert_eq!(added, file.images[1..].iter().map(|image| image.number).collect::<Vec<_>>());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn a_hostile_state_file_has_no_options() {
        let dir = scratch("hostile");
        let first = record("/first");
        dir.write_options("a", "/first", &first, Some(9)).unwrap();
        let path = dir.file("a", ".json");
        let hostile = json!({
            "name": "b", "pid": 7, "image": "/etc/shadow", "exports": [], "settings": {},
            "ublk": {"id": 3, "cookie": 1}, "attach_options": record("/etc/shadow"),
        });
        let mixed = json!({
            "pid": 7, "image": 0, "exports": [], "settings": {}, "name": "b",
            "ublk": {"id": 3, "cookie": 1}, "attach_options": record("/etc/shadow"),
        });
        let many: Vec<_> = (0..LIST_MAX as u64 + 1).map(|at| at.to_string()).collect();
        for (state, is_read) in [
            (json!({"pid": 7, "image": 0, "exports": [], "settings": {"depth": "1"}}), true),
            (mixed, true),
            (hostile, false),
            (json!({"pid": 7, "image": 1, "exports": [], "settings": {}}), false),
            (json!({"pid": 7, "image": -1, "exports": [], "settings": {}}), false),
            (json!({"pid": 7, "image": 0, "exports": many, "settings": {}}), false),
            (json!({"pid": 7, "image": 0, "exports": [], "settings": {"depth": ["1"]}}), false),
            (json!([]), false),
        ] {
            dir.write_state("a", &state).unwrap();
            let read = dir.read_state("a").unwrap();
            assert_eq!((read.name.as_str(), read.attach_options.is_some()), ("a", is_read), "{state}");
            assert!(read.attach_options.is_none_or(|record| record == first), "{state}");
            assert_eq!(read.ublk, Some(BlockDevice::new(Identity { id: u32::MAX, cookie: 9 })), "{state}");
        }
        // One of a program that writes no other file; a confined daemon can make none.
        let old = json!({
            "name": "a", "pid": 7, "image": "/old", "exports": [], "settings": {}, "attach_options": record("/old"),
        });
        fs::remove_file(&path).unwrap();
        fs::write(&path, old.to_string()).unwrap();
        let read = dir.read_state("a").unwrap();
        assert_eq!(
            (read.image.as_str(), read.attach_options, read.ublk),
            ("/old", Some(record("/old")), None)
        );
        assert_eq!(dir.next_image("a"), None);
        // Its next daemon is of this program.
        assert_eq!(dir.write_options("a", "/old", &record("/old"), None), Ok(0));
        dir.write_state("a", &daemon_state(0)).unwrap();
        assert_eq!(dir.read_state("a").unwrap().image, "/old");
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
