//! Opens an image, and probes what its file system and its block device support.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blkq::{Error, ErrorKind, IoBuffer};
use io_uring::opcode;
use rustix::fs::{
    Access, AtFlags, CWD, OFlags, SeekFrom, StatxFlags, accessat, fcntl_getfl, fcntl_setfl, fstatfs,
    ioctl_getflags, seek, statx,
};

/// The io_uring operations that are submitted to image files. A ring must support all of them.
pub(crate) const OPERATIONS: [(&str, u8); 8] = [
    ("IORING_OP_READ", opcode::Read::CODE),
    ("IORING_OP_WRITE", opcode::Write::CODE),
    ("IORING_OP_READV", opcode::Readv::CODE),
    ("IORING_OP_WRITEV", opcode::Writev::CODE),
    ("IORING_OP_READ_FIXED", opcode::ReadFixed::CODE),
    ("IORING_OP_WRITE_FIXED", opcode::WriteFixed::CODE),
    ("IORING_OP_FSYNC", opcode::Fsync::CODE),
    ("IORING_OP_FALLOCATE", opcode::Fallocate::CODE),
];

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

/// The alignment that direct I/O requires of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DirectAlign {
    /// Alignment of memory addresses, in bytes.
    pub memory: u32,
    /// Alignment of file offsets and of lengths, in bytes.
    pub offset: u32,
    /// The file system reports no alignment, and the usual 512 bytes are assumed.
    pub assumed: bool,
}

/// An open image, and the facts about it.
pub(crate) struct Backing {
    pub file: File,
    /// Absolute, with all symbolic links resolved, unless the owner of this value uses `link` instead.
    pub path: PathBuf,
    /// The symbolic link under which the image was opened, if the link is in another directory than the image.
    pub link: Option<PathBuf>,
    /// The device number of the file system, and the inode.
    pub identity: (u64, u64),
    pub block_device: bool,
    /// The alignment that direct I/O requires, or the reason why direct I/O is not possible.
    pub direct: Result<DirectAlign, String>,
    /// The logical block size of a block device, in bytes; 512 for a regular file.
    pub logical_block: u32,
    /// The unit in which space is allocated, in bytes.
    pub physical_block: u32,
    /// The unit in which space is freed, in bytes.
    pub discard_granularity: u32,
    /// False if a block device reports that it does not support discards. A file system has to be tried.
    pub discards: bool,
    pub rotational: bool,
}

impl Backing {
    /// Opens the image at `path`, which must be a regular file or a block device.
    ///
    /// # Errors
    /// One line that names the step that failed, the reason, and a hint if there is one.
    pub fn open(path: &Path, read_only: bool) -> Result<Backing, Error> {
        let shown = path.display();
        let link = link_elsewhere(path);
        let path = std::fs::canonicalize(path)
            .map_err(|e| Error::system(format!("cannot find the image {shown}"), e))?;
        let metadata = std::fs::metadata(&path)
            .map_err(|e| Error::system(format!("cannot inspect the image {shown}"), e))?;
        // The type is checked before the open, because opening a device can have side effects (a tape rewinds), and
        // again in `of_open`, because the path may name another file by then.
        check_type(&path, &metadata)?;
        // O_NONBLOCK: if the path names a pipe by now, the open must not wait for its other end.
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(&path)
            .map_err(|e| cannot_open(e, &path, read_only))?;
        Ok(Backing { link, ..Backing::of_open(file, path)? })
    }

    /// Probes the image at `path`, which `file` has open. The path is absolute, with symbolic links resolved.
    /// `O_NONBLOCK` is cleared.
    ///
    /// # Errors
    /// As [`Backing::open`].
    pub fn of_open(file: File, path: PathBuf) -> Result<Backing, Error> {
        let shown = path.display();
        let metadata =
            file.metadata().map_err(|e| Error::system(format!("cannot inspect the image {shown}"), e))?;
        check_type(&path, &metadata)?;
        set_flag(&file, OFlags::NONBLOCK, false)
            .map_err(|e| Error::system(format!("cannot clear O_NONBLOCK on the image {shown}"), e))?;

        let block_device = metadata.file_type().is_block_device();
        check_writable(&file, &path, block_device)?;
        let device = if block_device { metadata.rdev() } else { metadata.dev() };
        let queue = |name| queue_attribute(device, name);
        let logical_block = if block_device { queue("logical_block_size").unwrap_or(512) } else { 512 };
        let physical_block = if block_device {
            queue("physical_block_size").unwrap_or(512)
        } else {
            fstatfs(&file).map_or(4096, |stat| u64::try_from(stat.f_bsize).unwrap_or(4096))
        };
        let granularity = if block_device { queue("discard_granularity") } else { Some(physical_block) };
        let direct = probe_direct(&file, block_device, device);
        Ok(Backing {
            block_device,
            direct,
            logical_block: power_of_two(logical_block),
            physical_block: power_of_two(physical_block),
            discard_granularity: granularity.and_then(|g| u32::try_from(g).ok()).unwrap_or(0).max(512),
            discards: !block_device || queue("discard_max_bytes").is_none_or(|most| most > 0),
            rotational: queue("rotational") == Some(1),
            identity: (metadata.dev(), metadata.ino()),
            file,
            path,
            link: None,
        })
    }
}

/// The current path of the open file. The kernel appends " (deleted)" if the file was removed.
pub(crate) fn name_now(file: &File) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

/// If `path` is a symbolic link to an image in another directory, the absolute path of the link, of which only the
/// last component is not resolved.
pub fn link_elsewhere(path: &Path) -> Option<PathBuf> {
    if !std::fs::symlink_metadata(path).ok()?.is_symlink() {
        return None;
    }
    let directory = match path.parent()? {
        here if here.as_os_str().is_empty() => Path::new("."),
        directory => directory,
    };
    let link = std::fs::canonicalize(directory).ok()?.join(path.file_name()?);
    (std::fs::canonicalize(path).ok()?.parent() != link.parent()).then_some(link)
}

/// The size of the image in bytes.
pub(crate) fn size(file: &File, path: &Path) -> Result<u64, Error> {
    // Returns the size of files and of block devices alike.
    seek(file, SeekFrom::End(0))
        .map_err(|e| Error::system(format!("cannot find the size of {}", path.display()), e))
}

/// The creation time of the file, in nanoseconds; 0 if the file system does not record it. It distinguishes a file from
/// a later one that has got the same inode number.
pub(crate) fn birth(file: &File) -> u64 {
    let stat = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok();
    let stat = stat.filter(|stat| stat.stx_mask & StatxFlags::BTIME.bits() != 0);
    stat.map_or(0, |stat| {
        let seconds = u64::try_from(stat.stx_btime.tv_sec).unwrap_or(0);
        seconds.wrapping_mul(1_000_000_000).wrapping_add(stat.stx_btime.tv_nsec.into())
    })
}

/// Makes all writes to the file durable (fdatasync).
pub(crate) fn sync(file: &File) -> std::io::Result<()> {
    #[cfg(simulation)]
    return blkq::simulation::world().sync(file.as_raw_fd());
    #[cfg(not(simulation))]
    file.sync_data()
}

/// Sets or clears a status flag of the open file description.
pub(crate) fn set_flag(file: &File, flag: OFlags, on: bool) -> std::io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let wanted = if on { flags | flag } else { flags - flag };
    if wanted != flags {
        fcntl_setfl(file, wanted)?;
    }
    Ok(())
}

/// Opens the same file a second time, whatever its path is now. The new open file description has its own flags and
/// locks.
pub(crate) fn reopen(file: &File, path: &Path, writable: bool) -> Result<File, Error> {
    let fd_path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let what = if writable { "for writing" } else { "a second time" };
    let reopened = OpenOptions::new()
        .read(true)
        .write(writable)
        .open(fd_path)
        .map_err(|e| Error::system(format!("cannot open the image {} {what}", path.display()), e))?;
    if writable {
        let is_block_device =
            reopened.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device());
        check_writable(&reopened, path, is_block_device)?;
    }
    Ok(reopened)
}

fn is_read_only(block_device: &File) -> bool {
    let mut read_only: libc::c_int = 0;
    // SAFETY: the descriptor is open, and the kernel writes one int, which lives through the call.
    let asked = unsafe { libc::ioctl(block_device.as_raw_fd(), BLKROGET, &raw mut read_only) };
    asked == 0 && read_only != 0
}

/// Rejects an image that the kernel opens for writing although every write to it fails.
fn check_writable(file: &File, path: &Path, block_device: bool) -> Result<(), Error> {
    if !fcntl_getfl(file).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR) {
        return Ok(());
    }
    let why = if block_device && is_read_only(file) {
        "the kernel has set this block device to read-only"
    } else if !block_device && fstatfs(file).is_ok_and(|stat| stat.f_type == HUGETLBFS_MAGIC) {
        "files on hugetlbfs do not support write(2)"
    } else {
        return Ok(());
    };
    let message = format!("cannot open the image {} for writing: {why}", path.display());
    Err(Error::new(ErrorKind::Denied, message).with_cure("open it read-only"))
}

/// Checks whether this process may write to the image at `path`, without opening it.
///
/// # Errors
/// As [`Backing::open`].
pub(crate) fn check_write_access(path: &Path) -> Result<(), Error> {
    accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).map_err(|e| cannot_open(e.into(), path, false))
}

fn cannot_open(error: std::io::Error, path: &Path, read_only: bool) -> Error {
    let shown = path.display();
    let busy = match error.raw_os_error() {
        Some(libc::ETXTBSY) => Some("it is swap space or a running program"),
        // Kernels without CONFIG_BLK_DEV_WRITE_MOUNTED refuse to open mounted devices for writing.
        Some(libc::EBUSY) => Some("the kernel has claimed it, for example for a mount"),
        _ => None,
    };
    if let Some(why) = busy {
        return Error::new(ErrorKind::Claimed, format!("{shown} is in use: {why}"));
    }
    let (what, hint) = match error.raw_os_error() {
        // An open with O_NONBLOCK fails this way while another process holds a lease (F_SETLEASE in fcntl(2)).
        Some(libc::EAGAIN) => ("", "another process holds a lease on the file; stop that process"),
        Some(libc::EACCES | libc::EPERM | libc::EROFS) if !read_only => {
            (" for writing", "grant write permission, or open it read-only")
        }
        Some(libc::EACCES | libc::EPERM) => ("", "grant read permission, or open it as its owner"),
        _ => ("", ""),
    };
    Error::system(format!("cannot open the image {shown}{what}"), error).with_cure(hint)
}

fn check_type(path: &Path, metadata: &std::fs::Metadata) -> Result<(), Error> {
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
    let message = format!("{} is {what}: an image must be a regular file or a block device", path.display());
    Err(Error::new(ErrorKind::Invalid, message))
}

fn probe_direct(file: &File, block_device: bool, device: u64) -> Result<DirectAlign, String> {
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

/// Whether a direct read succeeds. overlayfs accepts the flag even if the file system below it does not support direct
/// I/O.
fn reads_directly(file: &File) -> bool {
    let mut block = IoBuffer::zeroed(4096);
    let read = set_flag(file, OFlags::DIRECT, true).and_then(|()| file.read_at(&mut block, 0));
    let cleared = set_flag(file, OFlags::DIRECT, false);
    read.is_ok() && cleared.is_ok()
}

/// A number in the sysfs directory `queue` of the block device, or of its disk if it is a partition.
fn queue_attribute(device: u64, name: &str) -> Option<u64> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    ["", "../"].iter().find_map(|of| {
        let path = format!("/sys/dev/block/{major}:{minor}/{of}queue/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    })
}

/// `size` in bytes, rounded up to a power of two from 512 to 65536, which is what the block layer accepts.
fn power_of_two(size: u64) -> u32 {
    size.clamp(512, 65536).next_power_of_two() as u32
}
