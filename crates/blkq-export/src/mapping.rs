//! Memory that another process may write and truncate: a region of a guest's memory, or of a group. Mapped for
//! as long as anything uses it.

mod sigbus;

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use blkq::{Error, ErrorKind};
use rustix::fs::{FileType, fstat, fstatfs};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use sigbus::Guard;

/// File systems whose pages arrive without a user-space server or a network in between (statfs(2)):
/// a page fault of an engine's thread waits for a local disk at most. A front end that owned the
/// server of a FUSE file could stop an engine for ever.
const LOCAL_FILE_SYSTEMS: [(u64, &str); 6] = [
    (0x0102_1994, "tmpfs"),
    (HUGETLBFS, "hugetlbfs"),
    (0x8584_58f6, "ramfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
];
const HUGETLBFS: u64 = 0x9584_58f6;

/// Bytes `offset..offset + length` of a file, shared with other processes.
pub struct Mapping {
    /// The first mapped byte, at or before that of the region.
    base: NonNull<u8>,
    /// Bytes mapped, whole pages.
    mapped: usize,
    /// Bytes from `base` to the region.
    skip: usize,
    guard: Guard,
}

// SAFETY: the memory is shared with another process anyway; it is accessed only by raw pointers and
// atomics, and stays mapped until the value is dropped.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::Invalid, format!("shared memory: {what}"))
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> Error {
    move |errno| Error::system(format!("shared memory: {what}"), errno)
}

/// Asks the file system of `file` of which type it is, which may take as long as that likes. Returns the
/// bytes of its pages.
///
/// # Errors
/// [`ErrorKind::Invalid`] if it is neither in memory nor on a local disk; the kernel's error.
pub fn check_file_system(file: BorrowedFd<'_>) -> Result<u64, Error> {
    let system = fstatfs(file).map_err(failed("cannot examine the file system"))?;
    let kind = system.f_type as u64 & 0xffff_ffff;
    if !LOCAL_FILE_SYSTEMS.iter().any(|(known, _)| *known == kind) {
        let names: Vec<&str> = LOCAL_FILE_SYSTEMS.iter().map(|(_, name)| *name).collect();
        return Err(invalid(format!(
            "the file is on a file system of type {kind:#x}; use {}",
            names.join(", ")
        )));
    }
    // Huge pages are mapped, and unmapped, as a whole.
    Ok(if kind == HUGETLBFS { system.f_bsize as u64 } else { page_bytes() })
}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` on; the file need not stay open.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a file that is too short, or that lies where a page fault may never
    /// be answered; [`ErrorKind::System`] with the kernel's words.
    pub fn new(file: BorrowedFd<'_>, offset: u64, length: u64) -> Result<Mapping, Error> {
        let status = fstat(file).map_err(failed("cannot examine the file"))?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(invalid("the descriptor is not a regular file".into()));
        }
        let end = offset.checked_add(length).filter(|_| length > 0);
        let Some(end) = end.filter(|end| *end <= i64::MAX as u64) else {
            return Err(invalid(format!("a region of {length} bytes at offset {offset} is not valid")));
        };
        let bytes = u64::try_from(status.st_size).unwrap_or(0);
        if end > bytes {
            return Err(invalid(format!(
                "the region ends at byte {end}, after the end of the file ({bytes} bytes)"
            )));
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
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
        let base = unsafe { mmap(null, mapped, protection, flags, file, offset - skip) }
            .map_err(failed("cannot map the file"))?;
        let unmap = |base| {
            // SAFETY: the mapping just made, which nobody uses.
            let _ = unsafe { munmap(base, mapped) };
        };
        let Some(address) = NonNull::new(base.cast::<u8>()) else {
            unmap(base);
            return Err(invalid("the kernel mapped the file at address 0".into()));
        };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // A guest's memory belongs into no core dump of this process and into no child of it; where
            // the kernel does not know the advice, it is as before.
            // SAFETY: the mapping just made; neither changes what this process sees.
            let _ = unsafe { madvise(base, mapped, advice) };
        }
        match Guard::new(address.as_ptr().addr(), mapped, page as usize) {
            Ok(guard) => Ok(Mapping { base: address, mapped, skip: skip as usize, guard }),
            Err(error) => {
                unmap(base);
                Err(error)
            }
        }
    }

    /// The first byte of the region.
    pub fn start(&self) -> NonNull<u8> {
        // SAFETY: the region begins inside of the mapping.
        unsafe { self.base.add(self.skip) }
    }

    /// Has the kernel make the pages of the `bytes` from byte `at` of the region on, which is inside, as
    /// far as it can: what it cannot is found by the one that needs them.
    pub fn populate(&self, at: usize, bytes: usize) {
        let first = (self.skip + at) & !(page_bytes() as usize - 1);
        let end = (self.skip + at + bytes).min(self.mapped);
        // SAFETY: inside the mapping.
        let start = unsafe { self.base.add(first) };
        // SAFETY: the pages are made as if they were written to, and keep their bytes.
        let _ = unsafe { madvise(start.as_ptr().cast(), end - first, Advice::LinuxPopulateWrite) };
    }

    /// Whether pages of it vanished, and zeroes of this process's own stand in their place.
    #[inline]
    pub fn is_broken(&self) -> bool {
        self.guard.is_broken()
    }
}

/// Bytes of a page of the system, as the C library knows them since the process began: rustix asks
/// the kernel at its first call, which a confined thread may not.
fn page_bytes() -> u64 {
    // SAFETY: returns a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).unwrap_or(4096)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard.release();
        // SAFETY: mapped in `new` with this very size; whatever holds an address of it holds the
        // mapping too.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.mapped) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
