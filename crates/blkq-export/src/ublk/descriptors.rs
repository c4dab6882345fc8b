//! The descriptors of a queue: memory that the kernel writes, and shows to its server.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use blkq::Error;

use super::abi::{IoDescriptor, QUEUE_DEPTH_MAX};

const PAGE_BYTES: usize = 4096;

/// The descriptors of one queue, by tag.
pub(super) struct Descriptors {
    memory: NonNull<IoDescriptor>,
    depth: u16,
}

impl Descriptors {
    fn bytes(depth: u16) -> usize {
        (usize::from(depth) * size_of::<IoDescriptor>()).next_multiple_of(PAGE_BYTES)
    }

    /// Maps those of `queue`, of `depth` tags, from the character device.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn map(file: &File, queue: u16, depth: u16) -> Result<Descriptors, Error> {
        // UBLKSRV_CMD_BUF_OFFSET is 0, and every queue has room for the largest depth.
        let offset = usize::from(queue) * Self::bytes(QUEUE_DEPTH_MAX);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                Self::bytes(depth),
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        match NonNull::new(memory) {
            Some(mapped) if memory != libc::MAP_FAILED => Ok(Descriptors { memory: mapped.cast(), depth }),
            _ => Err(Error::system("cannot map the queue of a ublk device", std::io::Error::last_os_error())),
        }
    }

    /// The request of `tag`, whose command has completed.
    #[inline]
    pub fn read(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth);
        // SAFETY: inside the mapping, which lives as long as `self`. The kernel wrote it before it
        // completed the command, whose completion was read with acquire ordering, and writes it
        // again only after the next command; volatile, for the compiler knows nothing of that.
        unsafe { self.memory.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this very size, and nobody has a reference into it.
        unsafe { libc::munmap(self.memory.as_ptr().cast(), Self::bytes(self.depth)) };
    }
}
