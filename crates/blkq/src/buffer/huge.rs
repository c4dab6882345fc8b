//! Buffers side by side in memory that the system may fill with huge pages.
//!
//! The pages of a buffer are pieces for a device: 256 KiB of small pages are 64 of them, and a queue
//! of a virtual disk with 256 descriptors has three such reads at once. In a huge page they are one.

use std::ptr::NonNull;
// There is no protocol here that a model checker could check, but that of Arc.
use std::sync::atomic::{AtomicUsize, Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Size and alignment of a huge page in bytes, where small ones have 4 KiB.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The mapping of a row of buffers. It lies in the mapping itself, at the end of the page before the first
/// buffer's: each buffer begins in the huge page behind it.
struct Row {
    /// Buffers that are not released.
    buffers: AtomicUsize,
    /// Of the mapping.
    base: NonNull<u8>,
    bytes: usize,
}

/// The row that `buffer` is in.
fn row_of(buffer: NonNull<u8>) -> NonNull<Row> {
    buffer
        .map_addr(|address| {
            let row = (address.get() & !(HUGE_PAGE_BYTES - 1)) - size_of::<Row>();
            row.try_into().expect("a page lies before the huge one")
        })
        .cast()
}

/// Maps zeroed memory for a row of `count` buffers of `len` bytes each, on a system with pages of `page`
/// bytes; `count` calls of [`release`] unmap it. Returns the address of the first one.
pub(super) fn map(len: usize, count: usize, page: usize) -> Option<NonNull<u8>> {
    let bytes = (count * len).next_multiple_of(HUGE_PAGE_BYTES);
    let (protection, null) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
    let mapped = bytes + 2 * HUGE_PAGE_BYTES;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing.
    let base = unsafe { mmap_anonymous(null, mapped, protection, MapFlags::PRIVATE) }.ok()?;
    let base = NonNull::new(base.cast::<u8>())?;
    let skip = (base.addr().get() + page).next_multiple_of(HUGE_PAGE_BYTES) - base.addr().get();
    for (unused, length) in [(0, skip - page), (skip + bytes, mapped - skip - bytes)] {
        if length > 0 {
            // SAFETY: whole pages of the mapping, of which nobody knows yet.
            let unmapped = unsafe { munmap(base.add(unused).as_ptr().cast(), length) };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        }
    }
    // SAFETY: inside the mapping: the first huge page's begin is at most one page and one huge page
    // behind the base, and pages are smaller than a huge one.
    let (first, base) = unsafe { (base.add(skip), base.add(skip - page)) };
    // SAFETY: changes how the kernel fills these pages, and not what is in them. Without huge pages
    // they are filled with small ones.
    let _ = unsafe { madvise(first.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
    let row = Row { buffers: AtomicUsize::new(count), base, bytes: page + bytes };
    // SAFETY: the place lies in the page before the first buffer, which is mapped for it, and a page
    // and the size of a row are multiples of its alignment.
    unsafe { row_of(first).write(row) };
    Some(first)
}

/// Drops a buffer's part in its row.
///
/// # Safety
/// `buffer` is the memory of a buffer of a row, which is not used from then on.
pub(super) unsafe fn release(buffer: NonNull<u8>) {
    let row = row_of(buffer);
    // SAFETY: the row is there as long as one of its buffers, which this one is until it counts no more.
    if unsafe { row.as_ref() }.buffers.fetch_sub(1, Ordering::Release) > 1 {
        return;
    }
    // Other threads are done with their buffers.
    fence(Ordering::Acquire);
    // SAFETY: this was the last buffer, so nobody else has the row.
    let (base, bytes) = unsafe { (row.as_ref().base, row.as_ref().bytes) };
    // SAFETY: mapped in `map`, and nobody uses any of it any more.
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
            // SAFETY: the buffers keep the row.
            let (base, bytes) = unsafe {
                let row = row_of(NonNull::from(&row[0][..]).cast());
                (row.as_ref().base.addr().get(), row.as_ref().bytes)
            };
            let is_mapped = move || {
                let base = std::ptr::without_provenance_mut(base);
                let mut pages = vec![0; bytes.div_ceil(4096)];
                // SAFETY: the call looks at no memory but its result, which has room for each page.
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
        let of_row = maps.split_once(&range).expect("a mapping of its own").1;
        let flags = of_row.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        let possible = std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists();
        assert_eq!(flags.contains(" hg"), possible, "{flags}");
    }
}
