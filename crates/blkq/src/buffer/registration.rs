//! A table of all registrations of buffers with rings. A buffer has two bytes to store its registration: the
//! number of an entry in one table for all rings of the process. The entry contains the ring and the slot in
//! the ring's table, so that other rings ignore the registration. Buffer and ring may be dropped in any
//! order, and on different threads. The entry, and with it the number, is free when both are dropped.

use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

pub(crate) const UNREGISTERED: u16 = u16::MAX;

/// Flag of an entry: the buffer was dropped, or was registered again.
pub(crate) const DROPPED: u64 = 1;
/// Flag of an entry: the ring was dropped.
pub(crate) const CLOSED: u64 = 2;
/// The shifts of the slot and of the ring's number in an entry. The ring's number is not 0, so an entry of 0
/// is free.
const PLACE_SHIFT: u32 = 2;
const RING_SHIFT: u32 = PLACE_SHIFT + u16::BITS;

/// A registration of a buffer with a ring, or a free entry.
pub(crate) struct Entry(AtomicU64);

impl Entry {
    /// Takes the entry for slot `place` of the table of ring number `ring`, if the entry is free. Acquire
    /// pairs with the release in [`Entry::free`].
    fn claim(&self, ring: u64, place: u16) -> bool {
        let value = ring << RING_SHIFT | u64::from(place) << PLACE_SHIFT;
        self.0.load(Relaxed) == 0 && self.0.compare_exchange(0, value, Acquire, Relaxed).is_ok()
    }

    /// The slot in the table of ring number `ring`, if the entry belongs to that ring. Must be called only
    /// while both buffer and ring exist, so a relaxed load is enough.
    pub fn place(&self, ring: u64) -> Option<u16> {
        let value = self.0.load(Relaxed);
        (value >> RING_SHIFT == ring).then_some((value >> PLACE_SHIFT) as u16)
    }

    /// Called when the buffer or the ring is dropped, as `side` says. The second call frees the entry.
    pub fn leave(&self, side: u64) {
        if self.0.fetch_or(side, AcqRel) & (DROPPED | CLOSED) & !side != 0 {
            self.free();
        }
    }

    pub fn has_left(&self, side: u64) -> bool {
        self.0.load(Acquire) & side != 0
    }

    /// Called by the last user of the entry.
    pub fn free(&self) {
        self.0.store(0, Release);
    }
}

/// Indexed by number. Only pages with entries that were used occupy memory.
#[cfg(not(model_check))]
static ENTRIES: [Entry; UNREGISTERED as usize] = [const { Entry(AtomicU64::new(0)) }; UNREGISTERED as usize];
/// The model checkers have no statics, so their rings register nothing.
#[cfg(model_check)]
static ENTRIES: [Entry; 0] = [];

pub(crate) fn entry(number: u16) -> Option<&'static Entry> {
    ENTRIES.get(usize::from(number))
}

/// Takes a free entry for slot `place` of the table of ring number `ring`, and returns it with its number; `None` if
/// all are in use.
pub(crate) fn claim(ring: u64, place: u16) -> Option<(u16, &'static Entry)> {
    ENTRIES
        .iter()
        .enumerate()
        .find(|(_, entry)| entry.claim(ring, place))
        .map(|(at, entry)| (at as u16, entry))
}

pub(crate) fn is_open(number: u16) -> bool {
    entry(number).is_some_and(|entry| !entry.has_left(CLOSED))
}

/// Called when the buffer with registration `number` is dropped. Its ring removes it from its table later.
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
