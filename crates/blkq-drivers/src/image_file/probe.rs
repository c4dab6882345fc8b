//! Probes what the file system and the block device of an image support, and recognises image formats other than raw, so
//! that such an image is not served as raw data by mistake. Chooses between direct and buffered I/O, also for an image to
//! which a device switches while clients use it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use blkq::{Error, ErrorKind, IoBuffer};
use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, fstatfs, ioctl_getflags, statx};

use crate::errors::invalid;
use crate::options::DirectIo;

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

/// Bytes of one read: the largest alignment of direct I/O, and more than any magic needs.
const BLOCK_BYTES: usize = 4096;
/// Size of the footer of a VHD image, in bytes. A fixed VHD image has no header.
const FOOTER_BYTES: u64 = 512;

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
    if wanted == flags { Ok(()) } else { Ok(fcntl_setfl(file, wanted)?) }
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

pub(super) fn detect_format(file: &File, size: u64) -> Option<&'static str> {
    let mut block = IoBuffer::zeroed(BLOCK_BYTES);
    // `offset` must be a multiple of the block. An error counts as the end of the file: the device reports the error when a
    // client reads there.
    let mut read =
        |offset| file.read_at(&mut block, offset).map_or(Vec::new(), |length| block[..length].to_vec());
    if let Some(format) = by_head(&read(0)) {
        return Some(format);
    }
    // A fixed VHD image consists of the raw data and a footer.
    let footer = size.checked_sub(FOOTER_BYTES)?;
    let within = (footer % BLOCK_BYTES as u64) as usize;
    read(footer - within as u64).get(within..)?.starts_with(b"conectix").then_some("VHD")
}

/// The format whose magic is at the beginning. The magics are those of QEMU's block drivers and of cryptsetup.
fn by_head(head: &[u8]) -> Option<&'static str> {
    const MAGICS: [(usize, &[u8], &str); 11] = [
        (0, b"QFI\xfb", "qcow2"),
        (0, b"QED\0", "QED"),
        (0, b"KDMV", "VMDK"),
        (0, b"COWD", "VMDK"),
        (0, b"# Disk DescriptorFile", "VMDK"),
        (0, b"vhdxfile", "VHDX"),
        (0, b"conectix", "VHD"),
        (64, b"\x7f\x10\xda\xbe", "VDI"),
        (0, b"LUKS\xba\xbe", "LUKS"),
        (0, b"WithoutFreeSpace", "Parallels"),
        (0, b"WithouFreSpacExt", "Parallels"),
    ];
    let has = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|bytes| bytes.starts_with(magic));
    MAGICS.iter().find(|(offset, magic, _)| has(*offset, magic)).map(|(.., format)| *format)
}

pub(super) const LOGICAL_BLOCK_MAX_BYTES: u32 = 4096;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Mode {
    /// The alignment of direct I/O; `None` for buffered I/O.
    pub direct: Option<DirectAlign>,
    /// The reason for buffered I/O; empty with direct I/O.
    pub reason: String,
}

/// The I/O mode that follows from `requested` and the alignment of the image, which is `possible`. Fails if
/// direct I/O is required and not possible; [`ErrorKind::DirectIoSector`] and [`ErrorKind::DirectIoOffset`]
/// carry the values that the caller needs for a hint.
pub(crate) fn choose_mode(
    requested: DirectIo,
    possible: &Result<DirectAlign, String>,
    path: &Path,
    sector_bytes: u32,
    offset: u64,
) -> Result<Mode, Error> {
    if requested == DirectIo::Off {
        return Ok(Mode { direct: None, reason: "as requested".to_owned() });
    }
    let align = match possible {
        Ok(align) => *align,
        Err(why) => return buffered(requested, path, why.clone(), ErrorKind::NoDirectIo),
    };
    let required = align.largest();
    let requires = format!("it requires an alignment of {required} bytes");
    let (reason, kind) = if required > LOGICAL_BLOCK_MAX_BYTES {
        (requires, ErrorKind::NoDirectIo)
    } else if sector_bytes < required {
        // A segment may be as short as one sector, and must be a multiple of the alignment.
        let needed_bytes = required.next_power_of_two();
        let reason = format!("{requires}, and the sector size is {sector_bytes}");
        (reason, ErrorKind::DirectIoSector { needed_bytes, sector_bytes })
    } else if !offset.is_multiple_of(u64::from(align.offset)) {
        let reason =
            format!("it requires an alignment of {} bytes, and the offset is {offset}", align.offset);
        (reason, ErrorKind::DirectIoOffset { align_bytes: align.offset, offset_bytes: offset })
    } else if align.assumed && requested == DirectIo::Auto {
        let reason = "its file system does not report the alignment that direct I/O requires";
        (reason.to_owned(), ErrorKind::NoDirectIo)
    } else {
        return Ok(Mode { direct: Some(align), reason: String::new() });
    };
    buffered(requested, path, reason, kind)
}

/// Buffered I/O because of `reason`. Fails with `kind` if `requested` demands direct I/O.
pub fn buffered(requested: DirectIo, path: &Path, reason: String, kind: ErrorKind) -> Result<Mode, Error> {
    match requested {
        DirectIo::On => Err(Error::new(kind, format!("no direct I/O on {}: {reason}", path.display()))),
        _ => Ok(Mode { direct: None, reason }),
    }
}

/// The properties of I/O that the clients of a device rely on, and that must stay the same with another image.
#[derive(Clone)]
pub(crate) struct ClientTerms {
    pub logical_block_bytes: u32,
    /// Alignment of the memory of the clients' requests, in bytes.
    pub memory_align: u32,
    pub requested: DirectIo,
    /// The reason for buffered I/O; `None` with direct I/O.
    pub buffered: Option<String>,
}

impl ClientTerms {
    /// The I/O mode of an image at `path` to which the device switches. `choose` returns the mode that the
    /// image would have without clients. Fails with [`ErrorKind::NoDirectIo`] if the alignment of the clients
    /// does not suffice and direct I/O was requested.
    pub fn mode(&self, path: &Path, choose: impl FnOnce() -> Result<Mode, Error>) -> Result<Mode, Error> {
        if let Some(why) = &self.buffered {
            return Ok(Mode { direct: None, reason: why.clone() });
        }
        let mode = choose()?;
        let align = mode.direct.map_or(1, DirectAlign::largest);
        if align <= self.memory_align {
            return Ok(mode);
        }
        let reason = format!(
            "it requires an alignment of {align} bytes, but the device's clients align to {} bytes",
            self.memory_align
        );
        buffered(self.requested, path, reason, ErrorKind::NoDirectIo)
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Option<&'static str> {
        let file =
            rustix::fs::memfd_create("image", rustix::fs::MemfdFlags::CLOEXEC).map(File::from).unwrap();
        file.write_all_at(bytes, 0).unwrap();
        detect_format(&file, bytes.len() as u64)
    }

    #[test]
    fn each_format_is_recognised_by_its_magic() {
        let image = |offset: usize, magic: &[u8], size: usize| {
            let mut bytes = vec![0; size];
            bytes[offset..offset + magic.len()].copy_from_slice(magic);
            bytes
        };
        for (offset, magic, format) in [
            (0, &b"QFI\xfb\0\0\0\x03"[..], "qcow2"),
            (0, b"KDMV\x01", "VMDK"),
            (0, b"COWD", "VMDK"),
            (0, b"# Disk DescriptorFile\nversion=1\n", "VMDK"),
            (0, b"vhdxfile", "VHDX"),
            (0, b"conectix", "VHD"),
            (64, b"\x7f\x10\xda\xbe", "VDI"),
            (0, b"LUKS\xba\xbe\0\x02", "LUKS"),
            (0, b"QED\0", "QED"),
            (0, b"WithoutFreeSpace", "Parallels"),
        ] {
            for size in [1 << 20, 4096, 512] {
                assert_eq!(of(&image(offset, magic, size)), Some(format), "{size}");
            }
        }
        // The footer of a fixed VHD may be anywhere in the last block that is read.
        for size in [512, 1024, 4096, 4096 + 512, (1 << 20) + 512] {
            assert_eq!(of(&image(size - 512, b"conectix", size)), Some("VHD"), "{size}");
        }
    }

    #[test]
    fn raw_short_and_empty_files_have_no_format() {
        for bytes in [&b""[..], b"QF", b"QFI", b"conecti", &[0; 511], &[0; 512], &[0xff; 70], &[0; 8192]] {
            assert_eq!(of(bytes), None);
        }
        // A magic at another offset does not count.
        assert_eq!(of(&[&[0][..], b"QFI\xfb", &[0; 600]].concat()), None);
        assert_eq!(of(&[&[0; 1024][..], b"conectix", &[0; 600]].concat()), None);
    }

    #[test]
    fn an_unreadable_file_has_no_format() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert_eq!(detect_format(&File::from(std::os::fd::OwnedFd::from(reader)), 1 << 20), None);
    }
}
