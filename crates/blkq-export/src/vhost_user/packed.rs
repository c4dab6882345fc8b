//! A packed ring (virtio 1.2, 2.8): one table that both sides write. Flags of a descriptor say whose it is.

use std::sync::atomic::Ordering;

use super::area::Area;
use super::chain::{
    Chain, DESCRIPTOR_BYTES, DESCRIPTOR_WRITE, Descriptor, Head, RingError, RingParts, needs_event,
};
use super::inflight::{InflightQueue, Recovered};
use super::inflight_packed::{PackedInflight, Position};

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
    (0..usize::from(size) * 2).all(|word| descriptors.load_u64(word * 8, Ordering::Relaxed) == 0)
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
        let flags = |index: u16| parts.descriptors.load_u16(flags_at(index), Ordering::Relaxed);
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
            self.load_flags(index, Ordering::Acquire) & (AVAILABLE | USED) != available_bits(wrap)
        };
        let is_new = is_cleared(&self.parts.descriptors, self.parts.size);
        let (mut inflight, recovered) = PackedInflight::open(queue, self.used, is_new, shown)?;
        let mut chains = Vec::new();
        if let Some((abandoned, recovered)) = recovered {
            self.used = inflight.used();
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
            if self.load_flags(index, Ordering::Relaxed) & (AVAILABLE | USED) == used_bits(wrap) {
                self.store_flags(index, available_bits(wrap));
            }
            position.advance(1, self.parts.size);
        }
    }

    fn load_flags(&self, index: u16, order: Ordering) -> u16 {
        self.parts.descriptors.load_u16(flags_at(index), order)
    }

    fn store_flags(&self, index: u16, flags: u16) {
        self.parts.descriptors.store_u16(flags_at(index), flags, Ordering::Release);
    }

    fn available(&self) -> Option<u16> {
        // Acquire: the driver writes the flags of the first descriptor last, after the whole chain.
        let flags = self.load_flags(self.next.index, Ordering::Acquire);
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
            let address = self.parts.descriptors.load_u64(at, Ordering::Relaxed);
            let length = self.parts.descriptors.load_u32(at + LENGTH_AT, Ordering::Relaxed);
            let id = self.parts.descriptors.load_u16(at + ID_AT, Ordering::Relaxed);
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
            flags = self.load_flags(position.index, Ordering::Relaxed);
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
            self.parts.descriptors.store_u32(at + LENGTH_AT, written, Ordering::Relaxed);
            self.parts.descriptors.store_u16(at + ID_AT, head.index, Ordering::Relaxed);
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
        let event = self.parts.driver.load_u32(0, Ordering::Relaxed);
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
        self.parts.device.store_u32(0, event, Ordering::Release);
    }

    /// Whether there is another chain.
    pub fn is_available(&self) -> bool {
        self.available().is_some()
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }
}
