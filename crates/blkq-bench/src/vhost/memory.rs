//! The guest's memory: a memfd that this process maps, and the server too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::Result;

/// Memory that another process may write at any time: so it is read and written by atomics, or
/// by copies while the protocol leaves it to this side.
pub struct SharedMemory {
    file: OwnedFd,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread, and is accessed by atomics and copies of bytes alone.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Zeroes, `bytes` long, in a file that cannot shrink.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub fn new(bytes: usize) -> Result<SharedMemory> {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        SharedMemory::map(file, bytes)
    }

    /// Maps the first `bytes` of `file`.
    ///
    /// # Errors
    /// If it cannot be mapped.
    pub fn map(file: OwnedFd, bytes: usize) -> Result<SharedMemory> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, &file, 0)? };
        Ok(SharedMemory { file, start: start.cast(), bytes })
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Where it is in this process.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    fn at<T>(&self, offset: usize) -> *mut T {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + size_of::<T>() <= self.bytes);
        // SAFETY: it is inside of the mapping.
        unsafe { self.start.add(offset).cast() }
    }

    /// The byte at `offset`.
    pub fn atomic_u8(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: mapped for as long as self, aligned, and accessed by nothing but atomics while shared.
        unsafe { AtomicU8::from_ptr(self.at(offset)) }
    }

    /// The little-endian number at `offset`, which is a multiple of its size; and so on.
    pub fn atomic_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as above.
        unsafe { AtomicU16::from_ptr(self.at(offset)) }
    }

    /// Stores a number of 16 bits.
    pub fn store_u16(&self, offset: usize, value: u16) {
        self.atomic_u16(offset).store(value.to_le(), Ordering::Relaxed);
    }

    /// Stores a number of 32 bits.
    pub fn store_u32(&self, offset: usize, value: u32) {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    /// Loads a number of 32 bits.
    pub fn load_u32(&self, offset: usize) -> u32 {
        // SAFETY: as above.
        u32::from_le(unsafe { AtomicU32::from_ptr(self.at(offset)) }.load(Ordering::Relaxed))
    }

    /// Stores a number of 64 bits.
    pub fn store_u64(&self, offset: usize, value: u64) {
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at(offset)) }.store(value.to_le(), Ordering::Relaxed);
    }

    /// Copies `bytes` to `offset`.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset <= self.bytes && bytes.len() <= self.bytes - offset);
        // SAFETY: inside of the mapping, of which there are no references.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(offset), bytes.len()) };
    }

    /// Copies from `offset` to `bytes`.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        assert!(offset <= self.bytes && bytes.len() <= self.bytes - offset);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset), bytes.as_mut_ptr(), bytes.len()) };
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference outlives it.
        let _ = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}
