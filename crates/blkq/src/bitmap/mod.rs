//! Dirty bitmaps record which parts of a disk were written since some point in time, for incremental backups.
//!
//! A queue sets the bits of a write before it hands the write to the driver (`queue/dispatch.rs`). So the bits
//! are set before the data can be read, and before the write completes. The bits of a failed write stay set.

#[cfg(test)]
#[cfg(not(model_check))]
mod tests;

use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{Mutex, lock};

/// The smallest granularity of a bitmap: the number of bytes for which one bit stands, a power of two.
pub const GRANULARITY_MIN: u64 = 512;
/// The largest granularity of a bitmap, in bytes.
pub const GRANULARITY_MAX: u64 = 2 << 30;
/// The maximum length of a name, in bytes.
pub const NAME_MAX_BYTES: usize = 1023;
/// The maximum number of bitmaps of a disk.
pub const BITMAPS_MAX: usize = 64;
/// The maximum memory of all bitmaps of a disk together, in bytes.
pub const MEMORY_MAX_BYTES: u64 = 32 << 20;

const EXTENTS_MAX: usize = 1024;
const WORD_BITS: u64 = u64::BITS as u64;

/// Whether writes set the bits of a bitmap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BitmapState {
    /// Writes set the bits of the bytes that they change.
    Recording,
    /// Writes do not set bits.
    Disabled,
    /// Bits of writes may be missing, because the daemon was killed, or a program wrote to the image without
    /// updating the bitmap.
    Inconsistent,
}

/// A range of bytes that are all dirty or all clean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirtyExtent {
    /// The length of the range in bytes.
    pub length: u64,
    /// Whether the range was written since the bitmap was added or cleared.
    pub dirty: bool,
}

/// A dirty bitmap of a disk.
pub struct Bitmap {
    name: String,
    id: u64,
    /// Base-2 logarithm of the granularity in bytes.
    granularity_bits: u32,
    size: u64,
    state: BitmapState,
    words: Box<[AtomicU64]>,
}

impl Bitmap {
    /// A bitmap without dirty bytes for a disk of `size` bytes. Each bit represents `granularity` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the name or the granularity is not valid, or if the bitmap would need more
    /// memory than [`MEMORY_MAX_BYTES`].
    pub fn new(name: &str, granularity: u64, size: u64, state: BitmapState) -> Result<Bitmap, Error> {
        check_name(name)?;
        let rejected = |why: String| Err(Error::new(ErrorKind::Invalid, format!("bitmap {name}: {why}")));
        if !granularity.is_power_of_two() || !(GRANULARITY_MIN..=GRANULARITY_MAX).contains(&granularity) {
            return rejected(format!(
                "the granularity must be a power of two from {GRANULARITY_MIN} to \
                 {GRANULARITY_MAX} bytes, not {granularity}"
            ));
        }
        let bytes = bytes_for(size, granularity);
        if bytes > MEMORY_MAX_BYTES {
            return rejected(format!(
                "the bitmap needs {bytes} bytes of memory, more than {MEMORY_MAX_BYTES}; choose a larger \
                 granularity"
            ));
        }
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let granularity_bits = granularity.trailing_zeros();
        // Relaxed, and an atomic that the model checkers do not see: the number only has to be unique.
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Bitmap { name: name.to_owned(), id, granularity_bits, size, state, words })
    }

    /// The name, at most [`NAME_MAX_BYTES`] bytes long.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Identifies the contents of the bitmap within this process. A bitmap that is cleared, or removed and
    /// added again under the same name, gets a new id. A bitmap that is resized keeps its id.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The number of bytes that one bit represents.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }

    /// Whether writes set the bits.
    pub fn state(&self) -> BitmapState {
        self.state
    }

    /// The size of the disk in bytes; 0 for an inconsistent bitmap, which has no bits.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The number of dirty bytes, in whole granules except for the last one of the disk.
    pub fn dirty_bytes(&self) -> u64 {
        let bits: u64 = self.words.iter().map(|word| u64::from(word.load(Relaxed).count_ones())).sum();
        let last = self.size.div_ceil(self.granularity());
        let beyond = (last << self.granularity_bits) - self.size;
        let is_cut = beyond > 0 && self.is_set(last - 1);
        // Saturates because the last bit may have been set after the count.
        (bits << self.granularity_bits).saturating_sub(if is_cut { beyond } else { 0 })
    }

    /// Sets the bits of the bytes in `range`, which must not be empty. Bytes beyond the disk are ignored.
    #[inline]
    pub fn mark(&self, range: Range<u64>) {
        let first = range.start >> self.granularity_bits;
        let last = (range.end - 1) >> self.granularity_bits;
        if first / WORD_BITS == last / WORD_BITS {
            return self.set(first / WORD_BITS, mask(first % WORD_BITS, last % WORD_BITS));
        }
        self.set(first / WORD_BITS, mask(first % WORD_BITS, WORD_BITS - 1));
        (first / WORD_BITS + 1..last / WORD_BITS).for_each(|word| self.set(word, u64::MAX));
        self.set(last / WORD_BITS, mask(0, last % WORD_BITS));
    }

    #[inline]
    fn set(&self, word: u64, bits: u64) {
        let Some(word) = self.words.get(word as usize) else { return };
        // Most writes hit dirty granules. Then the word is not written, and stays in the caches of other
        // processors. Relaxed here and in the readers: bits become visible to readers by the completion of
        // the write or by a freeze.
        if word.load(Relaxed) & bits != bits {
            word.fetch_or(bits, Relaxed);
        }
    }

    /// The state of the bytes of `range` as extents, at most `max` of them from the beginning of the range.
    pub fn extents(&self, range: Range<u64>, max: usize) -> Vec<DirtyExtent> {
        let end = range.end.min(self.size);
        let (mut at, mut extents) = (range.start, Vec::new());
        while at < end && extents.len() < max {
            let bit = at >> self.granularity_bits;
            let dirty = self.is_set(bit);
            let until = (self.next(bit, !dirty) << self.granularity_bits).min(end);
            extents.push(DirtyExtent { length: until - at, dirty });
            at = until;
        }
        extents
    }

    fn is_set(&self, bit: u64) -> bool {
        self.words[(bit / WORD_BITS) as usize].load(Relaxed) >> (bit % WORD_BITS) & 1 != 0
    }

    /// The first bit from `bit` on whose value is `set`, or the number of bits.
    fn next(&self, bit: u64, set: bool) -> u64 {
        let bits = self.size.div_ceil(self.granularity());
        let mut ahead = u64::MAX << (bit % WORD_BITS);
        for word in bit / WORD_BITS..self.words.len() as u64 {
            let content = self.words[word as usize].load(Relaxed);
            let found = (if set { content } else { !content }) & ahead;
            if found != 0 {
                return (word * WORD_BITS + u64::from(found.trailing_zeros())).min(bits);
            }
            ahead = u64::MAX;
        }
        bits
    }

    /// A copy with all bits clear. This bitmap does not change, so its readers are not affected.
    pub fn cleared(&self) -> Result<Bitmap, Error> {
        Bitmap::new(&self.name, self.granularity(), self.size, self.state)
    }

    /// A copy of the bitmap for a disk of `size` bytes. If the disk grows, the new bytes are dirty, because
    /// other programs may have written them. Fails as [`Bitmap::new`] does.
    pub fn resized(&self, size: u64) -> Result<Bitmap, Error> {
        // An inconsistent bitmap has no bits.
        let size = if self.state == BitmapState::Inconsistent { 0 } else { size };
        let mut bitmap = Bitmap::new(&self.name, self.granularity(), size, self.state)?;
        bitmap.id = self.id;
        for (new, old) in bitmap.words.iter().zip(&self.words) {
            new.store(old.load(Relaxed), Relaxed);
        }
        if size > self.size {
            bitmap.mark(self.size..size);
        }
        bitmap.clear_past_end();
        Ok(bitmap)
    }

    /// A copy of the bitmap with another state. Fails as [`Bitmap::new`] does.
    pub fn with_state(&self, state: BitmapState) -> Result<Bitmap, Error> {
        let mut bitmap = self.resized(self.size)?;
        bitmap.state = state;
        Ok(bitmap)
    }

    /// Also sets the bits of all bytes that are dirty in `other`, a bitmap of the same disk.
    pub(crate) fn merge(&self, other: &Bitmap) {
        if self.granularity_bits == other.granularity_bits {
            for (number, word) in other.words.iter().enumerate() {
                self.set(number as u64, word.load(Relaxed));
            }
            return self.clear_past_end();
        }
        let mut at = 0;
        while at < other.size {
            for extent in other.extents(at..other.size, EXTENTS_MAX) {
                if extent.dirty {
                    self.mark(at..at + extent.length);
                }
                at += extent.length;
            }
        }
        self.clear_past_end();
    }

    /// An inconsistent bitmap, without bits, with the name and granularity of this one.
    pub fn inconsistent(&self) -> Result<Bitmap, Error> {
        Bitmap::new(&self.name, self.granularity(), 0, BitmapState::Inconsistent)
    }

    /// The bits, eight in a byte, from the least significant bit on.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(bytes_for(self.size, self.granularity()) as usize);
        bytes
    }

    /// Replaces the bits from byte `at` of the bitmap on, a multiple of 8, by those in `bytes`. Bits beyond
    /// the end of the bitmap are ignored.
    pub fn load(&mut self, at: u64, bytes: &[u8]) {
        let words = self.words.get_mut((at / 8) as usize..).unwrap_or_default();
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut content = [0; 8];
            content[..bytes.len()].copy_from_slice(bytes);
            *word = AtomicU64::new(u64::from_le_bytes(content));
        }
        self.clear_past_end();
    }

    fn clear_past_end(&self) {
        let bits = self.size.div_ceil(self.granularity());
        if let Some(last) = self.words.last().filter(|_| !bits.is_multiple_of(WORD_BITS)) {
            last.fetch_and(mask(0, bits % WORD_BITS - 1), Relaxed);
        }
    }

    /// The memory of the bits, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    pub(crate) fn memory_for(&self, size: u64) -> u64 {
        match self.state {
            BitmapState::Inconsistent => 0,
            _ => bytes_for(size, self.granularity()).next_multiple_of(8),
        }
    }
}

/// The number of bytes that the bits for a disk of `size` bytes fill.
pub fn bytes_for(size: u64, granularity: u64) -> u64 {
    size.div_ceil(granularity).div_ceil(8)
}

/// A word in which the bits from `first` to `last`, inclusive, are set.
fn mask(first: u64, last: u64) -> u64 {
    u64::MAX << first & u64::MAX >> (WORD_BITS - 1 - last)
}

/// Checks that `name` is a valid name of a bitmap. Fails with [`ErrorKind::Invalid`] and the reason.
pub fn check_name(name: &str) -> Result<(), Error> {
    let why = match name {
        "" => "the name is empty",
        _ if name.len() > NAME_MAX_BYTES => "the name is longer than 1023 bytes",
        _ if name.contains(char::is_control) => "the name contains control characters",
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::Invalid, format!("not a valid bitmap name: {why}")))
}

/// The storage of bitmaps in a driver's image. Only control threads call it. Queues do no I/O meanwhile,
/// except during [`BitmapStore::check`].
pub trait BitmapStore: Send + Sync {
    /// Loads the bitmaps that are stored with the image, and marks them in the image as in use if the image
    /// is writable. Must be called before a queue is opened. Returns the bitmaps, and warnings of one line
    /// each. Fails with the I/O errors of the files.
    fn load(&self) -> Result<(Vec<Bitmap>, Vec<String>), Error>;

    /// Checks whether bitmaps can be stored with the image.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the reason if they cannot;
    /// [`ErrorKind::NotFound`] if they can, but only in a separate file that does
    /// not exist yet ([`BitmapStore::set_file`]).
    fn check(&self) -> Result<(), Error>;

    /// Stores the bitmaps of a raw image in `file`, a new file that is open for reading and writing. Its path
    /// must be that of the image with `.bitmaps` appended, where the bitmaps are searched when the image is
    /// opened next. Has no effect if the image already has such a file.
    ///
    /// # Errors
    /// The errors of [`BitmapStore::check`], or an error if the file is not new.
    fn set_file(&self, file: File) -> Result<(), Error>;

    /// Durably lists exactly the bitmaps `all` in the image as in use, with space for their bits. If this
    /// process is killed, they are inconsistent; and a full file system cannot make [`BitmapStore::store`]
    /// fail. Must be called whenever a bitmap is added, removed or resized, and for a driver that will
    /// replace the one that stores the bitmaps. Does nothing if [`BitmapStore::check`] fails.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image contains a bitmap of the same
    /// name that was not loaded; or the I/O error of the files, for example if there is no space. After an
    /// error the image lists the same bitmaps as before.
    fn reserve(&self, all: &[Arc<Bitmap>]) -> Result<(), Error>;

    /// Stores `all` with the image, and replaces the bitmaps that are stored there. The device must not be
    /// written during this call or later. After an I/O error, loaded bitmaps are still marked as in use.
    fn store(&self, all: &[Arc<Bitmap>]) -> Result<(), Error>;
}

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
