//! A packed ring (virtio 1.2, 2.8): one table that both sides write. Flags of a descriptor say whose it is.

use std::sync::atomic::Ordering::{self, Acquire, Relaxed, Release};

use super::area::Area;
use super::chain::{
    Chain, DESCRIPTOR_BYTES, DESCRIPTOR_WRITE, Descriptor, Head, RingError, RingParts, needs_event,
};
use super::inflight::{InflightQueue, Recovered, VERSION, sort_recovered};

// Bits of a descriptor's flags. With the wrap counter they say whether a descriptor is available or used.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
// Offsets in a descriptor.
const LENGTH_AT: usize = 8;
const ID_AT: usize = 12;
const FLAGS_AT: usize = 14;
// An event suppression area: a position with its wrap counter, then one of these values.
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_AT: u16 = 2;

// Offsets in the header of the record of requests in flight.
const COUNT: usize = 10;
const FREE_HEAD: usize = 12;
const OLD_FREE_HEAD: usize = 14;
// The used index, the old used index, the wrap counter of each as a byte, and padding. They are stored as one
// word, so that a device that is killed between two stores never leaves a mix of two positions.
const POSITIONS: usize = 16;
// Size of the record of a descriptor, and offsets in it.
const RECORD_BYTES: usize = 32;
const RECORD_MARK: usize = 0;
const RECORD_NEXT: usize = 2;
const RECORD_LAST: usize = 4;
const RECORD_LENGTH: usize = 6;
const RECORD_COUNTER: usize = 8;
const RECORD_ID: usize = 16;
const RECORD_FLAGS: usize = 18;
const RECORD_BUFFER_BYTES: usize = 20;
const RECORD_ADDRESS: usize = 24;

/// An index in the ring, and the wrap counter, which changes with each lap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    /// Decodes the 16 bits that messages and event areas contain.
    fn of(bits: u16) -> Position {
        Position { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    fn bits(self) -> u16 {
        self.index | if self.wrap { 0x8000 } else { 0 }
    }

    fn advance(&mut self, slots: u16, size: u16) {
        self.index += slots;
        if self.index >= size {
            self.index -= size;
            self.wrap = !self.wrap;
        }
    }
}

fn flags_at(index: u16) -> usize {
    usize::from(index) * DESCRIPTOR_BYTES + FLAGS_AT
}

/// The bits of an available descriptor.
fn available_bits(wrap: bool) -> u16 {
    if wrap { AVAILABLE } else { USED }
}

fn used_bits(wrap: bool) -> u16 {
    if wrap { AVAILABLE | USED } else { 0 }
}

/// Whether all descriptors are zero, as in a new ring. A descriptor that was once available has an address.
fn is_cleared(descriptors: &Area, size: u16) -> bool {
    (0..usize::from(size) * 2).all(|word| descriptors.load_u64(word * 8, Relaxed) == 0)
}

pub struct PackedRing {
    parts: RingParts,
    next: Position,
    /// The position of the next used descriptor.
    used: Position,
    /// Descriptors that were taken and that the driver does not see as used, at most the ring's size.
    in_flight: u16,
    /// Used chains that are not published yet, with the number of bytes written.
    unpublished: Vec<(Head, u32)>,
    /// The descriptors of the chain that is being taken, to be recorded.
    taken: Vec<Descriptor>,
    inflight: Option<PackedInflight>,
}

impl PackedRing {
    /// The lower half of the base is the position of the next chain, the upper half that of the next used
    /// descriptor. Fails for a position beyond the ring.
    pub fn new(parts: RingParts, base: u32) -> Result<PackedRing, RingError> {
        let size = parts.size;
        let (mut next, mut used) = (Position::of(base as u16), Position::of((base >> 16) as u16));
        if next.index >= size || used.index >= size {
            return Err(RingError::Base { base });
        }
        let flags = |index: u16| parts.descriptors.load_u16(flags_at(index), Relaxed);
        // Some front ends send the base 0 for a new ring of either kind. For a packed ring, 0 means the
        // second lap; but if that is meant, some descriptor was used in the first lap.
        if base == 0 && (0..size).all(|index| flags(index) & USED == 0) {
            (next.wrap, used.wrap) = (true, true);
        }
        let (unpublished, taken) = (Vec::with_capacity(usize::from(size)), Vec::new());
        Ok(PackedRing { parts, next, used, in_flight: 0, unpublished, taken, inflight: None })
    }

    /// Records chains in flight, and returns those that a killed device has left, the oldest last. Fails with
    /// [`RingError::Inflight`] if the record is not that of this ring.
    pub fn record(&mut self, queue: InflightQueue) -> Result<Vec<Recovered>, RingError> {
        let shown = |Position { index, wrap }: Position| {
            self.load_flags(index, Acquire) & (AVAILABLE | USED) != available_bits(wrap)
        };
        let is_new = is_cleared(&self.parts.descriptors, self.parts.size);
        let (mut inflight, recovered) = PackedInflight::open(queue, self.used, is_new, shown)?;
        let mut chains = Vec::new();
        if let Some((abandoned, recovered)) = recovered {
            self.used = inflight.used;
            self.remove_unpublished(abandoned);
            inflight.settle();
            self.in_flight = recovered.iter().map(|chain| chain.head.slots).sum();
            self.next = self.used;
            self.next.advance(self.in_flight, self.parts.size);
            chains = recovered;
        }
        self.inflight = Some(inflight);
        Ok(chains)
    }

    /// Removes used descriptors up to `end` that the killed device wrote but did not publish. The driver
    /// would see them as soon as the first descriptor of the next batch is published.
    fn remove_unpublished(&self, end: Position) {
        let mut position = self.used;
        for _ in 0..self.parts.size {
            if position == end {
                break;
            }
            let Position { index, wrap } = position;
            if self.load_flags(index, Relaxed) & (AVAILABLE | USED) == used_bits(wrap) {
                self.store_flags(index, available_bits(wrap));
            }
            position.advance(1, self.parts.size);
        }
    }

    fn load_flags(&self, index: u16, order: Ordering) -> u16 {
        self.parts.descriptors.load_u16(flags_at(index), order)
    }

    fn store_flags(&self, index: u16, flags: u16) {
        self.parts.descriptors.store_u16(flags_at(index), flags, Release);
    }

    fn available(&self) -> Option<u16> {
        // Acquire: the driver writes the flags of the first descriptor last, after the whole chain.
        let flags = self.load_flags(self.next.index, Acquire);
        (flags & (AVAILABLE | USED) == available_bits(self.next.wrap)).then_some(flags)
    }

    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        let Some(mut flags) = self.available() else { return Ok(None) };
        chain.clear();
        self.taken.clear();
        let free = self.parts.size - self.in_flight;
        let (mut position, mut slots) = (self.next, 0);
        let id = loop {
            let at = usize::from(position.index) * DESCRIPTOR_BYTES;
            let address = self.parts.descriptors.load_u64(at, Relaxed);
            let length = self.parts.descriptors.load_u32(at + LENGTH_AT, Relaxed);
            let id = self.parts.descriptors.load_u16(at + ID_AT, Relaxed);
            if slots >= free {
                return Err(RingError::RingOverrun { head: id });
            }
            slots += 1;
            position.advance(1, self.parts.size);
            let descriptor = Descriptor { address, length, flags, next: 0 };
            if self.inflight.is_some() {
                self.taken.push(descriptor);
            }
            if self.parts.read(id, &descriptor, chain)? {
                break id;
            }
            flags = self.load_flags(position.index, Relaxed);
        };
        if id >= self.parts.size {
            return Err(RingError::HeadRange { head: id, size: self.parts.size });
        }
        self.next = position;
        self.in_flight += slots;
        let record = self.inflight.as_mut().map_or(0, |inflight| inflight.take(&self.taken, id));
        Ok(Some(Head { index: id, slots, record }))
    }

    pub fn read_recovered(&mut self, recovered: &Recovered, chain: &mut Chain) -> Result<(), RingError> {
        chain.clear();
        let read = |descriptor| self.parts.read(recovered.head.index, descriptor, chain).map(drop);
        recovered.descriptors.iter().try_for_each(read)
    }

    pub fn push_used(&mut self, head: Head, written: u32) {
        self.unpublished.push((head, written));
    }

    /// Returns the number of published descriptors.
    pub fn publish(&mut self) -> u16 {
        if self.unpublished.is_empty() {
            return 0;
        }
        let first = self.used;
        let slots = self.unpublished.iter().map(|(head, _)| head.slots).sum();
        self.used.advance(slots, self.parts.size);
        if let Some(inflight) = &mut self.inflight {
            self.unpublished.iter().for_each(|(head, _)| inflight.complete(head.record));
            inflight.prepare(self.used);
        }
        // The driver sees the whole batch when it sees the first descriptor, so its flags are stored last,
        // with release ordering.
        let flags = |wrap, written| used_bits(wrap) | if written > 0 { DESCRIPTOR_WRITE } else { 0 };
        let mut position = first;
        for &(head, written) in &self.unpublished {
            let at = usize::from(position.index) * DESCRIPTOR_BYTES;
            self.parts.descriptors.store_u32(at + LENGTH_AT, written, Relaxed);
            self.parts.descriptors.store_u16(at + ID_AT, head.index, Relaxed);
            if position != first {
                self.store_flags(position.index, flags(position.wrap, written));
            }
            position.advance(head.slots, self.parts.size);
        }
        self.store_flags(first.index, flags(first.wrap, self.unpublished[0].1));
        self.in_flight -= slots;
        if let Some(inflight) = &mut self.inflight {
            inflight.commit(self.unpublished.iter().map(|(head, _)| head.record));
        }
        self.unpublished.clear();
        slots
    }

    /// Whether the driver must be called for the last `slots` published descriptors.
    pub fn needs_call(&self, slots: u16) -> bool {
        let event = self.parts.driver.load_u32(0, Relaxed);
        match (event >> 16) as u16 & 3 {
            EVENT_DISABLE => false,
            EVENT_AT if self.parts.event_idx => {
                let wanted = Position::of(event as u16);
                let lap = if wanted.wrap == self.used.wrap { 0 } else { self.parts.size };
                let new = self.used.index;
                needs_event(wanted.index.wrapping_sub(lap), new, new.wrapping_sub(slots))
            }
            // EVENT_ENABLE, or not a valid value: the driver is called, to be safe.
            _ => true,
        }
    }

    pub fn ask_for_kick(&mut self) {
        let (position, flags) =
            if self.parts.event_idx { (self.next.bits(), EVENT_AT) } else { (0, EVENT_ENABLE) };
        let event = u32::from(position) | u32::from(flags) << 16;
        self.parts.device.store_u32(0, event, Release);
    }

    /// Whether there is another chain.
    pub fn is_available(&self) -> bool {
        self.available().is_some()
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }
}

/// The record of requests in flight. It contains a copy of each descriptor that was taken, because the device
/// overwrites descriptors of the ring. Free entries are linked in a list.
struct PackedInflight {
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
    /// The position of the next used descriptor.
    used: Position,
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
    fn open(
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
            self.area.store_u16(record(entry) + RECORD_NEXT, entry + 1, Relaxed);
            self.area.store_u8(record(entry) + RECORD_MARK, 0, Relaxed);
        }
        self.area.store_u16(COUNT, self.size, Relaxed);
        self.settle();
        self.area.store_u16(VERSION, 1, Release);
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
        self.next = (0..size).map(|entry| self.area.load_u16(record(entry) + RECORD_NEXT, Relaxed)).collect();
        let mut owned = vec![false; usize::from(size)];
        let mut entry = self.free;
        while entry < size && !std::mem::replace(&mut owned[usize::from(entry)], true) {
            self.area.store_u8(record(entry) + RECORD_MARK, 0, Relaxed);
            entry = self.next[usize::from(entry)];
        }
        if entry != size {
            return Err(RingError::Inflight { what: "the free list has a loop" });
        }
        let mut chains = Vec::new();
        for first in 0..size {
            let is_marked = self.area.load_u8(record(first) + RECORD_MARK, Relaxed) != 0;
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
    fn settle(&mut self) {
        self.area.store_u16(FREE_HEAD, self.free, Release);
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        self.store_positions(self.used, self.used);
    }

    fn read_chain(&mut self, first: u16, owned: &mut [bool]) -> Result<Recovered, RingError> {
        let count = self.area.load_u16(record(first) + RECORD_LENGTH, Relaxed);
        let (mut entry, mut id, mut descriptors) = (first, 0, Vec::new());
        for _ in 0..count {
            match owned.get_mut(usize::from(entry)) {
                Some(owned) if !*owned => *owned = true,
                _ => return Err(RingError::Inflight { what: "two chains have the same entry" }),
            }
            let at = record(entry);
            id = self.area.load_u16(at + RECORD_ID, Relaxed);
            descriptors.push(Descriptor {
                address: self.area.load_u64(at + RECORD_ADDRESS, Relaxed),
                length: self.area.load_u32(at + RECORD_BUFFER_BYTES, Relaxed),
                flags: self.area.load_u16(at + RECORD_FLAGS, Relaxed),
                next: 0,
            });
            self.last[usize::from(first)] = entry;
            entry = self.next[usize::from(entry)];
        }
        if count == 0 || id >= self.size {
            return Err(RingError::Inflight { what: "a chain has no descriptors" });
        }
        let counter = self.area.load_u64(record(first) + RECORD_COUNTER, Relaxed);
        Ok(Recovered { counter, head: Head { index: id, slots: count, record: first }, descriptors })
    }

    fn store_positions(&self, new: Position, old: Position) {
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) << 32 | u64::from(old.wrap) << 40;
        self.area.store_u64(POSITIONS, indices | wraps, Release);
    }

    /// Records a chain, and returns its first entry. Panics if too few entries are free: the ring never takes
    /// more descriptors than it has.
    fn take(&mut self, descriptors: &[Descriptor], id: u16) -> u16 {
        let first = self.free;
        let head = record(first);
        self.area.store_u16(head + RECORD_LENGTH, descriptors.len() as u16, Relaxed);
        self.area.store_u64(head + RECORD_COUNTER, self.counter, Relaxed);
        self.area.store_u8(head + RECORD_MARK, 1, Release);
        self.counter = self.counter.wrapping_add(1);
        for descriptor in descriptors {
            let at = record(self.free);
            self.area.store_u64(at + RECORD_ADDRESS, descriptor.address, Relaxed);
            self.area.store_u32(at + RECORD_BUFFER_BYTES, descriptor.length, Relaxed);
            self.area.store_u16(at + RECORD_FLAGS, descriptor.flags, Relaxed);
            self.area.store_u16(at + RECORD_ID, id, Relaxed);
            self.last[usize::from(first)] = self.free;
            self.free = self.next[usize::from(self.free)];
        }
        self.area.store_u16(head + RECORD_LAST, self.last[usize::from(first)], Release);
        self.area.store_u16(FREE_HEAD, self.free, Release);
        self.area.store_u16(OLD_FREE_HEAD, self.free, Release);
        first
    }

    /// Adds a chain to the next batch. No chain may be taken before [`PackedInflight::commit`].
    fn complete(&mut self, first: u16) {
        let last = self.last[usize::from(first)];
        self.next[usize::from(last)] = self.free;
        self.area.store_u16(record(last) + RECORD_NEXT, self.free, Release);
        self.free = first;
        self.area.store_u16(FREE_HEAD, self.free, Release);
    }

    /// Records that the batch is about to be written to the ring, up to the position `used`.
    fn prepare(&mut self, used: Position) {
        self.store_positions(used, self.used);
        self.used = used;
    }

    /// Records that the driver sees `batch`, the first entries of the chains.
    fn commit(&mut self, batch: impl Iterator<Item = u16>) {
        for first in batch {
            self.area.store_u8(record(first) + RECORD_MARK, 0, Release);
        }
        self.settle();
    }
}
