//! The RAM driver: a device whose content is in the memory of this process and is lost with it.
//!
//! The medium is one anonymous mapping of the size of the device. The kernel allocates a page at the first write to it.
//! So the device is sparse without a table, and its queues need no lock. A discard frees pages, which read as zeroes
//! afterwards.
//!
//! Overlapping requests that are in flight together leave a mix of both contents, as on a disk. To keep such races
//! defined for the compiler, the medium and the memory of requests, which a guest may share, are accessed only in whole
//! words: by relaxed atomics, or by assembly.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
// Not `crate::sync`: the atomics are placed on bytes of the mapping, which the types of the model checkers cannot be.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::bio::{BioFlags, Operation};
use crate::budget::TURN_BUDGET;
use crate::buffer::Segment;
use crate::clock::{monotonic_ns, worker_ns};
use crate::driver::{Busy, Driver, DriverContext, DriverQueue, EXTENTS_QUERY_NS, Extent, OpenContext, Taken};
use crate::error::{Error, IoResult, Status};
use crate::limits::QueueLimits;
use crate::tags::Tag;
use std::sync::Arc;

/// Largest request that frees pages or zeroes memory, in bytes. The kernel needs up to 1 ms for that size, during which the
/// engine's thread waits.
const FILL_MAX_BYTES: u64 = 4 << 20;
const WORD: usize = size_of::<u64>();

/// A device whose content is in the memory of this process.
pub struct Ram {
    medium: Arc<Medium>,
    limits: QueueLimits,
}

impl Ram {
    /// A device of `capacity_bytes` bytes, all zeroes, with logical blocks of `logical_block_bytes` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the capacity is 0 or not a multiple of the block size,
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the kernel cannot reserve that much address space.
    pub fn new(capacity_bytes: u64, logical_block_bytes: u32, read_only: bool) -> Result<Ram, Error> {
        let page = rustix::param::page_size() as u32;
        let limits = QueueLimits {
            capacity_bytes,
            logical_block_bytes,
            physical_block_bytes: logical_block_bytes.max(page.min(65536)),
            max_discard_bytes: FILL_MAX_BYTES,
            discard_granularity: page.max(logical_block_bytes),
            discard_zeroes: true,
            max_write_zeroes_bytes: FILL_MAX_BYTES,
            max_write_zeroes_no_unmap_bytes: FILL_MAX_BYTES,
            memory_align: WORD as u32,
            fua: true,
            read_only,
            ..QueueLimits::default()
        };
        limits.validate()?;
        Ok(Ram { medium: Arc::new(Medium::new(capacity_bytes)?), limits })
    }
}

impl Driver for Ram {
    fn name(&self) -> &'static str {
        "ram"
    }

    fn limits(&self) -> QueueLimits {
        self.limits.clone()
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(RamQueue { medium: Arc::clone(&self.medium) }))
    }

    fn is_lost_with_process(&self) -> bool {
        true
    }

    fn extents(&self, range: Range<u64>, max: usize) -> Result<Vec<Extent>, Error> {
        self.medium
            .extents(range, max, worker_ns() + EXTENTS_QUERY_NS)
            .map_err(|e| Error::system("cannot read which pages of the RAM disk are allocated", e))
    }
}

struct RamQueue {
    medium: Arc<Medium>,
}

// SAFETY: only this thread uses the memory of a request, and only before the request completes.
unsafe impl DriverQueue for RamQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        let mut until_ns = None;
        for (index, &tag) in tags.iter().enumerate() {
            let result = self.execute(cx, tag);
            let fills = !cx.request(tag).operation().has_data();
            cx.complete(tag, result);
            if fills {
                let now_ns = monotonic_ns();
                let budget_ns = TURN_BUDGET.time.as_nanos() as u64;
                if now_ns >= *until_ns.get_or_insert(now_ns + budget_ns) {
                    return Taken::First(index + 1, Busy::Resource);
                }
            }
        }
        Taken::All
    }
}

impl RamQueue {
    fn execute(&self, cx: &DriverContext<'_>, tag: Tag) -> IoResult {
        let request = cx.request(tag);
        let operation = request.operation();
        let range = self.medium.range(request.offset(), request.bytes()).ok_or(Status::Invalid)?;
        match operation {
            Operation::Read | Operation::Write => {
                let mut place = range;
                let mut result = Ok(());
                cx.for_each_segment(tag, |segment| {
                    let len = segment.len as usize;
                    if len > place.len() || !(len | segment.ptr.addr()).is_multiple_of(WORD) {
                        result = Err(Status::Invalid);
                    } else {
                        // SAFETY: the memory of a request in flight is valid, and only the driver may write to that of
                        // a read.
                        unsafe { self.medium.transfer(operation, place.start, segment) }
                    }
                    place.start += len.min(place.len());
                });
                return result;
            }
            Operation::WriteZeroes if request.flags().contains(BioFlags::NO_UNMAP) => self.medium.zero(range),
            Operation::Discard | Operation::WriteZeroes => self.medium.discard(range),
            Operation::Flush => {}
        }
        Ok(())
    }
}

struct Medium {
    base: NonNull<u8>,
    bytes: usize,
    page: usize,
    /// /proc/self/pagemap, opened before this process is confined and can no longer open files. `None` if it cannot be
    /// opened; then holes are not reported.
    pagemap: Option<File>,
}

// SAFETY: only this value refers to the mapping, and its bytes are accessed only as atomics.
unsafe impl Send for Medium {}
// SAFETY: as above.
unsafe impl Sync for Medium {}

impl Medium {
    fn new(capacity: u64) -> Result<Medium, Error> {
        let fail = |e: rustix::io::Errno| {
            let policy = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
            let hint = match policy.trim() {
                "2" => "choose a smaller size, or set vm.overcommit_memory=0",
                _ => "choose a smaller size, or raise the limit of address space (ulimit -v)",
            };
            Error::system(format!("cannot reserve {capacity} bytes of memory for a RAM disk"), e)
                .with_hint(hint)
        };
        let bytes = usize::try_from(capacity).map_err(|_| fail(rustix::io::Errno::NOMEM))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }.map_err(fail)?;
        // With huge pages each isolated write of 4 KiB would allocate 2 MiB. Kernels without huge pages return an
        // error, which can be ignored.
        // SAFETY: the advice changes no content, and the range is the mapping just made.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) };
        let base = NonNull::new(base.cast()).ok_or_else(|| fail(rustix::io::Errno::NOMEM))?;
        let pagemap = File::open("/proc/self/pagemap").ok();
        Ok(Medium { base, bytes, page: rustix::param::page_size(), pagemap })
    }

    /// The range as indices, if it is within the medium and consists of whole words.
    fn range(&self, offset: u64, bytes: u64) -> Option<Range<usize>> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(bytes).ok()?)?;
        (end <= self.bytes && start.is_multiple_of(WORD) && end.is_multiple_of(WORD)).then_some(start..end)
    }

    fn words(&self, range: Range<usize>) -> &[AtomicU64] {
        assert!(range.end <= self.bytes && range.start.is_multiple_of(WORD));
        // SAFETY: the range is aligned and within the mapping, which outlives the borrow, and is accessed only as
        // atomics. The effect of `discard` is equivalent to a store of zeroes by another thread.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(range.start).cast(), range.len() / WORD) }
    }

    /// Copies the bytes from offset `at` into `segment` for a read, and `segment` to these bytes for a write, in whole
    /// words.
    ///
    /// # Safety
    /// The segment must be valid for the operation, and aligned to a word.
    unsafe fn transfer(&self, operation: Operation, at: usize, segment: Segment) {
        let words = self.words(at..at + segment.len as usize);
        // The words are atomics, so they may be written through a shared borrow.
        let (medium, memory) = (words.as_ptr().cast_mut().cast(), segment.ptr.cast());
        let (to, from) = if operation == Operation::Read { (memory, medium) } else { (medium, memory) };
        // SAFETY: the segment is as long as the words together, and both are aligned.
        unsafe { copy_words(to, from, words.len()) }
    }

    /// Fills a range with zeroes, and keeps its pages allocated.
    fn zero(&self, range: Range<usize>) {
        self.words(range).iter().for_each(|word| word.store(0, Relaxed));
    }

    /// Fills a range with zeroes, and frees the whole pages in it.
    fn discard(&self, range: Range<usize>) {
        let first = range.start.next_multiple_of(self.page);
        let last = range.end - range.end % self.page;
        if first >= last {
            return self.zero(range);
        }
        self.zero(range.start..first);
        self.zero(last..range.end);
        // SAFETY: whole pages of the mapping, whose content is only accessed as atomics.
        let released =
            unsafe { madvise(self.base.as_ptr().add(first).cast(), last - first, Advice::LinuxDontNeed) };
        if released.is_err() {
            // The kernel cannot free memory that is locked with mlockall(2).
            self.zero(first..last);
        }
    }

    /// The extents of `range` according to the kernel's page table, at most `max`. Pages that were swapped out count as
    /// data, and so do pages that were only read, which the kernel maps to its zero page. The search ends after the time
    /// `until_ns`, but not before it has found an extent.
    fn extents(&self, range: Range<u64>, max: usize, until_ns: u64) -> std::io::Result<Vec<Extent>> {
        // Bits 62 (swapped) and 63 (present) of an entry of /proc/self/pagemap.
        const POPULATED: u64 = 3 << 62;
        let pagemap = self.pagemap.as_ref().ok_or(std::io::ErrorKind::NotFound)?;
        let page = self.page as u64;
        let end = range.end.min(self.bytes as u64);
        let mut extents: Vec<Extent> = Vec::new();
        let mut entries = [0; 8192];
        let mut at = range.start;
        while at < end {
            let index = (self.base.as_ptr() as u64 + at) / page;
            let wanted = ((end.div_ceil(page) - at / page) as usize * WORD).min(entries.len());
            pagemap.read_exact_at(&mut entries[..wanted], index * WORD as u64)?;
            for entry in entries[..wanted].as_chunks().0 {
                let hole = u64::from_ne_bytes(*entry) & POPULATED == 0;
                let length = (page - at % page).min(end - at);
                let full = extents.len() == max;
                match extents.last_mut() {
                    Some(last) if last.hole == hole => last.length += length,
                    _ if full => return Ok(extents),
                    _ => extents.push(Extent { length, hole, zero: hole }),
                }
                at += length;
            }
            if worker_ns() >= until_ns {
                break;
            }
        }
        Ok(extents)
    }
}

/// Copies `count` words. Other threads and guests may access both places concurrently. Each word that they see, and each
/// word that is copied, is either old or new, and never torn.
///
/// # Safety
/// Both places must be valid for `count` words, and aligned to a word.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_words(to: *mut u64, from: *const u64, count: usize) {
    // The processor moves whole cache lines where possible. The compiler does not see the accesses, so for it they are
    // no data race.
    // SAFETY: the caller's promise. The direction flag is clear, as it is at the entry of any asm.
    unsafe {
        std::arch::asm!(
            "rep movsq",
            inout("rcx") count => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags)
        );
    }
}

/// Copies `count` words with relaxed atomics, for processors without the instruction above.
///
/// # Safety
/// Both places must be valid for `count` words, and aligned to a word.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_words(to: *mut u64, from: *const u64, count: usize) {
    for index in 0..count {
        // SAFETY: the caller's promise. The accesses are atomic, because others may access the same words.
        let (to, from) =
            unsafe { (AtomicU64::from_ptr(to.add(index)), AtomicU64::from_ptr(from.add(index).cast_mut())) };
        to.store(from.load(Relaxed), Relaxed);
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new`, and no borrow of it is left.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;
    use crate::testing::harness::{Harness, filled, pattern};

    #[test]
    fn data_written_in_several_segments_is_read_back() {
        let ram = Ram::new(1 << 40, 512, false).unwrap();
        let mut h = Harness::open(&ram).unwrap();
        let offset = (1 << 39) - 1024;
        let parts = [pattern(512, 1), pattern(4096, 2), pattern(1024, 3)];
        let want: Vec<u8> = parts.iter().flat_map(|p| p.to_vec()).collect();
        let tag = h.write(offset, parts.into());
        assert_eq!(h.run(tag).0, Ok(()));
        let tag = h.read(offset, &[1024, 512, 4096]);
        assert_eq!(h.run(tag), (Ok(()), want));
        assert_eq!(h.read_back(0, 512), vec![0; 512]);
        assert!(h.close().is_none());
        let mut other = Harness::open_index(&ram, 1).unwrap();
        assert_eq!(other.read_back(offset, 512), pattern(512, 1).to_vec(), "queues share the medium");
    }

    // Contract: no-unmap
    #[test]
    fn discard_zeroes_all_and_frees_whole_pages_but_no_unmap_none() {
        let ram = Ram::new(1 << 30, 512, false).unwrap();
        let mut h = Harness::open(&ram).unwrap();
        let tag = h.write(0, vec![filled(64 << 10, 7)]);
        assert_eq!(h.run(tag).0, Ok(()));
        let hole = |length| Extent { length, hole: true, zero: true };
        let data = |length| Extent { length, hole: false, zero: false };
        let tag = h.bare(Operation::WriteZeroes, BioFlags::NO_UNMAP, 32 << 10, 16 << 10);
        assert_eq!(h.run(tag).0, Ok(()));
        assert_eq!(ram.extents(0..1 << 20, 9).unwrap(), [data(64 << 10), hole((1 << 20) - (64 << 10))]);
        for operation in [Operation::Discard, Operation::WriteZeroes] {
            let tag = h.write(0, vec![filled(64 << 10, 7)]);
            assert_eq!(h.run(tag).0, Ok(()));
            let tag = h.bare(operation, BioFlags::empty(), 512, 12288);
            assert_eq!(h.run(tag).0, Ok(()));
            let extents = ram.extents(0..64 << 10, 9).unwrap();
            assert_eq!(extents, [data(4096), hole(8192), data((64 << 10) - 12288)]);
            let bytes = h.read_back(0, 64 << 10);
            assert!(bytes[..512].iter().all(|b| *b == 7) && bytes[512..12800].iter().all(|b| *b == 0));
            assert!(bytes[12800..].iter().all(|b| *b == 7));
        }
        assert_eq!(ram.extents(512..64 << 10, 1).unwrap(), [data((64 << 10) - 512)], "all was read");
    }

    #[test]
    fn ranges_and_memory_that_break_the_limits_are_rejected() {
        let ram = Ram::new(1 << 20, 512, false).unwrap();
        let mut h = Harness::open(&ram).unwrap();
        let tag = h.write((1 << 20) - 512, vec![filled(1024, 1)]);
        assert_eq!(h.run(tag).0, Err(Status::Invalid));
        let tag = h.bare(Operation::Discard, BioFlags::empty(), 1 << 20, 512);
        assert_eq!(h.run(tag).0, Err(Status::Invalid));
        assert!(Ram::new(1000, 512, false).is_err() && Ram::new(0, 512, false).is_err());
        assert!(Ram::new(1 << 62, 512, false).err().unwrap().to_string().contains("choose a smaller size"));
    }

    #[test]
    fn overlapping_writes_of_two_threads_leave_whole_words() {
        let ram = Ram::new(1 << 20, 512, false).unwrap();
        std::thread::scope(|scope| {
            for value in [1, 2] {
                let ram = &ram;
                scope.spawn(move || {
                    let mut h = Harness::open_index(ram, value).unwrap();
                    for _ in 0..300 {
                        let tag = h.write(0, vec![filled(4096, value as u8)]);
                        assert_eq!(h.run(tag).0, Ok(()));
                        let tag = h.bare(Operation::Discard, BioFlags::empty(), 0, 4096);
                        assert_eq!(h.run(tag).0, Ok(()));
                        let bytes = h.read_back(0, 4096);
                        assert!(bytes.chunks(8).all(|w| w == [0; 8] || w == [1; 8] || w == [2; 8]));
                    }
                });
            }
        });
    }
}
