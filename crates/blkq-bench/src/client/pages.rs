//! A bounded cache of pages: what a file system keeps of its files.

use std::collections::{BTreeSet, HashMap};

/// The cache stores, and the client reads and writes, so many bytes at once.
pub const PAGE_BYTES: usize = 4096;

/// The state of a cached page.
#[derive(Clone, Copy, Default)]
struct Slot {
    page: u64,
    used: bool,
    /// Was used since the hand passed.
    referenced: bool,
    dirty: bool,
    /// Its data is on the way to the device.
    writing: bool,
}

/// Pages of a file in memory, so many at most; the longest unused clean one makes room
/// (the clock algorithm).
pub struct Pages {
    memory: Vec<u8>,
    slots: Vec<Slot>,
    index: HashMap<u64, usize>,
    dirty: BTreeSet<u64>,
    writing: usize,
    hand: usize,
}

impl Pages {
    /// A cache of `bytes`, a multiple of the page, at least 16 pages.
    pub fn new(bytes: usize) -> Pages {
        let count = (bytes / PAGE_BYTES).max(16);
        Pages {
            memory: vec![0; count * PAGE_BYTES],
            slots: vec![Slot::default(); count],
            index: HashMap::with_capacity(count),
            dirty: BTreeSet::new(),
            writing: 0,
            hand: 0,
        }
    }

    /// Most pages in it.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Pages in it.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Pages that must be written before they may go.
    pub fn unwritten(&self) -> usize {
        self.dirty.len() + self.writing
    }

    /// Pages to be written that are not on their way.
    pub fn dirty(&self) -> impl Iterator<Item = u64> {
        self.dirty.iter().copied()
    }

    /// Whether `page` is there.
    pub fn contains(&self, page: u64) -> bool {
        self.index.contains_key(&page)
    }

    fn memory_of(&mut self, slot: usize) -> &mut [u8] {
        &mut self.memory[slot * PAGE_BYTES..][..PAGE_BYTES]
    }

    /// The bytes of `page`, if it is there.
    pub fn get(&mut self, page: u64) -> Option<&[u8]> {
        let slot = *self.index.get(&page)?;
        self.slots[slot].referenced = true;
        Some(self.memory_of(slot))
    }

    /// Takes in what was read from the device, unless there is something newer. `false`: no
    /// room, because everything else must be written first.
    pub fn insert(&mut self, page: u64, bytes: &[u8]) -> bool {
        self.contains(page)
            || self.place(page).map(|slot| self.memory_of(slot).copy_from_slice(bytes)).is_some()
    }

    /// Takes in what was written. `false`: no room.
    pub fn write(&mut self, page: u64, bytes: &[u8]) -> bool {
        let Some(slot) = self.index.get(&page).copied().or_else(|| self.place(page)) else { return false };
        self.memory_of(slot).copy_from_slice(bytes);
        self.slots[slot].referenced = true;
        self.slots[slot].dirty = true;
        self.dirty.insert(page);
        true
    }

    /// Copies `page`, which is dirty, to be written to the device.
    pub fn begin_writing(&mut self, page: u64, into: &mut [u8]) {
        let slot = self.index[&page];
        into.copy_from_slice(self.memory_of(slot));
        self.slots[slot].dirty = false;
        self.slots[slot].writing = true;
        self.dirty.remove(&page);
        self.writing += 1;
    }

    /// `page` has been written.
    pub fn complete_write(&mut self, page: u64) {
        let slot = self.index[&page];
        self.slots[slot].writing = false;
        self.writing -= 1;
    }

    /// A slot for `page`: a free one, or that of a clean page.
    fn place(&mut self, page: u64) -> Option<usize> {
        // Twice around: the first time takes the marks away.
        for _ in 0..2 * self.slots.len() {
            let hand = self.hand;
            self.hand = (hand + 1) % self.slots.len();
            let slot = &mut self.slots[hand];
            if slot.dirty || slot.writing || std::mem::take(&mut slot.referenced) {
                continue;
            }
            if slot.used {
                self.index.remove(&slot.page);
            }
            *slot = Slot { page, used: true, ..Slot::default() };
            self.index.insert(page, hand);
            return Some(hand);
        }
        None
    }
}
