//! The page cache of the modelled file system: a fixed number of pages with clock replacement.

use std::collections::{BTreeSet, HashMap};

/// Size of a page, and of each read and write of the client.
pub const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, Default)]
struct Slot {
    page: Option<u64>,
    /// Whether the page was used since the clock hand passed it.
    referenced: bool,
    dirty: bool,
    writing: bool,
}

/// A bounded number of cached pages. The clock algorithm replaces clean pages that were not used recently.
pub struct Pages {
    memory: Vec<u8>,
    slots: Vec<Slot>,
    index: HashMap<u64, usize>,
    dirty: BTreeSet<u64>,
    writing: usize,
    hand: usize,
}

impl Pages {
    /// A cache of `bytes`, a multiple of the page size; it has at least 16 pages.
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

    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Number of pages that are dirty or being written.
    pub fn unwritten(&self) -> usize {
        self.dirty.len() + self.writing
    }

    /// Dirty pages that are not being written, in ascending order.
    pub fn dirty(&self) -> impl Iterator<Item = u64> {
        self.dirty.iter().copied()
    }

    pub fn contains(&self, page: u64) -> bool {
        self.index.contains_key(&page)
    }

    fn memory_of(&mut self, slot: usize) -> &mut [u8] {
        &mut self.memory[slot * PAGE_BYTES..][..PAGE_BYTES]
    }

    pub fn get(&mut self, page: u64) -> Option<&[u8]> {
        let slot = *self.index.get(&page)?;
        self.slots[slot].referenced = true;
        Some(self.memory_of(slot))
    }

    /// Caches data that was read from the device, unless the page is cached already. Returns `false` if all pages of the
    /// cache are dirty or being written.
    pub fn insert(&mut self, page: u64, bytes: &[u8]) -> bool {
        self.contains(page)
            || self.place(page).map(|slot| self.memory_of(slot).copy_from_slice(bytes)).is_some()
    }

    /// Stores written data. Returns `false` if all pages of the cache are dirty or being written.
    pub fn write(&mut self, page: u64, bytes: &[u8]) -> bool {
        let Some(slot) = self.index.get(&page).copied().or_else(|| self.place(page)) else { return false };
        self.memory_of(slot).copy_from_slice(bytes);
        self.slots[slot].referenced = true;
        self.slots[slot].dirty = true;
        self.dirty.insert(page);
        true
    }

    /// Copies the dirty page `page` to `into`, and marks it as being written.
    pub fn begin_writing(&mut self, page: u64, into: &mut [u8]) {
        let slot = self.index[&page];
        into.copy_from_slice(self.memory_of(slot));
        self.slots[slot].dirty = false;
        self.slots[slot].writing = true;
        self.dirty.remove(&page);
        self.writing += 1;
    }

    pub fn complete_write(&mut self, page: u64) {
        let slot = self.index[&page];
        self.slots[slot].writing = false;
        self.writing -= 1;
    }

    /// Finds a slot for `page`: a free slot, or the slot of a clean page.
    fn place(&mut self, page: u64) -> Option<usize> {
        // Two rounds, because the first one may only clear the `referenced` marks.
        for _ in 0..2 * self.slots.len() {
            let hand = self.hand;
            self.hand = (hand + 1) % self.slots.len();
            let slot = &mut self.slots[hand];
            if slot.dirty || slot.writing || std::mem::take(&mut slot.referenced) {
                continue;
            }
            if let Some(page) = slot.page {
                self.index.remove(&page);
            }
            *slot = Slot { page: Some(page), ..Slot::default() };
            self.index.insert(page, hand);
            return Some(hand);
        }
        None
    }
}
