//! Which ring has which buffer registered, and where in its table.
//!
//! A buffer has two bytes to know that by: the number of an entry of one table for all rings of
//! the process. The entry names the ring and the place in that ring's table, so that a buffer of
//! one ring means nothing to another. Buffer and ring may be dropped in any order, on different
//! threads: the entry, and with it the number, is free when both are.

use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

/// The number of no registration.
pub(crate) const UNREGISTERED: u16 = u16::MAX;

/// The buffer was dropped, or is registered anew.
pub(crate) const DROPPED: u64 = 1;
/// The ring was dropped.
pub(crate) const CLOSED: u64 = 2;
/// Shifts of the place and of the ring's number, which is not 0; an entry of 0 is free.
const PLACE_SHIFT: u32 = 2;
const RING_SHIFT: u32 = PLACE_SHIFT + u16::BITS;

/// One registration.
pub(crate) struct Entry(AtomicU64);

impl Entry {
    /// Takes the entry for `place` of the table of ring number `ring`, if it is free.
    fn claim(&self, ring: u64, place: u16) -> bool {
        let value = ring << RING_SHIFT | u64::from(place) << PLACE_SHIFT;
        self.0.load(Relaxed) == 0 && self.0.compare_exchange(0, value, Acquire, Relaxed).is_ok()
    }

    /// The place in the table of ring number `ring`, if it is of that ring. Asked while both
    /// buffer and ring are there.
    #[inline]
    pub fn place(&self, ring: u64) -> Option<u16> {
        let value = self.0.load(Relaxed);
        (value >> RING_SHIFT == ring).then_some((value >> PLACE_SHIFT) as u16)
    }

    /// One of the two is dropped, `side`: the second frees the entry.
    pub fn leave(&self, side: u64) {
        if self.0.fetch_or(side, AcqRel) & (DROPPED | CLOSED) & !side != 0 {
            self.free();
        }
    }

    pub fn has_left(&self, side: u64) -> bool {
        self.0.load(Acquire) & side != 0
    }

    /// By the last that uses it.
    pub fn free(&self) {
        self.0.store(0, Release);
    }
}

/// By number. Only what was in use takes memory. The model checkers have no statics, and their ring
/// registers nothing.
#[cfg(not(model_check))]
static ENTRIES: [Entry; UNREGISTERED as usize] = [const { Entry(AtomicU64::new(0)) }; UNREGISTERED as usize];

/// The registration with that number.
#[cfg(not(model_check))]
#[inline]
pub(crate) fn entry(number: u16) -> Option<&'static Entry> {
    ENTRIES.get(usize::from(number))
}

/// Takes a free entry for `place` of the table of ring number `ring`. Its number, if there is one.
#[cfg(not(model_check))]
pub(crate) fn claim(ring: u64, place: u16) -> Option<u16> {
    ENTRIES.iter().position(|entry| entry.claim(ring, place)).map(|number| number as u16)
}

/// Whether the ring of registration `number` is still there.
#[cfg(not(model_check))]
pub(crate) fn is_open(number: u16) -> bool {
    entry(number).is_some_and(|entry| !entry.has_left(CLOSED))
}

/// The buffer with registration `number` is dropped: its ring takes it out of its table later.
#[cfg(not(model_check))]
pub(crate) fn drop_buffer(number: u16) {
    if let Some(entry) = entry(number) {
        entry.leave(DROPPED);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_an_entry_is_free_once_buffer_and_ring_are_dropped() {
        crate::sync::model_within(3, "a registration", 0, || {
            let entry = Arc::new(Entry(AtomicU64::new(0)));
            assert!(entry.claim(7, 3) && entry.place(7) == Some(3) && entry.place(8).is_none());
            let other = Arc::clone(&entry);
            let ring = thread::spawn(move || other.leave(CLOSED));
            assert!(!entry.claim(9, 9), "the buffer is there");
            entry.leave(DROPPED);
            ring.join().unwrap();
            assert!(entry.claim(9, 9), "both are dropped");
        });
    }
}
