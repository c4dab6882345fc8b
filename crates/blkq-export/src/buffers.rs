//! Free lists of I/O buffers by size, so that the steady state allocates nothing.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::{NonNull, slice_from_raw_parts_mut};

use blkq::{IoBuffer, Registrar};

/// Largest buffer.
pub const BUFFER_MAX_BYTES: u32 = 32 << 20;

/// Smallest buffer, in bytes.
const CLASS_MIN_BYTES: usize = 4096;
/// Largest request that begins and ends within blocks, with the rest of these: blocks have at
/// most 64 KiB.
pub const UNALIGNED_MAX_BYTES: usize = BUFFER_MAX_BYTES as usize + 2 * (64 << 10);
/// Buffers of 4 KiB, 8 KiB, ... up to the largest, and those of [`UNALIGNED_MAX_BYTES`].
const CLASSES: usize = (BUFFER_MAX_BYTES as usize / CLASS_MIN_BYTES).ilog2() as usize + 2;
/// Most that the free lists hold, in bytes.
const FREE_MAX_BYTES: usize = 2 * BUFFER_MAX_BYTES as usize;
/// Largest buffer that is registered with the ring, which then need not pin its pages for
/// each direct I/O. Larger ones are too few and too short-lived.
const REGISTERED_MAX_BYTES: usize = 64 << 10;
/// Smallest buffer of a row, which the system may fill with huge pages: so many small pages are many
/// pieces for a device. A row is released when none of its buffers is there any more.
const ROW_MIN_BYTES: usize = 128 << 10;
const _: () = assert!(ROW_MIN_BYTES > REGISTERED_MAX_BYTES, "others of a row are not registered");
/// Memory of a row of the smaller ones, in bytes: there are up to so many more than are used.
const ROW_BYTES: usize = 2 << 20;

/// Zeroed memory of `bytes` bytes, at least one; `None` if there is none. Its pages may be taken from
/// the system only when they are used.
pub(crate) fn try_zeroed(bytes: usize) -> Option<Box<[u8]>> {
    let layout = Layout::array::<u8>(bytes).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: the layout's size is not zero.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: it was allocated with the layout of so many bytes, which are zeroes, and is nobody
    // else's.
    Some(unsafe { Box::from_raw(slice_from_raw_parts_mut(memory.as_ptr(), bytes)) })
}

/// The buffers of one source.
pub(crate) struct BufferPool {
    free: [Vec<IoBuffer>; CLASSES],
    free_bytes: usize,
    /// Buffers handed out.
    used: usize,
}

impl BufferPool {
    pub fn new() -> BufferPool {
        BufferPool { free: [const { Vec::new() }; CLASSES], free_bytes: 0, used: 0 }
    }

    /// Size in bytes of the buffer that holds `bytes`, at most [`UNALIGNED_MAX_BYTES`].
    pub fn size(bytes: u32) -> usize {
        match bytes {
            ..=BUFFER_MAX_BYTES => (bytes as usize).next_power_of_two().max(CLASS_MIN_BYTES),
            _ => UNALIGNED_MAX_BYTES,
        }
    }

    fn class(size: usize) -> usize {
        if size == UNALIGNED_MAX_BYTES { CLASSES - 1 } else { (size / CLASS_MIN_BYTES).ilog2() as usize }
    }

    /// A buffer of at least `bytes` (at most [`UNALIGNED_MAX_BYTES`]), with whatever was in it; `None`
    /// if there is no memory.
    pub fn take(&mut self, bytes: u32, mut ring: Registrar<'_>) -> Option<IoBuffer> {
        let size = Self::size(bytes);
        let buffer = match self.free[Self::class(size)].pop() {
            Some(buffer) => {
                self.free_bytes -= size;
                buffer
            }
            None => {
                let mut buffer = self.make(size)?;
                if size <= REGISTERED_MAX_BYTES {
                    ring.register_buffer(&mut buffer);
                }
                buffer
            }
        };
        self.used += 1;
        Some(buffer)
    }

    /// A new buffer of `size` bytes, beside which others may be free from then on.
    fn make(&mut self, size: usize) -> Option<IoBuffer> {
        if size < ROW_MIN_BYTES || self.free_bytes + ROW_BYTES > FREE_MAX_BYTES {
            return IoBuffer::try_zeroed(size);
        }
        let mut row = IoBuffer::try_zeroed_row(size);
        let Some(buffer) = row.pop() else { return IoBuffer::try_zeroed(size) };
        self.free_bytes += row.len() * size;
        self.free[Self::class(size)].append(&mut row);
        Some(buffer)
    }

    /// Gives a buffer of [`BufferPool::take`] back.
    pub fn put(&mut self, mut buffer: IoBuffer) {
        self.used -= 1;
        // Registered buffers are kept until the pool is trimmed.
        if self.free_bytes + buffer.len() <= FREE_MAX_BYTES || buffer.is_registered() {
            self.free_bytes += buffer.len();
            self.free[Self::class(buffer.len())].push(buffer);
        } else if (ROW_MIN_BYTES..ROW_BYTES).contains(&buffer.len()) {
            // Others of its row may stay for long, and the row with them.
            buffer.release_pages();
        }
    }

    /// Whether there is memory to release that no request is about to use.
    pub fn is_idle(&self) -> bool {
        self.used == 0 && self.free_bytes > 0
    }

    /// Gives all free memory back to the system.
    pub fn trim(&mut self, mut ring: Registrar<'_>) {
        for mut buffer in self.free.iter_mut().flat_map(|free| free.drain(..)) {
            ring.unregister_buffer(&mut buffer);
        }
        self.free = [const { Vec::new() }; CLASSES];
        self.free_bytes = 0;
        // Other C libraries release freed memory by themselves, as far as they do.
        #[cfg(target_env = "gnu")]
        // SAFETY: only gives unused pages of the heap back.
        unsafe {
            libc::malloc_trim(0)
        };
    }
}

#[cfg(test)]
mod tests {
    use blkq::drivers::r#loop::{LoopDevice, LoopOptions};
    use blkq::{Disk, LocalQueue};

    use super::*;

    /// A queue with a ring.
    fn queue(name: &str) -> LocalQueue {
        let path = std::env::temp_dir().join(format!("blkq-{name}-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(4096).unwrap();
        let device = LoopDevice::open(&LoopOptions::new(&path)).unwrap();
        std::fs::remove_file(path).unwrap();
        Disk::builder(Box::new(device)).build().unwrap().open_queue(0).unwrap()
    }

    #[test]
    fn the_pool_keeps_a_bounded_amount() {
        let mut queue = queue("buffers");
        let mut pool = BufferPool::new();
        for bytes in [BUFFER_MAX_BYTES + 1, BUFFER_MAX_BYTES, BUFFER_MAX_BYTES / 2, BUFFER_MAX_BYTES / 4] {
            let taken: Vec<IoBuffer> =
                (0..6).filter_map(|_| pool.take(bytes, queue.registrar().unwrap())).collect();
            taken.into_iter().for_each(|buffer| pool.put(buffer));
            assert!(pool.free_bytes <= FREE_MAX_BYTES);
        }
        let kept: usize = pool.free.iter().flatten().map(|buffer| buffer.len()).sum();
        assert_eq!(kept, pool.free_bytes);
        assert!(pool.is_idle());
        pool.trim(queue.registrar().unwrap());
        assert!(!pool.is_idle());
    }

    #[test]
    fn one_buffer_of_a_row_keeps_no_memory_of_the_others() {
        const BUFFERS: usize = 2 * FREE_MAX_BYTES / ROW_MIN_BYTES;
        let resident_bytes = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        };
        let (mut pool, mut queue, before) = (BufferPool::new(), queue("rows"), resident_bytes());
        let taken: Vec<IoBuffer> = (0..BUFFERS)
            .map(|_| {
                let mut buffer = pool.take(ROW_MIN_BYTES as u32, queue.registrar().unwrap()).unwrap();
                buffer.fill(1);
                buffer
            })
            .collect();
        assert!(resident_bytes() >= before + 2 * FREE_MAX_BYTES);
        let mut kept = Vec::new();
        for (index, buffer) in taken.into_iter().enumerate() {
            match index % (ROW_BYTES / ROW_MIN_BYTES) {
                0 => kept.push(buffer),
                _ => pool.put(buffer),
            }
        }
        // Half of the rest is kept for the next requests.
        let (resident, others) = (resident_bytes() - before, 16 << 20);
        assert!(resident < FREE_MAX_BYTES + kept.len() * ROW_MIN_BYTES + others, "{resident} bytes");
    }
}
