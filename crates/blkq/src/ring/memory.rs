//! The registered buffers and memory of a ring, which avoid that direct I/O pins pages each time.

use std::ptr::NonNull;

use super::Ring;
use super::buffers::table_is_full;
use crate::buffer::{IoBuffer, MemoryOwner, RegisteredMemory, Segment};
use crate::error::Error;

impl Ring {
    pub fn register_buffer(&mut self, buffer: &mut IoBuffer) {
        self.register_front(buffer, buffer.len());
    }

    pub fn register_front(&mut self, buffer: &mut IoBuffer, bytes: usize) {
        if !self.buffers.has_room(bytes) {
            self.unregister_dropped();
        }
        let Some(place) = self.buffers.insert(buffer, bytes) else { return };
        if self.update_buffer(place, buffer.as_mut_ptr(), bytes).is_err() {
            self.buffers.remove(place, true);
            buffer.clear_registration();
        }
    }

    pub fn unregister_buffer(&mut self, buffer: &mut IoBuffer) {
        let Some(place) = self.buffers.place(buffer.segment().registered) else { return };
        self.unregister_place(place);
        buffer.clear_registration();
    }

    /// Registers memory as [`Registrar::register_memory`](super::Registrar::register_memory) does. Removes
    /// memory that was dropped from the table first.
    ///
    /// # Safety
    /// The requirements of that method apply. The table keeps the owner until the kernel has unpinned the pages.
    pub unsafe fn register_memory(
        &mut self,
        start: NonNull<u8>,
        bytes: usize,
        owner: MemoryOwner,
    ) -> Result<RegisteredMemory, Error> {
        self.unregister_dropped();
        let (place, number) = self.buffers.insert_memory(owner).ok_or_else(table_is_full)?;
        match self.update_buffer(place, start.as_ptr(), bytes) {
            Ok(()) => Ok(RegisteredMemory::new(number)),
            Err(error) => {
                self.buffers.remove(place, true);
                Err(Error::system("cannot register memory with io_uring", error))
            }
        }
    }

    /// The slot of the registered buffer in which `segment` lies, for use in an entry. `None` if the buffer
    /// is not registered with this ring, or not all of the segment is registered.
    #[inline]
    pub fn registered_buffer(&self, segment: &Segment) -> Option<u16> {
        if segment.registered == Segment::UNREGISTERED {
            return None;
        }
        self.buffers.place_of(segment)
    }

    pub fn unregister_dropped(&mut self) {
        while let Some(place) = self.buffers.next_dropped() {
            self.unregister_place(place);
        }
    }

    fn unregister_place(&mut self, place: u16) {
        let done = self.update_buffer(place, std::ptr::null_mut(), 0);
        self.buffers.remove(place, done.is_ok());
    }
}
