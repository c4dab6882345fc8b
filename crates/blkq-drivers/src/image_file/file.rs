//! Opens the file of an image, reads it, and reports the facts about it.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use blkq::clock::worker_ns;
use blkq::{Error, ErrorKind, Extent, IoBuffer};
use io_uring::opcode;
use rustix::fs::{
    Access, Advice, AtFlags, CWD, FallocateFlags, OFlags, SeekFrom, StatxAttributes, StatxFlags, accessat,
    fadvise, fallocate, fstatfs, seek, statx,
};
use rustix::io::Errno;

use crate::extents::append;
use crate::options::{DirectIo, check_logical_block};

use super::lock::{self, LockKind};
use super::probe::{
    DirectAlign, LOGICAL_BLOCK_MAX_BYTES, check_type, check_writable, detect_format, is_open_for_writing,
    name_now, power_of_two, probe_direct, queue_attribute, set_flag,
};

/// Size of one write of zeroes, in bytes, if the file system cannot punch holes.
const ZEROES_BYTES: usize = 1 << 20;

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

pub(crate) struct ImageFile {
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

impl ImageFile {
    /// Opens the image at `path`, which must be a regular file or a block device. Errors have one line that
    /// names the step that failed, the reason, and a hint if there is one.
    pub fn open(path: &Path, read_only: bool) -> Result<ImageFile, Error> {
        let shown = path.display();
        let link = link_elsewhere(path);
        let failed = |what: &str, e| Error::system(format!("cannot {what} the image {shown}"), e);
        let path = std::fs::canonicalize(path).map_err(|e| failed("find", e))?;
        let metadata = std::fs::metadata(&path).map_err(|e| failed("inspect", e))?;
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
        Ok(ImageFile { link, ..ImageFile::of_open(file, path)? })
    }

    /// Probes the image at `path`, which `file` has open. The path is absolute, with symbolic links resolved.
    /// `O_NONBLOCK` is cleared.
    pub fn of_open(file: File, path: PathBuf) -> Result<ImageFile, Error> {
        let shown = path.display();
        let failed = |what: &str, e| Error::system(format!("cannot {what} the image {shown}"), e);
        let metadata = file.metadata().map_err(|e| failed("inspect", e))?;
        check_type(&path, &metadata)?;
        set_flag(&file, OFlags::NONBLOCK, false).map_err(|e| failed("clear O_NONBLOCK on", e))?;

        let block_device = metadata.file_type().is_block_device();
        if is_open_for_writing(&file) {
            check_writable(&file, &path, block_device)?;
        }
        let device = if block_device { metadata.rdev() } else { metadata.dev() };
        let queue = |name| queue_attribute(device, name);
        let [logical_block, physical_block, granularity] = if block_device {
            ["logical_block_size", "physical_block_size", "discard_granularity"]
                .map(|name| queue(name).unwrap_or(512))
        } else {
            let block = fstatfs(&file).map_or(4096, |stat| u64::try_from(stat.f_bsize).unwrap_or(4096));
            [512, block, block]
        };
        Ok(ImageFile {
            block_device,
            direct: probe_direct(&file, block_device, device),
            logical_block: power_of_two(logical_block),
            physical_block: power_of_two(physical_block),
            discard_granularity: u32::try_from(granularity).unwrap_or(512).max(512),
            discards: !block_device || queue("discard_max_bytes").is_none_or(|most| most > 0),
            rotational: queue("rotational") == Some(1),
            identity: (metadata.dev(), metadata.ino()),
            file,
            path,
            link: None,
        })
    }

    /// Fills `buffer` with the bytes from `offset` on, for a thread that may wait. Fails with `UnexpectedEof`
    /// if the file ends before the range does.
    ///
    /// The call may block in the kernel for any time.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let end = |e: io::Error| if e.kind() == io::ErrorKind::UnexpectedEof { e.kind().into() } else { e };
        self.file.read_exact_at(buffer, offset).map_err(end)
    }

    /// As [`ImageFile::read_exact_at`], but the bytes beyond the end of the file read as zeroes, because the
    /// last cluster of an image may be incomplete. `file_bytes` is the size that the file is known to have
    /// had. Fails with EIO if the file was truncated.
    pub fn read_padded_at(&self, buffer: &mut [u8], offset: u64, file_bytes: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) if offset + (done as u64) < file_bytes => {
                    return Err(io::Error::from_raw_os_error(libc::EIO));
                }
                Ok(0) => break,
                Ok(count) => done += count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        buffer[done..].fill(0);
        Ok(())
    }

    /// Zeroes `range`, and frees its space if the file system can punch holes.
    pub fn zero(&self, range: Range<u64>) -> io::Result<()> {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, mode, range.start, range.end - range.start) {
            Ok(()) => return Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            Err(e) => return Err(e.into()),
        }
        let zeroes = IoBuffer::zeroed(ZEROES_BYTES.min((range.end - range.start) as usize));
        for at in range.clone().step_by(ZEROES_BYTES) {
            self.file.write_all_at(&zeroes[..ZEROES_BYTES.min((range.end - at) as usize)], at)?;
        }
        Ok(())
    }

    /// The error of an operation on the file. `what` completes the message "cannot ... PATH".
    pub fn failed(&self, what: &str, error: impl Into<io::Error>) -> Error {
        Error::system(format!("cannot {what} {}", self.path.display()), error)
    }

    pub fn size(&self) -> Result<u64, Error> {
        // Returns the size of files and of block devices alike.
        seek(&self.file, SeekFrom::End(0)).map_err(|e| self.failed("find the size of", e))
    }

    /// The creation time in nanoseconds; 0 if the file system does not record it. It distinguishes a file
    /// from a later one with the same inode number.
    pub fn birth(&self) -> u64 {
        let stat = statx(&self.file, c"", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok();
        let stat = stat.filter(|stat| stat.stx_mask & StatxFlags::BTIME.bits() != 0);
        stat.map_or(0, |stat| {
            let seconds = u64::try_from(stat.stx_btime.tv_sec).unwrap_or(0);
            seconds.wrapping_mul(1_000_000_000).wrapping_add(stat.stx_btime.tv_nsec.into())
        })
    }

    pub fn detect_format(&self, size: u64) -> Option<&'static str> {
        detect_format(&self.file, size)
    }

    /// The extents of `range`, in bytes of a device that begins at byte `offset` of the file; at most `max`.
    /// Holes are narrowed to whole sectors. The search ends when the time `until_ns` has passed, but not before it has
    /// found an extent.
    ///
    /// A file may be truncated while it is served. Reads beyond its end fail, so these bytes are reported as data: a
    /// client that copies the device then reads them and gets the error.
    pub fn extents(
        &self,
        offset: u64,
        sector_bytes: u64,
        range: Range<u64>,
        max: usize,
        until_ns: u64,
    ) -> io::Result<Vec<Extent>> {
        let end = offset + range.end;
        let mut at = offset + range.start;
        let mut extents: Vec<Extent> = Vec::new();
        // Round a position in the file to a sector of the device.
        let down = |position: u64| offset + (position - offset) / sector_bytes * sector_bytes;
        let up = |position: u64| offset + (position - offset).div_ceil(sector_bytes) * sector_bytes;
        // Holes and data alternate. The hole at the beginning may be empty.
        let mut hole = true;
        while at < end {
            let from = if hole { SeekFrom::Data(at) } else { SeekFrom::Hole(at) };
            let until = match (seek(&self.file, from), hole) {
                (Ok(data), true) => down(data),
                // If the file changes between two searches, the second one may not advance. Reporting one sector as data
                // guarantees progress.
                (Ok(hole), false) => up(hole).max(up(at + 1)),
                (Err(Errno::NXIO), true) => {
                    // The size is read after the search, so that a truncation before the search is not reported as
                    // a hole.
                    let file_end = seek(&self.file, SeekFrom::End(0))?;
                    if file_end < end { down(file_end.max(offset)) } else { end }
                }
                // The file system does not support SEEK_DATA.
                (Err(Errno::INVAL | Errno::OPNOTSUPP), true) => at,
                (Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP), false) => end,
                (Err(error), _) => return Err(error.into()),
            };
            let until = until.clamp(at, end);
            let is_appended = append(&mut extents, Extent { length: until - at, hole, zero: hole }, max);
            if !is_appended || !hole && worker_ns() >= until_ns {
                break;
            }
            (at, hole) = (until, !hole);
        }
        Ok(extents)
    }

    /// The logical block size of a device of this image, in bytes: `requested`, or the one that the file and
    /// `direct_io` require. Fails with [`ErrorKind::Invalid`] if no device may have the requested one.
    pub fn choose_logical_block(&self, requested: Option<u32>, direct_io: DirectIo) -> Result<u32, Error> {
        if let Some(bytes) = requested {
            return check_logical_block(bytes);
        }
        let required = match &self.direct {
            Ok(align) if direct_io == DirectIo::On => align.largest(),
            _ => 512,
        };
        Ok(required.max(self.logical_block).clamp(512, LOGICAL_BLOCK_MAX_BYTES).next_power_of_two())
    }

    /// Switches direct I/O on or off for this open file description.
    pub fn set_direct(&self, on: bool) -> Result<(), Error> {
        set_flag(&self.file, OFlags::DIRECT, on).map_err(|e| self.failed("set direct I/O on", e))
    }

    pub fn turn_off_read_ahead(&self) -> Result<(), Error> {
        fadvise(&self.file, 0, None, Advice::Random).map_err(|e| self.failed("turn off read-ahead for", e))
    }

    pub fn lock(&self, range: &Range<u64>, kind: LockKind) -> Result<Option<String>, Error> {
        lock::acquire(&self.file, &self.path, range, kind)
    }

    pub fn downgrade(&self, range: &Range<u64>) {
        lock::downgrade(&self.file, range);
    }

    pub fn unlock(&self, range: &Range<u64>) {
        lock::release(&self.file, range);
    }

    /// Opens the same file a second time, whatever its path is now. The new open file description has its own
    /// flags and locks. Fails with [`ErrorKind::Denied`] if writes to it would fail.
    pub fn reopen(&self, writable: bool) -> Result<ImageFile, Error> {
        let fd_path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let what = if writable { "for writing" } else { "a second time" };
        let path = &self.path;
        let reopened = OpenOptions::new()
            .read(true)
            .write(writable)
            .open(fd_path)
            .map_err(|e| Error::system(format!("cannot open the image {} {what}", path.display()), e))?;
        if writable {
            check_writable(&reopened, path, self.block_device)?;
        }
        Ok(self.with_file(reopened))
    }

    /// Fails with [`ErrorKind::Mismatch`] if the file is shorter than the `bytes` that it had. As a backing file
    /// that is opened again, or is extended, it would read zeroes where it fails now.
    pub fn check_not_truncated(&self, bytes: u64) -> Result<(), Error> {
        let now = self.size()?;
        if now >= bytes {
            return Ok(());
        }
        let shown = self.path.display();
        let message = format!("{shown} was truncated from {bytes} to {now} bytes: what was beyond is lost");
        Err(Error::new(ErrorKind::Mismatch, message).with_hint("restore it from a backup"))
    }

    /// Fails with [`ErrorKind::Denied`] if the kernel would fail every write to the image.
    pub fn check_writable(&self) -> Result<(), Error> {
        check_writable(&self.file, &self.path, self.block_device)
    }

    /// `file` is another open file description of this image.
    pub fn with_file(&self, file: File) -> ImageFile {
        let (path, link, direct) = (self.path.clone(), self.link.clone(), self.direct.clone());
        ImageFile { file, path, link, direct, ..*self }
    }
}

/// Rejects a backing file that is longer than the device: its end would become visible after the switch.
pub(crate) fn check_not_longer(path: &Path, bytes: u64, size: u64) -> Result<(), Error> {
    if bytes <= size {
        return Ok(());
    }
    let message =
        format!("the backing file {} has {bytes} bytes, more than the device ({size})", path.display());
    Err(Error::new(ErrorKind::Mismatch, message))
}

/// If `path` is a symbolic link to an image in another directory, the absolute path of the link, of which only the
/// last component is not resolved.
pub fn link_elsewhere(path: &Path) -> Option<PathBuf> {
    if !std::fs::symlink_metadata(path).ok()?.is_symlink() {
        return None;
    }
    let parent = path.parent()?;
    let directory = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let link = std::fs::canonicalize(directory).ok()?.join(path.file_name()?);
    (std::fs::canonicalize(path).ok()?.parent() != link.parent()).then_some(link)
}

/// Makes all writes to an open file of an image durable (fdatasync).
pub(crate) fn sync(file: &File) -> io::Result<()> {
    #[cfg(simulation)]
    return blkq::simulation::world().sync(file.as_raw_fd());
    #[cfg(not(simulation))]
    file.sync_data()
}

/// Checks whether this process may write to the image at `path`, without opening it for writing.
pub(crate) fn check_write_access(path: &Path) -> Result<(), Error> {
    accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)
        .map_err(|e| cannot_open(e.into(), path, false))?;
    ImageFile::open(path, true)?.check_writable()
}

fn cannot_open(error: io::Error, path: &Path, read_only: bool) -> Error {
    let (shown, errno) = (path.display(), error.raw_os_error());
    let claimed = |why| Error::new(ErrorKind::Claimed, format!("{shown} is in use: {why}"));
    let failed = |what| Error::system(format!("cannot open the image {shown}{what}"), error);
    match errno {
        Some(libc::ETXTBSY) => claimed("it is swap space or a running program"),
        // Kernels without CONFIG_BLK_DEV_WRITE_MOUNTED refuse to open mounted devices for writing.
        Some(libc::EBUSY) => claimed("the kernel has claimed it, for example for a mount"),
        // An open with O_NONBLOCK fails this way while another process holds a lease (F_SETLEASE in fcntl(2)).
        Some(libc::EAGAIN) => {
            failed("").with_hint("another process holds a lease on the file; stop that process")
        }
        Some(libc::EACCES | libc::EPERM | libc::EROFS) if !read_only => {
            failed(" for writing").with_hint("grant write permission").or_read_only()
        }
        Some(libc::EACCES | libc::EPERM) => {
            failed("").with_hint("grant read permission, or open it as its owner")
        }
        _ => failed(""),
    }
}

/// Reports the current path of an open image, even after a rename and after this process has left the mount namespace.
pub(crate) struct ImageName {
    path: PathBuf,
    /// Once the process has left its mount namespace, the kernel reports paths relative to this mount.
    mount_point: PathBuf,
}

impl ImageName {
    /// Must be called before this process leaves its mount namespace. `path` is absolute.
    pub fn new(path: &Path) -> ImageName {
        let path = &std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let mount_point = path.ancestors().find(|path| is_mount_root(path)).unwrap_or(Path::new("/"));
        ImageName { path: path.to_owned(), mount_point: mount_point.to_owned() }
    }

    pub fn now(&self, file: &ImageFile) -> String {
        let now = name_now(&file.file).map_or_else(|| self.path.clone(), |name| self.path_of(&name));
        now.display().to_string()
    }

    fn path_of(&self, name: &Path) -> PathBuf {
        let below = match name.strip_prefix("/") {
            // A rename cannot move a file to another mount, so a name outside of the mount point is relative to it.
            Ok(below) if !name.starts_with(&self.mount_point) => below,
            _ => return name.to_owned(),
        };
        // Joining an empty path would append a slash.
        if below.as_os_str().is_empty() { self.mount_point.clone() } else { self.mount_point.join(below) }
    }
}

/// Whether `path` is a mount point. A path that cannot be inspected counts as none.
fn is_mount_root(path: &Path) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    statx(CWD, path, flags, StatxFlags::empty())
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_relative_to_a_left_mount_becomes_absolute() {
        let name = |mount: &str| ImageName { path: "/net/a.img".into(), mount_point: mount.into() };
        let path_of = |mount: &str, now: &str| name(mount).path_of(Path::new(now)).display().to_string();
        assert_eq!(path_of("/net", "/a.img"), "/net/a.img");
        assert_eq!(path_of("/net", "/dir/b.img (deleted)"), "/net/dir/b.img (deleted)");
        // The process still has the mount; then a mount of a single file.
        assert_eq!(path_of("/net", "/net/b.img"), "/net/b.img");
        assert_eq!(path_of("/", "/other/b.img"), "/other/b.img");
        assert_eq!(path_of("/net/a.img", "/"), "/net/a.img");
        assert_eq!(path_of("/net", "memfd:a"), "memfd:a");
        assert_eq!(ImageName::new(Path::new("/proc/self/nowhere")).mount_point, Path::new("/proc"));
    }
}
