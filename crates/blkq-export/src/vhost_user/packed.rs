//! A packed ring (virtio 1.2, 2.8): one table that both sides write. Flags of a descriptor say whose it is.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::area::Area;
use super::chain::{
    Chain, DESCRIPTOR_BYTES, DESCRIPTOR_INDIRECT, DESCRIPTOR_NEXT, DESCRIPTOR_WRITE, Head, RingError,
};
use super::descriptor::{Descriptor, RingMemory, RingSpec, needs_event};
use super::inflight::InflightQueue;
use super::inflight_packed::{PackedInflight, Position, Recovered};
use super::memory::GuestMemory;

// Bits of a descriptor's flags. With the wrap counter they say whether a descriptor is available or used.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
// Offsets in a descriptor.
const LENGTH_AT: usize = 8;
const ID_AT: usize = 12;
const FLAGS_AT: usize = 14;
// An event suppression area: a position with its wrap counter, then one of these values.
const EVENT_BYTES: usize = 4;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_AT: u16 = 2;

fn flags_at(index: u16) -> usize {
    usize::from(index) * DESCRIPTOR_BYTES + FLAGS_AT
}

fn wrap_bits(flags: u16) -> (bool, bool) {
    (flags & AVAILABLE != 0, flags & USED != 0)
}

/// Whether all descriptors are zero, as in a new ring. A descriptor that was once available has an address.
fn is_cleared(descriptors: &Area, size: u16) -> bool {
    (0..usize::from(size) * 2).all(|word| descriptors.load_u64(word * 8, Ordering::Relaxed) == 0)
}

pub struct PackedRing {
    descriptors: Area,
    driver_event: Area,
    device_event: Area,
    size: u16,
    event_idx: bool,
    next: Position,
    /// The position of the next used descriptor.
    used: Position,
    /// Descriptors that were taken and that the driver does not see as used, at most `size`.
    in_flight: u16,
    /// Used chains that are not published yet, with the number of bytes written.
    unpublished: Vec<(Head, u32)>,
    /// The descriptors of the chain that is being taken, to be recorded.
    taken: Vec<Descriptor>,
    inflight: Option<PackedInflight>,
    /// Chains that were in flight when the previous device was killed. The next one is last.
    recovered: Vec<Recovered>,
    /// The driver was not called yet since the ring was opened. It is called once in any case, because it may
    /// wait for a call that the previous device did not make.
    call_first: bool,
    memory: RingMemory,
}

impl PackedRing {
    /// Opens the ring. The lower half of the base is the position of the next chain, the upper half that of
    /// the next used descriptor. Fails for a position beyond the ring, or a part outside of one region.
    pub fn new(memory: &Arc<GuestMemory>, spec: &RingSpec) -> Result<PackedRing, RingError> {
        let &RingSpec { size, event_idx, base, .. } = spec;
        let (mut next, mut used) = (Position::of(base as u16), Position::of((base >> 16) as u16));
        if next.index >= size || used.index >= size {
            return Err(RingError::Base { base });
        }
        let bytes = usize::from(size) * DESCRIPTOR_BYTES;
        let memory = RingMemory::new(memory, spec);
        let descriptors = memory.area("descriptors", spec.descriptors, bytes, 16)?;
        let driver_event = memory.area("driver area", spec.driver_area, EVENT_BYTES, 4)?;
        let device_event = memory.area("device area", spec.device_area, EVENT_BYTES, 4)?;
        let flags = |index: u16| descriptors.load_u16(flags_at(index), Ordering::Relaxed);
        // Some front ends send the base 0 for a new ring of either kind. For a packed ring, 0 means the
        // second lap; but if that is meant, some descriptor was used in the first lap.
        if base == 0 && (0..size).all(|index| flags(index) & USED == 0) {
            (next.wrap, used.wrap) = (true, true);
        }
        Ok(PackedRing {
            descriptors,
            driver_event,
            device_event,
            size,
            event_idx,
            next,
            used,
            in_flight: 0,
            unpublished: Vec::with_capacity(usize::from(size)),
            taken: Vec::new(),
            inflight: None,
            recovered: Vec::new(),
            call_first: true,
            memory,
        })
    }

    /// Records chains in flight, and recovers those that a killed device has left. Fails with
    /// [`RingError::Inflight`] if the record is not that of this ring.
    pub fn record(&mut self, queue: InflightQueue) -> Result<(), RingError> {
        let shown = |Position { index, wrap }: Position| {
            let (available, used) = wrap_bits(self.load_flags(index, Ordering::Acquire));
            !(available == wrap && used != wrap)
        };
        let is_new = is_cleared(&self.descriptors, self.size);
        let (mut inflight, state) = PackedInflight::open(queue, self.used, is_new, shown)?;
        if let Some(state) = state {
            self.used = state.used;
            self.remove_unpublished(state.abandoned);
            inflight.settle();
            self.in_flight = state.chains.iter().map(|chain| chain.descriptors.len() as u16).sum();
            self.next = self.used;
            self.next.advance(self.in_flight, self.size);
            self.recovered = state.chains;
            self.recovered.reverse();
        }
        self.inflight = Some(inflight);
        Ok(())
    }

    /// Removes used descriptors up to `end` that the killed device wrote but did not publish. The driver
    /// would see them as soon as the first descriptor of the next batch is published.
    fn remove_unpublished(&self, end: Position) {
        let mut position = self.used;
        for _ in 0..self.size {
            if position == end {
                break;
            }
            let (available, used) = wrap_bits(self.load_flags(position.index, Ordering::Relaxed));
            if available == position.wrap && used == position.wrap {
                let flags = if position.wrap { AVAILABLE } else { USED };
                self.store_flags(position.index, flags);
            }
            position.advance(1, self.size);
        }
    }

    fn load_flags(&self, index: u16, order: Ordering) -> u16 {
        self.descriptors.load_u16(flags_at(index), order)
    }

    fn store_flags(&self, index: u16, flags: u16) {
        self.descriptors.store_u16(flags_at(index), flags, Ordering::Release);
    }

    #[inline]
    fn available(&self) -> Option<u16> {
        // Acquire: the driver writes the flags of the first descriptor last, after the whole chain.
        let flags = self.load_flags(self.next.index, Ordering::Acquire);
        let (available, used) = wrap_bits(flags);
        (available == self.next.wrap && used != self.next.wrap).then_some(flags)
    }

    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        if let Some(recovered) = self.recovered.pop() {
            return self.read_recovered(recovered, chain).map(Some);
        }
        let Some(mut flags) = self.available() else { return Ok(None) };
        chain.clear();
        self.taken.clear();
        let free = self.size - self.in_flight;
        let (mut position, mut slots) = (self.next, 0);
        let id = loop {
            let at = usize::from(position.index) * DESCRIPTOR_BYTES;
            let address = self.descriptors.load_u64(at, Ordering::Relaxed);
            let length = self.descriptors.load_u32(at + LENGTH_AT, Ordering::Relaxed);
            let id = self.descriptors.load_u16(at + ID_AT, Ordering::Relaxed);
            if slots >= free {
                return Err(RingError::RingOverrun { head: id });
            }
            slots += 1;
            position.advance(1, self.size);
            let descriptor = Descriptor { address, length, flags, next: 0 };
            if self.inflight.is_some() {
                self.taken.push(descriptor);
            }
            if self.read_descriptor(id, &descriptor, chain)? {
                break id;
            }
            flags = self.load_flags(position.index, Ordering::Relaxed);
        };
        if id >= self.size {
            return Err(RingError::HeadRange { head: id, size: self.size });
        }
        self.next = position;
        self.in_flight += slots;
        let record = self.inflight.as_mut().map_or(0, |inflight| inflight.take(&self.taken, id));
        Ok(Some(Head { index: id, slots, record }))
    }

    fn read_recovered(&mut self, recovered: Recovered, chain: &mut Chain) -> Result<Head, RingError> {
        let Recovered { id, record, ref descriptors, .. } = recovered;
        chain.clear();
        for descriptor in descriptors {
            self.read_descriptor(id, descriptor, chain)?;
        }
        Ok(Head { index: id, slots: descriptors.len() as u16, record })
    }

    #[inline]
    fn read_descriptor(
        &mut self,
        id: u16,
        descriptor: &Descriptor,
        chain: &mut Chain,
    ) -> Result<bool, RingError> {
        if descriptor.has(DESCRIPTOR_INDIRECT) {
            self.read_indirect(id, descriptor, chain)?;
            return Ok(true);
        }
        chain.push(id, descriptor.buffer(), descriptor.flags)?;
        Ok(!descriptor.has(DESCRIPTOR_NEXT))
    }

    fn read_indirect(&mut self, head: u16, table: &Descriptor, chain: &mut Chain) -> Result<(), RingError> {
        let mut table = self.memory.table(head, table)?;
        for index in 0..table.entries {
            let entry = Descriptor::packed(table.entry(index)?);
            if entry.has(DESCRIPTOR_INDIRECT) {
                return Err(RingError::IndirectNested { head });
            }
            chain.push(head, entry.buffer(), entry.flags)?;
        }
        Ok(())
    }

    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) {
        self.unpublished.push((head, written));
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.unpublished.is_empty() {
            return false;
        }
        let first = self.used;
        let slots = self.unpublished.iter().map(|(head, _)| head.slots).sum();
        self.used.advance(slots, self.size);
        if let Some(inflight) = &mut self.inflight {
            self.unpublished.iter().for_each(|(head, _)| inflight.complete(head.record));
            inflight.prepare(self.used);
        }
        // The driver sees the whole batch when it sees the first descriptor, so its flags are stored last,
        // with release ordering.
        let mut position = first;
        let mut first_flags = 0;
        for &(head, written) in &self.unpublished {
            let at = usize::from(position.index) * DESCRIPTOR_BYTES;
            self.descriptors.store_u32(at + LENGTH_AT, written, Ordering::Relaxed);
            self.descriptors.store_u16(at + ID_AT, head.index, Ordering::Relaxed);
            let mut flags = if position.wrap { AVAILABLE | USED } else { 0 };
            if written > 0 {
                flags |= DESCRIPTOR_WRITE;
            }
            if position == first {
                first_flags = flags;
            } else {
                self.store_flags(position.index, flags);
            }
            position.advance(head.slots, self.size);
        }
        self.store_flags(first.index, first_flags);
        self.unpublished.clear();
        self.in_flight -= slots;
        if let Some(inflight) = &mut self.inflight {
            inflight.commit();
        }
        // The store of the flags must precede the load of the driver's event: otherwise the driver could go
        // to sleep in between, and would not be called.
        fence(Ordering::SeqCst);
        if std::mem::take(&mut self.call_first) {
            return true;
        }
        let event = self.driver_event.load_u32(0, Ordering::Relaxed);
        match (event >> 16) as u16 & 3 {
            EVENT_ENABLE => true,
            EVENT_DISABLE => false,
            EVENT_AT if self.event_idx => {
                let wanted = Position::of(event as u16);
                let lap = if wanted.wrap == self.used.wrap { 0 } else { self.size };
                let new = self.used.index;
                needs_event(wanted.index.wrapping_sub(lap), new, new.wrapping_sub(slots))
            }
            // Not a valid value: the driver is called, to be safe.
            _ => true,
        }
    }

    pub fn enable_kicks(&mut self) -> bool {
        let (position, flags) = if self.event_idx { (self.next.bits(), EVENT_AT) } else { (0, EVENT_ENABLE) };
        let event = u32::from(position) | u32::from(flags) << 16;
        self.device_event.store_u32(0, event, Ordering::Release);
        // Either the driver sees the request for a kick, or this side sees the driver's chain. Without the
        // fence both could miss each other.
        fence(Ordering::SeqCst);
        !self.recovered.is_empty() || self.available().is_some()
    }

    pub fn recovered(&self) -> impl Iterator<Item = u16> {
        self.recovered.iter().map(|chain| chain.id)
    }

    pub fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }
}
