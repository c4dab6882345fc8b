//! A file that is mapped into memory as 64-bit words. The stores survive the process.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

pub struct Words {
    first: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: this owns its mapping, and no part of it is tied to a thread.
unsafe impl Send for Words {}
// SAFETY: all accesses to the mapping are atomic.
unsafe impl Sync for Words {}

impl Words {
    /// `file` must have allocated space for all words.
    pub fn map(file: BorrowedFd<'_>, len: usize) -> Result<Words, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), len * 8, protection, MapFlags::SHARED, file, 0) }?;
        let first = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Words { first, len })
    }

    #[inline]
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: `len` words are mapped as long as this exists, and pages are aligned. Only this user can
        // truncate the file, and blkq never does. Other processes that map the file use atomic accesses.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `map`, to which no reference is left.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.len * 8) };
    }
}
