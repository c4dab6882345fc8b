//! The table of a ring's registered buffers.

use crate::buffer::IoBuffer;
use crate::buffer::registration::{self, CLOSED, DROPPED};

/// One ring's table of registered buffers.
pub(crate) struct BufferTable {
    ring: u64,
    /// Places that are free.
    free: Vec<u16>,
    /// By place: the number of the registration and the length of the buffer.
    held: Box<[Option<(u16, usize)>]>,
    /// Bytes registered, and the most that there may be.
    bytes: usize,
    pub bytes_max: usize,
}

impl BufferTable {
    /// A table of `places` for buffers of up to `bytes_max` together, of ring number `ring`.
    pub fn new(ring: u64, places: u16, bytes_max: usize) -> BufferTable {
        let held = vec![None; usize::from(places)].into_boxed_slice();
        BufferTable { ring, free: (0..places).rev().collect(), held, bytes: 0, bytes_max }
    }

    /// Whether there is room for a buffer of `bytes`.
    pub fn has_room(&self, bytes: usize) -> bool {
        !self.free.is_empty() && self.bytes + bytes <= self.bytes_max
    }

    /// Gives `buffer` a place; none if the table is full, or the buffer has one somewhere.
    pub fn insert(&mut self, buffer: &mut IoBuffer) -> Option<u16> {
        if buffer.is_registered() || !self.has_room(buffer.len()) {
            return None;
        }
        let place = self.free.pop()?;
        let Some(number) = registration::claim(self.ring, place) else {
            self.free.push(place);
            return None;
        };
        self.held[usize::from(place)] = Some((number, buffer.len()));
        self.bytes += buffer.len();
        buffer.set_registration(number);
        Some(place)
    }

    /// The place of the buffer with registration `number`, if it is one of this table.
    #[inline]
    pub fn place(&self, number: u16) -> Option<u16> {
        registration::entry(number)?.place(self.ring)
    }

    /// A place whose buffer was dropped.
    pub fn next_dropped(&self) -> Option<u16> {
        let dropped = |held: &Option<(u16, usize)>| {
            held.and_then(|(number, _)| registration::entry(number))
                .is_some_and(|entry| entry.has_left(DROPPED))
        };
        self.held.iter().position(dropped).map(|place| place as u16)
    }

    /// Frees a place, which is `reusable` if the kernel has no buffer in it any more. Its buffer
    /// was dropped or is no longer registered.
    pub fn remove(&mut self, place: u16, reusable: bool) {
        let Some((number, bytes)) = self.held[usize::from(place)].take() else { return };
        self.bytes -= bytes;
        if let Some(entry) = registration::entry(number) {
            entry.free();
        }
        if reusable {
            self.free.push(place);
        }
    }
}

impl Drop for BufferTable {
    fn drop(&mut self) {
        for (number, _) in self.held.iter().flatten() {
            if let Some(entry) = registration::entry(*number) {
                entry.leave(CLOSED);
            }
        }
    }
}
