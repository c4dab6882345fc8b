//! Free lists of I/O buffers by size, so that the steady state allocates nothing.

use blkq::IoBuffer;

use super::proto::PAYLOAD_MAX_BYTES;

/// Smallest buffer, in bytes.
const CLASS_MIN_BYTES: usize = 4096;
/// Buffers of 4 KiB, 8 KiB, ... up to the largest payload.
const CLASSES: usize = (PAYLOAD_MAX_BYTES as usize / CLASS_MIN_BYTES).ilog2() as usize + 1;

/// The buffers of one engine's connections.
pub(super) struct BufferPool {
    free: [Vec<IoBuffer>; CLASSES],
    /// Buffers handed out.
    used: usize,
}

impl BufferPool {
    pub fn new() -> BufferPool {
        BufferPool { free: [const { Vec::new() }; CLASSES], used: 0 }
    }

    /// Size in bytes of the buffer that holds `bytes`, at most [`PAYLOAD_MAX_BYTES`].
    pub fn size(bytes: u32) -> usize {
        (bytes as usize).next_power_of_two().max(CLASS_MIN_BYTES)
    }

    fn class(size: usize) -> usize {
        (size / CLASS_MIN_BYTES).ilog2() as usize
    }

    /// A buffer of at least `bytes` (at most [`PAYLOAD_MAX_BYTES`]), with whatever was in it.
    pub fn take(&mut self, bytes: u32) -> IoBuffer {
        self.used += 1;
        let size = Self::size(bytes);
        self.free[Self::class(size)].pop().unwrap_or_else(|| IoBuffer::zeroed(size))
    }

    /// Gives a buffer of [`BufferPool::take`] back.
    pub fn put(&mut self, buffer: IoBuffer) {
        self.used -= 1;
        self.free[Self::class(buffer.len())].push(buffer);
    }

    /// Whether there is memory to give back and nobody about to use it.
    pub fn is_idle(&self) -> bool {
        self.used == 0 && self.free.iter().any(|buffers| !buffers.is_empty())
    }

    /// Gives all free memory back to the system.
    pub fn trim(&mut self) {
        self.free = [const { Vec::new() }; CLASSES];
        // SAFETY: only gives unused pages of the heap back.
        unsafe { libc::malloc_trim(0) };
    }
}
