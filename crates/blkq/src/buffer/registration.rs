//! Which ring has which buffer registered, and where in its table.
//!
//! A buffer has two bytes to know that by: the number of an entry of one table for all rings of
//! the process. The entry names the ring and the place in that ring's table, so that a buffer of
//! one ring means nothing to another. Buffer and ring may be dropped in any order, on different
//! threads: the entry, and with it the number, is free when both are.

use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

#[cfg(not(any(loom, shuttle)))]
pub(crate) use process::{BufferTable, drop_buffer, is_open};

/// The buffer was dropped, or is registered anew.
const DROPPED: u64 = 1;
/// The ring was dropped.
const CLOSED: u64 = 2;
/// Shifts of the place and of the ring's number, which is not 0; an entry of 0 is free.
const PLACE_SHIFT: u32 = 2;
const RING_SHIFT: u32 = PLACE_SHIFT + u16::BITS;

/// One registration.
struct Entry(AtomicU64);

impl Entry {
    /// Takes the entry for `place` of the table of ring number `ring`, if it is free.
    fn claim(&self, ring: u64, place: u16) -> bool {
        let value = ring << RING_SHIFT | u64::from(place) << PLACE_SHIFT;
        self.0.load(Relaxed) == 0 && self.0.compare_exchange(0, value, Acquire, Relaxed).is_ok()
    }

    /// The place in the table of ring number `ring`, if that is whose it is. Asked while both
    /// buffer and ring are there.
    #[inline]
    fn place(&self, ring: u64) -> Option<u16> {
        let value = self.0.load(Relaxed);
        (value >> RING_SHIFT == ring).then_some((value >> PLACE_SHIFT) as u16)
    }

    /// One of the two is dropped, `side`: the second frees the entry.
    fn leave(&self, side: u64) {
        if self.0.fetch_or(side, AcqRel) & (DROPPED | CLOSED) & !side != 0 {
            self.free();
        }
    }

    fn has_left(&self, side: u64) -> bool {
        self.0.load(Acquire) & side != 0
    }

    /// By the last that uses it.
    fn free(&self) {
        self.0.store(0, Release);
    }
}

/// The entries of this process. The model checkers have no statics, and their ring registers nothing.
#[cfg(not(any(loom, shuttle)))]
mod process {
    use super::{AtomicU64, CLOSED, DROPPED, Entry};
    use crate::buffer::{IoBuffer, Segment};

    /// By number. Only what was in use takes memory.
    static ENTRIES: [Entry; Segment::UNREGISTERED as usize] =
        [const { Entry(AtomicU64::new(0)) }; Segment::UNREGISTERED as usize];

    fn entry(number: u16) -> Option<&'static Entry> {
        ENTRIES.get(usize::from(number))
    }

    /// Whether the ring of registration `number` is still there.
    pub fn is_open(number: u16) -> bool {
        entry(number).is_some_and(|entry| !entry.has_left(CLOSED))
    }

    /// The buffer with registration `number` is dropped: its ring takes it out of its table later.
    pub fn drop_buffer(number: u16) {
        if let Some(entry) = entry(number) {
            entry.leave(DROPPED);
        }
    }

    /// One ring's table of registered buffers.
    pub struct BufferTable {
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
            let Some(number) = ENTRIES.iter().position(|entry| entry.claim(self.ring, place)) else {
                self.free.push(place);
                return None;
            };
            self.held[usize::from(place)] = Some((number as u16, buffer.len()));
            self.bytes += buffer.len();
            buffer.set_registration(number as u16);
            Some(place)
        }

        /// The place of the buffer with registration `number`, if it is one of this table.
        #[inline]
        pub fn place(&self, number: u16) -> Option<u16> {
            entry(number)?.place(self.ring)
        }

        /// A place whose buffer was dropped.
        pub fn next_dropped(&self) -> Option<u16> {
            let dropped = |held: &Option<(u16, usize)>| {
                held.and_then(|(number, _)| entry(number)).is_some_and(|entry| entry.has_left(DROPPED))
            };
            self.held.iter().position(dropped).map(|place| place as u16)
        }

        /// Frees a place, which is `reusable` if the kernel has no buffer in it any more. Its buffer
        /// was dropped or is no longer registered.
        pub fn remove(&mut self, place: u16, reusable: bool) {
            let Some((number, bytes)) = self.held[usize::from(place)].take() else { return };
            self.bytes -= bytes;
            if let Some(entry) = entry(number) {
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
                if let Some(entry) = entry(*number) {
                    entry.leave(CLOSED);
                }
            }
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_an_entry_is_free_when_buffer_and_ring_are_gone_and_not_before() {
        crate::sync::model_within(3, "a registration", 0, || {
            let entry = Arc::new(Entry(AtomicU64::new(0)));
            assert!(entry.claim(7, 3) && entry.place(7) == Some(3) && entry.place(8).is_none());
            let other = Arc::clone(&entry);
            let ring = thread::spawn(move || other.leave(CLOSED));
            assert!(!entry.claim(9, 9), "the buffer is there");
            entry.leave(DROPPED);
            ring.join().unwrap();
            assert!(entry.claim(9, 9), "both are gone");
        });
    }
}
