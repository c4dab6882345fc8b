//! Free lists of I/O buffers by size, so that no memory is allocated in the steady state.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::{NonNull, slice_from_raw_parts_mut};

use blkq::{IoBuffer, Registrar, SourceContext};

/// Size in bytes of the largest buffer for a request of whole blocks.
pub const BUFFER_MAX_BYTES: u32 = 32 << 20;

/// Size in bytes of the smallest buffer.
const CLASS_MIN_BYTES: usize = 4096;
/// Bytes of the largest buffer: a request of [`BUFFER_MAX_BYTES`] and the rest of its first and last block.
pub const UNALIGNED_MAX_BYTES: usize = BUFFER_MAX_BYTES as usize + 2 * (64 << 10);
/// The size classes: 4 KiB, 8 KiB and so on up to [`BUFFER_MAX_BYTES`], then [`UNALIGNED_MAX_BYTES`].
const CLASSES: usize = (BUFFER_MAX_BYTES as usize / CLASS_MIN_BYTES).ilog2() as usize + 2;
/// Upper bound of the memory in the free lists, in bytes. Registered buffers may exceed it.
const FREE_MAX_BYTES: usize = 2 * BUFFER_MAX_BYTES as usize;
/// Largest buffer that is registered with the ring, in bytes: the kernel pins its pages once instead of for
/// each direct I/O. Larger buffers are few and short-lived.
const REGISTERED_MAX_BYTES: usize = 64 << 10;
/// Smallest buffer in bytes that is part of a row: adjacent buffers in one mapping that the kernel may fill
/// with huge pages. In small pages, such a buffer would be many segments for a device. A row is unmapped when
/// its last buffer is dropped.
const ROW_MIN_BYTES: usize = 128 << 10;
const _: () = assert!(ROW_MIN_BYTES > REGISTERED_MAX_BYTES, "others of a row are not registered");
/// Bytes of a row. Its unused buffers are allocated together with the one that is needed.
const ROW_BYTES: usize = 2 << 20;
/// Time in nanoseconds after which unused buffers are released.
const IDLE_NS: u64 = 1_000_000_000;

/// Returns `None` for 0 bytes or without memory. The kernel may provide the pages on first use.
pub(crate) fn try_zeroed(bytes: usize) -> Option<Box<[u8]>> {
    let layout = Layout::array::<u8>(bytes).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: the layout's size is not zero.
    let memory = NonNull::new(unsafe { alloc_zeroed(layout) })?;
    // SAFETY: the memory was just allocated with the layout of `bytes` bytes, is zeroed, and has no other
    // owner.
    Some(unsafe { Box::from_raw(slice_from_raw_parts_mut(memory.as_ptr(), bytes)) })
}

/// The buffers of one source. They are used on the thread of its engine only.
#[derive(Default)]
pub(crate) struct BufferPool {
    free: [Vec<IoBuffer>; CLASSES],
    free_bytes: usize,
    /// Size of the buffers that were taken and not put back.
    pub used_bytes: usize,
    /// Time since which no buffer is in use, if there is free memory to release.
    idle_since_ns: Option<u64>,
}

impl BufferPool {
    /// Size in bytes of the buffer for a request of `bytes`, which is at most [`UNALIGNED_MAX_BYTES`].
    pub fn size(bytes: u32) -> usize {
        match bytes {
            ..=BUFFER_MAX_BYTES => (bytes as usize).next_power_of_two().max(CLASS_MIN_BYTES),
            _ => UNALIGNED_MAX_BYTES,
        }
    }

    fn class(size: usize) -> usize {
        if size == UNALIGNED_MAX_BYTES { CLASSES - 1 } else { (size / CLASS_MIN_BYTES).ilog2() as usize }
    }

    /// Takes a buffer of at least `bytes`, which may contain old data. Returns `None` if there is no memory.
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
        self.used_bytes += size;
        self.idle_since_ns = None;
        Some(buffer)
    }

    /// Allocates a buffer. If it is part of a row, the row's other buffers go to the free list.
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

    pub fn put(&mut self, mut buffer: IoBuffer) {
        self.used_bytes -= buffer.len();
        // A registered buffer is kept whatever the limit, because only `trim` has the ring to unregister it.
        if self.free_bytes + buffer.len() <= FREE_MAX_BYTES || buffer.is_registered() {
            self.free_bytes += buffer.len();
            self.free[Self::class(buffer.len())].push(buffer);
        } else if (ROW_MIN_BYTES..ROW_BYTES).contains(&buffer.len()) {
            // The other buffers of the row may be in use for a long time, and keep the mapping. Its pages are
            // released now.
            buffer.release_pages();
        }
    }

    pub fn is_idle(&self) -> bool {
        self.used_bytes == 0 && self.free_bytes > 0
    }

    /// Releases all free memory if no buffer has been in use for [`IDLE_NS`]. A source calls this at the end
    /// of each turn, and at [`BufferPool::trim_at_ns`].
    pub fn trim_if_idle(&mut self, cx: &mut SourceContext<'_>) {
        match (self.is_idle(), self.trim_at_ns()) {
            (false, _) => self.idle_since_ns = None,
            (true, None) => self.idle_since_ns = Some(cx.now_ns()),
            (true, Some(at_ns)) if cx.now_ns() < at_ns => {}
            (true, Some(_)) => {
                self.trim(cx.registrar());
                self.idle_since_ns = None;
            }
        }
    }

    /// The time at which free memory is to be released, if no buffer is used until then.
    pub fn trim_at_ns(&self) -> Option<u64> {
        self.idle_since_ns.map(|since_ns| since_ns + IDLE_NS)
    }

    pub fn trim(&mut self, mut ring: Registrar<'_>) {
        for mut buffer in self.free.iter_mut().flat_map(|free| free.drain(..)) {
            ring.unregister_buffer(&mut buffer);
        }
        self.free = [const { Vec::new() }; CLASSES];
        self.free_bytes = 0;
        // glibc keeps freed heap memory until malloc_trim is called. Other C libraries have no such function.
        #[cfg(target_env = "gnu")]
        // SAFETY: malloc_trim only releases unused pages of the heap.
        unsafe {
            libc::malloc_trim(0)
        };
    }
}

#[cfg(test)]
mod tests {
    use blkq::{Disk, LocalQueue};
    use blkq_drivers::r#loop::{DriverOptions, LoopDevice};

    use super::*;

    fn queue(name: &str) -> LocalQueue {
        let path = std::env::temp_dir().join(format!("blkq-{name}-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(4096).unwrap();
        let device = LoopDevice::open(&DriverOptions::new(&path)).unwrap();
        std::fs::remove_file(path).unwrap();
        Disk::builder(Box::new(device)).build().unwrap().open_queue(0).unwrap()
    }

    #[test]
    fn a_buffer_in_use_for_an_instant_resets_the_idle_time() {
        let mut queue = queue("idleness");
        let mut pool = BufferPool { idle_since_ns: Some(0), ..BufferPool::default() };
        let buffer = pool.take(4096, queue.registrar().unwrap()).unwrap();
        pool.put(buffer);
        assert!(pool.is_idle() && pool.trim_at_ns().is_none());
    }

    #[test]
    fn the_pool_keeps_a_bounded_amount_of_memory() {
        let mut queue = queue("buffers");
        let mut pool = BufferPool::default();
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
    fn one_buffer_in_use_does_not_keep_the_memory_of_its_row() {
        const BUFFERS: usize = 2 * FREE_MAX_BYTES / ROW_MIN_BYTES;
        let resident_bytes = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
        };
        let (mut pool, mut queue, before) = (BufferPool::default(), queue("rows"), resident_bytes());
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
        // The pool keeps FREE_MAX_BYTES of the returned buffers for the next requests.
        let (resident, others) = (resident_bytes() - before, 16 << 20);
        assert!(resident < FREE_MAX_BYTES + kept.len() * ROW_MIN_BYTES + others, "{resident} bytes");
    }
}
