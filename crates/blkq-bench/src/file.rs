//! The file that `blkq bench` measures on.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blkq::random::Random;
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};

use crate::interrupt::Undo;
use crate::progress::Progress;
use crate::{Result, ensure};

/// The file is filled in chunks of 1 MiB.
const CHUNK_BYTES: usize = 1 << 20;

/// The measured file, filled with data. A file that [`TestFile::create`] created is removed on drop.
pub struct TestFile {
    pub path: PathBuf,
    pub bytes: u64,
    _made: Undo,
}

impl TestFile {
    /// Creates the file at `path`, or opens the existing file, and fills it with random data, which no file system can
    /// compress or store as a hole. `bytes` is the size of the file, a multiple of 1 MiB. If `path` is `None`, the file
    /// is a temporary file in the current directory.
    ///
    /// # Errors
    ///
    /// Fails if the path is not a regular file, if the file is in use, if it is not empty and `overwrite` is not set,
    /// or if the file system has too little space or does not support direct I/O.
    pub fn create(
        path: Option<&Path>,
        overwrite: bool,
        bytes: u64,
        progress: &mut Progress,
    ) -> Result<TestFile> {
        let path = match path {
            Some(path) => std::path::absolute(path)?,
            None => std::env::current_dir()?.join(format!(".blkq-bench-{}", std::process::id())),
        };
        let elsewhere =
            |e: std::io::Error| format!("{}: {e}; choose another file with --file", path.display());
        let existing = match std::fs::metadata(&path) {
            Ok(metadata) => Some(metadata),
            Err(e) if e.kind() == ErrorKind::NotFound => None,
            Err(e) => return Err(elsewhere(e).into()),
        };
        if let Some(metadata) = &existing {
            check_existing(&path, metadata, overwrite)?;
        }
        check_room(&path, existing.as_ref(), bytes)?;
        let (is_new, at) = (existing.is_none(), path.clone());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(is_new);
        let remove = move || {
            if is_new {
                drop(std::fs::remove_file(at))
            }
        };
        let (mut file, made) = Undo::after(|| options.open(&path), remove).map_err(elsewhere)?;
        // Removes a created file also if a step below fails.
        let test_file = TestFile { path: path.clone(), bytes, _made: made };
        file.set_len(bytes).map_err(elsewhere)?;
        check_direct_io(&path)?;
        fill(&mut file, &path, bytes, progress).map_err(elsewhere)?;
        crate::cache::evict(&file).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(test_file)
    }
}

fn fill(file: &mut File, path: &Path, bytes: u64, progress: &mut Progress) -> std::io::Result<()> {
    let mut random = Random::new(bytes);
    let mut chunk = vec![0u8; CHUNK_BYTES];
    for left in (0..bytes / CHUNK_BYTES as u64).rev() {
        random.fill(&mut chunk);
        file.write_all(&chunk)?;
        progress.show(&format!("filling {} ({left} MiB left)", path.display()));
    }
    file.sync_all()
}

/// Accepts an existing file that is regular, not in use, and empty unless `overwrite` is set.
fn check_existing(path: &Path, metadata: &Metadata, overwrite: bool) -> Result {
    let name = path.display();
    ensure(metadata.is_file(), || {
        format!("{name} is not a regular file; choose a regular file or a new one with --file")
    })?;
    ensure(metadata.len() == 0 || overwrite, || {
        format!("{name} is not empty; --overwrite destroys its content, --file chooses another file")
    })?;
    // The loop driver takes the locks of blkq and QEMU, and detects kernel loop devices and mounts.
    match LoopDevice::open(&DriverOptions { direct_io: DirectIo::Off, ..DriverOptions::new(path) }) {
        Err(e) if matches!(e.kind(), blkq::ErrorKind::Busy | blkq::ErrorKind::Claimed) => {
            Err(format!("{e}; release the file there, or choose another file with --file").into())
        }
        _ => Ok(()),
    }
}

/// Checks that the file system has `bytes` free for the file at `path`, counting the blocks of `existing` as
/// free.
pub fn check_room(path: &Path, existing: Option<&Metadata>, bytes: u64) -> Result {
    let directory = path.parent().unwrap_or(path);
    let system = rustix::fs::statvfs(directory)
        .map_err(|e| format!("{}: {e}; choose another directory with --file", directory.display()))?;
    let free = system.f_bavail * system.f_frsize + existing.map_or(0, |file| file.blocks() * 512);
    // Reserves 1 % for the file system's metadata; block maps take about 0.1 %.
    let required = bytes + bytes / 100;
    ensure(free >= required, || {
        let (name, free, required) = (directory.display(), free >> 20, required >> 20);
        let hint = "choose a smaller --size, or another directory with --file";
        format!("{name}: {free} MiB are free, {required} MiB are required; {hint}")
    })
}

/// Checks that the file system supports direct I/O: without it, the measurement would be one of memory.
fn check_direct_io(path: &Path) -> Result {
    match LoopDevice::open(&DriverOptions { direct_io: DirectIo::On, ..DriverOptions::new(path) }) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == blkq::ErrorKind::Busy => Err(e.into()),
        Err(_) => Err(format!(
            "{}: the file system does not support direct I/O (tmpfs does not); choose a file on a disk with --file",
            path.display()
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 4 << 20;

    /// A directory in the source tree, which is on a disk; the system's temporary directory may be in memory.
    fn directory(name: &str) -> PathBuf {
        let directory =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!(".test-{}-{name}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        directory
    }

    fn create(path: &Path, overwrite: bool) -> Result<TestFile> {
        TestFile::create(Some(path), overwrite, BYTES, &mut Progress::new(1.0))
    }

    fn failure(path: &Path, overwrite: bool) -> String {
        create(path, overwrite).err().expect("it fails").to_string()
    }

    #[test]
    fn a_created_file_is_filled_with_data_and_removed_on_drop() {
        let directory = directory("made");
        let path = directory.join("file");
        let file = create(&path, false).unwrap();
        let metadata = path.metadata().unwrap();
        assert!(metadata.len() == BYTES && metadata.blocks() * 512 >= BYTES);
        assert_eq!(crate::cache::cached_bytes(&File::open(&file.path).unwrap()).unwrap(), 0);
        drop(file);
        // This fails unless the directory is empty.
        std::fs::remove_dir(directory).unwrap();
    }

    #[test]
    fn content_is_overwritten_only_with_overwrite() {
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
    fn a_file_in_use_is_refused_and_not_changed() {
        let directory = directory("attached");
        let path = directory.join("file");
        std::fs::write(&path, [7; 4096]).unwrap();
        let device = LoopDevice::open(&DriverOptions::new(&path)).unwrap();
        assert!(failure(&path, true).contains("in use"));
        drop(device);
        assert_eq!(std::fs::read(&path).unwrap(), [7; 4096]);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_path_without_a_regular_file_or_space_fails() {
        let directory = directory("unusable");
        assert!(failure(&directory, true).contains("not a regular file"));
        assert!(failure(Path::new("/dev/null"), true).contains("not a regular file"));
        assert!(failure(&directory.join("none/file"), false).contains("No such file"));
        let path = directory.join("file");
        let made = TestFile::create(Some(&path), false, 1 << 60, &mut Progress::new(1.0));
        let error = made.err().unwrap().to_string();
        assert!(error.contains("MiB are free") && !error.contains('\n'), "{error}");
        std::fs::remove_dir(directory).unwrap();
    }
}
