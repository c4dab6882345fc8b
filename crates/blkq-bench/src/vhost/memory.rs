//! The guest's memory: a memfd that this process and the server map.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::Result;

/// Memory that the server may write at any time, so all of it is accessed as atomics. The atomics are Relaxed,
/// because `queue.rs` orders them with the ring's indexes.
pub struct SharedMemory {
    file: OwnedFd,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and is accessed only by atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Creates `bytes` of zeroes, in a file that cannot shrink.
    pub fn new(bytes: usize) -> Result<SharedMemory> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0)? };
        Ok(SharedMemory { file, start: start.cast(), bytes })
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn address(&self) -> u64 {
        self.start as u64
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes);
        // SAFETY: the offset is inside of the mapping, as asserted above.
        unsafe { self.start.add(offset).cast() }
    }

    pub fn atomic_u8(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: mapped as long as self exists, aligned, and accessed only by atomics while shared.
        unsafe { AtomicU8::from_ptr(self.at(offset)) }
    }

    /// The 16-bit little-endian number at `offset`, which must be a multiple of 2.
    pub fn atomic_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as above.
        unsafe { AtomicU16::from_ptr(self.at(offset)) }
    }

    pub fn store_u16(&self, offset: usize, value: u16) {
        self.atomic_u16(offset).store(value.to_le(), Ordering::Relaxed);
    }

    pub fn store_u32(&self, offset: usize, value: u32) {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    pub fn load_u32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        u32::from_le(unsafe { AtomicU32::from_ptr(self.at(offset)) }.load(Ordering::Relaxed))
    }

    pub fn store_u64(&self, offset: usize, value: u64) {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no reference outlives it.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}
