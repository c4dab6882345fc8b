//! Memory of I/O: [`IoBuffer`] owns aligned memory, [`Segment`] points into memory
//! that its owner keeps alive, [`KernelPages`] names memory that only the kernel reaches,
//! [`Data`] is what a bio carries.

mod huge;
#[cfg_attr(model_check, allow(dead_code, reason = "the ring of a model registers nothing"))]
pub(crate) mod registration;

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Alignment in bytes of every [`IoBuffer`]: a page, which satisfies the direct I/O of
/// every device known.
pub const BUFFER_ALIGN: usize = 4096;

/// Buffers of at least so many bytes are mappings of their own: they take memory, and the
/// time to zero it, page by page as they are filled.
const MAPPED_MIN_BYTES: usize = 256 << 10;

/// A piece of memory of one I/O. The code that makes one promises that the memory stays
/// valid, and untouched where the device writes it, until the bio has completed.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: u32,
    /// The registration of the buffer that all of it lies in, or [`Segment::UNREGISTERED`]. Of the
    /// buffer perhaps only a front is registered.
    pub(crate) registered: u16,
}

impl Segment {
    /// `registered` of memory that no ring knows.
    pub(crate) const UNREGISTERED: u16 = registration::UNREGISTERED;

    /// The `len` bytes from `ptr` on.
    pub const fn new(ptr: *mut u8, len: u32) -> Segment {
        Segment { ptr, len, registered: Segment::UNREGISTERED }
    }

    /// The `len` bytes from `ptr` on, all of them in `memory`: I/O on its ring need not pin their pages.
    /// I/O on bytes that are not fails.
    #[inline]
    pub fn registered(ptr: *mut u8, len: u32, memory: &RegisteredMemory) -> Segment {
        Segment { ptr, len, registered: memory.0 }
    }

    /// Whether it is in memory that was registered.
    #[inline]
    pub fn is_registered(&self) -> bool {
        self.registered != Segment::UNREGISTERED
    }

    /// Whether both are in memory that was registered as one, or neither in any.
    #[inline]
    pub fn same_registration(&self, other: &Segment) -> bool {
        self.registered == other.registered
    }
}

/// Keeps memory mapped that is not a buffer's.
pub(crate) type MemoryOwner = Arc<dyn Any + Send + Sync>;

/// Memory of another owner that a ring has registered
/// ([`Registrar::register_memory`](crate::Registrar::register_memory)), until this is dropped.
#[derive(Debug)]
pub struct RegisteredMemory(u16);

impl RegisteredMemory {
    /// Of registration `number`.
    #[cfg(not(model_check))]
    pub(crate) fn new(number: u16) -> RegisteredMemory {
        RegisteredMemory(number)
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        #[cfg(not(model_check))]
        registration::drop_buffer(self.0);
    }
}

// SAFETY: a segment is an address; what may be done with it on which thread is the
// promise of the code that made it (see `Data`, whose constructors demand it).
unsafe impl Send for Segment {}

/// Owned, zeroed, page-aligned memory for I/O.
pub struct IoBuffer {
    ptr: NonNull<u8>,
    len: u32,
    registered: u16,
    origin: Origin,
}

/// Where the memory of a buffer comes from. [`Data`] uses the values that this has not to distinguish its
/// variants, and so is as large as a buffer: two words, which move through registers.
#[derive(Clone, Copy)]
#[repr(u16)]
enum Origin {
    /// The heap, or a mapping of its own.
    Own,
    /// A row of buffers ([`IoBuffer::try_zeroed_row`]).
    Row,
}

// SAFETY: an IoBuffer owns its memory exclusively, as a Box<[u8]> does.
unsafe impl Send for IoBuffer {}
// SAFETY: shared access only reads, as with a Box<[u8]>.
unsafe impl Sync for IoBuffer {}

impl IoBuffer {
    /// Zeroed memory of `len` bytes (0 to 2 GiB), aligned to [`BUFFER_ALIGN`]. Aborts the process if
    /// there is none.
    ///
    /// # Panics
    /// If `len` is above 2 GiB.
    pub fn zeroed(len: usize) -> IoBuffer {
        IoBuffer::try_zeroed(len).unwrap_or_else(|| handle_alloc_error(Self::layout(len as u32)))
    }

    /// As [`IoBuffer::zeroed`], but `None` if there is no memory.
    ///
    /// # Panics
    /// If `len` is above 2 GiB.
    pub fn try_zeroed(len: usize) -> Option<IoBuffer> {
        assert!(len <= 1 << 31, "an IoBuffer has at most 2 GiB");
        let layout = Self::layout(len as u32);
        let ptr = if layout.size() < MAPPED_MIN_BYTES {
            // SAFETY: the layout's size is not zero.
            unsafe { alloc_zeroed(layout) }
        } else {
            let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
            // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
            let mapped = unsafe { mmap_anonymous(null, layout.size(), protection, MapFlags::PRIVATE) };
            mapped.map_or(std::ptr::null_mut(), |ptr| ptr.cast())
        };
        let ptr = NonNull::new(ptr)?;
        Some(IoBuffer { ptr, len: len as u32, registered: Segment::UNREGISTERED, origin: Origin::Own })
    }

    /// Zeroed buffers of `len` bytes each, a multiple of [`BUFFER_ALIGN`] and at most 1 GiB: as many as fit
    /// into 2 MiB, at least one, side by side in memory that the system fills with huge pages if it has
    /// any. That is released when the last of them is dropped. None of them if there is no memory.
    ///
    /// # Panics
    /// If `len` is 0, not such a multiple, or larger.
    pub fn try_zeroed_row(len: usize) -> Vec<IoBuffer> {
        assert!(len > 0 && len.is_multiple_of(BUFFER_ALIGN) && len <= 1 << 30, "{len} bytes");
        let count = (huge::HUGE_PAGE_BYTES / len).max(1);
        let Some(first) = huge::map(len, count, page_bytes()) else { return Vec::new() };
        let buffer = |index: usize| {
            // SAFETY: `count` of them fit into the mapping.
            let ptr = unsafe { first.add(index * len) };
            IoBuffer { ptr, len: len as u32, registered: Segment::UNREGISTERED, origin: Origin::Row }
        };
        (0..count).map(buffer).collect()
    }

    fn layout(len: u32) -> Layout {
        let size = (len as usize).next_multiple_of(BUFFER_ALIGN).max(BUFFER_ALIGN);
        Layout::from_size_align(size, BUFFER_ALIGN).expect("at most 2 GiB, aligned to a page")
    }

    /// The memory as one segment.
    #[inline]
    pub(crate) fn segment(&self) -> Segment {
        Segment { ptr: self.ptr.as_ptr(), len: self.len, registered: self.registered }
    }

    /// Releases the whole pages of the system that lie inside the buffer; their content is zeroes
    /// from then on. A buffer that a ring knows keeps its pages: the ring would go on with the old
    /// ones.
    pub fn release_pages(&mut self) {
        Self::release_all_pages([self]);
    }

    /// [`IoBuffer::release_pages`] of all `buffers`, those that lie side by side at once. The kernel
    /// may have filled them with huge pages; it splits one that is released in parts into small ones,
    /// and I/O on those costs it more from then on.
    pub fn release_all_pages<'a>(buffers: impl IntoIterator<Item = &'a mut IoBuffer>) {
        let page = page_bytes();
        let pages_of = |buffer: &mut IoBuffer| {
            let pages = whole_pages(buffer.ptr.addr().get(), Self::layout(buffer.len).size(), page);
            // SAFETY: inside the allocation.
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
            // SAFETY: whole pages that these buffers own exclusively. That the kernel does not
            // do it only leaves them where they are.
            let _ = unsafe { madvise(first.as_ptr().cast(), bytes, Advice::LinuxDontNeed) };
        }
    }

    /// Whether the buffer is registered with a ring that is still there
    /// ([`Registrar::register_buffer`](crate::Registrar::register_buffer)).
    pub fn is_registered(&self) -> bool {
        #[cfg(not(model_check))]
        return registration::is_open(self.registered);
        #[cfg(model_check)]
        return false;
    }

    /// Notes that the buffer's registration is `number`, and no longer what it was.
    #[cfg(not(model_check))]
    pub(crate) fn set_registration(&mut self, number: u16) {
        registration::drop_buffer(std::mem::replace(&mut self.registered, number));
    }

    /// The ring has taken the buffer out of its table.
    #[cfg(not(model_check))]
    pub(crate) fn clear_registration(&mut self) {
        self.registered = Segment::UNREGISTERED;
    }
}

/// Bytes of a page of the system, as the C library knows them since the process began: rustix asks
/// the kernel at its first call, which a confined thread may not.
fn page_bytes() -> usize {
    // SAFETY: returns a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Which of the `bytes` from `address` on are whole pages of `page` bytes. Where those are larger
/// than [`BUFFER_ALIGN`], the first and the last may be shared with other memory of the heap.
fn whole_pages(address: usize, bytes: usize, page: usize) -> Range<usize> {
    let first = address.next_multiple_of(page) - address;
    let end = bytes.saturating_sub((address + bytes) % page);
    first..end.max(first)
}

impl Drop for IoBuffer {
    // Out of line: code that moves buffers about, and drops none, need not carry it.
    #[cold]
    fn drop(&mut self) {
        #[cfg(not(model_check))]
        registration::drop_buffer(self.registered);
        let layout = Self::layout(self.len);
        if let Origin::Row = self.origin {
            // SAFETY: made by `try_zeroed_row`, and nobody uses it any more.
            unsafe { huge::release(self.ptr) }
        } else if layout.size() < MAPPED_MIN_BYTES {
            // SAFETY: allocated in `zeroed` with this very layout, freed once.
            unsafe { dealloc(self.ptr.as_ptr(), layout) }
        } else {
            // SAFETY: mapped in `zeroed` with this very size, and nobody uses it any more.
            let unmapped = unsafe { munmap(self.ptr.as_ptr().cast(), layout.size()) };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        }
    }
}

impl Deref for IoBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that we own; while an I/O is in flight the
        // block layer owns the buffer and hands out no reference.
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

/// The owner of scattered memory: a guest's pages, a caller's slices.
///
/// Its maker gets the concrete type back from a completion by way of [`Any`], and can use it again:
/// `(owner as &mut dyn Any).downcast_mut()`.
///
/// # Safety
/// The segments must stay valid, and the same, until the value is dropped, or changed by an exclusive
/// borrow of it, which nobody has while a bio carries it; and they may be accessed from any thread.
/// Until a bio with it has completed nothing else in this process may touch memory that a read fills,
/// nor write what a write reads.
///
/// Another process may do both at any time, if it shares the memory: a guest does. The bytes of a
/// segment can therefore differ from one look to the next, and a driver makes no reference to them: it
/// passes their address to the kernel, or copies them by raw pointers, and what it checks or computes
/// with is the copy.
pub unsafe trait SegmentOwner: Any + Send {
    /// The memory, in the order of the device's bytes.
    fn segments(&self) -> &[Segment];
}

/// Pages of the kernel's that the ring knows as a registered buffer, or a part of them: those
/// of a request to a ublk device, for one. There is no address, so no thread can touch them;
/// only READ_FIXED and WRITE_FIXED on that ring move their bytes.
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
    /// Bios with it, with a copy or a part of it must be submitted only to queues on the ring that
    /// knows it, and the buffer must stay registered, with at least `len` bytes, until they have
    /// completed.
    pub unsafe fn new(index: u16, len: u32) -> KernelPages {
        KernelPages { offset: 0, len, index }
    }

    /// Index in the ring's table of registered buffers.
    #[inline]
    pub fn index(self) -> u16 {
        self.index
    }

    /// Where it begins in the registered buffer, in bytes. A buffer of the kernel's has no
    /// address: operations on it are given this in its place.
    #[inline]
    pub fn offset(self) -> u32 {
        self.offset
    }

    /// Its length in bytes.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "no bio with data is empty")]
    pub fn len(self) -> u32 {
        self.len
    }

    /// The part of `len` bytes from byte `skip` on.
    ///
    /// # Panics
    /// If it does not end inside.
    #[must_use]
    pub fn part(self, skip: u32, len: u32) -> KernelPages {
        assert!(skip.checked_add(len).is_some_and(|end| end <= self.len), "a part beyond the buffer");
        KernelPages { offset: self.offset + skip, len, index: self.index }
    }
}

/// The memory that a bio carries and returns when it completes.
#[derive(Default)]
pub enum Data {
    /// No memory: flush, discard, write zeroes.
    #[default]
    None,
    /// One owned buffer; its length is at least that of the bio.
    Buffer(IoBuffer),
    /// Memory of another owner, which keeps it alive.
    Segments(Box<Box<dyn SegmentOwner>>),
    /// Memory that only the ring's operations reach; it makes a bio one that never merges
    /// ([`BioFlags::NO_MERGE`](crate::BioFlags::NO_MERGE)). Rejected unless the driver declares that it
    /// can ([`QueueLimits::kernel_pages`](crate::QueueLimits::kernel_pages)).
    Kernel(KernelPages),
}

impl Data {
    /// The memory as segments; none of memory that has no address.
    pub(crate) fn with_segments<R>(&self, f: impl FnOnce(&[Segment]) -> R) -> R {
        match self {
            Data::None | Data::Kernel(_) => f(&[]),
            Data::Buffer(buffer) => f(&[buffer.segment()]),
            Data::Segments(owner) => f(owner.segments()),
        }
    }

    /// The memory's pieces, only to be measured: memory without an address is one piece,
    /// whose offset is shown in the address's place.
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

    /// The buffer, if that is what the bio carried.
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

    /// Pages of `buffer` that take memory.
    fn resident_pages(buffer: &IoBuffer) -> usize {
        let mut pages = vec![0u8; buffer.len().div_ceil(BUFFER_ALIGN)];
        // SAFETY: one byte for each page of the buffer.
        let done =
            unsafe { libc::mincore(buffer.as_ptr().cast_mut().cast(), buffer.len(), pages.as_mut_ptr()) };
        assert_eq!(done, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn a_large_buffer_takes_memory_as_it_is_filled() {
        let mut buffer = IoBuffer::zeroed(32 << 20);
        assert_eq!(resident_pages(&buffer), 0);
        buffer[5 << 20..6 << 20].fill(1);
        // With huge pages it is some more.
        assert!((256..=1536).contains(&resident_pages(&buffer)), "{}", resident_pages(&buffer));
        assert_eq!((buffer[0], buffer[6 << 20], buffer[(32 << 20) - 1]), (0, 0, 0));
        buffer.release_pages();
        assert_eq!((resident_pages(&buffer), buffer[5 << 20]), (0, 0));
    }

    #[test]
    fn buffers_side_by_side_are_released_and_no_others() {
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
                        assert!(end <= bytes && start < page && bytes - end < page, "and all of them");
                    } else {
                        assert!(bytes < 2 * page - BUFFER_ALIGN, "there is one");
                    }
                }
            }
        }
    }

    #[test]
    fn a_part_of_kernel_pages_lies_inside_them() {
        // SAFETY: no bio is made of it.
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
