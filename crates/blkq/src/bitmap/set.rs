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
    /// They are kept with an image.
    kept: AtomicBool,
    /// They change no more.
    closed: AtomicBool,
}

impl BitmapSet {
    pub fn new() -> BitmapSet {
        BitmapSet {
            bitmaps: Mutex::new(Vec::new()),
            recording: AtomicBool::new(false),
            kept: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<Arc<Bitmap>> {
        lock(&self.bitmaps).clone()
    }

    /// Whether writes set bits of some.
    pub fn has_recording(&self) -> bool {
        self.recording.load(Relaxed)
    }

    /// They are kept with an image from now on.
    pub fn set_kept(&self) {
        self.kept.store(true, Relaxed);
    }

    /// Whether they are kept with an image.
    pub fn is_kept(&self) -> bool {
        self.kept.load(Relaxed)
    }

    /// They change no more: what keeps them has them as they are.
    pub fn close(&self) {
        self.closed.store(true, Relaxed);
    }

    /// Whether they change no more.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
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
        self.note(&bitmaps);
    }

    /// Checks whether all have room in memory if the disk gets `size` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if not: which bitmaps there are.
    pub fn check_size(&self, size: u64) -> Result<(), Error> {
        let bitmaps = self.list();
        let memory: u64 = bitmaps.iter().map(|bitmap| bitmap.memory_for(size)).sum();
        if memory <= MEMORY_MAX_BYTES {
            return Ok(());
        }
        let names: Vec<&str> = bitmaps.iter().map(|bitmap| bitmap.name()).collect();
        let message = format!(
            "its bitmaps would take {memory} bytes of memory, and may take {MEMORY_MAX_BYTES}; remove some first: {}",
            names.join(", ")
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Has all be for a disk of `size` bytes, which was checked. One that cannot be so large all the same is
    /// inconsistent. Nothing else changes the set meanwhile.
    pub fn resize(&self, size: u64) {
        let resize = |bitmap: &Arc<Bitmap>| bitmap.resized(size).or_else(|_| bitmap.inconsistent());
        // Connections read the set: it is not locked while bits are copied.
        self.restore(self.list().iter().filter_map(|bitmap| resize(bitmap).map(Arc::new).ok()).collect());
    }

    /// Has these, which are a list of before or were made of one, in the place of all.
    pub fn restore(&self, bitmaps: Vec<Arc<Bitmap>>) {
        self.note(&bitmaps);
        *lock(&self.bitmaps) = bitmaps;
    }

    fn note(&self, bitmaps: &[Arc<Bitmap>]) {
        let recording = bitmaps.iter().any(|bitmap| bitmap.state() == BitmapState::Recording);
        self.recording.store(recording, Relaxed);
    }
}
