//! A cache for slices of L2 tables and refcount blocks, with second-chance replacement.

use std::collections::HashMap;
use std::ops::Range;

use crate::qcow2::format::u64_at;

/// Size of the cache in bytes: enough L2 slices for 64 GiB of a device with clusters of 64 KiB.
pub const CACHE_BYTES: usize = 8 << 20;
/// The dirty slices should be written once they are `1 / DIRTY_PART` of all slices.
const DIRTY_PART: usize = 4;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Key {
    pub layer: u8,
    pub offset: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Table {
    #[default]
    L2,
    Refcounts,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    key: Key,
    table: Table,
    used: bool,
    dirty: bool,
    /// A copy of the slice is being written. Until then the file has the old content: the slice must not be
    /// evicted.
    writing: bool,
    /// Used since the clock hand last passed the slot.
    recent: bool,
}

/// The cached slices. A slot number is valid until the next [`Cache::insert`].
pub struct Cache {
    slots: Vec<Slot>,
    places: HashMap<Key, usize>,
    bytes: Vec<u8>,
    slice_bytes: usize,
    hand: usize,
    dirty: usize,
}

impl Cache {
    pub fn new(bytes: usize, slice_bytes: usize) -> Cache {
        let count = bytes / slice_bytes;
        Cache {
            slots: vec![Slot::default(); count],
            places: HashMap::new(),
            // `vec!` of zeroes asks for zeroed pages, which take no memory until they are used.
            bytes: vec![0; count * slice_bytes],
            slice_bytes,
            hand: 0,
            dirty: 0,
        }
    }

    pub fn slice_bytes(&self) -> usize {
        self.slice_bytes
    }

    pub fn find(&mut self, key: Key) -> Option<usize> {
        let slot = *self.places.get(&key)?;
        self.slots[slot].recent = true;
        Some(slot)
    }

    pub fn peek(&self, key: Key) -> Option<usize> {
        self.places.get(&key).copied()
    }

    pub fn get(&self, slot: usize) -> &[u8] {
        &self.bytes[slot * self.slice_bytes..][..self.slice_bytes]
    }

    pub fn entry(&self, slot: usize, index: usize) -> u64 {
        u64_at(self.get(slot), index * 8)
    }

    pub fn entry_offset(&self, slot: usize, index: usize) -> u64 {
        self.slots[slot].key.offset + index as u64 * 8
    }

    pub fn change(&mut self, slot: usize) -> &mut [u8] {
        if !self.slots[slot].dirty {
            self.slots[slot].dirty = true;
            self.dirty += 1;
        }
        &mut self.bytes[slot * self.slice_bytes..][..self.slice_bytes]
    }

    pub fn set_entry(&mut self, slot: usize, index: usize, entry: u64) {
        self.change(slot)[index * 8..index * 8 + 8].copy_from_slice(&entry.to_be_bytes());
    }

    /// Inserts a slice with its content in the file. Returns `None` if all slices are dirty or being written.
    pub fn insert(&mut self, key: Key, table: Table, content: &[u8]) -> Option<usize> {
        if let Some(slot) = self.find(key) {
            return Some(slot);
        }
        let slot = self.victim()?;
        if self.slots[slot].used {
            self.places.remove(&self.slots[slot].key);
        }
        self.slots[slot] = Slot { key, table, used: true, recent: true, ..Slot::default() };
        self.places.insert(key, slot);
        self.bytes[slot * self.slice_bytes..][..self.slice_bytes].copy_from_slice(content);
        Some(slot)
    }

    fn victim(&mut self) -> Option<usize> {
        // Two rounds: the first clears the `recent` marks of slots that it passes.
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

    /// Drops the slices of a range of the file without writing them, because the range gets another use.
    pub fn forget(&mut self, layer: u8, range: Range<u64>) {
        for offset in range.step_by(self.slice_bytes) {
            if let Some(slot) = self.places.remove(&Key { layer, offset }) {
                self.dirty -= usize::from(self.slots[slot].dirty);
                self.slots[slot] = Slot::default();
            }
        }
    }

    pub fn is_dirty(&self) -> bool {
        self.dirty > 0
    }

    /// Whether the dirty slices should be written before more become dirty.
    pub fn is_crowded(&self) -> bool {
        self.dirty >= self.slots.len() / DIRTY_PART
    }

    /// Takes copies of the dirty slices of one kind, to be written. The slices are clean from now on, but are
    /// not evicted until [`Cache::written`].
    pub fn take_dirty(&mut self, table: Table) -> Vec<(Key, Vec<u8>)> {
        let mut taken = Vec::new();
        if self.dirty == 0 {
            return taken;
        }
        for (slot, content) in self.slots.iter_mut().zip(self.bytes.chunks_exact(self.slice_bytes)) {
            if slot.dirty && slot.table == table {
                (slot.dirty, slot.writing) = (false, true);
                self.dirty -= 1;
                taken.push((slot.key, content.to_vec()));
            }
        }
        taken.sort_by_key(|(key, _)| key.offset);
        taken
    }

    /// Reports the write of a slice from [`Cache::take_dirty`]. If it failed, the slice is dirty again.
    pub fn written(&mut self, key: Key, done: bool) {
        let Some(slot) = self.peek(key) else { return };
        self.slots[slot].writing = false;
        if !done {
            self.change(slot);
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn key(offset: u64) -> Key {
        Key { layer: 0, offset }
    }

    #[test]
    fn dirty_and_written_slices_are_not_evicted() {
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
        // A slice whose copy is being written is not evicted either, because the file has the old content.
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
