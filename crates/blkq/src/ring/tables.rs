use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::buffer::registration::{self, CLOSED, DROPPED, Entry};
use crate::buffer::{IoBuffer, MemoryOwner, Segment};
use crate::kick::Kick;

/// A slot of the table of buffers that is in use, by a buffer or by other memory.
struct TableEntry {
    registration: &'static Entry,
    /// The number of registered bytes of a buffer; 0 for other memory, which counts towards no limit.
    bytes: usize,
    /// Kept while the kernel has the memory pinned, so that nothing else is mapped at its address.
    #[allow(dead_code, reason = "it is there to be dropped")]
    owner: Option<MemoryOwner>,
}

/// The tables of registered files and buffers of one ring, and the kicks for which it waits.
pub(crate) struct Tables {
    /// The number of the ring, which no other ring of the process has had.
    pub ring: u64,
    pub free_files: Vec<u32>,
    free: Vec<u16>,
    entries: Box<[Option<TableEntry>]>,
    /// The ends of the registrations, indexed by slot: the address just after the registered bytes.
    ends: Box<[usize]>,
    /// The number of registered bytes of buffers, and its limit.
    bytes: usize,
    pub bytes_max: usize,
    /// The slots that only the kernel fills, and that are not reserved yet.
    pub kernel_buffers: Range<u16>,
    /// Indexed by the payload of the tokens of [`KICK`](super::KICK).
    pub kicks: Vec<Arc<Kick>>,
    /// Operations in flight never complete by themselves, so dropping the ring must not wait for them.
    pub abandoned: bool,
}

impl Tables {
    /// Tables with slots for `files` files, `buffers` buffers of at most `bytes_max` bytes together, and
    /// `kernel_buffers` buffers of the kernel.
    pub fn new(files: u32, buffers: u16, bytes_max: usize, kernel_buffers: u16) -> Tables {
        static NEXT_RING: AtomicU64 = AtomicU64::new(1);
        Tables {
            ring: NEXT_RING.fetch_add(1, Relaxed),
            free_files: (0..files).rev().collect(),
            free: (0..buffers).rev().collect(),
            entries: (0..buffers).map(|_| None).collect(),
            ends: vec![0; usize::from(buffers)].into_boxed_slice(),
            bytes: 0,
            bytes_max,
            kernel_buffers: buffers..buffers + kernel_buffers,
            kicks: Vec::new(),
            abandoned: false,
        }
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

    /// Assigns a slot to the memory that ends at `end`. Returns the slot and the number of the registration;
    /// `None` if the table is full. The table keeps `owner` until the kernel has unpinned the pages.
    pub fn claim(&mut self, bytes: usize, end: usize, owner: Option<MemoryOwner>) -> Option<(u16, u16)> {
        let place = self.free.pop()?;
        let Some((number, registration)) = registration::claim(self.ring, place) else {
            self.free.push(place);
            return None;
        };
        self.entries[usize::from(place)] = Some(TableEntry { registration, bytes, owner });
        self.ends[usize::from(place)] = end;
        self.bytes += bytes;
        Some((place, number))
    }

    /// The slot of the buffer with registration `number`, if it belongs to this table.
    pub fn place(&self, number: u16) -> Option<u16> {
        registration::entry(number)?.place(self.ring)
    }

    /// The slot of the buffer that contains `segment`, if it is in this table and is wholly registered.
    pub fn place_of(&self, segment: &Segment) -> Option<u16> {
        let place = self.place(segment.registered)?;
        (segment.ptr.addr() + segment.len as usize <= self.ends[usize::from(place)]).then_some(place)
    }

    /// The slot of a buffer that was dropped, if there is one.
    pub fn next_dropped(&self) -> Option<u16> {
        let dropped = |entry: &Option<TableEntry>| {
            entry.as_ref().is_some_and(|entry| entry.registration.has_left(DROPPED))
        };
        self.entries.iter().position(dropped).map(|place| place as u16)
    }

    /// Releases the slot of a buffer that was dropped or is no longer registered. The slot is `reusable`
    /// unless the kernel still has a buffer in it.
    pub fn remove(&mut self, place: u16, reusable: bool) {
        let Some(entry) = self.entries[usize::from(place)].take() else { return };
        self.bytes -= entry.bytes;
        entry.registration.free();
        if reusable {
            self.free.push(place);
        } else {
            // The kernel still has the memory pinned, so neither the memory nor the number may be reused.
            std::mem::forget(entry);
        }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        self.entries.iter().flatten().for_each(|entry| entry.registration.leave(CLOSED));
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn only_segments_in_the_registered_front_are_registered() {
        let mut table = Tables::new(0, 2, 4096, 0);
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
