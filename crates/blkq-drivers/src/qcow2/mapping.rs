//! A file that is mapped as words, which outlive the process.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The words of a file.
pub(super) struct Words {
    first: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: it owns its mapping, of which nothing is tied to a thread.
unsafe impl Send for Words {}
// SAFETY: all access to it is atomic.
unsafe impl Sync for Words {}

impl Words {
    /// Maps the first `len` words of `file`, which has them, with space for each.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map(file: BorrowedFd<'_>, len: usize) -> Result<Words, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
        let base = unsafe { mmap(std::ptr::null_mut(), len * 8, protection, MapFlags::SHARED, file, 0) }?;
        let first = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Words { first, len })
    }

    /// All of them.
    #[inline]
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped as long as this lives, and pages are aligned. Only this user can make the
        // file shorter; nothing does. Others that map it change it as atomics may be changed.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `map`, to which no reference is left.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.len * 8) };
    }
}
