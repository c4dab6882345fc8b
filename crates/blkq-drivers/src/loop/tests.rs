//! Tests of the loop driver on real files. The system's temporary directory must be on a file system with direct I/O,
//! holes and FALLOC_FL_ZERO_RANGE (ext4, xfs), and some tests need root to mount file systems. If one of these is
//! missing, the tests fail instead of being skipped.

mod control;
mod data;
mod open;
mod tail;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;

use super::*;
use blkq::testing::harness::{Harness, filled, pattern, run, unmount};

const MIB: u64 = 1 << 20;

struct Directory {
    path: PathBuf,
    mounted: bool,
}

impl Directory {
    fn new() -> Directory {
        Directory::below(&std::env::temp_dir())
    }

    fn below(parent: &Path) -> Directory {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let path = parent.join(format!("blkq-loop-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Directory { path, mounted: false }
    }

    fn tmpfs(options: &str) -> Directory {
        Directory::mount(&["-t", "tmpfs", "-o", options, "blkq-test"])
    }

    fn ext(kind: &str, block_bytes: u32) -> Directory {
        let parent = Directory::new();
        let image = parent.image(32 * MIB);
        let image = image.to_str().unwrap();
        run("mke2fs", &["-q", "-t", kind, "-b", &block_bytes.to_string(), image]);
        // The kernel keeps the image until the file system is unmounted.
        Directory::mount(&["-o", "loop", image])
    }

    fn mount(words: &[&str]) -> Directory {
        let mut directory = Directory::new();
        run("mount", &[words, &[directory.path.to_str().unwrap()]].concat());
        directory.mounted = true;
        directory
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn image(&self, bytes: u64) -> PathBuf {
        let path = self.file("image");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.mounted {
            unmount(&self.path);
        }
        let removed = std::fs::remove_dir_all(&self.path);
        assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
    }
}

/// An ext4 file system on a loop device whose tmpfs can be filled: data written to its files reaches the page cache,
/// and write-back fails.
pub(crate) struct FullDisk {
    high: Directory,
    /// Dropped after `high`, because fields are dropped in this order and `high` is mounted on a file in it.
    low: Directory,
}

impl FullDisk {
    pub fn new() -> FullDisk {
        let low = Directory::tmpfs("size=80M");
        let store = low.file("store");
        File::create(&store).unwrap().set_len(64 * MIB).unwrap();
        let looped = run("losetup", &["-f", "--show", store.to_str().unwrap()]).trim().to_owned();
        run("mkfs.ext4", &["-qF", "-O", "^has_journal", "-E", "nodiscard", &looped]);
        let mut high = Directory::new();
        run("mount", &[&looped, high.path.to_str().unwrap()]);
        run("losetup", &["-d", &looped]); // when it is unmounted
        high.mounted = true;
        FullDisk { high, low }
    }

    pub fn image(&self) -> PathBuf {
        let path = self.high.file("image");
        let file = File::create(&path).unwrap();
        file.write_all_at(&vec![0; 16 << 20], 0).unwrap();
        file.sync_all().unwrap();
        path
    }

    /// Fills the tmpfs, so that no further write reaches the disk.
    pub fn fill(&self) {
        run("fallocate", &["-d", self.low.file("store").to_str().unwrap()]);
        // The ballast is larger than the free space, so writing it fails after filling all of it.
        let full = std::fs::write(self.low.file("ballast"), vec![1; 80 << 20]);
        assert_eq!(full.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    }
}

fn options(path: &Path, direct_io: DirectIo) -> DriverOptions {
    DriverOptions { direct_io, ..DriverOptions::new(path) }
}

fn open(path: &Path, direct_io: DirectIo) -> LoopDevice {
    LoopDevice::open(&options(path, direct_io)).unwrap()
}

fn refusal(options: &DriverOptions) -> String {
    let message = LoopDevice::open(options).err().expect("a refusal").to_string();
    assert!(!message.contains('\n'), "one line: {message}");
    message
}

fn bytes_of(path: &Path, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn allocated(path: &Path) -> u64 {
    File::open(path).unwrap().sync_all().unwrap();
    std::fs::metadata(path).unwrap().blocks() * 512
}

fn fact(device: &LoopDevice, name: &str) -> String {
    device.describe().into_iter().find(|(key, _)| *key == name).unwrap().1
}

fn count(device: &LoopDevice, name: &str) -> u64 {
    fact(device, name).parse().unwrap()
}

/// The number of queues with writes in flight that take turns.
fn writers(device: &LoopDevice) -> u64 {
    device.shared.counters.writers.load(Relaxed)
}

/// Pages of the image in the page cache, and how many of them are dirty or under write-back.
fn cached(path: &Path) -> (u64, u64) {
    #[repr(C)]
    struct Range(u64, u64);
    #[repr(C)]
    #[derive(Default)]
    struct Stat([u64; 5]);
    const SYS_CACHESTAT: libc::c_long = 451;
    let file = File::open(path).unwrap();
    let (range, mut stat) = (Range(0, 0), Stat::default());
    // SAFETY: both structures have the layout of the kernel's and live through the call.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &range, &mut stat, 0) };
    assert_eq!(result, 0, "cachestat: {}", std::io::Error::last_os_error());
    (stat.0[0], stat.0[1] + stat.0[2])
}
