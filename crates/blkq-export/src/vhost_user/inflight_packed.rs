//! The record of a packed ring: a copy of each descriptor that was taken, as the ring's own may be
//! overwritten, in entries that a free list joins.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::area::Area;
use super::chain::RingError;
use super::descriptor::Descriptor;
use super::inflight::{InflightQueue, VERSION};

/// Fields of the region.
const COUNT: usize = 10;
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
/// The used index, the old one, the lap of each in a byte, and padding: stored as one word, as a
/// device that dies between two stores must leave no position that is half of each.
const POSITIONS: usize = 16;
/// Fields of a record.
const RECORD_BYTES: usize = 32;
const MARK: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const LENGTH: usize = 6;
const COUNTER: usize = 8;
const ID: usize = 16;
const FLAGS: usize = 18;
const BYTES: usize = 20;
const ADDRESS: usize = 24;

/// The record of a packed ring.
pub struct PackedInflight {
    area: Area,
    size: u16,
    counter: u64,
    /// By entry: the next free one, or the next of its chain.
    next: Box<[u16]>,
    /// By first entry: the last one of the chain.
    last: Box<[u16]>,
    /// The first free entry; `size` if there is none.
    free: u16,
    /// The next used descriptor goes there.
    used: UsedPosition,
    /// First entries of the chains of the batch that is being shown.
    batch: Vec<u16>,
}

/// Where used descriptors go: the index, and the lap's bit.
pub type UsedPosition = (u16, bool);

/// A chain that was in flight when the device died.
pub struct Recovered {
    counter: u64,
    /// Its first entry.
    pub record: u16,
    /// Its buffer identifier.
    pub id: u16,
    /// Its descriptors.
    pub descriptors: Vec<Descriptor>,
}

/// The state of a ring as the record has it.
pub struct State {
    /// The next used descriptor goes there.
    pub used: UsedPosition,
    /// Up to there a batch was written that the driver does not see.
    pub abandoned: UsedPosition,
    /// In the order in which they were taken.
    pub chains: Vec<Recovered>,
}

fn record(entry: u16) -> usize {
    RECORD_BYTES + usize::from(entry) * RECORD_BYTES
}

impl PackedInflight {
    /// The record of a ring, and the state of the ring by it. `None` in its place if the record is a new
    /// one, of a ring whose next used descriptor goes to `used`. `is_new` if its driver has just
    /// cleared it; `shown` decides if the driver sees what was written to a position as used.
    ///
    /// # Errors
    /// A version that is not known; another size; entries that name what there is not.
    pub fn open(
        queue: InflightQueue,
        used: UsedPosition,
        is_new: bool,
        shown: impl FnOnce(UsedPosition) -> bool,
    ) -> Result<(PackedInflight, Option<State>), RingError> {
        let InflightQueue { area, size } = queue;
        let count = usize::from(size);
        let mut this = PackedInflight {
            area,
            size,
            counter: 0,
            next: (1..=size).collect(),
            last: vec![0; count].into(),
            free: 0,
            used,
            batch: Vec::with_capacity(count),
        };
        match this.area.load_u16(VERSION, Relaxed) {
            0 => this.begin(),
            // A guest that starts anew clears its ring, and the front end may keep the record.
            1 if is_new && this.positions().1 != (0, true) => this.begin(),
            1 => return this.recover(shown).map(|state| (this, Some(state))),
            _ => return Err(RingError::Inflight { what: "a version that is not known" }),
        }
        Ok((this, None))
    }

    /// Makes it a new one.
    fn begin(&mut self) {
        self.area.store_u16(VERSION, 0, Release);
        for entry in 0..self.size {
            self.area.store_u16(record(entry) + NEXT, entry + 1, Relaxed);
            self.area.store_u8(record(entry) + MARK, 0, Relaxed);
        }
        self.area.store_u16(COUNT, self.size, Relaxed);
        self.settle();
        self.area.store_u16(VERSION, 1, Release);
    }

    /// The new and the old position.
    fn positions(&self) -> (UsedPosition, UsedPosition) {
        let positions = self.area.load_u64(POSITIONS, Relaxed);
        let new = (positions as u16, positions >> 32 & 0xff != 0);
        (new, ((positions >> 16) as u16, positions >> 40 & 0xff != 0))
    }

    fn recover(&mut self, shown: impl FnOnce(UsedPosition) -> bool) -> Result<State, RingError> {
        let size = self.size;
        if self.area.load_u16(COUNT, Relaxed) != size {
            return Err(RingError::Inflight { what: "it is that of a ring of another size" });
        }
        let (new, old) = self.positions();
        if new.0 >= size || old.0 >= size {
            return Err(RingError::Inflight { what: "a position beyond the ring" });
        }
        // The driver sees either all of the last batch, or nothing of it.
        let is_shown = new != old && shown(old);
        self.used = if is_shown { new } else { old };
        self.free = self.area.load_u16(if is_shown { FREE_HEAD } else { OLD_FREE_HEAD }, Relaxed);
        self.next = (0..size).map(|entry| self.area.load_u16(record(entry) + NEXT, Relaxed)).collect();
        let mut owned = vec![false; usize::from(size)];
        let mut entry = self.free;
        while entry < size && !std::mem::replace(&mut owned[usize::from(entry)], true) {
            self.area.store_u8(record(entry) + MARK, 0, Relaxed);
            entry = self.next[usize::from(entry)];
        }
        if entry != size {
            return Err(RingError::Inflight { what: "its free list is a loop" });
        }
        let mut chains = Vec::new();
        for first in 0..size {
            let is_marked = self.area.load_u8(record(first) + MARK, Relaxed) != 0;
            if is_marked && !owned[usize::from(first)] {
                chains.push(self.read_chain(first, &mut owned)?);
            }
        }
        if owned.contains(&false) {
            return Err(RingError::Inflight { what: "an entry belongs to nothing" });
        }
        chains.sort_by_key(|chain| chain.counter);
        self.counter = chains.last().map_or(0, |chain| chain.counter.wrapping_add(1));
        Ok(State { used: self.used, abandoned: new, chains })
    }

    /// The ring is as the record has it: nothing that a daemon left half done remains.
    pub fn settle(&mut self) {
        self.store_free();
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        self.store_positions(self.used, self.used);
    }

    fn read_chain(&mut self, first: u16, owned: &mut [bool]) -> Result<Recovered, RingError> {
        let count = self.area.load_u16(record(first) + LENGTH, Relaxed);
        let (mut entry, mut id, mut descriptors) = (first, 0, Vec::new());
        for _ in 0..count {
            match owned.get_mut(usize::from(entry)) {
                Some(owned) if !*owned => *owned = true,
                _ => return Err(RingError::Inflight { what: "a chain has entries of another" }),
            }
            let at = record(entry);
            id = self.area.load_u16(at + ID, Relaxed);
            descriptors.push(Descriptor {
                address: self.area.load_u64(at + ADDRESS, Relaxed),
                length: self.area.load_u32(at + BYTES, Relaxed),
                flags: self.area.load_u16(at + FLAGS, Relaxed),
                next: 0,
            });
            self.last[usize::from(first)] = entry;
            entry = self.next[usize::from(entry)];
        }
        if count == 0 || id >= self.size {
            return Err(RingError::Inflight { what: "a chain without descriptors" });
        }
        let counter = self.area.load_u64(record(first) + COUNTER, Relaxed);
        Ok(Recovered { counter, record: first, id, descriptors })
    }

    fn store_free(&self) {
        self.area.store_u16(FREE_HEAD, self.free, Release);
    }

    fn store_positions(&self, new: UsedPosition, old: UsedPosition) {
        let indices = u64::from(new.0) | u64::from(old.0) << 16;
        self.area.store_u64(POSITIONS, indices | u64::from(new.1) << 32 | u64::from(old.1) << 40, Release);
    }

    /// A chain was taken, of these descriptors and with this identifier. Returns its first entry.
    ///
    /// # Panics
    /// If there are not as many free entries: the ring takes no more than it has.
    pub fn take(&mut self, descriptors: &[Descriptor], id: u16) -> u16 {
        let first = self.free;
        let head = record(first);
        self.area.store_u16(head + LENGTH, descriptors.len() as u16, Relaxed);
        self.area.store_u64(head + COUNTER, self.counter, Relaxed);
        self.area.store_u8(head + MARK, 1, Release);
        self.counter = self.counter.wrapping_add(1);
        for descriptor in descriptors {
            let at = record(self.free);
            self.area.store_u64(at + ADDRESS, descriptor.address, Relaxed);
            self.area.store_u32(at + BYTES, descriptor.length, Relaxed);
            self.area.store_u16(at + FLAGS, descriptor.flags, Relaxed);
            self.area.store_u16(at + ID, id, Relaxed);
            self.last[usize::from(first)] = self.free;
            self.free = self.next[usize::from(self.free)];
        }
        self.area.store_u16(head + LAST, self.last[usize::from(first)], Release);
        self.store_free();
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        first
    }

    /// The chain that begins at entry `first` is part of the batch that the driver is about to see.
    /// None is taken before [`PackedInflight::commit`].
    pub fn complete(&mut self, first: u16) {
        let last = self.last[usize::from(first)];
        self.next[usize::from(last)] = self.free;
        self.area.store_u16(record(last) + NEXT, self.free, Release);
        self.free = first;
        self.store_free();
        self.batch.push(first);
    }

    /// The batch is about to be written to the ring, up to `used`.
    pub fn prepare(&mut self, used: UsedPosition) {
        self.store_positions(used, self.used);
        self.used = used;
    }

    /// The driver sees the batch.
    pub fn commit(&mut self) {
        for first in self.batch.drain(..) {
            self.area.store_u8(record(first) + MARK, 0, Release);
        }
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        self.store_positions(self.used, self.used);
    }
}
