//! The file that `blkq bench` measures on, and the page cache of a file: counts its cached pages, and evicts them.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blkq::random::Random;
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::interrupt::Undo;
use crate::measurement::{Run, mib};
use crate::metric::Metric;
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
        evict(&file).map_err(|e| format!("{}: {e}", path.display()))?;
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

/// System call number of cachestat (Linux 6.5), the same on all architectures.
const SYS_CACHESTAT: libc::c_long = 451;

/// Bytes of `file` in the page cache, counted with cachestat, or with mincore before Linux 6.5.
pub fn cached_bytes(file: &File) -> Result<u64> {
    let page = rustix::param::page_size() as u64;
    // struct cachestat_range (offset and length; 0 is the whole file), and struct cachestat, which begins with nr_cache
    // (include/uapi/linux/mman.h).
    let (range, mut found) = ([0_u64; 2], [0_u64; 5]);
    // SAFETY: both arrays have the layout of the kernel's structures, and outlive the call.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0) };
    if result == 0 {
        return Ok(found[0] * page);
    }
    let length = file.metadata()?.len() as usize;
    if length == 0 {
        return Ok(0);
    }
    let mut resident = vec![0u8; length.div_ceil(page as usize)];
    // SAFETY: the mapping is new, covers the whole file, is not accessed, and is unmapped below. `resident` has one
    // byte for each of its pages.
    let result = unsafe {
        let map = mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0)?;
        let result = libc::mincore(map, length, resident.as_mut_ptr());
        munmap(map, length)?;
        result
    };
    if result != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(resident.iter().filter(|page| **page & 1 != 0).count() as u64 * page)
}

/// How long the kernel may take to finish reading ahead: until then it keeps the pages.
const READ_AHEAD_TIME: Duration = Duration::from_secs(5);

/// Writes back and drops the cached pages of `file`. Fails if more than 1 % of them stay cached, which happens
/// while another process maps the file.
pub fn evict(file: &File) -> Result {
    let length = file.metadata()?.len();
    file.sync_data()?;
    let until = Instant::now() + READ_AHEAD_TIME;
    let left = loop {
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
        let left = cached_bytes(file)?;
        if left <= length / 100 || Instant::now() >= until {
            break left;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    ensure(left <= length / 100, || {
        format!(
            "{left} bytes of the file cannot be dropped from the page cache; another process uses the file"
        )
    })
}

/// Runs `measure` with a cold page cache: evicts the file at `path` first. Adds to the run the cached bytes
/// before and after it, and their growth per I/O. Dirty pages that `measure` leaves are written back after
/// the run, so that the next case does not pay for them.
pub fn cold(path: &Path, measure: impl FnOnce() -> Result<Run>) -> Result<Run> {
    let file = File::open(path)?;
    evict(&file)?;
    let before = cached_bytes(&file)?;
    let run = measure()?;
    let after = cached_bytes(&file)?;
    file.sync_data()?;
    let per_io = after.saturating_sub(before) as f64 / 1024.0 / run.ios as f64;
    Ok(run
        .with(Metric::CachedBeforeMib, mib(before))
        .with(Metric::CachedMib, mib(after))
        .with(Metric::CachedKibPerIo, per_io))
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
        assert_eq!(cached_bytes(&File::open(&file.path).unwrap()).unwrap(), 0);
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

    #[test]
    fn evict_succeeds_only_if_the_pages_are_dropped() {
        let path = std::env::temp_dir().join(format!("blkq-bench-evict-{}", std::process::id()));
        let bytes = 4 << 20;
        std::fs::write(&path, vec![1; bytes]).unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!(cached_bytes(&file).unwrap(), bytes as u64);
        let evicted = evict(&file);
        let left = cached_bytes(&file).unwrap();
        // tmpfs cannot drop pages, and `evict` must report that.
        assert_eq!(evicted.is_ok(), left <= bytes as u64 / 100, "{left} bytes left: {evicted:?}");
        std::fs::remove_file(&path).unwrap();
    }
}
