use crate::buffer::registration::{self, CLOSED, DROPPED};
use crate::buffer::{IoBuffer, MemoryOwner, Segment};
use crate::error::{Error, ErrorKind};

/// A slot of the table that is in use, by a buffer or by other memory.
struct TableEntry {
    /// The number in the process-wide table of registrations.
    number: u16,
    /// The number of registered bytes of a buffer; 0 for other memory, which counts towards no limit.
    bytes: usize,
    /// Kept while the kernel has the memory pinned, so that nothing else is mapped at its address.
    #[allow(dead_code, reason = "it is there to be dropped")]
    owner: Option<MemoryOwner>,
}

/// The table of registered buffers of one ring.
pub(crate) struct BufferTable {
    ring: u64,
    free: Vec<u16>,
    entries: Box<[Option<TableEntry>]>,
    /// The ends of the registrations, indexed by slot: the address just after the registered bytes.
    ends: Box<[usize]>,
    /// The number of registered bytes of buffers, and its limit.
    bytes: usize,
    pub bytes_max: usize,
}

impl BufferTable {
    /// A table of `places` slots for ring number `ring`, with buffers of at most `bytes_max` bytes together.
    pub fn new(ring: u64, places: u16, bytes_max: usize) -> BufferTable {
        let entries = (0..places).map(|_| None).collect();
        let ends = vec![0; usize::from(places)].into_boxed_slice();
        BufferTable { ring, free: (0..places).rev().collect(), entries, ends, bytes: 0, bytes_max }
    }

    pub fn has_room(&self, bytes: usize) -> bool {
        !self.free.is_empty() && self.bytes + bytes <= self.bytes_max
    }

    /// Assigns a slot to the first `bytes` of `buffer`. `None` if the table is full, or the buffer is shorter
    /// or already registered with a ring.
    pub fn insert(&mut self, buffer: &mut IoBuffer, bytes: usize) -> Option<u16> {
        if buffer.is_registered() || !self.has_room(bytes) || bytes > buffer.len() {
            return None;
        }
        let end = buffer.segment().ptr.addr() + bytes;
        let (place, number) = self.claim(bytes, end, None)?;
        buffer.set_registration(number);
        Some(place)
    }

    /// Assigns a slot to memory of `owner`, of any size. Returns the slot and the number of the registration;
    /// `None` if the table is full.
    pub fn insert_memory(&mut self, owner: MemoryOwner) -> Option<(u16, u16)> {
        // There is no end to check: users of such memory promise to name only parts of it.
        self.claim(0, usize::MAX, Some(owner))
    }

    fn claim(&mut self, bytes: usize, end: usize, owner: Option<MemoryOwner>) -> Option<(u16, u16)> {
        let place = self.free.pop()?;
        let Some(number) = registration::claim(self.ring, place) else {
            self.free.push(place);
            return None;
        };
        self.entries[usize::from(place)] = Some(TableEntry { number, bytes, owner });
        self.ends[usize::from(place)] = end;
        self.bytes += bytes;
        Some((place, number))
    }

    /// The slot of the buffer with registration `number`, if it belongs to this table.
    #[inline]
    pub fn place(&self, number: u16) -> Option<u16> {
        registration::entry(number)?.place(self.ring)
    }

    /// The slot of the buffer that contains `segment`, if it is in this table and is wholly registered.
    #[inline]
    pub fn place_of(&self, segment: &Segment) -> Option<u16> {
        let place = self.place(segment.registered)?;
        (segment.ptr.addr() + segment.len as usize <= self.ends[usize::from(place)]).then_some(place)
    }

    /// The slot of a buffer that was dropped, if there is one.
    pub fn next_dropped(&self) -> Option<u16> {
        let dropped = |entry: &Option<TableEntry>| {
            entry
                .as_ref()
                .and_then(|entry| registration::entry(entry.number))
                .is_some_and(|registration| registration.has_left(DROPPED))
        };
        self.entries.iter().position(dropped).map(|place| place as u16)
    }

    /// Releases the slot of a buffer that was dropped or is no longer registered. The slot is `reusable`
    /// unless the kernel still has a buffer in it.
    pub fn remove(&mut self, place: u16, reusable: bool) {
        let Some(entry) = self.entries[usize::from(place)].take() else { return };
        self.bytes -= entry.bytes;
        if let Some(registration) = registration::entry(entry.number) {
            registration.free();
        }
        if reusable {
            self.free.push(place);
        } else {
            // The kernel still has the memory pinned, so neither the memory nor the number may be reused.
            std::mem::forget(entry);
        }
    }
}

pub(super) fn table_is_full() -> Error {
    Error::new(ErrorKind::System, "the ring's table of registered buffers is full")
}

impl Drop for BufferTable {
    fn drop(&mut self) {
        for entry in self.entries.iter().flatten() {
            if let Some(registration) = registration::entry(entry.number) {
                registration.leave(CLOSED);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::token::new_ring_id;

    #[test]
    fn only_segments_in_the_registered_front_are_registered() {
        let mut table = BufferTable::new(new_ring_id(), 2, 4096);
        let mut buffer = IoBuffer::zeroed(16384);
        assert_eq!(table.insert(&mut buffer, 16384), None, "it is larger than the limit of bytes");
        let place = table.insert(&mut buffer, 4096).unwrap();
        let part = |skip: usize, len| Segment {
            ptr: buffer.segment().ptr.wrapping_add(skip),
            len,
            ..buffer.segment()
        };
        for (skip, len, registered) in
            [(0, 4096, true), (512, 3584, true), (0, 4097, false), (3584, 1024, false), (4096, 512, false)]
        {
            assert_eq!(table.place_of(&part(skip, len)).is_some(), registered, "{skip}, {len}");
        }
        assert_eq!(table.place_of(&buffer.segment()), None);
        table.remove(place, true);
        assert!(table.has_room(4096), "its bytes no longer count");
        let mut small = IoBuffer::zeroed(512);
        assert_eq!(table.insert(&mut small, 4096), None, "it has fewer bytes");
    }
}
