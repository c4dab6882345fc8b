//! The bitmaps of one disk.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Mutex, lock};

use super::{BITMAPS_MAX, Bitmap, BitmapState, MEMORY_MAX_BYTES};

/// The bitmaps of one disk. They are exchanged while it is frozen, and their bits are set by its queues.
pub(crate) struct BitmapSet {
    /// By name, each one once.
    bitmaps: Mutex<Vec<Arc<Bitmap>>>,
    /// Some are recording: changed while the disk is frozen.
    recording: AtomicBool,
}

impl BitmapSet {
    pub fn new() -> BitmapSet {
        BitmapSet { bitmaps: Mutex::new(Vec::new()), recording: AtomicBool::new(false) }
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<Arc<Bitmap>> {
        lock(&self.bitmaps).clone()
    }

    /// Whether writes set bits of some.
    pub fn has_recording(&self) -> bool {
        self.recording.load(Relaxed)
    }

    /// Those whose bits are set by writes.
    pub fn recording(&self) -> Vec<Arc<Bitmap>> {
        let mut bitmaps = self.list();
        bitmaps.retain(|bitmap| bitmap.state() == BitmapState::Recording);
        bitmaps
    }

    /// Adds one.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if there is one of that name, or there is no room for one more.
    pub fn add(&self, bitmap: Bitmap) -> Result<(), Error> {
        let mut bitmaps = lock(&self.bitmaps);
        let rejected =
            |why: String| Err(Error::new(ErrorKind::Invalid, format!("bitmap {}: {why}", bitmap.name())));
        let Err(place) = bitmaps.binary_search_by(|other| other.name().cmp(bitmap.name())) else {
            return rejected("there is one of that name already".to_owned());
        };
        if bitmaps.len() == BITMAPS_MAX {
            return rejected(format!("there are {BITMAPS_MAX} already; remove one first"));
        }
        let memory = bitmaps.iter().map(|bitmap| bitmap.memory_bytes()).sum::<u64>() + bitmap.memory_bytes();
        if memory > MEMORY_MAX_BYTES {
            return rejected(format!(
                "all together would take {memory} bytes of memory, and may take {MEMORY_MAX_BYTES}; remove one \
                 first, or choose a greater granularity"
            ));
        }
        bitmaps.insert(place, Arc::new(bitmap));
        self.note(&bitmaps);
        Ok(())
    }

    /// Removes the one called `name`; false if there is none.
    pub fn remove(&self, name: &str) -> bool {
        let mut bitmaps = lock(&self.bitmaps);
        let before = bitmaps.len();
        bitmaps.retain(|bitmap| bitmap.name() != name);
        self.note(&bitmaps);
        bitmaps.len() < before
    }

    /// Puts one in the place of that of its name.
    pub fn replace(&self, bitmap: Bitmap) {
        let mut bitmaps = lock(&self.bitmaps);
        if let Some(place) = bitmaps.iter_mut().find(|other| other.name() == bitmap.name()) {
            *place = Arc::new(bitmap);
        }
    }

    /// Has all be for a disk of `size` bytes. One that cannot be so large is removed: its name is returned.
    pub fn resize(&self, size: u64) -> Vec<String> {
        let mut bitmaps = lock(&self.bitmaps);
        let mut removed = Vec::new();
        *bitmaps = std::mem::take(&mut *bitmaps)
            .into_iter()
            .filter_map(|bitmap| match bitmap.resized(size) {
                Ok(resized) => Some(Arc::new(resized)),
                Err(_) => {
                    removed.push(bitmap.name().to_owned());
                    None
                }
            })
            .collect();
        self.note(&bitmaps);
        removed
    }

    fn note(&self, bitmaps: &[Arc<Bitmap>]) {
        let recording = bitmaps.iter().any(|bitmap| bitmap.state() == BitmapState::Recording);
        self.recording.store(recording, Relaxed);
    }
}
