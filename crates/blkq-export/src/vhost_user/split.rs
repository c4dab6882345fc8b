//! A split ring (virtio 1.2, 2.7): a table of descriptors, the available ring, and the used ring. Each field
//! is read once, and then checked.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::area::Area;
use super::chain::{
    Chain, DESCRIPTOR_BYTES, Descriptor, ENTRIES_AT, Head, RingError, RingParts, needs_event,
};
use super::inflight::{InflightQueue, Recovered, VERSION, sort_recovered};

/// A flag of the available ring: the driver does not need calls.
const NO_INTERRUPT: u16 = 1;
// Offsets in the available and the used ring, which both end with an event index of 2 bytes.
const FLAGS: usize = 0;
const INDEX: usize = 2;

// Offsets in the header of the record of requests in flight.
const COUNT: usize = 10;
const LAST_BATCH: usize = 12;
const USED_INDEX: usize = 14;
// Size of the record of a chain, and offsets in it.
const RECORD_BYTES: usize = 16;
const MARK: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

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
        let used_next = parts.device.load_u16(INDEX, Acquire);
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
        let head = self.parts.driver.load_u16(ENTRIES_AT + self.entry(self.next) * 2, Relaxed);
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
            self.seen = self.parts.driver.load_u16(INDEX, Acquire);
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
            let low = self.parts.descriptors.load_u64(at, Relaxed);
            let high = self.parts.descriptors.load_u64(at + 8, Relaxed);
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
        self.parts.device.store_u32(at, u32::from(head), Relaxed);
        self.parts.device.store_u32(at + 4, written, Relaxed);
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
            self.parts.device.store_u16(INDEX, new, Release);
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
            let event = driver.load_u16(ENTRIES_AT + usize::from(*size) * 2, Relaxed);
            needs_event(event, self.published, self.published.wrapping_sub(count))
        } else {
            driver.load_u16(FLAGS, Relaxed) & NO_INTERRUPT == 0
        }
    }

    pub fn ask_for_kick(&mut self) {
        let RingParts { device, size, event_idx, .. } = &self.parts;
        let (at, value) =
            if *event_idx { (ENTRIES_AT + usize::from(*size) * 8, self.next) } else { (FLAGS, 0) };
        device.store_u16(at, value, Relaxed);
    }

    pub fn base(&self) -> u32 {
        self.next.into()
    }
}

/// The record of requests in flight: a mark and a counter for each head. The heads of the last batch form a list:
/// after a kill between publishing and clearing the marks, the next daemon clears them.
struct SplitInflight {
    area: Area,
    /// The counter of the next chain, which gives the order in which chains were taken.
    counter: u64,
    last_batch: u16,
    /// Heads that are used and not published yet.
    batch: Vec<u16>,
}

fn record(head: u16) -> usize {
    RECORD_BYTES + usize::from(head) * RECORD_BYTES
}

impl SplitInflight {
    /// Returns the chains in flight, the oldest last; `None` if the record is new. Fails with
    /// [`RingError::Inflight`] if the version is unknown or the size is that of another ring.
    fn open(queue: InflightQueue, used: u16) -> Result<(SplitInflight, Option<Vec<Recovered>>), RingError> {
        let InflightQueue { area, size } = queue;
        let version = area.load_u16(VERSION, Relaxed);
        let mut this =
            SplitInflight { area, counter: 0, last_batch: 0, batch: Vec::with_capacity(usize::from(size)) };
        match version {
            0 => {
                // The ring may already be in use. With a recorded index of 0, `recover` would take the
                // difference for an unfinished batch.
                this.area.store_u16(USED_INDEX, used, Relaxed);
                this.area.store_u16(COUNT, size, Relaxed);
                this.area.store_u16(VERSION, 1, Release);
                Ok((this, None))
            }
            1 => this.recover(size, used).map(|chains| (this, Some(chains))),
            _ => Err(RingError::Inflight { what: "unknown version" }),
        }
    }

    fn recover(&mut self, size: u16, used: u16) -> Result<Vec<Recovered>, RingError> {
        if self.area.load_u16(COUNT, Relaxed) != size {
            return Err(RingError::Inflight { what: "the ring has another size" });
        }
        self.last_batch = self.area.load_u16(LAST_BATCH, Relaxed);
        // `used` minus the recorded index is the length of a batch that was published and not cleared. The
        // list has no terminator, and its last NEXT is stale, so it is followed for that length only.
        let shown = used.wrapping_sub(self.area.load_u16(USED_INDEX, Relaxed));
        if shown <= size {
            let mut head = self.last_batch;
            for _ in 0..shown {
                if head >= size {
                    let what = "the last batch names a descriptor that does not exist";
                    return Err(RingError::Inflight { what });
                }
                self.area.store_u8(record(head) + MARK, 0, Relaxed);
                head = self.area.load_u16(record(head) + NEXT, Relaxed);
            }
        }
        self.area.store_u16(USED_INDEX, used, Release);
        let mut chains: Vec<Recovered> = (0..size)
            .filter(|head| self.area.load_u8(record(*head) + MARK, Relaxed) != 0)
            .map(|index| Recovered {
                counter: self.area.load_u64(record(index) + COUNTER, Relaxed),
                head: Head { index, slots: 1, record: 0 },
                descriptors: Vec::new(),
            })
            .collect();
        self.counter = sort_recovered(&mut chains);
        Ok(chains)
    }

    fn take(&mut self, head: u16) {
        self.area.store_u64(record(head) + COUNTER, self.counter, Relaxed);
        self.area.store_u8(record(head) + MARK, 1, Release);
        self.counter = self.counter.wrapping_add(1);
    }

    fn complete(&mut self, head: u16) {
        self.area.store_u16(record(head) + NEXT, self.last_batch, Relaxed);
        self.area.store_u16(LAST_BATCH, head, Release);
        self.last_batch = head;
        self.batch.push(head);
    }

    /// Clears the marks of the batch. Must be called after `used`, the new used index, was published.
    fn commit(&mut self, used: u16) {
        for head in self.batch.drain(..) {
            self.area.store_u8(record(head) + MARK, 0, Release);
        }
        self.area.store_u16(USED_INDEX, used, Release);
    }
}
