//! Records the regions of the device that are written while a block commit copies the overlay.

use std::ops::Range;

use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::SeqCst;
use blkq::sync::{Mutex, lock};

/// One bit represents a region of at least `1 << UNIT_BITS_MIN` bytes of the device.
const UNIT_BITS_MIN: u32 = 16;
/// Largest number of bits: a map takes at most 4 MiB. On larger devices a bit represents a larger region.
const BITS_MAX: u64 = 1 << 25;

#[derive(Default)]
pub(in crate::qcow2) struct Changes {
    tracked: AtomicBool,
    map: Mutex<RegionMap>,
}

#[derive(Default)]
pub(in crate::qcow2) struct RegionMap {
    unit_bits: u32,
    words: Vec<u64>,
    size: u64,
}

impl Changes {
    /// Begins to track the changes of a device of `size` bytes. A write must be recorded unless it has
    /// completed before this call.
    pub fn track(&self, size: u64) {
        *lock(&self.map) = RegionMap::new(size);
        self.tracked.store(true, SeqCst);
    }

    pub fn stop(&self) {
        self.tracked.store(false, SeqCst);
        *lock(&self.map) = RegionMap::default();
    }

    /// Records that `bytes` from `position` on may have changed. Must be called after the change was made and
    /// before its request completes.
    #[inline]
    pub fn note(&self, position: u64, bytes: u64) {
        if self.tracked.load(SeqCst) {
            lock(&self.map).set(position, bytes);
        }
    }

    pub fn take(&self) -> RegionMap {
        let mut map = lock(&self.map);
        let empty = RegionMap::new(map.size);
        std::mem::replace(&mut *map, empty)
    }
}

impl RegionMap {
    fn new(size: u64) -> RegionMap {
        let mut unit_bits = UNIT_BITS_MIN;
        while size >> unit_bits > BITS_MAX {
            unit_bits += 1;
        }
        let bits = size.div_ceil(1 << unit_bits);
        RegionMap { unit_bits, words: vec![0; bits.div_ceil(64) as usize], size }
    }

    pub fn full(size: u64) -> RegionMap {
        let mut map = RegionMap::new(size);
        map.set(0, size);
        map
    }

    fn set(&mut self, position: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        for unit in position >> self.unit_bits..=(position + bytes - 1) >> self.unit_bits {
            // The map is empty if tracking was stopped between the check and the lock.
            if let Some(word) = self.words.get_mut((unit / 64) as usize) {
                *word |= 1 << (unit % 64);
            }
        }
    }

    /// The first run of changed bytes from `position` on.
    pub fn next(&self, position: u64) -> Option<Range<u64>> {
        let units = self.words.len() as u64 * 64;
        let first = self.find(position >> self.unit_bits, units, true)?;
        let end = self.find(first, units, false).unwrap_or(units);
        let start = (first << self.unit_bits).max(position);
        (start < self.size).then(|| start..(end << self.unit_bits).min(self.size))
    }

    /// The first unit from `unit` on whose bit is `is_set`.
    fn find(&self, unit: u64, units: u64, is_set: bool) -> Option<u64> {
        let mut unit = unit;
        while unit < units {
            let word = self.words[(unit / 64) as usize];
            let word = (if is_set { word } else { !word }) >> (unit % 64);
            if word != 0 {
                return Some(unit + u64::from(word.trailing_zeros()));
            }
            unit = (unit / 64 + 1) * 64;
        }
        None
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    fn runs(map: &RegionMap) -> Vec<Range<u64>> {
        let (mut runs, mut at) = (Vec::new(), 0);
        while let Some(run) = map.next(at) {
            at = run.end;
            runs.push(run);
        }
        runs
    }

    #[test]
    fn changes_are_reported_in_whole_regions() {
        let changes = Changes::default();
        changes.note(0, 1 << 20);
        changes.track((100 << 16) + 512);
        assert_eq!(runs(&changes.take()), []);
        for (position, bytes) in [(65535, 2), (70 << 16, 1), (63 << 16, 65 << 10), (100 << 16, 512), (9, 0)] {
            changes.note(position, bytes);
        }
        let found = runs(&changes.take());
        let whole = [(0, 2), (63, 65), (70, 71), (100, 101)].map(|(from, to)| from << 16..to << 16);
        assert_eq!(found[..3], whole[..3]);
        assert_eq!((found.len(), &found[3]), (4, &(100 << 16..(100 << 16) + 512)));
        assert_eq!(runs(&changes.take()), []);
        assert_eq!(RegionMap::full(1 << 40).next(0), Some(0..1 << 40));
        changes.stop();
        changes.note(0, 512);
        assert_eq!(runs(&changes.take()), []);
    }
}
