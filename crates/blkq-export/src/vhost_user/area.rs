//! A part of a ring, in memory that the guest shares: read and written only as atomics, at offsets
//! that are checked.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use super::mapping::Mapping;

/// Bytes that the guest and this process both access, which stay mapped as long as the value.
pub struct Area {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the bytes mapped.
    _mapping: Arc<Mapping>,
}

// SAFETY: the bytes are shared with another process anyway, and accessed only as atomics.
unsafe impl Send for Area {}

macro_rules! atomic {
    ($name:ident, $atomic:ty) => {
        /// The word at `offset`, in the byte order of virtio: little endian.
        ///
        /// # Panics
        /// If it is not inside, or not aligned.
        #[inline(always)]
        pub fn $name(&self, offset: usize) -> &$atomic {
            let inside = offset.checked_add(size_of::<$atomic>()).is_some_and(|end| end <= self.bytes);
            assert!(inside && offset.is_multiple_of(align_of::<$atomic>()), "beside a ring");
            // SAFETY: inside, and aligned, as `start` is for the largest of them that is used here
            // (see `new`); the guest writes it as another process. The mapping lives as long as
            // `self`.
            unsafe { self.start.add(offset).cast::<$atomic>().as_ref() }
        }
    };
}

impl Area {
    /// The `bytes` from `start` on.
    ///
    /// # Safety
    /// They must be mapped for reading and writing, for as long as `mapping` lives.
    pub unsafe fn new(mapping: Arc<Mapping>, start: NonNull<u8>, bytes: usize) -> Area {
        Area { start, bytes, _mapping: mapping }
    }

    atomic!(u16_at, AtomicU16);
    atomic!(u32_at, AtomicU32);
    atomic!(u64_at, AtomicU64);
}
