//! The file that is measured on.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blkq::random::Random;
use blkq_drivers::r#loop::{DirectIo, LoopDevice, LoopOptions};

use crate::Result;
use crate::interrupt::Undo;
use crate::progress::Progress;

/// Bytes written at once while the file is filled.
const CHUNK_BYTES: usize = 1 << 20;

/// The file that the user chose to measure on.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The file; or else a temporary one in the current directory.
    pub path: Option<PathBuf>,
    /// Its size.
    pub bytes: u64,
    /// A file that has content may be taken.
    pub overwrite: bool,
}

/// A file filled with data. If it was made for the measurement it is removed with this.
pub struct TestFile {
    path: PathBuf,
    bytes: u64,
    _made: Option<Undo>,
}

impl TestFile {
    /// Makes or takes the file, and fills it with data that no file system can compress or
    /// leave out.
    ///
    /// # Errors
    /// If there is something else, content that must not be lost, or a process that uses it;
    /// if there is no room; if there is no direct I/O; if it cannot be written.
    pub fn create(wanted: &Wanted, progress: &mut Progress) -> Result<TestFile> {
        let path = match &wanted.path {
            Some(path) => std::path::absolute(path)?,
            None => std::env::current_dir()?.join(format!(".blkq-bench-{}", std::process::id())),
        };
        let elsewhere =
            |e: std::io::Error| format!("{}: {e}; choose another place with --file", path.display());
        let existing = match std::fs::metadata(&path) {
            Ok(metadata) => Some(metadata),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(elsewhere(e).into()),
        };
        if let Some(metadata) = &existing {
            check_existing(&path, metadata, wanted.overwrite)?;
        }
        check_room(&path, existing.as_ref(), wanted.bytes)?;
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let (mut file, made) = if existing.is_some() {
            (options.open(&path).map_err(elsewhere)?, None)
        } else {
            let at = path.clone();
            let remove = move || drop(std::fs::remove_file(at));
            let (file, undo) =
                Undo::after(|| options.create_new(true).open(&path), remove).map_err(elsewhere)?;
            (file, Some(undo))
        };
        // From here on the file is removed with this, also if filling it fails.
        let test_file = TestFile { path: path.clone(), bytes: wanted.bytes, _made: made };
        file.set_len(wanted.bytes).map_err(elsewhere)?;
        check_direct_io(&path)?;
        fill(&mut file, &path, wanted.bytes, progress).map_err(elsewhere)?;
        crate::cache::evict(&file).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(test_file)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Opens it to inspect its page cache.
    ///
    /// # Errors
    /// If it was removed.
    #[cfg(test)]
    pub fn open(&self) -> Result<File> {
        Ok(File::open(&self.path)?)
    }
}

fn fill(file: &mut File, path: &Path, bytes: u64, progress: &mut Progress) -> std::io::Result<()> {
    let mut random = Random::new(bytes);
    let mut chunk = vec![0u8; CHUNK_BYTES];
    let mut left = bytes;
    while left > 0 {
        random.fill(&mut chunk);
        let now = left.min(CHUNK_BYTES as u64);
        file.write_all(&chunk[..now as usize])?;
        left -= now;
        progress.show(&format!("filling {} ({} MiB left)", path.display(), left >> 20));
    }
    file.sync_all()
}

/// An existing file is accepted if it is regular, empty or abandoned, and not in use.
fn check_existing(path: &Path, metadata: &Metadata, overwrite: bool) -> Result {
    let name = path.display();
    if !metadata.is_file() {
        return Err(format!("{name} is not a regular file; name one with --file, or a new one").into());
    }
    if metadata.len() > 0 && !overwrite {
        let message = format!("{name} has content; --overwrite gives it up, --file names another one");
        return Err(message.into());
    }
    // The loop driver knows whether a device of blkq or QEMU has it, or the kernel.
    match LoopDevice::open(&LoopOptions { direct_io: DirectIo::Off, ..LoopOptions::new(path) }) {
        Err(e) if matches!(e.kind(), blkq::ErrorKind::Busy | blkq::ErrorKind::Claimed) => {
            Err(format!("{e}; detach it there, or name another file").into())
        }
        _ => Ok(()),
    }
}

/// The file system has room for so many bytes of the file, less what it takes already.
///
/// # Errors
/// If it has not, with the place and how much.
pub fn check_room(path: &Path, existing: Option<&Metadata>, bytes: u64) -> Result {
    let directory = path.parent().unwrap_or(path);
    let system = rustix::fs::statvfs(directory)
        .map_err(|e| format!("{}: {e}; choose another place with --file", directory.display()))?;
    let free = system.f_bavail * system.f_frsize + existing.map_or(0, |file| file.blocks() * 512);
    // Block maps take some room too: about a thousandth.
    if free < bytes + bytes / 100 {
        return Err(format!(
            "{}: {} MiB are free, {} MiB are needed; choose a smaller --size, or another place with --file",
            directory.display(),
            free >> 20,
            (bytes + bytes / 100) >> 20
        )
        .into());
    }
    Ok(())
}

/// Measures a disk, not memory: the file system does direct I/O.
fn check_direct_io(path: &Path) -> Result {
    match LoopDevice::open(&LoopOptions { direct_io: DirectIo::On, ..LoopOptions::new(path) }) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == blkq::ErrorKind::Busy => Err(e.into()),
        Err(_) => Err(format!(
            "{}: its file system has no direct I/O (tmpfs, for one); choose a place on a disk with --file",
            path.display()
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 4 << 20;

    /// A directory on a disk: the temporary one may be in memory.
    fn directory(name: &str) -> PathBuf {
        let directory =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!(".test-{}-{name}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        directory
    }

    fn create(path: &Path, overwrite: bool) -> Result<TestFile> {
        let wanted = Wanted { path: Some(path.to_owned()), bytes: BYTES, overwrite };
        TestFile::create(&wanted, &mut Progress::new(1.0))
    }

    fn failure(path: &Path, overwrite: bool) -> String {
        create(path, overwrite).err().expect("it fails").to_string()
    }

    #[test]
    fn a_file_that_was_made_is_full_of_data_and_is_removed() {
        let directory = directory("made");
        let path = directory.join("file");
        let file = create(&path, false).unwrap();
        let metadata = path.metadata().unwrap();
        assert!(metadata.len() == BYTES && metadata.blocks() * 512 >= BYTES);
        assert_eq!(crate::cache::cached_bytes(&file.open().unwrap()).unwrap(), 0);
        drop(file);
        // This fails unless it is empty.
        std::fs::remove_dir(directory).unwrap();
    }

    #[test]
    fn content_is_lost_only_if_the_user_agrees_and_the_file_stays() {
        let directory = directory("content");
        let path = directory.join("file");
        std::fs::write(&path, "dear").unwrap();
        assert!(failure(&path, false).contains("--overwrite"));
        assert_eq!(std::fs::read(&path).unwrap(), b"dear");
        drop(create(&path, true).unwrap());
        assert_eq!(path.metadata().unwrap().len(), BYTES);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn what_is_attached_fails_and_is_left_alone() {
        let directory = directory("attached");
        let path = directory.join("file");
        std::fs::write(&path, [7; 4096]).unwrap();
        let device = LoopDevice::open(&LoopOptions::new(&path)).unwrap();
        assert!(failure(&path, true).contains("in use"));
        drop(device);
        assert_eq!(std::fs::read(&path).unwrap(), [7; 4096]);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn what_is_no_file_or_has_no_room_fails() {
        let directory = directory("unusable");
        assert!(failure(&directory, true).contains("not a regular file"));
        assert!(failure(Path::new("/dev/null"), true).contains("not a regular file"));
        assert!(failure(&directory.join("none/file"), false).contains("No such file"));
        let wanted = Wanted { path: Some(directory.join("file")), bytes: 1 << 60, overwrite: false };
        let error = TestFile::create(&wanted, &mut Progress::new(1.0)).err().unwrap().to_string();
        assert!(error.contains("MiB are free") && !error.contains('\n'), "{error}");
        std::fs::remove_dir(directory).unwrap();
    }
}
