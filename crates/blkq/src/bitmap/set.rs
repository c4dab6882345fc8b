use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Mutex, lock};

use super::{BITMAPS_MAX, Bitmap, BitmapState, MEMORY_MAX_BYTES};

/// The bitmaps of one disk. The list changes only while the disk is frozen.
#[derive(Default)]
pub(crate) struct BitmapSet {
    /// Sorted by name. Each name occurs once.
    bitmaps: Mutex<Vec<Arc<Bitmap>>>,
    /// The driver stores the bitmaps with its image. This flag and the next one are accessed only under the
    /// disk's lock of changes, so relaxed accesses are enough.
    persistent: AtomicBool,
    /// The bitmaps have been stored and must no longer change.
    closed: AtomicBool,
}

impl BitmapSet {
    pub fn list(&self) -> Vec<Arc<Bitmap>> {
        lock(&self.bitmaps).clone()
    }

    pub fn set_persistent(&self) {
        self.persistent.store(true, Relaxed);
    }

    pub fn is_persistent(&self) -> bool {
        self.persistent.load(Relaxed)
    }

    pub fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }

    pub fn recording(&self) -> Vec<Arc<Bitmap>> {
        let mut bitmaps = self.list();
        bitmaps.retain(|bitmap| bitmap.state() == BitmapState::Recording);
        bitmaps
    }

    /// Fails with [`ErrorKind::Invalid`] if the name exists, or the disk has no room for another bitmap.
    pub fn add(&self, bitmap: Bitmap) -> Result<(), Error> {
        let mut bitmaps = lock(&self.bitmaps);
        let rejected =
            |why: String| Err(Error::new(ErrorKind::Invalid, format!("bitmap {}: {why}", bitmap.name())));
        let Err(place) = bitmaps.binary_search_by(|other| other.name().cmp(bitmap.name())) else {
            return rejected("a bitmap of that name already exists".to_owned());
        };
        if bitmaps.len() == BITMAPS_MAX {
            return rejected(format!("the disk already has {BITMAPS_MAX} bitmaps; remove one first"));
        }
        let memory = bitmaps.iter().map(|bitmap| bitmap.memory_bytes()).sum::<u64>() + bitmap.memory_bytes();
        if memory > MEMORY_MAX_BYTES {
            return rejected(format!(
                "all bitmaps of the disk would need {memory} bytes of memory, more than {MEMORY_MAX_BYTES}; remove one \
                 first, or choose a larger granularity"
            ));
        }
        bitmaps.insert(place, Arc::new(bitmap));
        Ok(())
    }

    pub fn remove(&self, name: &str) -> bool {
        let mut bitmaps = lock(&self.bitmaps);
        let before = bitmaps.len();
        bitmaps.retain(|bitmap| bitmap.name() != name);
        bitmaps.len() < before
    }

    pub fn replace(&self, bitmap: Bitmap) {
        let mut bitmaps = lock(&self.bitmaps);
        if let Some(place) = bitmaps.iter_mut().find(|other| other.name() == bitmap.name()) {
            *place = Arc::new(bitmap);
        }
    }

    /// Checks that the memory limit permits all bitmaps if the disk gets `size` bytes. Fails with
    /// [`ErrorKind::Unsupported`], and the names of the bitmaps, if it does not.
    pub fn check_size(&self, size: u64) -> Result<(), Error> {
        let bitmaps = self.list();
        let memory: u64 = bitmaps.iter().map(|bitmap| bitmap.memory_for(size)).sum();
        if memory <= MEMORY_MAX_BYTES {
            return Ok(());
        }
        let names: Vec<&str> = bitmaps.iter().map(|bitmap| bitmap.name()).collect();
        let message = format!(
            "the dirty bitmaps would need {memory} bytes of memory, more than {MEMORY_MAX_BYTES}; remove some first: {}",
            names.join(", ")
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Resizes all bitmaps for a disk of `size` bytes, after [`BitmapSet::check_size`]. A bitmap that
    /// nevertheless cannot be resized becomes inconsistent. One thread at a time may change the set.
    pub fn resize(&self, size: u64) {
        let resize = |bitmap: &Arc<Bitmap>| bitmap.resized(size).or_else(|_| bitmap.inconsistent());
        // The set is not locked while bits are copied, because connections read it.
        self.restore(self.list().iter().filter_map(|bitmap| resize(bitmap).map(Arc::new).ok()).collect());
    }

    /// Replaces all bitmaps by a list that was returned earlier, or was derived from one.
    pub fn restore(&self, bitmaps: Vec<Arc<Bitmap>>) {
        *lock(&self.bitmaps) = bitmaps;
    }
}
