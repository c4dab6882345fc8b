//! The files from which the next daemon of a device reads how the device was attached.
//!
//! `NAME.options` is trusted. It holds the attach options for each image that the device may serve. The
//! daemon writes the file before it has clients; afterwards only commands write it. The daemon does not keep
//! it open, and cannot open it once it is confined. A command that switches the device to another image
//! appends that image before it asks the daemon to switch. So the next daemon finds the image, no matter when
//! the command is killed.
//!
//! `NAME.json` belongs to the daemon. It says which of these images the daemon serves, and holds its
//! settings. The daemon keeps it open for writing, so an attacker who controls the engine can write anything
//! to it. Therefore it is parsed as untrusted input: it can only select one of the images in `NAME.options`,
//! and set what a user could set.
//!
//! `NAME.owner` is trusted like `NAME.options`, and exists only if the storage of the image names its users. The
//! next daemon breaks the lock of the client that this file names. `NAME.json` must not name that client: another
//! one would lose its lock, and its access to the cluster, to a daemon that may have more rights than the one that
//! wrote the file. Older versions of blkq recorded the client there; the next daemon waits until its lock expires.
//!
//! Older versions of blkq stored the options in `NAME.json`, and the daemon still adds them there, because such a
//! version can take over the device ([`DaemonState::older`]). This version does not read them. A compromised daemon
//! cannot pass its file off as such an old one, because the two have different modes, and a confined daemon can neither
//! change a mode nor create a file in this directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use blkq::text::shell_word;
use blkq_drivers::qcow2::BackingFile;
use blkq_export::ublk::Identity;
use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate, renameat_with};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Claim, OPTIONS, OWNER, StateDir, remove};
use crate::failure::{Failure, Outcome};
use crate::info::{BlockDevice, DaemonState, FileId, RecordedBacking, StateFile, image_path, ordered};
use crate::options::Record;
use crate::system::{if_exists, read_bounded};

/// The version of the `NAME.options` format that this program reads and writes.
const VERSION: u32 = 1;
/// Maximum number of images that `NAME.options` records. A daemon answers fewer commands at a time, so the
/// entries of commands in progress are never dropped.
const IMAGES_MAX: usize = 64;
/// Maximum size of `NAME.options` in bytes, and of a `NAME.json` written by an older version.
const OPTIONS_BYTES_MAX: u64 = 16 << 20;
/// Maximum size of `NAME.json` in bytes.
const STATE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of exports, and of settings, in a `NAME.json`.
const LIST_MAX: usize = 64;
/// The mode of `NAME.json`. Older versions, which stored the options there, used 0600.
const STATE_MODE: u32 = 0o400;

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptionsFile {
    version: u32,
    /// The cookie that identifies the kernel's block device, if the device has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ublk: Option<u64>,
    /// Whether entries may record backing files. Older versions cannot read such entries. So a file that an older
    /// version wrote gets none, even from this version: after a failed upgrade, a daemon of the older version reads
    /// the file. `blkq recover` sets this, when no daemon of the older version is left.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    has_backing: bool,
    images: Vec<ImageEntry>,
}

/// An image that the device serves, has served, or may switch to.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageEntry {
    /// Identifies the entry in `NAME.json`.
    number: u64,
    /// Path of the image, or a word such as `ram:SIZE` or `rbd:POOL/IMAGE`.
    path: String,
    /// The file that was at `path`; it may have been renamed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<FileId>,
    /// The backing files of the image, in order from the nearest. The headers of the images do not decide which files
    /// are opened, because a daemon can change the header of each image that it has written to. See
    /// [`OptionsFile::has_backing`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    backing: Vec<RecordedBacking>,
    options: Record,
}

impl ImageEntry {
    fn new(number: u64, path: &str, options: &Record, backing: Vec<RecordedBacking>) -> ImageEntry {
        let file = FileId::of(image_path(path, Some(options)));
        ImageEntry { number, path: path.to_owned(), file, backing, options: options.clone() }
    }

    /// The entry for the next daemon that serves this image. The backing files are still the recorded ones, but may
    /// have other numbers, as [`StateFile::check_image`] permits.
    fn succeeded_with(&self, options: &Record) -> ImageEntry {
        let mut next = ImageEntry::new(self.number, &self.path, options, self.backing.clone());
        let image = [self.file, next.file];
        for (before, now) in next.backing.iter_mut().zip(backing_of(options)) {
            let file = FileId::from(&now);
            if before.is_at(&now, false, image) {
                before.file = file;
            }
        }
        next
    }
}

/// The backing files of the image of `options`, in order from the nearest.
fn backing_of(options: &Record) -> Vec<BackingFile> {
    options.read().map(|options| options.backing_files()).unwrap_or_default()
}

fn recorded(found: &[BackingFile]) -> Vec<RecordedBacking> {
    found.iter().map(RecordedBacking::from).collect()
}

impl OptionsFile {
    /// Parses `NAME.options`. Fails if the text is malformed, or was written by a version of blkq whose
    /// format this one does not know.
    pub fn parse(text: &[u8]) -> Outcome<OptionsFile> {
        let file: OptionsFile = serde_json::from_slice(text).map_err(|e| Failure::new(e.to_string()))?;
        match file.version {
            VERSION => Ok(file),
            version => Err(Failure::new(format!(
                "the file has format {version}, but this version of blkq reads format {VERSION}; use the version that attached \
                 the device, or a newer one"
            ))),
        }
    }

    fn next_number(&self) -> u64 {
        self.images.iter().map(|image| image.number).max().map_or(0, |last| last + 1)
    }

    /// Adds an image, and drops the oldest entry if there are too many. `current` is the image that the
    /// device serves, which is never dropped.
    fn add(&mut self, entry: ImageEntry, current: Option<u64>) {
        self.images.push(entry);
        while self.images.len() > IMAGES_MAX {
            // The oldest entry is a former image, or was added by a command that was killed.
            let oldest = self.images.iter().position(|image| Some(image.number) != current);
            self.images.remove(oldest.unwrap_or(0));
        }
    }

    /// Combines the options with the `state` that the daemon wrote, if it wrote one. The result has no owner.
    pub fn with_state(self, name: &str, state: Option<DaemonState>) -> StateFile {
        let number = state.as_ref().map(|state| state.number);
        let DaemonState { pid, exports, settings, .. } = state.unwrap_or_default();
        let image = self.images.into_iter().find(|image| Some(image.number) == number);
        let file = image.as_ref().and_then(|image| image.file);
        let backing = image.as_ref().filter(|_| self.has_backing).map(|image| image.backing.clone());
        let (image, attach_options) = image.map(|image| (image.path, image.options)).unzip();
        StateFile {
            name: name.to_owned(),
            pid,
            image: image.unwrap_or_default(),
            exports,
            attach_options,
            // The daemon may have died before it recorded the number of the block device.
            // The kernel knows the number.
            ublk: self.ublk.map(|cookie| BlockDevice::new(Identity { id: u32::MAX, cookie })),
            owner: None,
            settings,
            number,
            file,
            backing,
        }
    }
}

/// The fields of `NAME.json` that this version reads.
#[derive(Deserialize)]
struct Written {
    pid: u32,
    number: Option<u64>,
    /// Versions that did not write [`DaemonState::older`] called the number `image`.
    image: Option<Value>,
    exports: Vec<String>,
    #[serde(default, with = "ordered")]
    settings: Vec<(String, String)>,
}

/// Parses a daemon's `NAME.json`. Returns `None` if the text is malformed or exceeds a limit.
pub fn parse_daemon_state(text: &[u8]) -> Option<DaemonState> {
    let Written { pid, number, image, exports, settings } = serde_json::from_slice(text).ok()?;
    let number = number.or_else(|| image?.as_u64())?;
    let state = DaemonState { pid, number, exports, settings, older: None };
    let is_bounded = state.exports.len() <= LIST_MAX && state.settings.len() <= LIST_MAX;
    is_bounded.then_some(state)
}

/// Parses a `NAME.json` of an older version, which holds the options, too. Returns `None` if the text is
/// malformed.
pub fn parse_state(text: &[u8]) -> Option<StateFile> {
    serde_json::from_slice(text).ok()
}

impl StateDir {
    /// Reads the state of the device `name`, as its last daemon and the commands that changed it left it.
    /// Returns `None` if there is no such device, or its files cannot be read.
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
        // A daemon without a block device that was killed before it wrote its state left nothing to recover.
        (state.is_some() || options.ublk.is_some())
            .then(|| StateFile { owner: self.read_owner(name), ..options.with_state(name, state) })
    }

    fn read_owner(&self, name: &str) -> Option<String> {
        let text = read_bounded(File::open(self.file(name, OWNER)).ok()?, STATE_BYTES_MAX as u64).ok()?;
        serde_json::from_slice(&text).ok()
    }

    fn read_options(&self, name: &str) -> Outcome<OptionsFile> {
        let failed = |e: io::Error| Failure::new(e.to_string());
        let file = File::open(self.file(name, OPTIONS)).map_err(failed)?;
        OptionsFile::parse(&read_bounded(file, OPTIONS_BYTES_MAX).map_err(failed)?)
    }

    /// The number for the next image of the device. Returns `None` if the daemon is of an older version,
    /// which stores the options itself.
    pub fn next_image(&self, name: &str) -> Option<u64> {
        let state = self.read_state(name)?;
        state.number?;
        Some(self.read_options(name).ok()?.next_number())
    }

    /// Records that the device `name` may switch to the image at `path`, with `options` and `backing` as its
    /// backing files, under `number`. Fails if another command has taken that number.
    pub fn add_image(
        &self,
        name: &str,
        number: u64,
        path: &str,
        options: &Record,
        backing: Vec<RecordedBacking>,
    ) -> Outcome {
        let current = self.read_state(name).and_then(|state| state.number);
        self.change_options(name, |file| {
            if file.next_number() > number {
                let why = "another command is switching the device to a new image; try again";
                return Err(Failure::new(why));
            }
            let backing = if file.has_backing { backing } else { Vec::new() };
            file.add(ImageEntry::new(number, path, options, backing), current);
            Ok(())
        })
    }

    /// Records the files that are the backing files of the device's image now, in place of the recorded files. No
    /// daemon serves the device. Fails if they have other formats, or `NAME.options` cannot be replaced.
    pub fn accept_backing_files(&self, state: &StateFile) -> Outcome {
        let StateFile { number: Some(number), attach_options: Some(options), backing: Some(before), .. } =
            state
        else {
            return Ok(());
        };
        let found = backing_of(options);
        if found.is_empty() {
            return Ok(());
        }
        // If a raw image were opened as qcow2, its contents, which a client may have written, would choose further
        // files to open.
        let is_other = |(before, now): (&RecordedBacking, &BackingFile)| before.qcow2 != now.qcow2;
        if before.iter().zip(&found).any(is_other) {
            return Err(Failure::new(format!(
                "a backing file of {} has another format than before; run `blkq detach {}`, and check the image with \
                 `qemu-img info --backing-chain {}`",
                state.image,
                state.name,
                shell_word(state.image_path())
            )));
        }
        let now = recorded(&found);
        self.change_options(&state.name, |file| {
            let images = file.images.iter_mut().filter(|image| image.number == *number);
            images.for_each(|image| image.backing.clone_from(&now));
            Ok(())
        })
    }

    /// The backing files of each image of the device `name`, with the number and the path of the image, if an older
    /// version wrote `NAME.options` and did not record them.
    pub fn unrecorded_backing_files(&self, name: &str) -> Vec<(u64, String, Vec<RecordedBacking>)> {
        let options = self.read_options(name).ok().filter(|options| !options.has_backing);
        let images = options.into_iter().flat_map(|options| options.images);
        images.map(|image| (image.number, image.path, recorded(&backing_of(&image.options)))).collect()
    }

    /// Records the [`StateDir::unrecorded_backing_files`], if there are any. Older versions can then no longer read
    /// `NAME.options`. Fails if the file cannot be replaced.
    pub fn record_backing_files(&self, name: &str, found: &[(u64, String, Vec<RecordedBacking>)]) -> Outcome {
        if found.is_empty() {
            return Ok(());
        }
        self.change_options(name, |file| {
            for image in &mut file.images {
                // A daemon that serves the image with other options since has recorded it again.
                let same = found.iter().find(|(number, ..)| *number == image.number);
                let known = same.or_else(|| found.iter().rfind(|(_, path, _)| *path == image.path));
                image.backing = known
                    .map_or_else(|| recorded(&backing_of(&image.options)), |(.., backing)| backing.clone());
            }
            file.has_backing = true;
            Ok(())
        })
    }

    /// Removes the image `number` again, after the daemon has refused to switch to it.
    pub fn remove_image(&self, name: &str, number: u64) {
        // If this fails, an unused entry stays, which does no harm.
        let _ = self.change_options(name, |file| {
            file.images.retain(|image| image.number != number);
            Ok(())
        });
    }

    /// Opens and locks `NAME.options`, waiting for other processes that change it. Closing the returned file
    /// releases the lock. Returns `None` if there is no such file.
    fn lock_options(&self, name: &str) -> io::Result<Option<File>> {
        let path = self.file(name, OPTIONS);
        loop {
            let Some(file) = if_exists(File::open(&path))? else { return Ok(None) };
            file.lock()?;
            // The previous holder of the lock may have replaced the file. Then lock the new one.
            if FileId::of(&path) == Some(FileId::from(&file.metadata()?)) {
                return Ok(Some(file));
            }
        }
    }

    /// Replaces `NAME.options` atomically. Only one process at a time does this.
    fn change_options(&self, name: &str, change: impl FnOnce(&mut OptionsFile) -> Outcome) -> Outcome {
        let path = self.file(name, OPTIONS);
        let new = self.file(name, ".options.new");
        let failure = |e: io::Error| Failure::new(format!("{}: {e}", path.display()));
        let file = self.lock_options(name).and_then(|file| file.ok_or(io::ErrorKind::NotFound.into()));
        let file = file.map_err(failure)?;
        let text = read_bounded(file.try_clone().map_err(failure)?, OPTIONS_BYTES_MAX).map_err(failure)?;
        let mut options = OptionsFile::parse(&text).map_err(|e| e.during(path.display()))?;
        change(&mut options)?;
        // The new file is locked before it gets its name, so that the next process waits until the replaced
        // file has been checked and removed below.
        let replacement = write_new(&new, &options, 0o600).map_err(failure)?;
        replacement.lock().inspect_err(|_| _ = remove(&new)).map_err(failure)?;
        match renameat_with(CWD, &new, CWD, &path, RenameFlags::EXCHANGE) {
            Ok(()) => {
                let [replaced, ours] = [fs::symlink_metadata(&new), file.metadata()];
                if FileId::from(&replaced.map_err(failure)?) != FileId::from(&ours.map_err(failure)?) {
                    // The device was detached, and its name attached again, since the file was opened. Undo
                    // the exchange: the options of the new device must stay.
                    let _ = renameat_with(CWD, &new, CWD, &path, RenameFlags::EXCHANGE);
                    remove(&new).map_err(failure)?;
                    return Err(Failure::new(format!("{name} was detached meanwhile")));
                }
                remove(&new).map_err(failure)
            }
            // Not all file systems support RENAME_EXCHANGE.
            Err(Errno::INVAL | Errno::NOSYS) => fs::rename(&new, &path).map_err(failure),
            Err(e) => {
                let _ = remove(&new);
                Err(failure(e.into()))
            }
        }
    }
}

/// Only the owner of a name writes these files, except `NAME.options` once the device has clients.
impl Claim {
    /// Replaces the state file atomically, and returns it open for writing.
    pub fn write_state(&self, state: &impl Serialize) -> Outcome<File> {
        let failed = |e| Failure::new(format!("state file {}: {e}", self.file(".json").display()));
        self.replace(".json", state, STATE_MODE).map_err(failed)
    }

    /// Records the [`owner`](blkq::Driver::owner) of this daemon's image, or that there is none. Must be called before
    /// the first client connects.
    pub fn write_owner(&self, owner: Option<&str>) -> Outcome {
        let written = match owner {
            Some(owner) => self.replace(OWNER, &owner, 0o600).map(drop),
            None => remove(&self.file(OWNER)),
        };
        written.map_err(|e| Failure::new(format!("{}: {e}", self.file(OWNER).display())))
    }

    /// Records that the device is attached to the image at `path` with `options`, and that its block device, if it has
    /// one, has the cookie `ublk`. Returns the number of the image. Must be called before the first client connects.
    pub fn write_options(&self, path: &str, options: &Record, ublk: Option<u64>) -> Outcome<u64> {
        let (dir, name) = (self.dir(), self.name());
        // A command may be adding an image at the same time.
        let failed = |e| Failure::new(format!("{}: {e}", self.file(OPTIONS).display()));
        let _lock = dir.lock_options(name).map_err(failed)?;
        // A file without a current image belongs to another device: `NAME.json` is missing, or of an older
        // version that wrote no `NAME.options`.
        let current = dir.read_state(name).and_then(|state| state.number);
        let before = current.and_then(|_| dir.read_options(name).ok());
        let has_backing = before.as_ref().is_none_or(|before| before.has_backing);
        let mut served = before.iter().flat_map(|before| &before.images);
        let same = served.find(|image| Some(image.number) == current && image.path == path);
        let entry = match same {
            Some(same) => same.succeeded_with(options),
            None => {
                let backing = if has_backing { recorded(&backing_of(options)) } else { Vec::new() };
                ImageEntry::new(0, path, options, backing)
            }
        };
        if before.as_ref().is_some_and(|before| before.ublk == ublk) && same == Some(&entry) {
            return Ok(entry.number);
        }
        let new = OptionsFile { version: VERSION, ublk: None, has_backing, images: Vec::new() };
        let mut file = before.unwrap_or(new);
        file.ublk = ublk;
        let number = file.next_number();
        file.add(ImageEntry { number, ..entry }, current);
        self.replace(OPTIONS, &file, 0o600).map(|_| number).map_err(failed)
    }

    /// Replaces a file atomically.
    fn replace(&self, suffix: &str, value: &impl Serialize, mode: u32) -> io::Result<File> {
        let new = self.file(&format!("{suffix}.new"));
        let file = write_new(&new, value, mode)?;
        fs::rename(&new, self.file(suffix)).map(|()| file)
    }
}

/// Serializes `value` as JSON, followed by a newline.
pub(crate) fn json_line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(text)
}

/// Writes a file that the caller then renames over another one.
fn write_new(path: &Path, value: &impl Serialize, mode: u32) -> io::Result<File> {
    let text = json_line(value)?;
    remove(path)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(&text).map(|()| file));
    if written.is_err() {
        let _ = remove(path);
    }
    written
}

/// Overwrites an open state file in place, for a confined daemon that cannot create files. A single write
/// that never shortens the file replaces the content, so the file is complete whenever this process is
/// killed. The space is reserved first, so a full file system leaves the old content.
pub fn overwrite_state(file: &File, state: &impl Serialize) -> Outcome {
    let failure = |e: io::Error| Failure::new(format!("state file: {e}"));
    let mut text = json_line(state).map_err(failure)?;
    if text.len() > STATE_BYTES_MAX {
        return Err(Failure::new(format!("state file: longer than {STATE_BYTES_MAX} bytes")));
    }
    let before = file.metadata().map_err(failure)?.len() as usize;
    text.pop();
    text.resize(before.max(text.len() + 1) - 1, b' ');
    text.push(b'\n');
    match fallocate(file, FallocateFlags::KEEP_SIZE, 0, text.len() as u64) {
        // Not all file systems support fallocate(2).
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(e) => return Err(failure(e.into())),
    }
    file.write_all_at(&text, 0).map_err(failure)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::harness::{options, scratch};
    use crate::info::OlderState;

    fn record(image: &str) -> Record {
        Record::new(&options(&[image, "--export", "vhost-user-blk"])).unwrap()
    }

    fn daemon_state(number: u64) -> DaemonState {
        DaemonState { pid: 7, number, ..DaemonState::default() }
    }

    #[test]
    fn a_state_file_is_whole_when_it_becomes_shorter() {
        let dir = scratch("overwrite");
        let claim = dir.claim("a").unwrap();
        let file = claim.write_state(&"a long one").unwrap();
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
        let claim = dir.claim("a").unwrap();
        assert_eq!(dir.read_state("a"), None);
        let (first, second) = (record("/first"), record("/second"));
        assert_eq!(claim.write_options("/first", &first, None), Ok(0));
        assert_eq!(dir.read_state("a"), None, "its daemon was killed early");
        let file = claim.write_state(&daemon_state(0)).unwrap();
        assert_eq!(claim.write_options("/first", &first, None), Ok(0), "the entry exists");
        assert_eq!(dir.next_image("a"), Some(1));
        let backing = vec![RecordedBacking { file: FileId::of(&dir.0).unwrap(), qcow2: true }];
        dir.add_image("a", 1, "/second", &second, backing.clone()).unwrap();
        let again = dir.add_image("a", 1, "/second", &second, Vec::new());
        assert!(again.unwrap_err().to_string().contains("try again"));
        let image = || dir.read_state("a").map(|state| (state.image, state.attach_options));
        assert_eq!(image(), Some(("/first".to_owned(), Some(first))), "the daemon has not switched");
        overwrite_state(&file, &daemon_state(1)).unwrap();
        assert_eq!(image(), Some(("/second".to_owned(), Some(second.clone()))));
        assert_eq!(claim.write_options("/second", &second, None), Ok(1), "the next daemon");
        assert_eq!(dir.read_state("a").unwrap().backing, Some(backing));
        // The image that the device serves stays, no matter how many commands were killed.
        for number in 2..200 {
            dir.add_image("a", number, "/other", &record("/other"), Vec::new()).unwrap();
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

    #[test]
    fn an_older_program_still_reads_its_options_file() {
        let dir = scratch("options-older");
        let claim = dir.claim("a").unwrap();
        let first = record("/first");
        claim.write_options("/first", &first, None).unwrap();
        claim.write_state(&daemon_state(0)).unwrap();
        let path = dir.file("a", ".options");
        let mut file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(file["has_backing"], json!(true));
        file.as_object_mut().unwrap().remove("has_backing");
        fs::write(&path, file.to_string()).unwrap();
        let backing = RecordedBacking { file: FileId::of(&dir.0).unwrap(), qcow2: true };
        dir.add_image("a", 1, "/second", &record("/second"), vec![backing]).unwrap();
        claim.write_options("/first", &first, Some(3)).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(
            text.contains("/second") && text.contains("\"ublk\":3") && !text.contains("backing\""),
            "{text}"
        );
        assert_eq!(dir.read_state("a").unwrap().backing, None);
        dir.record_backing_files("a", &dir.unrecorded_backing_files("a")).unwrap();
        assert_eq!(dir.read_state("a").unwrap().backing, Some(Vec::new()));
        assert!(dir.unrecorded_backing_files("a").is_empty());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn a_daemon_cannot_choose_whose_lock_is_broken() {
        let dir = scratch("owner-file");
        let first = record("rbd:p/i");
        let mut claim = dir.claim("a").unwrap();
        claim.write_options("rbd:p/i", &first, None).unwrap();
        let other = json!({"pid": 7, "image": 0, "exports": [], "settings": {}, "owner": "192.0.2.2:0/2"});
        claim.write_state(&other).unwrap();
        let owner = || dir.read_state("a").unwrap().owner;
        assert_eq!(owner(), None, "the image has no lock");
        claim.write_owner(Some("192.0.2.1:0/1")).unwrap();
        assert_eq!(owner().as_deref(), Some("192.0.2.1:0/1"));
        // The next daemon finds the owner, and its own replaces it.
        claim.keep(true);
        drop(claim);
        let claim = dir.claim_for_successor("a").unwrap();
        let before = claim.predecessor_of("rbd:p/i").and_then(|before| before.owner.clone());
        assert_eq!(before.as_deref(), Some("192.0.2.1:0/1"));
        assert_eq!(owner(), before);
        claim.write_owner(None).unwrap();
        assert_eq!(owner(), None);
        fs::remove_dir_all(&dir.0).unwrap();
    }

    /// A daemon takes over the device while commands add images.
    #[test]
    fn no_image_is_lost_and_no_number_is_given_twice() {
        let dir = scratch("options-race");
        let claim = dir.claim("a").unwrap();
        let first = record("/first");
        claim.write_options("/first", &first, None).unwrap();
        claim.write_state(&daemon_state(0)).unwrap();
        let mut added: Vec<u64> = std::thread::scope(|scope| {
            let commands = [0; 2].map(|_| {
                scope.spawn(|| {
                    let add = |_| {
                        let number = dir.next_image("a").unwrap();
                        let added = dir.add_image("a", number, "/second", &first, Vec::new());
                        let refused = |failure: &Failure| failure.to_string().contains("try again");
                        assert!(added.as_ref().err().is_none_or(refused), "{added:?}");
                        added.is_ok().then_some(number)
                    };
                    (0..20).filter_map(add).collect::<Vec<_>>()
                })
            });
            let daemons = (0..20).map(|_| claim.write_options("/third", &first, None).unwrap());
            let of_daemons: Vec<_> = daemons.collect();
            commands.into_iter().flat_map(|command| command.join().unwrap()).chain(of_daemons).collect()
        });
        // The images are fewer than IMAGES_MAX, so none was dropped.
        let file = dir.read_options("a").unwrap();
        added.sort_unstable();
        assert_eq!(added, file.images[1..].iter().map(|image| image.number).collect::<Vec<_>>());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn a_hostile_state_file_has_no_options() {
        let dir = scratch("hostile");
        let claim = dir.claim("a").unwrap();
        let first = record("/first");
        claim.write_options("/first", &first, Some(9)).unwrap();
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
            claim.write_state(&state).unwrap();
            let read = dir.read_state("a").unwrap();
            assert_eq!((read.name.as_str(), read.attach_options.is_some()), ("a", is_read), "{state}");
            assert!(read.attach_options.is_none_or(|record| record == first), "{state}");
            assert_eq!(read.ublk, Some(BlockDevice::new(Identity { id: u32::MAX, cookie: 9 })), "{state}");
        }
        // A file of a version that did not add the options for older ones, and the file that this one writes, as these
        // read it.
        claim.write_state(&json!({"pid": 7, "image": 0, "exports": [], "settings": {}})).unwrap();
        assert_eq!(dir.read_state("a").unwrap().image, "/first");
        let (ublk, attach_options) =
            (Some(BlockDevice::new(Identity { id: 3, cookie: 9 })), Some(first.clone()));
        let older = OlderState { name: "a".to_owned(), image: "/first".to_owned(), attach_options, ublk };
        let long = OlderState { image: "x".repeat(4096), ..older.clone() };
        assert_eq!(long.if_short(), None);
        let settings = vec![("limit".to_owned(), "none".to_owned()), ("group".to_owned(), "g".to_owned())];
        let state =
            DaemonState { older: older.clone().if_short(), settings: settings.clone(), ..daemon_state(0) };
        claim.write_state(&state).unwrap();
        assert_eq!(dir.read_state("a").unwrap().settings, settings, "in the order in which they were set");
        assert_eq!(dir.read_state("a").unwrap().attach_options.as_ref(), Some(&first));
        let read = parse_state(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(
            OlderState {
                name: read.name,
                image: read.image,
                attach_options: read.attach_options,
                ublk: read.ublk
            },
            older
        );
        // A file of an older version, which wrote no NAME.options. A confined daemon cannot create such a
        // file.
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
        // The next daemon is of the current version.
        assert_eq!(claim.write_options("/old", &record("/old"), None), Ok(0));
        claim.write_state(&daemon_state(0)).unwrap();
        assert_eq!(dir.read_state("a").unwrap().image, "/old");
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
