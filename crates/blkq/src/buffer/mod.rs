mod huge;
pub(crate) mod registration;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The alignment in bytes of every [`IoBuffer`]: a page, which is enough for direct I/O of all known devices.
pub const BUFFER_ALIGN: usize = 4096;

/// Buffers of at least this number of bytes have their own mapping, so that memory is allocated and zeroed
/// page by page as they are filled.
const MAPPED_MIN_BYTES: usize = 256 << 10;

static HUGE_PAGES: AtomicBool = AtomicBool::new(true);

/// Sets whether this process allocates buffers of large I/O in huge pages, which is the default. Buffers that exist
/// stay as they are.
pub fn set_huge_pages(on: bool) {
    HUGE_PAGES.store(on, Relaxed);
}

/// Whether this process allocates buffers of large I/O in huge pages.
pub fn has_huge_pages() -> bool {
    HUGE_PAGES.load(Relaxed)
}

/// A contiguous piece of memory of one I/O. The code that creates a segment promises that the memory stays
/// valid until the bio has completed, and that no thread accesses it meanwhile if the device writes to it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    /// The address of the first byte.
    pub ptr: *mut u8,
    /// The length of the segment in bytes.
    pub len: u32,
    /// The registration of the buffer that contains the segment, or [`Segment::UNREGISTERED`]. The end of
    /// that buffer may be unregistered.
    pub(crate) registered: u16,
}

impl Segment {
    pub(crate) const UNREGISTERED: u16 = registration::UNREGISTERED;

    /// A segment of `len` bytes from `ptr` on.
    pub const fn new(ptr: *mut u8, len: u32) -> Segment {
        Segment { ptr, len, registered: Segment::UNREGISTERED }
    }

    /// A segment of `len` bytes from `ptr` on that is inside `memory`. I/O on the ring of `memory` need not
    /// pin its pages. I/O on bytes outside of `memory` fails.
    pub fn registered(ptr: *mut u8, len: u32, memory: &RegisteredMemory) -> Segment {
        Segment { ptr, len, registered: memory.0 }
    }

    /// Whether the segment is inside memory that was registered.
    pub fn is_registered(&self) -> bool {
        self.registered != Segment::UNREGISTERED
    }

    /// Whether both segments are inside the same registered memory, or neither is in registered memory.
    pub fn same_registration(&self, other: &Segment) -> bool {
        self.registered == other.registered
    }
}

/// Owns registered memory that is not an [`IoBuffer`], and keeps it mapped.
pub(crate) type MemoryOwner = Arc<dyn Any + Send + Sync>;

/// Memory that is registered with a ring and is not an [`IoBuffer`]
/// ([`Registrar::register_memory`](crate::Registrar::register_memory)). Dropping the value ends the
/// registration.
#[derive(Debug)]
pub struct RegisteredMemory(pub(crate) u16);

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        registration::drop_buffer(self.0);
    }
}

// SAFETY: a segment is only an address. Which threads may access its memory is a promise of the owner: see
// `SegmentOwner`, an unsafe trait.
unsafe impl Send for Segment {}

/// Owned, zeroed, page-aligned memory for I/O.
pub struct IoBuffer {
    ptr: NonNull<u8>,
    len: u32,
    registered: u16,
    origin: Origin,
}

/// Where the memory of a buffer was allocated. [`Data`] stores its variants in the values that this enum does
/// not use, and so is as large as a buffer: two words, which are passed in registers.
#[derive(Clone, Copy)]
#[repr(u16)]
enum Origin {
    /// The heap, or the buffer's own mapping.
    Own,
    /// A row of buffers ([`IoBuffer::try_zeroed_row`]).
    Row,
}

// SAFETY: an IoBuffer owns its memory exclusively, as a Box<[u8]> does.
unsafe impl Send for IoBuffer {}
// SAFETY: shared access only reads, as with a Box<[u8]>.
unsafe impl Sync for IoBuffer {}

impl IoBuffer {
    /// Zeroed memory of `len` bytes, aligned to [`BUFFER_ALIGN`]. Panics if `len` is above 2 GiB. Aborts the
    /// process if there is not enough memory.
    pub fn zeroed(len: usize) -> IoBuffer {
        IoBuffer::try_zeroed(len).unwrap_or_else(|| handle_alloc_error(Self::layout(len as u32)))
    }

    /// Allocates as [`IoBuffer::zeroed`] does, but returns `None` if there is not enough memory. Panics if
    /// `len` is above 2 GiB.
    pub fn try_zeroed(len: usize) -> Option<IoBuffer> {
        assert!(len <= 1 << 31, "an IoBuffer has at most 2 GiB");
        let layout = Self::layout(len as u32);
        let ptr = if layout.size() < MAPPED_MIN_BYTES {
            // SAFETY: the size of the layout is not zero.
            unsafe { alloc_zeroed(layout) }
        } else {
            let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
            // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
            let mapped = unsafe { mmap_anonymous(null, layout.size(), protection, MapFlags::PRIVATE) };
            mapped.map_or(std::ptr::null_mut(), |ptr| ptr.cast())
        };
        let ptr = NonNull::new(ptr)?;
        Some(IoBuffer { ptr, len: len as u32, registered: Segment::UNREGISTERED, origin: Origin::Own })
    }

    /// Allocates as many zeroed buffers of `len` bytes as fit into 2 MiB, but at least one. The buffers are
    /// adjacent in memory that the kernel fills with huge pages if it has any. The memory is released when
    /// the last buffer is dropped. Returns an empty list if there is not enough memory, and after
    /// `set_huge_pages(false)`. Panics if `len` is 0, not a multiple of [`BUFFER_ALIGN`], or larger than 1 GiB.
    pub fn try_zeroed_row(len: usize) -> Vec<IoBuffer> {
        assert!(len > 0 && len.is_multiple_of(BUFFER_ALIGN) && len <= 1 << 30, "{len} bytes");
        if !has_huge_pages() {
            return Vec::new();
        }
        let count = (huge::HUGE_PAGE_BYTES / len).max(1);
        let Some(first) = huge::map(len, count, page_bytes()) else { return Vec::new() };
        let buffer = |index: usize| {
            // SAFETY: the mapping has room for `count` buffers.
            let ptr = unsafe { first.add(index * len) };
            IoBuffer { ptr, len: len as u32, registered: Segment::UNREGISTERED, origin: Origin::Row }
        };
        (0..count).map(buffer).collect()
    }

    fn layout(len: u32) -> Layout {
        let size = (len as usize).next_multiple_of(BUFFER_ALIGN).max(BUFFER_ALIGN);
        Layout::from_size_align(size, BUFFER_ALIGN).expect("at most 2 GiB, aligned to a page")
    }

    pub(crate) fn segment(&self) -> Segment {
        Segment { ptr: self.ptr.as_ptr(), len: self.len, registered: self.registered }
    }

    /// Releases the whole pages that lie inside the buffer. Their content is zeroes afterwards. Has no effect
    /// on a registered buffer, because its ring would continue to use the old pages.
    pub fn release_pages(&mut self) {
        Self::release_all_pages([self]);
    }

    /// Releases pages as [`IoBuffer::release_pages`] does, with one system call for adjacent `buffers`. If
    /// the kernel has filled them with a huge page and only a part of it is released, the kernel splits it
    /// into small pages, and I/O on these is more expensive.
    pub fn release_all_pages<'a>(buffers: impl IntoIterator<Item = &'a mut IoBuffer>) {
        let page = page_bytes();
        let pages_of = |buffer: &mut IoBuffer| {
            let pages = whole_pages(buffer.ptr.addr().get(), Self::layout(buffer.len).size(), page);
            // SAFETY: the address is inside the allocation.
            let first = unsafe { buffer.ptr.add(pages.start) };
            (!buffer.is_registered() && !pages.is_empty()).then_some((first, pages.len()))
        };
        let mut runs: Vec<_> = buffers.into_iter().filter_map(pages_of).collect();
        runs.sort_unstable();
        runs.dedup_by(|next, run| {
            let adjacent = run.0.addr().get() + run.1 == next.0.addr().get();
            run.1 += if adjacent { next.1 } else { 0 };
            adjacent
        });
        for (first, bytes) in runs {
            // SAFETY: these are whole pages that the buffers own exclusively. If the kernel refuses, the
            // pages merely stay allocated.
            let _ = unsafe { madvise(first.as_ptr().cast(), bytes, Advice::LinuxDontNeed) };
        }
    }

    /// Whether the buffer is registered with a ring that still exists
    /// ([`Registrar::register_buffer`](crate::Registrar::register_buffer)).
    pub fn is_registered(&self) -> bool {
        registration::is_open(self.registered)
    }

    pub(crate) fn set_registration(&mut self, number: u16) {
        registration::drop_buffer(std::mem::replace(&mut self.registered, number));
    }

    /// Called when the ring has removed the buffer from its table.
    pub(crate) fn clear_registration(&mut self) {
        self.registered = Segment::UNREGISTERED;
    }
}

/// The page size of the system in bytes, which the C library has known since the process started. rustix
/// would ask the kernel at its first call, which a confined thread is not permitted to do.
fn page_bytes() -> usize {
    // SAFETY: the call returns a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// The range of the `bytes` from `address` on that consists of whole pages of `page` bytes. If pages are
/// larger than [`BUFFER_ALIGN`], the first and the last page may also contain other memory of the heap.
fn whole_pages(address: usize, bytes: usize, page: usize) -> Range<usize> {
    let first = address.next_multiple_of(page) - address;
    let end = bytes.saturating_sub((address + bytes) % page);
    first..end.max(first)
}

impl Drop for IoBuffer {
    // Not inlined, to keep the code small that moves buffers and rarely drops one.
    #[cold]
    fn drop(&mut self) {
        registration::drop_buffer(self.registered);
        let layout = Self::layout(self.len);
        if let Origin::Row = self.origin {
            // SAFETY: the memory is from `try_zeroed_row`, and is no longer used.
            unsafe { huge::release(self.ptr) }
        } else if layout.size() < MAPPED_MIN_BYTES {
            // SAFETY: the memory was allocated in `try_zeroed` with the same layout, and is freed once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        } else {
            // SAFETY: the memory was mapped in `try_zeroed` with the same size, and is no longer used.
            let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), layout.size()) };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        }
    }
}

impl Deref for IoBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the buffer owns `len` initialised bytes. While an I/O is in flight, the block layer owns
        // the buffer and hands out no reference.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl DerefMut for IoBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len as usize) }
    }
}

impl fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoBuffer({} bytes)", self.len)
    }
}

/// The owner of scattered memory, such as the pages of a guest or the slices of a caller.
///
/// The submitter gets the concrete type back from a completion through [`Any`]: `(owner as &mut dyn
/// Any).downcast_mut()`.
///
/// # Safety
/// The segments must stay valid and unchanged until the owner is dropped, or is changed through an exclusive
/// borrow, which is impossible while a bio carries it. The memory must be accessible on all threads. Until a
/// bio with it has completed, no other code in this process may access memory that a read fills, or write
/// memory whose content a write transfers.
///
/// If the memory is shared with another process, such as a guest, that process may access it at any time. The
/// bytes of a segment can therefore change between two accesses, and a driver must not create references to
/// them: it passes their address to the kernel, or copies them through raw pointers and then uses only the
/// copy for checks and computations.
pub unsafe trait SegmentOwner: Any + Send {
    /// The memory, in the order of the bytes on the device.
    fn segments(&self) -> &[Segment];
}

struct Borrowed<T>(T);

// SAFETY: created only by `Data::borrowed`, whose caller promises what the trait demands.
unsafe impl<T: AsRef<[Segment]> + Send + 'static> SegmentOwner for Borrowed<T> {
    fn segments(&self) -> &[Segment] {
        self.0.as_ref()
    }
}

/// Pages of the kernel that the ring knows as a registered buffer, or a part of them; for example the pages
/// of a request to a ublk device. They have no address, so no thread can access them. Only READ_FIXED and
/// WRITE_FIXED on that ring move their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelPages {
    offset: u32,
    len: u32,
    index: u16,
}

impl KernelPages {
    /// The first `len` bytes of the registered buffer `index`.
    ///
    /// # Safety
    /// Bios with this value, a copy or a part of it must be submitted only to queues on the buffer's ring.
    /// The buffer must stay registered, with at least `len` bytes, until these bios have completed.
    pub unsafe fn new(index: u16, len: u32) -> KernelPages {
        KernelPages { offset: 0, len, index }
    }

    /// The index in the ring's table of registered buffers.
    pub fn index(self) -> u16 {
        self.index
    }

    /// Where the memory begins in the registered buffer, in bytes. A buffer of the kernel has no address, so
    /// operations on it use this offset instead.
    pub fn offset(self) -> u32 {
        self.offset
    }

    /// The length of the memory in bytes.
    #[allow(clippy::len_without_is_empty, reason = "no bio with data is empty")]
    pub fn len(self) -> u32 {
        self.len
    }

    /// The part of `len` bytes that begins at byte `skip`. Panics if the part does not end inside the memory.
    #[must_use]
    pub fn part(self, skip: u32, len: u32) -> KernelPages {
        assert!(skip.checked_add(len).is_some_and(|end| end <= self.len), "the part ends beyond the buffer");
        KernelPages { offset: self.offset + skip, len, index: self.index }
    }
}

/// The memory that a bio carries, and returns when it completes.
#[derive(Default)]
pub enum Data {
    /// No memory: flush, discard, write zeroes.
    #[default]
    None,
    /// An owned buffer, which is at least as long as the bio.
    Buffer(IoBuffer),
    /// Memory of another owner, which keeps it valid.
    Segments(Box<Box<dyn SegmentOwner>>),
    /// Memory that only operations of the ring can access. A bio with it never merges
    /// ([`BioFlags::NO_MERGE`](crate::BioFlags::NO_MERGE)), and is rejected unless the driver declares
    /// support ([`QueueLimits::kernel_pages`](crate::QueueLimits::kernel_pages)).
    Kernel(KernelPages),
}

impl Data {
    /// Memory that the caller owns.
    ///
    /// # Safety
    /// The memory must stay valid, and borrowed as the operation needs it, until the bio has completed.
    pub(crate) unsafe fn borrowed(segments: impl AsRef<[Segment]> + Send + 'static) -> Data {
        Data::Segments(Box::new(Box::new(Borrowed(segments))))
    }

    /// Calls `f` with the memory as segments, or with no segment if the memory has no address.
    pub(crate) fn with_segments<R>(&self, f: impl FnOnce(&[Segment]) -> R) -> R {
        match self {
            Data::None | Data::Kernel(_) => f(&[]),
            Data::Buffer(buffer) => f(&[buffer.segment()]),
            Data::Segments(owner) => f(owner.segments()),
        }
    }

    /// Calls `f` with segments that must be used only to measure the memory. Memory without an address is one
    /// segment, with the offset as its address.
    pub(crate) fn with_shape<R>(&self, f: impl FnOnce(&[Segment]) -> R) -> R {
        match self {
            Data::Kernel(pages) => f(&[Segment {
                ptr: std::ptr::without_provenance_mut(pages.offset as usize),
                len: pages.len,
                registered: pages.index,
            }]),
            _ => self.with_segments(f),
        }
    }

    /// The buffer, if the memory is one owned buffer.
    #[inline]
    pub fn into_buffer(self) -> Option<IoBuffer> {
        match self {
            Data::Buffer(buffer) => Some(buffer),
            _ => None,
        }
    }
}

impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Data::None => f.write_str("None"),
            Data::Buffer(buffer) => buffer.fmt(f),
            Data::Segments(owner) => write!(f, "Segments({})", owner.segments().len()),
            Data::Kernel(pages) => pages.fmt(f),
        }
    }
}

impl From<IoBuffer> for Data {
    fn from(buffer: IoBuffer) -> Data {
        Data::Buffer(buffer)
    }
}

const _: () = assert!(size_of::<Segment>() == 16);
const _: () = assert!(size_of::<IoBuffer>() == 16 && size_of::<Data>() == 16);

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn resident_pages(buffer: &IoBuffer) -> usize {
        let mut pages = vec![0u8; buffer.len().div_ceil(BUFFER_ALIGN)];
        // SAFETY: the result has one byte for each page of the buffer.
        let done =
            unsafe { libc::mincore(buffer.as_ptr().cast_mut().cast(), buffer.len(), pages.as_mut_ptr()) };
        assert_eq!(done, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn a_large_buffer_occupies_memory_as_it_is_filled() {
        let mut buffer = IoBuffer::zeroed(32 << 20);
        assert_eq!(resident_pages(&buffer), 0);
        buffer[5 << 20..6 << 20].fill(1);
        // With huge pages more memory is resident.
        assert!((256..=1536).contains(&resident_pages(&buffer)), "{}", resident_pages(&buffer));
        assert_eq!((buffer[0], buffer[6 << 20], buffer[(32 << 20) - 1]), (0, 0, 0));
        buffer.release_pages();
        assert_eq!((resident_pages(&buffer), buffer[5 << 20]), (0, 0));
    }

    #[test]
    fn adjacent_buffers_are_released_and_no_others() {
        let mut buffers: Vec<_> = (0..9).map(|_| IoBuffer::zeroed(MAPPED_MIN_BYTES)).collect();
        buffers.push(IoBuffer::zeroed(BUFFER_ALIGN));
        buffers.iter_mut().for_each(|buffer| buffer.fill(1));
        for kept in [3, 4, 9] {
            let others = buffers.iter_mut().enumerate().filter(|(index, _)| *index != kept);
            IoBuffer::release_all_pages(others.map(|(_, buffer)| buffer));
            for (index, buffer) in buffers.iter().enumerate() {
                let content = u8::from(index == kept);
                assert!(buffer.iter().all(|byte| *byte == content), "{index}, {kept} kept");
            }
            buffers.iter_mut().for_each(|buffer| buffer.fill(1));
        }
    }

    #[test]
    fn only_whole_pages_inside_the_buffer_are_released() {
        for page in [4096, 16 << 10, 64 << 10] {
            for address in (0..32).map(|index| (1 << 30) + index * BUFFER_ALIGN) {
                for bytes in (1..40).map(|count| count * BUFFER_ALIGN) {
                    let Range { start, end } = whole_pages(address, bytes, page);
                    assert!(start <= end);
                    if start < end {
                        assert!(
                            (address + start).is_multiple_of(page) && (address + end).is_multiple_of(page)
                        );
                        assert!(
                            end <= bytes && start < page && bytes - end < page,
                            "all whole pages are released"
                        );
                    } else {
                        assert!(bytes < 2 * page - BUFFER_ALIGN, "the buffer contains a whole page");
                    }
                }
            }
        }
    }

    #[test]
    fn a_part_of_kernel_pages_lies_inside_them() {
        // SAFETY: no bio is created with these pages.
        let pages = unsafe { KernelPages::new(3, 4096) };
        let part = pages.part(512, 3584);
        assert_eq!((part.offset(), part.len(), part.index()), (512, 3584, 3));
        for (skip, len) in [(512, 3585), (4097, 0), (u32::MAX, 2)] {
            let beyond = std::panic::catch_unwind(|| pages.part(skip, len));
            assert!(beyond.is_err(), "{skip} {len}");
        }
    }

    #[test]
    fn buffers_of_any_size_are_aligned_and_zeroed() {
        for len in [0, 1, 512, 4097, MAPPED_MIN_BYTES - 1, MAPPED_MIN_BYTES, MAPPED_MIN_BYTES + 1] {
            for _ in 0..3 {
                let mut buffer = IoBuffer::zeroed(len);
                assert!(buffer.len() == len && buffer.iter().all(|byte| *byte == 0));
                assert!(buffer.as_ptr().addr().is_multiple_of(BUFFER_ALIGN));
                buffer.fill(0xff);
            }
        }
    }
}
