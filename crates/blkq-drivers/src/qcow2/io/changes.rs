//! Records the regions of the device that are written while a block commit copies the overlay.

use std::ops::Range;

use blkq::Error;
use blkq::bitmap::{Bitmap, BitmapState, GRANULARITY_MAX};
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::SeqCst;
use blkq::sync::{Mutex, lock};

/// The smallest region that a bit represents, in bytes.
const REGION_MIN_BYTES: u64 = 1 << 16;
/// With more bits than this, each bit represents a larger region, so that a map takes at most 4 MiB. The size of a
/// region is limited too, so the maps of the largest devices take more.
const BITS_MAX: u64 = 1 << 25;

#[derive(Default)]
pub struct Changes {
    tracked: AtomicBool,
    /// `None` unless changes are tracked.
    map: Mutex<Option<Bitmap>>,
}

impl Changes {
    /// Begins to track changes, in `map`. A write must be recorded unless it has completed before this call.
    pub fn track(&self, map: Bitmap) {
        *lock(&self.map) = Some(map);
        self.tracked.store(true, SeqCst);
    }

    pub fn stop(&self) {
        self.tracked.store(false, SeqCst);
        *lock(&self.map) = None;
    }

    /// Records that `bytes` from `position` on may have changed. Must be called after the change was made and
    /// before its request completes.
    pub fn note(&self, position: u64, bytes: u64) {
        if bytes > 0
            && self.tracked.load(SeqCst)
            && let Some(map) = &*lock(&self.map)
        {
            map.mark(position..position + bytes);
        }
    }

    /// Takes the changes so far, and continues with `empty`. Returns `None` if changes are not tracked.
    pub fn take(&self, empty: Bitmap) -> Option<Bitmap> {
        lock(&self.map).as_mut().map(|map| std::mem::replace(map, empty))
    }
}

/// An empty map for a device of `size` bytes. Fails for a device that is too large for a bitmap, more than 512 PiB.
pub fn map_for(size: u64) -> Result<Bitmap, Error> {
    let region_bytes = size.div_ceil(BITS_MAX).next_power_of_two().clamp(REGION_MIN_BYTES, GRANULARITY_MAX);
    Bitmap::new("changes", region_bytes, size, BitmapState::Recording)
}

/// The first run of changed bytes from byte `at` on.
pub fn next_changed(map: &Bitmap, mut at: u64) -> Option<Range<u64>> {
    // One extent at a time: what follows the first changed run may be long, and is not searched.
    loop {
        let extent = map.extents(at..map.size(), 1).pop()?;
        let range = at..at + extent.length;
        if extent.dirty {
            return Some(range);
        }
        at = range.end;
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    fn runs(map: &Bitmap) -> Vec<Range<u64>> {
        let (mut runs, mut at) = (Vec::new(), 0);
        while let Some(run) = next_changed(map, at) {
            at = run.end;
            runs.push(run);
        }
        runs
    }

    #[test]
    fn changes_are_reported_in_whole_regions() {
        let changes = Changes::default();
        changes.note(0, 1 << 20);
        changes.track(map_for((100 << 16) + 512).unwrap());
        let take = || changes.take(map_for((100 << 16) + 512).unwrap()).map(|map| runs(&map));
        assert_eq!(take(), Some(Vec::new()));
        for (position, bytes) in [(65535, 2), (70 << 16, 1), (63 << 16, 65 << 10), (100 << 16, 512), (9, 0)] {
            changes.note(position, bytes);
        }
        let found = take().unwrap();
        let whole = [(0, 2), (63, 65), (70, 71), (100, 101)].map(|(from, to)| from << 16..to << 16);
        assert_eq!(found[..3], whole[..3]);
        assert_eq!((found.len(), &found[3]), (4, &(100 << 16..(100 << 16) + 512)));
        assert_eq!(take(), Some(Vec::new()));
        changes.stop();
        changes.note(0, 512);
        assert_eq!(take(), None);
    }

    #[test]
    fn a_large_device_has_larger_regions() {
        for (size, granularity) in [(1 << 40, 1 << 16), (1 << 50, 1 << 25), (1 << 59, GRANULARITY_MAX)] {
            let map = map_for(size).unwrap();
            assert_eq!(map.granularity(), granularity);
            map.mark(0..size);
            assert_eq!(next_changed(&map, 0), Some(0..size));
        }
        assert!(map_for(1 << 60).is_err());
    }
}
