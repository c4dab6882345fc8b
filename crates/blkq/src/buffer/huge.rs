//! Adjacent buffers in memory that the kernel may fill with huge pages. A device sees each page of a buffer
//! as a separate segment. With small pages a read of 256 KiB has 64 of them, and a virtual disk with a queue
//! of 256 descriptors has no room for more than three such reads. In a huge page the read is one segment.

use std::ptr::NonNull;
// Not checked by a model checker: the only protocol here is the reference count, which works as that of
// `Arc`.
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The bookkeeping of a row of buffers. It is stored in the mapping of the row, at the end of the page before
/// the first huge page. Each buffer begins in that huge page, which is how `row_of` finds the row.
struct Row {
    /// The number of buffers that are not released.
    buffers: AtomicUsize,
    base: NonNull<u8>,
    bytes: usize,
}

fn row_of(buffer: NonNull<u8>) -> NonNull<Row> {
    buffer
        .map_addr(|address| {
            let row = (address.get() & !(HUGE_PAGE_BYTES - 1)) - size_of::<Row>();
            row.try_into().expect("a page lies before the huge one")
        })
        .cast()
}

/// Maps zeroed memory for a row of `count` buffers of `len` bytes each, on a system with pages of `page`
/// bytes. Returns the address of the first buffer. The memory is unmapped by the last of `count` calls of
/// [`release`].
pub(super) fn map(len: usize, count: usize, page: usize) -> Option<NonNull<u8>> {
    let bytes = (count * len).next_multiple_of(HUGE_PAGE_BYTES);
    let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    let mapped = bytes + 2 * HUGE_PAGE_BYTES;
    // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
    let base = unsafe { mmap_anonymous(null, mapped, protection, MapFlags::PRIVATE) }.ok()?;
    let base = NonNull::new(base.cast::<u8>())?;
    let skip = (base.addr().get() + page).next_multiple_of(HUGE_PAGE_BYTES) - base.addr().get();
    for (unused, length) in [(0, skip - page), (skip + bytes, mapped - skip - bytes)] {
        if length > 0 {
            // SAFETY: these are whole pages of the new mapping, to which no reference exists yet.
            let unmapped = unsafe { munmap(base.add(unused).as_ptr().cast(), length) };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        }
    }
    // SAFETY: both are inside the mapping: the first huge page begins at most one page and one huge page
    // after the base, and a page is smaller than a huge page.
    let (first, base) = unsafe { (base.add(skip), base.add(skip - page)) };
    // SAFETY: the call changes how the kernel fills these pages, and not their content. If there are no huge
    // pages, the kernel uses small ones.
    let _ = unsafe { madvise(first.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    let row = Row { buffers: AtomicUsize::new(count), base, bytes: page + bytes };
    // SAFETY: the place is in the page before the first buffer, which is mapped for it. A page and the size
    // of a row are multiples of its alignment.
    unsafe { row_of(first).write(row) };
    Some(first)
}

/// # Safety
/// `buffer` must be the memory of a buffer of a row, which is not used after the call.
pub(super) unsafe fn release(buffer: NonNull<u8>) {
    let row = row_of(buffer);
    // SAFETY: the row exists while one of its buffers does, and this buffer exists until it is no longer
    // counted.
    if unsafe { row.as_ref() }.buffers.fetch_sub(1, Ordering::Release) > 1 {
        return;
    }
    // Acquire: what other threads did with their buffers, before they released them, happened before the
    // unmapping.
    fence(Ordering::Acquire);
    // SAFETY: this was the last buffer, so no other thread accesses the row.
    let (base, bytes) = unsafe { (row.as_ref().base, row.as_ref().bytes) };
    // SAFETY: the memory was mapped in `map`, and is no longer used.
    let unmapped = unsafe { munmap(base.as_ptr().cast(), bytes) };
    debug_assert!(unmapped.is_ok(), "{unmapped:?}");
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;
    use crate::IoBuffer;

    #[test]
    fn buffers_of_a_row_lie_side_by_side_and_are_zeroed() {
        for len in [4096, 12288, 64 << 10, 256 << 10, 1 << 20, 2 << 20, (4 << 20) + 4096] {
            let mut row = IoBuffer::try_zeroed_row(len);
            assert_eq!(row.len(), (HUGE_PAGE_BYTES / len).max(1));
            let first = row[0].as_ptr().addr();
            assert!(first.is_multiple_of(HUGE_PAGE_BYTES));
            for (index, buffer) in row.iter_mut().enumerate() {
                assert_eq!((buffer.as_ptr().addr(), buffer.len()), (first + index * len, len));
                assert!(buffer.iter().all(|byte| *byte == 0), "{len}, {index}");
                buffer.fill(0xff);
            }
        }
    }

    #[test]
    fn a_row_is_unmapped_with_its_last_buffer_on_any_thread() {
        for last in [0, 3, 7] {
            let mut row = IoBuffer::try_zeroed_row(256 << 10);
            // SAFETY: the buffers keep the row mapped.
            let (base, bytes) = unsafe {
                let row = row_of(NonNull::from(&row[0][..]).cast());
                (row.as_ref().base.addr().get(), row.as_ref().bytes)
            };
            let is_mapped = move || {
                let base = std::ptr::without_provenance_mut(base);
                let mut pages = vec![0; bytes.div_ceil(4096)];
                // SAFETY: the call writes only to its result, which has room for each page.
                unsafe { libc::mincore(base, bytes, pages.as_mut_ptr()) == 0 }
            };
            let mut kept = row.swap_remove(last);
            drop(row);
            kept.fill(7);
            assert!(is_mapped());
            std::thread::spawn(move || {
                assert!(kept.iter().all(|byte| *byte == 7));
                drop(kept);
                assert!(!is_mapped(), "{last}");
            })
            .join()
            .unwrap();
        }
    }

    #[test]
    fn the_system_is_asked_for_huge_pages_for_a_row() {
        let mut row = IoBuffer::try_zeroed_row(256 << 10);
        row[0].fill(1);
        let range = format!("{:x}-", row[0].as_ptr().addr());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_row = maps.split_once(&range).expect("the row has its own mapping").1;
        let flags = of_row.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        let possible = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(flags.contains(" hg"), possible, "{flags}");
    }
}
