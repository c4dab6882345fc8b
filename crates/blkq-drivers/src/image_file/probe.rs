//! Probes what the file system and the block device of an image support.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use blkq::{Error, ErrorKind, IoBuffer};
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, fstatfs, ioctl_getflags, statx};

use crate::errors::invalid;

/// `TMPFS_MAGIC` of the kernel's uapi/linux/magic.h.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// `EXT4_SUPER_MAGIC` of uapi/linux/magic.h; ext2 and ext3 have the same number.
const EXT_MAGIC: i64 = 0xef53;
/// `FS_EXTENT_FL` of uapi/linux/fs.h: the file maps its blocks by extents.
const EXTENT_FLAG: u32 = 0x0008_0000;

// uapi/linux/magic.h
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;
// uapi/linux/fs.h
const BLKROGET: libc::Ioctl = 0x125e;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirectAlign {
    /// Alignment of memory addresses, in bytes.
    pub memory: u32,
    /// Alignment of file offsets and of lengths, in bytes.
    pub offset: u32,
    /// The file system reports no alignment, and the usual 512 bytes are assumed.
    pub assumed: bool,
}

impl DirectAlign {
    pub fn largest(self) -> u32 {
        self.memory.max(self.offset)
    }
}

/// The current path of the open file. The kernel appends " (deleted)" if the file was removed.
pub(crate) fn name_now(file: &File) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

pub(super) fn set_flag(file: &File, flag: OFlags, on: bool) -> std::io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let wanted = if on { flags | flag } else { flags - flag };
    if wanted != flags {
        fcntl_setfl(file, wanted)?;
    }
    Ok(())
}

fn is_read_only(block_device: &File) -> bool {
    let mut read_only: libc::c_int = 0;
    // SAFETY: the descriptor is open, and the kernel writes one int, which lives through the call.
    let asked = unsafe { libc::ioctl(block_device.as_raw_fd(), BLKROGET, &raw mut read_only) };
    asked == 0 && read_only != 0
}

pub(super) fn is_open_for_writing(file: &File) -> bool {
    fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR)
}

/// Rejects an image that the kernel opens for writing although every write to it fails.
pub(super) fn check_writable(file: &File, path: &Path, block_device: bool) -> Result<(), Error> {
    let why = if block_device && is_read_only(file) {
        "the kernel has set this block device to read-only"
    } else if !block_device && fstatfs(file).is_ok_and(|stat| stat.f_type == HUGETLBFS_MAGIC) {
        "files on hugetlbfs do not support write(2)"
    } else {
        return Ok(());
    };
    let message = format!("cannot open the image {} for writing: {why}", path.display());
    Err(Error::new(ErrorKind::Denied, message).or_read_only())
}

pub(super) fn check_type(path: &Path, metadata: &std::fs::Metadata) -> Result<(), Error> {
    let kind = metadata.file_type();
    let what = if kind.is_file() || kind.is_block_device() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a character device"
    };
    Err(invalid(format!("{} is {what}: an image must be a regular file or a block device", path.display())))
}

pub(super) fn probe_direct(file: &File, block_device: bool, device: u64) -> Result<DirectAlign, String> {
    let file_system = if block_device { None } else { fstatfs(file).ok().map(|stat| stat.f_type) };
    // Since Linux 6.6 O_DIRECT can be set on tmpfs, without effect.
    if file_system == Some(TMPFS_MAGIC) {
        return Err("tmpfs stores files only in the page cache".to_owned());
    }
    // In a file without extents a direct write into a hole goes through the page cache. If it dirties a page to which
    // another direct write completes, the kernel cannot invalidate the page and fails the next fsync(2).
    if file_system == Some(EXT_MAGIC)
        && ioctl_getflags(file).is_ok_and(|flags| flags.bits() & EXTENT_FLAG == 0)
    {
        return Err("the file has no extents (ext2, ext3), so its holes are written through the page cache"
            .to_owned());
    }
    // A file system may report an alignment for direct I/O and still reject the flag.
    let settable = set_flag(file, OFlags::DIRECT, true).and_then(|()| set_flag(file, OFlags::DIRECT, false));
    settable.map_err(|e| format!("its file system refuses O_DIRECT ({e})"))?;
    let stat = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    if let Some(stat) = stat {
        return match (stat.stx_dio_mem_align, stat.stx_dio_offset_align) {
            (0, _) | (_, 0) => Err("its file system does not support direct I/O on this file".to_owned()),
            (memory, offset) => Ok(DirectAlign { memory, offset, assumed: false }),
        };
    }
    // Block devices before Linux 6.10 and some file systems do not report the alignment. The logical block of the
    // underlying block device decides then.
    match queue_attribute(device, "logical_block_size").and_then(|block| u32::try_from(block).ok()) {
        Some(block) => Ok(DirectAlign { memory: block, offset: block, assumed: false }),
        None if !block_device && !reads_directly(file) => {
            Err("its file system fails direct reads".to_owned())
        }
        None => Ok(DirectAlign { memory: 512, offset: 512, assumed: !block_device }),
    }
}

/// overlayfs accepts the flag even if the file system below it does not support direct I/O.
fn reads_directly(file: &File) -> bool {
    let mut block = IoBuffer::zeroed(4096);
    let read = set_flag(file, OFlags::DIRECT, true).and_then(|()| file.read_at(&mut block, 0));
    let cleared = set_flag(file, OFlags::DIRECT, false);
    read.is_ok() && cleared.is_ok()
}

/// A number in the sysfs directory `queue` of the block device, or of its disk if it is a partition.
pub(super) fn queue_attribute(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    ["", "../"].iter().find_map(|of| {
        let path = format!("/sys/dev/block/{major}:{minor}/{of}queue/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// `size` in bytes, rounded up to a power of two from 512 to 65536, which is what the block layer accepts.
pub(super) fn power_of_two(size: u64) -> u32 {
    size.clamp(512, 65536).next_power_of_two() as u32
}
