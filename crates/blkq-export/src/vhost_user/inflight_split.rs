//! The record of a split ring: an in-flight mark and a counter for each head. The heads of the last batch
//! form a list: after a kill between publishing and clearing the marks, the next daemon clears them.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::area::Area;
use super::chain::{Head, RingError};
use super::inflight::{InflightQueue, Recovered, VERSION, sort_recovered};

// Offsets in the header of the region.
const COUNT: usize = 10;
const LAST_BATCH: usize = 12;
const USED_INDEX: usize = 14;
// Size of a record, and offsets in it.
const RECORD_BYTES: usize = 16;
const MARK: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

pub struct SplitInflight {
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
    pub fn open(
        queue: InflightQueue,
        used: u16,
    ) -> Result<(SplitInflight, Option<Vec<Recovered>>), RingError> {
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
                    return Err(RingError::Inflight {
                        what: "the last batch names a descriptor that does not exist",
                    });
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

    pub fn take(&mut self, head: u16) {
        self.area.store_u64(record(head) + COUNTER, self.counter, Relaxed);
        self.area.store_u8(record(head) + MARK, 1, Release);
        self.counter = self.counter.wrapping_add(1);
    }

    pub fn complete(&mut self, head: u16) {
        self.area.store_u16(record(head) + NEXT, self.last_batch, Relaxed);
        self.area.store_u16(LAST_BATCH, head, Release);
        self.last_batch = head;
        self.batch.push(head);
    }

    /// Clears the marks of the batch. Must be called after `used`, the new used index, was published.
    pub fn commit(&mut self, used: u16) {
        for head in self.batch.drain(..) {
            self.area.store_u8(record(head) + MARK, 0, Release);
        }
        self.area.store_u16(USED_INDEX, used, Release);
    }
}
