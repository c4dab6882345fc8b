//! Which of many have something pending: a bitmap that anybody sets and its owner empties
//! (the kernel's `ctx_map` of software queues with requests).

use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// A bit for each of a fixed number of software queues.
#[derive(Debug)]
pub struct PendingMap {
    words: Box<[CachePadded<AtomicU64>]>,
}

impl PendingMap {
    /// A map for `count`, numbered from 0, of which none is pending.
    pub fn new(count: usize) -> PendingMap {
        PendingMap { words: (0..count.div_ceil(64)).map(|_| CachePadded::new(AtomicU64::new(0))).collect() }
    }

    /// Where the words lie.
    pub fn hot_fields(&self, writer: Writer, fields: &mut Vec<HotField>) {
        fields.extend(self.words.iter().map(|word| HotField::of("pending", writer, &**word)));
    }

    /// Marks `index`. Whether it was not marked: then the owner is to be kicked.
    #[inline]
    pub fn set(&self, index: usize) -> bool {
        let bit = 1 << (index % 64);
        self.words[index / 64].fetch_or(bit, SeqCst) & bit == 0
    }

    /// Whether none is pending.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| word.load(SeqCst) == 0)
    }

    /// Calls `each` for all that are pending, in ascending order. Each is unmarked before its
    /// call, so that what comes meanwhile marks it anew.
    #[inline]
    pub fn take_all(&self, mut each: impl FnMut(usize)) {
        for (index, word) in self.words.iter().enumerate() {
            if word.load(SeqCst) == 0 {
                continue;
            }
            let mut bits = word.swap(0, SeqCst);
            while bits != 0 {
                each(index * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_taken_once_and_in_order() {
        let map = PendingMap::new(130);
        assert!(map.is_empty());
        for index in [129, 0, 63, 64] {
            assert!(map.set(index));
            assert!(!map.set(index));
        }
        assert!(!map.is_empty());
        let mut taken = Vec::new();
        map.take_all(|index| {
            taken.push(index);
            if index == 63 {
                assert!(map.set(63), "it may be set anew while it is scanned");
            }
        });
        assert_eq!(taken, [0, 63, 64, 129]);
        taken.clear();
        map.take_all(|index| taken.push(index));
        assert_eq!(taken, [63]);
        assert!(map.is_empty());
    }
}
