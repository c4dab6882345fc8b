//! The record of a packed ring. It contains a copy of each descriptor that was taken, because the device
//! overwrites descriptors of the ring. Free entries are linked in a list.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::area::Area;
use super::chain::{Descriptor, Head, RingError};
use super::inflight::{InflightQueue, Recovered, VERSION, sort_recovered};

// Offsets in the header of the region.
const COUNT: usize = 10;
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
// The used index, the old used index, the wrap counter of each as a byte, and padding. They are stored as one
// word, so that a device that is killed between two stores never leaves a mix of two positions.
const POSITIONS: usize = 16;
// Size of a record, and offsets in it.
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

pub struct PackedInflight {
    area: Area,
    size: u16,
    /// The counter of the next chain, which gives the order in which chains were taken.
    counter: u64,
    /// For each entry: the next free entry, or the next entry of its chain.
    next: Box<[u16]>,
    /// For the first entry of each chain: the last entry of the chain.
    last: Box<[u16]>,
    /// The first free entry; `size` if no entry is free.
    free: u16,
    used: Position,
}

/// An index in the ring, and the wrap counter, which changes with each lap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    pub index: u16,
    pub wrap: bool,
}

impl Position {
    /// Decodes the 16 bits that messages and event areas contain.
    pub fn of(bits: u16) -> Position {
        Position { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    pub fn bits(self) -> u16 {
        self.index | if self.wrap { 0x8000 } else { 0 }
    }

    pub fn advance(&mut self, slots: u16, size: u16) {
        self.index += slots;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }
}

/// The end of a batch that was written to the ring but not published, and the chains in flight.
type Left = (Position, Vec<Recovered>);

fn record(entry: u16) -> usize {
    RECORD_BYTES + usize::from(entry) * RECORD_BYTES
}

impl PackedInflight {
    /// Opens the record, and returns what a killed device has left; `None` if the record is new. `used`: the
    /// position of the next used descriptor, for a new record. `is_new`: the driver has just cleared the ring.
    /// `shown`: whether the driver sees the descriptor at a position as used. Fails with
    /// [`RingError::Inflight`] for an unknown version, the size of another ring, or inconsistent entries.
    pub fn open(
        queue: InflightQueue,
        used: Position,
        is_new: bool,
        shown: impl FnOnce(Position) -> bool,
    ) -> Result<(PackedInflight, Option<Left>), RingError> {
        let InflightQueue { area, size } = queue;
        let mut this = PackedInflight {
            area,
            size,
            counter: 0,
            next: (1..=size).collect(),
            last: vec![0; usize::from(size)].into(),
            free: 0,
            used,
        };
        match this.area.load_u16(VERSION, Relaxed) {
            0 => this.begin(),
            // The guest has cleared its ring to use it from the beginning, but the front end may still have
            // the record.
            1 if is_new && this.positions().1 != (Position { index: 0, wrap: true }) => this.begin(),
            1 => return this.recover(shown).map(|left| (this, Some(left))),
            _ => return Err(RingError::Inflight { what: "unknown version" }),
        }
        Ok((this, None))
    }

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

    /// The position of the next used descriptor.
    pub fn used(&self) -> Position {
        self.used
    }

    /// The new and the old position of the next used descriptor.
    fn positions(&self) -> (Position, Position) {
        let positions = self.area.load_u64(POSITIONS, Relaxed);
        let new = Position { index: positions as u16, wrap: positions >> 32 & 0xff != 0 };
        (new, Position { index: (positions >> 16) as u16, wrap: positions >> 40 & 0xff != 0 })
    }

    fn recover(&mut self, shown: impl FnOnce(Position) -> bool) -> Result<Left, RingError> {
        let size = self.size;
        if self.area.load_u16(COUNT, Relaxed) != size {
            return Err(RingError::Inflight { what: "the ring has another size" });
        }
        let (new, old) = self.positions();
        if new.index >= size || old.index >= size {
            return Err(RingError::Inflight { what: "a position is beyond the end of the ring" });
        }
        // The first descriptor of a batch is written last. So the driver sees either the whole last batch or
        // nothing of it.
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
            return Err(RingError::Inflight { what: "the free list has a loop" });
        }
        let mut chains = Vec::new();
        for first in 0..size {
            let is_marked = self.area.load_u8(record(first) + MARK, Relaxed) != 0;
            if is_marked && !owned[usize::from(first)] {
                chains.push(self.read_chain(first, &mut owned)?);
            }
        }
        if owned.contains(&false) {
            return Err(RingError::Inflight { what: "an entry is neither free nor in a chain" });
        }
        self.counter = sort_recovered(&mut chains);
        Ok((new, chains))
    }

    /// Stores the current state of the ring in both the new and the old fields. After this, the last batch
    /// counts as published.
    pub fn settle(&mut self) {
        self.area.store_u16(FREE_HEAD, self.free, Release);
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        self.store_positions(self.used, self.used);
    }

    fn read_chain(&mut self, first: u16, owned: &mut [bool]) -> Result<Recovered, RingError> {
        let count = self.area.load_u16(record(first) + LENGTH, Relaxed);
        let (mut entry, mut id, mut descriptors) = (first, 0, Vec::new());
        for _ in 0..count {
            match owned.get_mut(usize::from(entry)) {
                Some(owned) if !*owned => *owned = true,
                _ => return Err(RingError::Inflight { what: "two chains have the same entry" }),
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
            return Err(RingError::Inflight { what: "a chain has no descriptors" });
        }
        let counter = self.area.load_u64(record(first) + COUNTER, Relaxed);
        Ok(Recovered { counter, head: Head { index: id, slots: count, record: first }, descriptors })
    }

    fn store_positions(&self, new: Position, old: Position) {
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40;
        self.area.store_u64(POSITIONS, indices | wraps, Release);
    }

    /// Records a chain, and returns its first entry. Panics if too few entries are free: the ring never takes
    /// more descriptors than it has.
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
        self.area.store_u16(FREE_HEAD, self.free, Release);
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        first
    }

    /// Adds a chain to the next batch. No chain may be taken before [`PackedInflight::commit`].
    pub fn complete(&mut self, first: u16) {
        let last = self.last[usize::from(first)];
        self.next[usize::from(last)] = self.free;
        self.area.store_u16(record(last) + NEXT, self.free, Release);
        self.free = first;
        self.area.store_u16(FREE_HEAD, self.free, Release);
    }

    /// Records that the batch is about to be written to the ring, up to the position `used`.
    pub fn prepare(&mut self, used: Position) {
        self.store_positions(used, self.used);
        self.used = used;
    }

    /// Records that the driver sees `batch`, the first entries of the chains.
    pub fn commit(&mut self, batch: impl Iterator<Item = u16>) {
        for first in batch {
            self.area.store_u8(record(first) + MARK, 0, Release);
        }
        self.settle();
    }
}
