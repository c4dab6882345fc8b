//! The record of a split ring: a mark and a counter for each head, and a list of the heads that were
//! used last, for a daemon that dies between showing them to the driver and removing their marks.

use std::sync::atomic::Ordering::{Relaxed, Release};

use super::area::Area;
use super::chain::RingError;
use super::inflight::{InflightQueue, VERSION};

/// Fields of the region.
const COUNT: usize = 10;
const LAST_BATCH: usize = 12;
const USED_INDEX: usize = 14;
/// Fields of a record.
const RECORD_BYTES: usize = 16;
const MARK: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// The record of a split ring.
pub struct SplitInflight {
    area: Area,
    /// Counts chains as they are taken.
    counter: u64,
    last_batch: u16,
    /// Heads that are used, and not yet shown to the driver.
    batch: Vec<u16>,
}

fn record(head: u16) -> usize {
    RECORD_BYTES + usize::from(head) * RECORD_BYTES
}

impl SplitInflight {
    /// The record of a ring whose used index is `used`, and the heads that are in flight, in the order
    /// in which they were taken. `None` in their place if the record is a new one.
    ///
    /// # Errors
    /// A version that is not known; another size.
    pub fn open(queue: InflightQueue, used: u16) -> Result<(SplitInflight, Option<Vec<u16>>), RingError> {
        let InflightQueue { area, size } = queue;
        let version = area.load_u16(VERSION, Relaxed);
        let mut this =
            SplitInflight { area, counter: 0, last_batch: 0, batch: Vec::with_capacity(usize::from(size)) };
        match version {
            0 => {
                // The driver may have used the ring before: an index of 0 would look like a batch.
                this.area.store_u16(USED_INDEX, used, Relaxed);
                this.area.store_u16(COUNT, size, Relaxed);
                this.area.store_u16(VERSION, 1, Release);
                Ok((this, None))
            }
            1 => this.recover(size, used).map(|heads| (this, Some(heads))),
            _ => Err(RingError::Inflight { what: "a version that is not known" }),
        }
    }

    fn recover(&mut self, size: u16, used: u16) -> Result<Vec<u16>, RingError> {
        if self.area.load_u16(COUNT, Relaxed) != size {
            return Err(RingError::Inflight { what: "it is that of a ring of another size" });
        }
        self.last_batch = self.area.load_u16(LAST_BATCH, Relaxed);
        // The driver sees as many more as used as the index has advanced: those are the last batch. Its
        // list is followed that far and no further, whatever its end names.
        let shown = used.wrapping_sub(self.area.load_u16(USED_INDEX, Relaxed));
        if shown <= size {
            let mut head = self.last_batch;
            for _ in 0..shown {
                if head >= size {
                    return Err(RingError::Inflight { what: "its last batch names no descriptor" });
                }
                self.area.store_u8(record(head) + MARK, 0, Relaxed);
                head = self.area.load_u16(record(head) + NEXT, Relaxed);
            }
        }
        self.area.store_u16(USED_INDEX, used, Release);
        let mut heads: Vec<(u64, u16)> = (0..size)
            .filter(|head| self.area.load_u8(record(*head) + MARK, Relaxed) != 0)
            .map(|head| (self.area.load_u64(record(head) + COUNTER, Relaxed), head))
            .collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// The chain of `head` was taken.
    #[inline]
    pub fn take(&mut self, head: u16) {
        self.area.store_u64(record(head) + COUNTER, self.counter, Relaxed);
        self.area.store_u8(record(head) + MARK, 1, Release);
        self.counter = self.counter.wrapping_add(1);
    }

    /// The chain of `head` is used, as the driver will see.
    #[inline]
    pub fn complete(&mut self, head: u16) {
        self.area.store_u16(record(head) + NEXT, self.last_batch, Relaxed);
        self.area.store_u16(LAST_BATCH, head, Release);
        self.last_batch = head;
        self.batch.push(head);
    }

    /// The driver sees all that is used: its index is `used`.
    #[inline]
    pub fn commit(&mut self, used: u16) {
        for head in self.batch.drain(..) {
            self.area.store_u8(record(head) + MARK, 0, Release);
        }
        self.area.store_u16(USED_INDEX, used, Release);
    }
}
