//! A bitmap of software queues with requests, which any thread sets and the owner of the hardware queue
//! empties (the kernel's `ctx_map`).

use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// One bit for each of 64 software queues.
#[derive(Debug, Default)]
pub struct PendingMap(CachePadded<AtomicU64>);

impl PendingMap {
    pub fn hot_fields(&self, writer: Writer, fields: &mut Vec<HotField>) {
        fields.push(HotField::of("pending", writer, &*self.0));
    }

    /// Marks `index`. Returns whether it was unmarked, in which case the caller must kick the owner.
    #[inline]
    pub fn set(&self, index: usize) -> bool {
        let bit = 1 << index;
        self.0.fetch_or(bit, SeqCst) & bit == 0
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.load(SeqCst) == 0
    }

    /// Takes all marks, one bit for each index. They are then unset, so that later work sets them again.
    #[inline]
    pub fn take_all(&self) -> u64 {
        if self.is_empty() { 0 } else { self.0.swap(0, SeqCst) }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn each_mark_is_taken_once() {
        let map = PendingMap::default();
        assert!(map.is_empty());
        for index in [63, 0, 31] {
            assert!(map.set(index));
            assert!(!map.set(index));
        }
        assert!(!map.is_empty());
        assert_eq!(map.take_all(), 1 << 63 | 1 << 31 | 1);
        assert!(map.is_empty() && map.set(63), "it may be set again");
        assert_eq!((map.take_all(), map.take_all()), (1 << 63, 0));
    }
}
