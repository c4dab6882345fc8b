//! [`Registrar`]: what a driver or a source may ask of the ring of its thread. The ring itself is
//! never lent: with two of them in hand their places could be exchanged, and completions would
//! reach a queue that did not submit.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use super::{FileSlot, Ring};
use crate::buffer::{IoBuffer, MemoryOwner, RegisteredMemory};
use crate::error::Error;

/// Registers files and buffers with the ring of this thread (`io_uring_register(2)`), and answers
/// what the kernel supports.
pub struct Registrar<'a>(&'a mut Ring);

impl<'a> Registrar<'a> {
    pub(crate) fn new(ring: &'a mut Ring) -> Registrar<'a> {
        Registrar(ring)
    }

    /// Whether the kernel knows the operation with number `code` (`opcode::X::CODE`).
    pub fn supports(&self, code: u8) -> bool {
        self.0.supports(code)
    }

    /// Checks that the kernel knows every operation of `needed` (name and number).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), naming what is missing.
    pub fn require(&self, needed: &[(&str, u8)]) -> Result<(), Error> {
        self.0.require(needed)
    }

    /// Puts `fd` into the ring's file table, which keeps it open.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the table is full or the kernel refuses.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> Result<FileSlot, Error> {
        self.0.register_file(fd)
    }

    /// Takes a file out of the table and leaves `slot` empty. Operations in flight keep the file
    /// open. A slot that is dropped instead stays in the table for as long as the ring.
    ///
    /// # Panics
    /// If the slot is empty, or one of another ring.
    pub fn unregister_file(&mut self, slot: &mut FileSlot) {
        self.0.unregister_file(slot);
    }

    /// Registers `buffer`, so that direct I/O need not pin its pages each time. A buffer that
    /// cannot be registered (locked-memory limit, table full, registered already) stays as it is,
    /// which is no error. To another ring it is a buffer that is not registered; once dropped it
    /// leaves the table when room is needed.
    pub fn register_buffer(&mut self, buffer: &mut IoBuffer) {
        self.0.register_buffer(buffer);
    }

    /// [`Registrar::register_buffer`] for the first `bytes` of `buffer`, which has at least so many:
    /// data in these is registered. All of the buffer keeps its pages until that is undone.
    pub fn register_front(&mut self, buffer: &mut IoBuffer, bytes: usize) {
        self.0.register_front(buffer, bytes);
    }

    /// Undoes [`Registrar::register_buffer`] and [`Registrar::register_front`]; does nothing with a
    /// buffer of another ring.
    pub fn unregister_buffer(&mut self, buffer: &mut IoBuffer) {
        self.0.unregister_buffer(buffer);
    }

    /// Registers memory that is not a buffer's: the `bytes` from `start` on, 1 to
    /// [`REGISTERED_MEMORY_MAX_BYTES`](crate::ring::REGISTERED_MEMORY_MAX_BYTES). The kernel pins all of
    /// its pages, and makes those that are not there yet, which takes long; they stay what I/O on it
    /// reaches, whatever becomes of the mapping. [`Segment::registered`](crate::Segment::registered)
    /// makes pieces of it. It stays registered until the value is dropped and
    /// [`Registrar::unregister_dropped`] is called, or the ring is dropped; so does `owner`.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the table is full, or with the kernel's reason:
    /// ENOMEM if so much memory may not be locked or is not there, EOPNOTSUPP or EFAULT for pages of a
    /// file that is not on tmpfs or hugetlbfs.
    ///
    /// # Safety
    /// The bytes must be mapped, and nothing else be mapped in their place but by code that knows of
    /// it, for as long as `owner` lives.
    pub unsafe fn register_memory(
        &mut self,
        start: NonNull<u8>,
        bytes: usize,
        owner: MemoryOwner,
    ) -> Result<RegisteredMemory, Error> {
        // SAFETY: the caller's promise.
        unsafe { self.0.register_memory(start, bytes, owner) }
    }

    /// Unregisters buffers and memory that were dropped. Operations in flight keep their pages pinned.
    pub fn unregister_dropped(&mut self) {
        self.0.unregister_dropped();
    }

    /// Reserves `count` slots of the table of registered buffers for the kernel to fill, for as
    /// long as the ring. Returns the first of them.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if there are not so many.
    pub fn keep_kernel_buffers(&mut self, count: u16) -> Result<u16, Error> {
        self.0.keep_kernel_buffers(count)
    }

    /// Announces that operations on registered files, which never complete by themselves, will be
    /// in flight when the ring is dropped: the kernel then completes them, and closes the files,
    /// some time later.
    pub fn abandon(&mut self) {
        self.0.abandon();
    }
}
