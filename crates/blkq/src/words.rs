//! A file that is mapped into memory as 64-bit words, which processes share.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Words of a file. Stores survive the process.
pub struct MappedWords {
    first: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the value owns its mapping, which is not tied to a thread.
unsafe impl Send for MappedWords {}
// SAFETY: all accesses to the mapping are atomic.
unsafe impl Sync for MappedWords {}

impl MappedWords {
    /// Maps `len` words of `file` from byte `offset` on, which is a multiple of the page size. Fails with the errno
    /// of mmap(2).
    ///
    /// # Safety
    /// The file must have these words while the value exists, and other processes must access them only as
    /// atomics. If `protection` does not include writing, the words must only be read.
    pub unsafe fn map(
        file: impl AsFd,
        offset: u64,
        len: usize,
        protection: ProtFlags,
    ) -> Result<MappedWords, Errno> {
        let (null, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let base = unsafe { mmap(null, len * 8, protection, flags, file, offset) }?;
        let first = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(MappedWords { first, len })
    }

    /// Returns the words. They may change at any time, because other processes may map the file.
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: `len` words are mapped while this value exists, as `map` demands, and pages are aligned.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl Drop for MappedWords {
    fn drop(&mut self) {
        // SAFETY: the mapping was created by `map`, and no reference to it is left.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.len * 8) };
    }
}
