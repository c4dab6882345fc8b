//! A split ring (virtio 1.2, 2.7): a table of descriptors, the available ring, and the used ring. Each field
//! is read once, and then checked.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::area::Area;
use super::chain::{Chain, DESCRIPTOR_BYTES, DESCRIPTOR_INDIRECT, DESCRIPTOR_NEXT, Head, RingError};
use super::descriptor::{Descriptor, RingMemory, RingSpec, needs_event};
use super::inflight::InflightQueue;
use super::inflight_split::SplitInflight;
use super::memory::GuestMemory;

/// A flag of the available ring: the driver does not need calls.
const NO_INTERRUPT: u16 = 1;
// Offsets in the available and the used ring, which both end with an event index of 2 bytes.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ENTRIES: usize = 4;

pub struct SplitRing {
    descriptors: Area,
    available: Area,
    used: Area,
    size: u16,
    event_idx: bool,
    next: u16,
    /// The available index at the last read.
    seen: u16,
    /// The used index, including chains that are not published yet.
    used_next: u16,
    published: u16,
    /// The driver was not called yet since the ring was opened. It is called once in any case, because it may
    /// wait for a call that the previous device did not make.
    call_first: bool,
    inflight: Option<SplitInflight>,
    /// Heads that were in flight when the previous device was killed. The next one is last.
    recovered: Vec<u16>,
    memory: RingMemory,
}

impl SplitRing {
    /// The base is the available index of the next chain. Fails for a base of more than 16 bits, a size that
    /// is not a power of two, or a part that is not inside one region.
    pub fn new(memory: &Arc<GuestMemory>, spec: &RingSpec) -> Result<SplitRing, RingError> {
        let &RingSpec { size, event_idx, base, .. } = spec;
        let next = u16::try_from(base).map_err(|_| RingError::Base { base })?;
        if !size.is_power_of_two() {
            return Err(RingError::Size { size: size.into() });
        }
        let entries = usize::from(size);
        let memory = RingMemory::new(memory, spec);
        let descriptors = memory.area("descriptors", spec.descriptors, entries * DESCRIPTOR_BYTES, 16)?;
        let available = memory.area("driver area", spec.driver_area, ENTRIES + entries * 2 + 2, 2)?;
        let used = memory.area("device area", spec.device_area, ENTRIES + entries * 8 + 2, 4)?;
        let used_next = used.load_u16(INDEX, Ordering::Acquire);
        Ok(SplitRing {
            descriptors,
            available,
            used,
            size,
            event_idx,
            next,
            seen: next,
            used_next,
            published: used_next,
            call_first: true,
            inflight: None,
            recovered: Vec::new(),
            memory,
        })
    }

    fn mask(&self) -> u16 {
        self.size - 1
    }

    /// As [`PackedRing::record`](super::packed::PackedRing::record).
    pub fn record(&mut self, queue: InflightQueue) -> Result<(), RingError> {
        let (inflight, heads) = SplitInflight::open(queue, self.published)?;
        if let Some(heads) = heads {
            self.next = self.published.wrapping_add(heads.len() as u16);
            self.seen = self.next;
            self.recovered = heads;
            self.recovered.reverse();
        }
        self.inflight = Some(inflight);
        Ok(())
    }

    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        let Some(index) = self.next_head()? else { return Ok(None) };
        self.read_chain(index, chain)?;
        Ok(Some(Head { index, slots: 1, record: 0 }))
    }

    #[inline]
    fn next_head(&mut self) -> Result<Option<u16>, RingError> {
        if let Some(head) = self.recovered.pop() {
            return Ok(Some(head));
        }
        if self.next == self.seen && !self.read_available_index() {
            return Ok(None);
        }
        let ahead = self.seen.wrapping_sub(self.next);
        if ahead > self.size {
            let (index, expected, size) = (self.seen, self.next, self.size);
            return Err(RingError::AvailableIndex { index, expected, size });
        }
        let entry = ENTRIES + usize::from(self.next & self.mask()) * 2;
        let head = self.available.load_u16(entry, Ordering::Relaxed);
        if head >= self.size {
            return Err(RingError::HeadRange { head, size: self.size });
        }
        self.next = self.next.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head);
        }
        Ok(Some(head))
    }

    /// Returns whether the index is new. Acquire: the driver writes the chain and its entry before the index.
    fn read_available_index(&mut self) -> bool {
        self.seen = self.available.load_u16(INDEX, Ordering::Acquire);
        self.seen != self.next
    }

    /// Reads the chain of `head`, which is less than the ring's size, into `chain`.
    #[inline]
    fn read_chain(&mut self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        chain.clear();
        let mut index = head;
        for _ in 0..self.size {
            let at = usize::from(index) * DESCRIPTOR_BYTES;
            let low = self.descriptors.load_u64(at, Ordering::Relaxed);
            let high = self.descriptors.load_u64(at + 8, Ordering::Relaxed);
            let descriptor = Descriptor::split((low, high));
            if descriptor.has(DESCRIPTOR_INDIRECT) {
                return self.read_indirect(head, &descriptor, chain);
            }
            chain.push(head, descriptor.buffer(), descriptor.flags)?;
            if !descriptor.has(DESCRIPTOR_NEXT) {
                return Ok(());
            }
            index = descriptor.next;
            if index >= self.size {
                return Err(RingError::NextRange { head, next: index });
            }
        }
        Err(RingError::ChainLoop { head })
    }

    fn read_indirect(&mut self, head: u16, table: &Descriptor, chain: &mut Chain) -> Result<(), RingError> {
        let mut table = self.memory.table(head, table)?;
        let mut index = 0;
        for _ in 0..table.entries {
            let descriptor = Descriptor::split(table.entry(index)?);
            if descriptor.has(DESCRIPTOR_INDIRECT) {
                return Err(RingError::IndirectNested { head });
            }
            chain.push(head, descriptor.buffer(), descriptor.flags)?;
            if !descriptor.has(DESCRIPTOR_NEXT) {
                return Ok(());
            }
            index = u32::from(descriptor.next);
            if index >= table.entries {
                return Err(RingError::NextRange { head, next: descriptor.next });
            }
        }
        Err(RingError::ChainLoop { head })
    }

    #[inline]
    pub fn push_used(&mut self, Head { index: head, .. }: Head, written: u32) {
        let at = ENTRIES + usize::from(self.used_next & self.mask()) * 8;
        self.used.store_u32(at, u32::from(head), Ordering::Relaxed);
        self.used.store_u32(at + 4, written, Ordering::Relaxed);
        self.used_next = self.used_next.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.complete(head);
        }
    }

    #[inline]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.used_next);
        if old == new {
            return false;
        }
        // Release: the entries of the used ring must be visible before the index.
        self.used.store_u16(INDEX, new, Ordering::Release);
        self.published = new;
        if let Some(inflight) = &mut self.inflight {
            inflight.commit(new);
        }
        // The store of the index must precede the load of the driver's event: otherwise the driver could go
        // to sleep in between, and would not be called.
        fence(Ordering::SeqCst);
        if std::mem::take(&mut self.call_first) {
            return true;
        }
        if self.event_idx {
            let event = ENTRIES + usize::from(self.size) * 2;
            let event = self.available.load_u16(event, Ordering::Relaxed);
            needs_event(event, new, old)
        } else {
            self.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
        }
    }

    pub fn enable_kicks(&mut self) -> bool {
        if self.event_idx {
            let event = ENTRIES + usize::from(self.size) * 8;
            self.used.store_u16(event, self.next, Ordering::Relaxed);
        } else {
            self.used.store_u16(FLAGS, 0, Ordering::Relaxed);
        }
        // Either the driver sees the request for a kick, or this side sees the driver's chain. Without the
        // fence both could miss each other.
        fence(Ordering::SeqCst);
        !self.recovered.is_empty() || self.seen != self.next || self.read_available_index()
    }

    pub fn base(&self) -> u32 {
        self.next.into()
    }

    pub fn recovered(&self) -> impl Iterator<Item = u16> {
        self.recovered.iter().copied()
    }
}
