//! Slices of L2 tables and refcount blocks in memory, of which only some fit.

use std::collections::HashMap;
use std::ops::Range;

use super::header::u64_at;

/// Memory of a cache in bytes: L2 slices for 64 GiB of a device with clusters of 64 KiB.
pub(super) const CACHE_BYTES: usize = 8 << 20;
/// Largest slice in bytes.
pub(super) const SLICE_MAX_BYTES: u64 = 4096;
/// The part of the slices that may be dirty before they are written.
const DIRTY_PART: usize = 4;

/// Where a slice is: an image of the chain, and a byte of its file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Key {
    pub layer: u8,
    pub offset: u64,
}

/// The tables that slices are parts of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Table {
    L2,
    Refcounts,
}

#[derive(Clone, Copy)]
struct Slot {
    key: Key,
    table: Table,
    used: bool,
    dirty: bool,
    /// It is being written, from a copy: the file does not have it yet.
    writing: bool,
    /// It was used since the hand passed it.
    recent: bool,
}

/// The slices. The slot of a slice is valid until another slice is inserted.
pub(super) struct Cache {
    slots: Vec<Slot>,
    places: HashMap<Key, usize>,
    bytes: Vec<u8>,
    slice_bytes: usize,
    hand: usize,
    dirty: usize,
}

impl Cache {
    /// A cache of `bytes`, for slices of `slice_bytes`.
    pub fn new(bytes: usize, slice_bytes: usize) -> Cache {
        let count = bytes / slice_bytes;
        let key = Key { layer: 0, offset: 0 };
        let empty = Slot { key, table: Table::L2, used: false, dirty: false, writing: false, recent: false };
        Cache {
            slots: vec![empty; count],
            places: HashMap::new(),
            // Zeroed memory that is not used takes no space.
            bytes: vec![0; count * slice_bytes],
            slice_bytes,
            hand: 0,
            dirty: 0,
        }
    }

    /// Bytes of a slice.
    pub fn slice_bytes(&self) -> usize {
        self.slice_bytes
    }

    /// The slot of the slice, if it is here.
    pub fn find(&mut self, key: Key) -> Option<usize> {
        let slot = *self.places.get(&key)?;
        self.slots[slot].recent = true;
        Some(slot)
    }

    /// As [`Cache::find`], for somebody who only passes by.
    pub fn peek(&self, key: Key) -> Option<usize> {
        self.places.get(&key).copied()
    }

    /// The content of a slice.
    pub fn get(&self, slot: usize) -> &[u8] {
        &self.bytes[slot * self.slice_bytes..][..self.slice_bytes]
    }

    /// Entry `index` of a slice of an L2 table.
    pub fn entry(&self, slot: usize, index: usize) -> u64 {
        u64_at(self.get(slot), index * 8)
    }

    /// The byte of the file of an entry of a slice of an L2 table.
    pub fn entry_offset(&self, slot: usize, index: usize) -> u64 {
        self.slots[slot].key.offset + index as u64 * 8
    }

    /// The content of a slice, to be changed: it is dirty now.
    pub fn change(&mut self, slot: usize) -> &mut [u8] {
        if !self.slots[slot].dirty {
            self.slots[slot].dirty = true;
            self.dirty += 1;
        }
        &mut self.bytes[slot * self.slice_bytes..][..self.slice_bytes]
    }

    /// Sets entry `index` of a slice of an L2 table.
    pub fn set_entry(&mut self, slot: usize, index: usize, entry: u64) {
        self.change(slot)[index * 8..index * 8 + 8].copy_from_slice(&entry.to_be_bytes());
    }

    /// Inserts a slice with the content that the file has. Without room, which is when all slices are
    /// dirty or being written, returns `None`.
    pub fn insert(&mut self, key: Key, table: Table, content: &[u8]) -> Option<usize> {
        if let Some(slot) = self.find(key) {
            return Some(slot);
        }
        let slot = self.victim()?;
        if self.slots[slot].used {
            self.places.remove(&self.slots[slot].key);
        }
        self.slots[slot] = Slot { key, table, used: true, dirty: false, writing: false, recent: true };
        self.places.insert(key, slot);
        self.bytes[slot * self.slice_bytes..][..self.slice_bytes].copy_from_slice(content);
        Some(slot)
    }

    fn victim(&mut self) -> Option<usize> {
        // Twice around: the first time the recently used are passed over.
        for _ in 0..2 * self.slots.len() {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.slots.len();
            let found = &mut self.slots[slot];
            if !found.used || !found.dirty && !found.writing && !found.recent {
                return Some(slot);
            }
            found.recent = false;
        }
        None
    }

    /// Drops the slices of a range of the file, which has another use from now on.
    pub fn forget(&mut self, layer: u8, range: Range<u64>) {
        for offset in range.step_by(self.slice_bytes) {
            if let Some(slot) = self.places.remove(&Key { layer, offset }) {
                self.dirty -= usize::from(self.slots[slot].dirty);
                (self.slots[slot].used, self.slots[slot].dirty) = (false, false);
                (self.slots[slot].writing, self.slots[slot].recent) = (false, false);
            }
        }
    }

    /// Whether a slice is dirty.
    pub fn is_dirty(&self) -> bool {
        self.dirty > 0
    }

    /// Whether so many slices are dirty that they should be written before there are more.
    pub fn is_crowded(&self) -> bool {
        self.dirty >= self.slots.len() / DIRTY_PART
    }

    /// Takes the dirty slices of one kind, to be written: they are clean from now on, and stay here until
    /// [`Cache::written`].
    pub fn take_dirty(&mut self, table: Table) -> Vec<(Key, Vec<u8>)> {
        let mut taken = Vec::new();
        if self.dirty == 0 {
            return taken;
        }
        for slot in 0..self.slots.len() {
            if self.slots[slot].dirty && self.slots[slot].table == table {
                (self.slots[slot].dirty, self.slots[slot].writing) = (false, true);
                self.dirty -= 1;
                taken.push((self.slots[slot].key, self.get(slot).to_vec()));
            }
        }
        taken.sort_by_key(|(key, _)| key.offset);
        taken
    }

    /// A slice of [`Cache::take_dirty`] was written, or else is dirty again.
    pub fn written(&mut self, key: Key, done: bool) {
        let Some(slot) = self.peek(key) else { return };
        self.slots[slot].writing = false;
        if !done {
            self.change(slot);
        }
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    fn key(offset: u64) -> Key {
        Key { layer: 0, offset }
    }

    #[test]
    fn slices_that_the_file_lacks_stay_and_others_make_room() {
        let mut cache = Cache::new(4 * 512, 512);
        for at in 0..4 {
            let slot = cache.insert(key(at * 512), Table::L2, &[at as u8; 512]).unwrap();
            if at < 3 {
                cache.set_entry(slot, 1, 7);
            }
        }
        assert!(cache.is_crowded());
        assert!(cache.insert(key(4096), Table::L2, &[9; 512]).is_some());
        assert!(cache.peek(key(3 * 512)).is_none() && cache.peek(key(0)).is_some());
        cache.change(cache.peek(key(4096)).unwrap());
        assert!(cache.insert(key(8192), Table::L2, &[9; 512]).is_none());
        // One that is written from a copy stays too: the file has the old one.
        let taken = cache.take_dirty(Table::L2);
        assert_eq!((taken.len(), cache.is_dirty()), (4, false));
        assert_eq!(u64_at(&taken[0].1, 8), 7);
        assert!(cache.insert(key(8192), Table::L2, &[9; 512]).is_none());
        cache.written(key(0), true);
        cache.written(key(512), false);
        assert!(cache.insert(key(8192), Table::L2, &[9; 512]).is_some());
        assert!(cache.peek(key(0)).is_none() && cache.is_dirty());
    }

    #[test]
    fn a_forgotten_slice_is_not_written() {
        let mut cache = Cache::new(4 * 512, 512);
        let slot = cache.insert(key(512), Table::Refcounts, &[0; 512]).unwrap();
        cache.change(slot)[0] = 1;
        cache.forget(0, 0..1024);
        assert!(!cache.is_dirty() && cache.take_dirty(Table::Refcounts).is_empty());
    }
}
