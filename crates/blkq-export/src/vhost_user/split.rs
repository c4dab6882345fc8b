//! A split ring (virtio 1.2, 2.7): a table of descriptors, the available ring, and the used ring. Each field
//! is read once, and then checked.

use std::sync::atomic::Ordering;

use super::chain::{
    Chain, DESCRIPTOR_BYTES, Descriptor, ENTRIES_AT, Head, RingError, RingParts, needs_event,
};
use super::inflight::{InflightQueue, Recovered};
use super::inflight_split::SplitInflight;

/// A flag of the available ring: the driver does not need calls.
const NO_INTERRUPT: u16 = 1;
// Offsets in the available and the used ring, which both end with an event index of 2 bytes.
const FLAGS: usize = 0;
const INDEX: usize = 2;

pub struct SplitRing {
    parts: RingParts,
    next: u16,
    /// The available index at the last read.
    seen: u16,
    /// The used index, including chains that are not published yet.
    used_next: u16,
    published: u16,
    inflight: Option<SplitInflight>,
}

impl SplitRing {
    /// The base is the available index of the next chain. Fails for a base of more than 16 bits, or a size
    /// that is not a power of two.
    pub fn new(parts: RingParts, base: u32) -> Result<SplitRing, RingError> {
        let next = u16::try_from(base).map_err(|_| RingError::Base { base })?;
        if !parts.size.is_power_of_two() {
            return Err(RingError::Size { size: parts.size.into() });
        }
        let used_next = parts.device.load_u16(INDEX, Ordering::Acquire);
        Ok(SplitRing { parts, next, seen: next, used_next, published: used_next, inflight: None })
    }

    /// The entry of the available or used ring for the index `index`.
    fn entry(&self, index: u16) -> usize {
        usize::from(index & (self.parts.size - 1))
    }

    /// As [`PackedRing::record`](super::packed::PackedRing::record).
    pub fn record(&mut self, queue: InflightQueue) -> Result<Vec<Recovered>, RingError> {
        let (inflight, recovered) = SplitInflight::open(queue, self.published)?;
        if let Some(recovered) = &recovered {
            self.next = self.published.wrapping_add(recovered.len() as u16);
            self.seen = self.next;
        }
        self.inflight = Some(inflight);
        Ok(recovered.unwrap_or_default())
    }

    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        if !self.is_available() {
            return Ok(None);
        }
        let size = self.parts.size;
        if self.seen.wrapping_sub(self.next) > size {
            return Err(RingError::AvailableIndex { index: self.seen, expected: self.next, size });
        }
        let head = self.parts.driver.load_u16(ENTRIES_AT + self.entry(self.next) * 2, Ordering::Relaxed);
        if head >= size {
            return Err(RingError::HeadRange { head, size });
        }
        self.next = self.next.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.take(head);
        }
        self.read_chain(head, chain)?;
        Ok(Some(Head { index: head, slots: 1, record: 0 }))
    }

    pub fn read_recovered(&mut self, recovered: &Recovered, chain: &mut Chain) -> Result<(), RingError> {
        self.read_chain(recovered.head.index, chain)
    }

    /// Whether there is another chain. Acquire: the driver writes the chain and its entry before the index.
    pub fn is_available(&mut self) -> bool {
        if self.seen == self.next {
            self.seen = self.parts.driver.load_u16(INDEX, Ordering::Acquire);
        }
        self.seen != self.next
    }

    /// Reads the chain of `head`, which is less than the ring's size, into `chain`.
    fn read_chain(&mut self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        chain.clear();
        let mut index = head;
        let size = self.parts.size;
        for _ in 0..size {
            let at = usize::from(index) * DESCRIPTOR_BYTES;
            let low = self.parts.descriptors.load_u64(at, Ordering::Relaxed);
            let high = self.parts.descriptors.load_u64(at + 8, Ordering::Relaxed);
            let descriptor = Descriptor::split(low, high);
            if self.parts.read(head, &descriptor, chain)? {
                return Ok(());
            }
            index = descriptor.next;
            if index >= size {
                return Err(RingError::NextRange { head, next: index });
            }
        }
        Err(RingError::ChainLoop { head })
    }

    pub fn push_used(&mut self, Head { index: head, .. }: Head, written: u32) {
        let at = ENTRIES_AT + self.entry(self.used_next) * 8;
        self.parts.device.store_u32(at, u32::from(head), Ordering::Relaxed);
        self.parts.device.store_u32(at + 4, written, Ordering::Relaxed);
        self.used_next = self.used_next.wrapping_add(1);
        if let Some(inflight) = &mut self.inflight {
            inflight.complete(head);
        }
    }

    /// Returns the number of published chains.
    pub fn publish(&mut self) -> u16 {
        let new = self.used_next;
        let count = new.wrapping_sub(self.published);
        if count > 0 {
            // Release: the entries of the used ring must be visible before the index.
            self.parts.device.store_u16(INDEX, new, Ordering::Release);
            self.published = new;
            if let Some(inflight) = &mut self.inflight {
                inflight.commit(new);
            }
        }
        count
    }

    /// Whether the driver must be called for the last `count` published chains.
    pub fn needs_call(&self, count: u16) -> bool {
        let RingParts { driver, size, event_idx, .. } = &self.parts;
        if *event_idx {
            let event = driver.load_u16(ENTRIES_AT + usize::from(*size) * 2, Ordering::Relaxed);
            needs_event(event, self.published, self.published.wrapping_sub(count))
        } else {
            driver.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
        }
    }

    pub fn ask_for_kick(&mut self) {
        let RingParts { device, size, event_idx, .. } = &self.parts;
        let (at, value) =
            if *event_idx { (ENTRIES_AT + usize::from(*size) * 8, self.next) } else { (FLAGS, 0) };
        device.store_u16(at, value, Ordering::Relaxed);
    }

    pub fn base(&self) -> u32 {
        self.next.into()
    }
}
