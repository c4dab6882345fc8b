//! The request descriptors of a queue: an array that the kernel writes, and that the server maps read-only.

use std::fs::File;
use std::ptr::{NonNull, null_mut};

use blkq::Error;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::abi::{IoDescriptor, QUEUE_DEPTH_MAX};
use crate::mapping::page_bytes;

pub(super) struct Descriptors {
    memory: NonNull<IoDescriptor>,
    depth: u16,
    bytes: usize,
}

/// Size of the descriptors of a queue, rounded up to pages of `page_bytes` as the kernel does.
fn queue_bytes(depth: u16, page_bytes: u64) -> u64 {
    (u64::from(depth) * size_of::<IoDescriptor>() as u64).next_multiple_of(page_bytes)
}

impl Descriptors {
    pub fn map(file: &File, queue: u16, depth: u16) -> Result<Descriptors, Error> {
        // UBLKSRV_CMD_BUF_OFFSET is 0, and the kernel reserves room for the largest depth for each queue.
        let offset = u64::from(queue) * queue_bytes(QUEUE_DEPTH_MAX, page_bytes());
        let bytes = queue_bytes(depth, page_bytes()) as usize;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        let failed = |e| Error::system("cannot map a queue of the ublk device", e);
        // SAFETY: the kernel chooses the address of the new mapping, so no existing memory changes.
        let memory = unsafe { mmap(null_mut(), bytes, ProtFlags::READ, flags, file, offset) };
        let memory = NonNull::new(memory.map_err(failed)?.cast()).ok_or(Errno::FAULT).map_err(failed)?;
        Ok(Descriptors { memory, depth, bytes })
    }

    /// Reads the request of `tag`. The command of the tag must have completed.
    pub fn read(&self, tag: u16) -> IoDescriptor {
        assert!(tag < self.depth);
        // SAFETY: the descriptor is inside the mapping, which exists as long as `self`. The kernel wrote the
        // descriptor before it completed the command, and the ring read that completion with acquire
        // ordering. The kernel writes the descriptor again only after the next command of the tag. Volatile,
        // because the compiler cannot see the kernel's writes.
        unsafe { self.memory.add(usize::from(tag)).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: `map` created this mapping with the same size, and there are no references into it.
        let _ = unsafe { munmap(self.memory.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_as_far_apart_as_the_kernel_rounds() {
        assert_eq!(queue_bytes(QUEUE_DEPTH_MAX, 4096), 96 << 10);
        assert_eq!(queue_bytes(QUEUE_DEPTH_MAX, 65536), 128 << 10);
        assert_eq!(
            (queue_bytes(1, 4096), queue_bytes(171, 4096), queue_bytes(1, 65536)),
            (4096, 8192, 65536)
        );
    }
}
