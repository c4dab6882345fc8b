//! [`Registrar`]: the operations that a driver or a source may perform on the ring of its thread. The ring
//! itself is never lent: code that borrowed two rings could swap them, and completions would reach a queue
//! that did not submit the operations.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use io_uring::types;

use super::{FileSlot, Ring};
use crate::buffer::{IoBuffer, MemoryOwner, RegisteredMemory};
use crate::error::{Error, ErrorKind};

/// Registers files and buffers with the ring of this thread (`io_uring_register(2)`), and reports what the
/// kernel supports.
pub struct Registrar<'a>(&'a mut Ring);

impl<'a> Registrar<'a> {
    pub(crate) fn new(ring: &'a mut Ring) -> Registrar<'a> {
        Registrar(ring)
    }

    /// Whether the kernel supports the operation with number `code` (`opcode::X::CODE`).
    pub fn supports(&self, code: u8) -> bool {
        self.0.supports(code)
    }

    /// Checks that the kernel supports all operations of `needed`, given as name and number. Fails with
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) and the names of the missing operations.
    pub fn require(&self, needed: &[(&str, u8)]) -> Result<(), Error> {
        let missing: Vec<&str> =
            needed.iter().filter(|(_, code)| !self.supports(*code)).map(|(name, _)| *name).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let message =
            format!("this kernel's io_uring lacks {}: blkq needs Linux 6.1 or newer", missing.join(", "));
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Adds `fd` to the ring's file table, which keeps the file open. Fails with
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the table is full or the kernel refuses the file.
    pub fn register_file(&mut self, fd: BorrowedFd<'_>) -> Result<FileSlot, Error> {
        let Some(index) = self.0.tables.free_files.pop() else {
            return Err(Error::new(ErrorKind::System, "the ring's file table is full"));
        };
        self.0.update_file(index, fd.as_raw_fd()).map_err(|e| {
            self.0.tables.free_files.push(index);
            Error::system("cannot register a file with io_uring", e)
        })?;
        Ok(FileSlot { ring: self.0.tables.ring, index })
    }

    /// Removes a file from the table and leaves `slot` empty. Operations in flight keep the file open. If a
    /// slot is dropped instead, the file stays in the table until the ring is dropped. Panics if the slot is
    /// empty, or belongs to another ring.
    pub fn unregister_file(&mut self, slot: &mut FileSlot) {
        let types::Fixed(index) = self.0.file(slot);
        slot.ring = 0;
        if self.0.update_file(index, -1).is_ok() {
            self.0.tables.free_files.push(index);
        }
    }

    /// Registers `buffer`, so that direct I/O need not pin its pages each time. It is not an error if a
    /// buffer cannot be registered (locked-memory limit, full table, already registered): the buffer works as
    /// before. For other rings a registered buffer is an ordinary buffer. If a registered buffer is dropped,
    /// it is removed from the table when room is needed.
    pub fn register_buffer(&mut self, buffer: &mut IoBuffer) {
        self.register_front(buffer, buffer.len());
    }

    /// Registers the first `bytes` of `buffer`, as [`Registrar::register_buffer`] does; the buffer must have
    /// at least that number of bytes. Only I/O inside these bytes uses the registration. While the buffer is
    /// registered, none of its pages can be released.
    pub fn register_front(&mut self, buffer: &mut IoBuffer, bytes: usize) {
        if !self.0.tables.has_room(bytes) {
            self.unregister_dropped();
        }
        let Some(place) = self.0.tables.insert(buffer, bytes) else { return };
        if self.0.update_buffer(place, buffer.as_mut_ptr(), bytes).is_err() {
            self.0.tables.remove(place, true);
            buffer.clear_registration();
        }
    }

    /// Removes the registration of [`Registrar::register_buffer`] or [`Registrar::register_front`]. Does
    /// nothing with a buffer that is registered with another ring.
    pub fn unregister_buffer(&mut self, buffer: &mut IoBuffer) {
        let Some(place) = self.0.tables.place(buffer.segment().registered) else { return };
        self.unregister_place(place);
        buffer.clear_registration();
    }

    /// Registers memory that is not an [`IoBuffer`]: `bytes` bytes from `start` on, 1 to
    /// [`REGISTERED_MEMORY_MAX_BYTES`](crate::ring::REGISTERED_MEMORY_MAX_BYTES). The kernel pins all pages,
    /// after allocating those that do not exist yet, which takes long. I/O on the registration reaches these
    /// pages even if the mapping changes later. [`Segment::registered`](crate::Segment::registered) makes
    /// segments of the memory.
    ///
    /// The memory stays registered, and `owner` alive, until the returned value is dropped and
    /// [`Registrar::unregister_dropped`] is called, or until the ring is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) if the table is full, or with the kernel's reason:
    /// ENOMEM if the memory exceeds the locked-memory limit or cannot be allocated, EOPNOTSUPP or EFAULT for
    /// pages of a file that is not on tmpfs or hugetlbfs.
    ///
    /// # Safety
    /// The bytes must be mapped while `owner` exists, and only code that takes the registration into account
    /// may map other memory at their addresses.
    pub unsafe fn register_memory(
        &mut self,
        start: NonNull<u8>,
        bytes: usize,
        owner: MemoryOwner,
    ) -> Result<RegisteredMemory, Error> {
        self.unregister_dropped();
        // There is no end to check: users of such memory promise to name only parts of it.
        let claimed = self.0.tables.claim(0, usize::MAX, Some(owner));
        let (place, number) = claimed.ok_or_else(table_is_full)?;
        self.0.update_buffer(place, start.as_ptr(), bytes).map_err(|error| {
            self.0.tables.remove(place, true);
            Error::system("cannot register memory with io_uring", error)
        })?;
        Ok(RegisteredMemory(number))
    }

    /// Unregisters buffers and memory that were dropped. Operations in flight keep their pages pinned.
    pub fn unregister_dropped(&mut self) {
        while let Some(place) = self.0.tables.next_dropped() {
            self.unregister_place(place);
        }
    }

    fn unregister_place(&mut self, place: u16) {
        let done = self.0.update_buffer(place, std::ptr::null_mut(), 0);
        self.0.tables.remove(place, done.is_ok());
    }

    /// Reserves `count` slots of the table of registered buffers for the kernel to fill, until the ring is
    /// dropped. Returns the first of them. Fails with [`ErrorKind::System`](crate::ErrorKind::System) if
    /// fewer slots are left.
    pub fn keep_kernel_buffers(&mut self, count: u16) -> Result<u16, Error> {
        let left = &mut self.0.tables.kernel_buffers;
        if count > left.end - left.start {
            return Err(table_is_full());
        }
        left.start += count;
        Ok(left.start - count)
    }

    /// Announces that operations on registered files will be in flight when the ring is dropped, and never
    /// complete by themselves. The kernel then completes these operations, and closes the files, some time
    /// later.
    pub fn abandon(&mut self) {
        self.0.tables.abandoned = true;
    }
}

fn table_is_full() -> Error {
    Error::new(ErrorKind::System, "the ring's table of registered buffers is full")
}
