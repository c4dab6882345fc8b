//! Which of many have something pending: a bitmap that anybody sets and its owner empties
//! (the kernel's `ctx_map` of software queues with requests).

use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A bit for each of 64 software queues, numbered from 0.
#[derive(Debug)]
pub struct PendingMap(CachePadded<AtomicU64>);

impl PendingMap {
    /// A map of which none is pending.
    pub fn new() -> PendingMap {
        PendingMap(CachePadded::new(AtomicU64::new(0)))
    }

    /// Where the word lies.
    pub fn hot_fields(&self, writer: Writer, fields: &mut Vec<HotField>) {
        fields.push(HotField::of("pending", writer, &*self.0));
    }

    /// Marks `index`. Whether it was not marked: then the owner is to be kicked.
    #[inline]
    pub fn set(&self, index: usize) -> bool {
        let bit = 1 << index;
        self.0.fetch_or(bit, SeqCst) & bit == 0
    }

    /// Whether none is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.load(SeqCst) == 0
    }

    /// Takes all that are pending, a bit for each. They are unmarked, so that what comes meanwhile marks
    /// them anew.
    #[inline]
    pub fn take_all(&self) -> u64 {
        if self.is_empty() { 0 } else { self.0.swap(0, SeqCst) }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_taken_once() {
        let map = PendingMap::new();
        assert!(map.is_empty());
        for index in [63, 0, 31] {
            assert!(map.set(index));
            assert!(!map.set(index));
        }
        assert!(!map.is_empty());
        assert_eq!(map.take_all(), 1 << 63 | 1 << 31 | 1);
        assert!(map.is_empty() && map.set(63), "it may be set anew");
        assert_eq!((map.take_all(), map.take_all()), (1 << 63, 0));
    }
}
