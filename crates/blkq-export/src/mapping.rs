//! Mappings of memory that other processes may write and truncate: a region of a guest's memory, or the
//! limits of a group. The file stays mapped as long as the [`Mapping`] exists.

mod sigbus;

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use blkq::{Error, ErrorKind};
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use sigbus::Slot;

/// File systems (numbers of statfs(2)) whose page faults wait for a local disk at most. With a file on FUSE,
/// for example, a front end that runs the FUSE server could stop an engine for ever.
const LOCAL_FILE_SYSTEMS: [(u64, &str); 6] = [
    (0x0102_1994, "tmpfs"),
    (HUGETLBFS, "hugetlbfs"),
    (0x8584_58f6, "ramfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
];
const HUGETLBFS: u64 = 0x9584_58f6;

/// A shared mapping of the bytes `offset..offset + length` of a file.
pub struct Mapping {
    base: NonNull<u8>,
    mapped: usize,
    /// Offset of the region in the mapping, in bytes.
    skip: usize,
    /// The entry of the mapping in the table of the signal handler.
    slot: &'static Slot,
}

// SAFETY: other processes access the memory as well, so it is accessed through raw pointers and atomics only,
// from any thread. It stays mapped until the value is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("shared memory: {what}"))
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::system(format!("shared memory: {what}"), errno)
}

/// Checks that `file` is in memory or on a local disk, and returns the page size of its mappings in bytes.
/// Blocks as long as the file system takes to answer.
///
/// # Errors
/// [`ErrorKind::Invalid`] for other file systems, or the error of fstatfs(2).
pub fn check_file_system(file: BorrowedFd<'_>) -> Result<u64, Error> {
    let system = fstatfs(file).map_err(failed("cannot examine the file system"))?;
    let kind = system.f_type as u64 & 0xffff_ffff;
    if !LOCAL_FILE_SYSTEMS.iter().any(|(known, _)| *known == kind) {
        let names = LOCAL_FILE_SYSTEMS.map(|(_, name)| name).join(", ");
        return Err(invalid(format!("the file is on a file system of type {kind:#x}; use {names}")));
    }
    // hugetlbfs maps and unmaps whole huge pages only.
    Ok(if kind == HUGETLBFS { system.f_bsize as u64 } else { page_bytes() })
}

impl Mapping {
    /// Maps `length` bytes of `file`, starting at `offset`. The caller may close the file afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the file ends before the region, is not a regular file, or is on a file
    /// system whose page faults may block for ever; [`ErrorKind::System`] also for too many mappings.
    pub fn new(file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<Mapping, Error> {
        let status = fstat(file).map_err(failed("cannot examine the file"))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(invalid("the descriptor is not a regular file".into()));
        }
        let end = offset.checked_add(length).filter(|end| length > 0 && *end <= i64::MAX as u64);
        let Some(end) = end else {
            return Err(invalid(format!("a region of {length} bytes at offset {offset} is not valid")));
        };
        let bytes = u64::try_from(status.st_size).unwrap_or(0);
        if end > bytes {
            let what = format!("the region ends at byte {end}, after the end of the file ({bytes} bytes)");
            return Err(invalid(what));
        }
        let page = check_file_system(file)?;
        if !page.is_power_of_two() {
            return Err(invalid(format!("the page size of {page} bytes is not a power of two")));
        }
        let skip = offset & (page - 1);
        let mapped = (skip + length).checked_next_multiple_of(page).and_then(|b| usize::try_from(b).ok());
        let Some(mapped) = mapped.filter(|bytes| *bytes <= isize::MAX as usize) else {
            return Err(invalid(format!("a region of {length} bytes is too large")));
        };
        let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice does not affect existing memory.
        let base = unsafe { mmap(null, mapped, protection, flags, file, offset - skip) }
            .map_err(failed("cannot map the file"))?;
        let unmap = |base| {
            // SAFETY: unmaps the mapping that was just made, to which no reference exists.
            let _ = unsafe { munmap(base, mapped) };
        };
        let Some(address) = NonNull::new(base.cast::<u8>()) else {
            unmap(base);
            return Err(invalid("the kernel mapped the file at address 0".into()));
        };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // The memory of a guest must not get into a core dump or a child process. If the kernel does not
            // know the advice, nothing changes.
            // SAFETY: this is the mapping that was just made, and the advice does not change its contents.
            let _ = unsafe { madvise(base, mapped, advice) };
        }
        let slot = Slot::take(address.as_ptr().addr(), mapped, page as usize).inspect_err(|_| unmap(base))?;
        Ok(Mapping { base: address, mapped, skip: skip as usize, slot })
    }

    /// Address of the region's first byte.
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: `skip` is less than the length of the mapping.
        unsafe { self.base.add(self.skip) }
    }

    /// Allocates the pages of `bytes` bytes at `at`. After a failure, the first access does so or faults.
    pub fn populate(&self, at: usize, bytes: usize) {
        let first = (self.skip + at) & !(page_bytes() as usize - 1);
        let end = (self.skip + at + bytes).min(self.mapped);
        // SAFETY: `first` is inside the mapping.
        let start = unsafe { self.base.add(first) };
        // SAFETY: MADV_POPULATE_WRITE faults the pages in without changing their contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), end - first, Advice::LinuxPopulateWrite) };
    }

    /// Whether the file was truncated, so that private zero pages have replaced the contents.
    pub fn is_broken(&self) -> bool {
        self.slot.is_broken()
    }
}

/// The page size of the system in bytes. The C library has known the number since the process began. rustix
/// would read it from the kernel at its first call, which the seccomp filter of a confined thread may forbid.
pub(crate) fn page_bytes() -> u64 {
    // SAFETY: sysconf with this name only returns a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.slot.release();
        // SAFETY: `new` mapped exactly this range, and everything that uses an address of it also holds the
        // `Mapping`.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
