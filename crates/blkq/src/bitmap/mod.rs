//! Dirty bitmaps: which parts of a disk were written to since a moment, for incremental backups.
//!
//! A queue sets the bits of a write before its driver gets it (`queue/tracked.rs`): so they are set before the data can
//! be read, and before the write completes. One that fails leaves them set.

mod set;
mod store;
#[cfg(test)]
#[cfg(not(model_check))]
mod tests;

use std::ops::Range;

use crate::error::{Error, ErrorKind};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(crate) use set::BitmapSet;
pub use store::BitmapStore;

/// Least and greatest number of bytes that one bit stands for: powers of two.
pub const GRANULARITY_MIN: u64 = 512;
/// See [`GRANULARITY_MIN`].
pub const GRANULARITY_MAX: u64 = 2 << 30;
/// Longest name, in bytes.
pub const NAME_MAX_BYTES: usize = 1023;
/// Most bitmaps of a disk.
pub const BITMAPS_MAX: usize = 64;
/// Most memory of all bitmaps of a disk, in bytes.
pub const MEMORY_MAX_BYTES: u64 = 32 << 20;

/// Runs that are merged at a time.
const EXTENTS_MAX: usize = 1024;
const WORD_BITS: u64 = u64::BITS as u64;

/// Whether a bitmap is kept up to date.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BitmapState {
    /// Writes set its bits.
    Recording,
    /// It stays as it is.
    Disabled,
    /// Writes may be missing: of a daemon that was killed, or of a program that does not keep it up to date.
    Inconsistent,
}

/// A run of bytes that are all dirty, or all clean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DirtyExtent {
    /// Length in bytes.
    pub length: u64,
    /// Written to since the bitmap was added or cleared.
    pub dirty: bool,
}

/// The parts of a disk that were written to since a moment, a bit for each.
pub struct Bitmap {
    name: String,
    /// See [`Bitmap::id`].
    id: u64,
    /// A bit stands for `1 << granularity_bits` bytes.
    granularity_bits: u32,
    /// Of the disk, in bytes.
    size: u64,
    state: BitmapState,
    words: Box<[AtomicU64]>,
}

impl Bitmap {
    /// A bitmap without a bit set, of a disk of `size` bytes: a bit stands for `granularity` bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a name or a granularity that a bitmap cannot have, or one that would take too
    /// much memory.
    pub fn new(name: &str, granularity: u64, size: u64, state: BitmapState) -> Result<Bitmap, Error> {
        check_name(name)?;
        let rejected = |why: String| Err(Error::new(ErrorKind::Invalid, format!("bitmap {name}: {why}")));
        if !granularity.is_power_of_two() || !(GRANULARITY_MIN..=GRANULARITY_MAX).contains(&granularity) {
            return rejected(format!(
                "its granularity is {granularity} bytes; choose a power of two from {GRANULARITY_MIN} to \
                 {GRANULARITY_MAX}"
            ));
        }
        let bytes = bytes_for(size, granularity);
        if bytes > MEMORY_MAX_BYTES {
            return rejected(format!(
                "it would take {bytes} bytes of memory, and may take {MEMORY_MAX_BYTES}; choose a greater \
                 granularity"
            ));
        }
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let granularity_bits = granularity.trailing_zeros();
        // Only a number: no model has to see it.
        static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Ok(Bitmap { name: name.to_owned(), id, granularity_bits, size, state, words })
    }

    /// Its name, at most [`NAME_MAX_BYTES`] long.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A number of its own in this process: one that was added or cleared has another than that of its name before;
    /// one that got another size has the same.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The bytes that one bit stands for.
    pub fn granularity(&self) -> u64 {
        1 << self.granularity_bits
    }

    /// Whether it is kept up to date.
    pub fn state(&self) -> BitmapState {
        self.state
    }

    /// The size of the disk that it is of, in bytes; 0 of an inconsistent one, which has no bits.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// How many bytes are dirty, in whole granules but for the last one.
    pub fn dirty_bytes(&self) -> u64 {
        let bits: u64 = self.words.iter().map(|word| u64::from(word.load(Relaxed).count_ones())).sum();
        let last = self.size.div_ceil(self.granularity());
        let beyond = (last << self.granularity_bits) - self.size;
        let is_cut = beyond > 0 && self.is_set(last - 1);
        // Its bit may be set just now.
        (bits << self.granularity_bits).saturating_sub(if is_cut { beyond } else { 0 })
    }

    /// Sets the bits of the bytes in `range`, which is not empty. Bytes beyond the disk are left out.
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
        // Most writes hit what is dirty already: no other core loses the line then.
        if word.load(Relaxed) & bits != bits {
            word.fetch_or(bits, Relaxed);
        }
    }

    /// The state of the bytes of `range`, in at most `max` runs from its beginning.
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

    /// The first bit from `bit` on that is `set`, or the number of bits.
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

    /// The same without a bit set. Readers of this one get nothing of that.
    pub fn cleared(&self) -> Result<Bitmap, Error> {
        Bitmap::new(&self.name, self.granularity(), self.size, self.state)
    }

    /// The bitmap for the disk with another size: what is new in that is dirty, as what others wrote there is not
    /// known.
    ///
    /// # Errors
    /// As [`Bitmap::new`].
    pub fn resized(&self, size: u64) -> Result<Bitmap, Error> {
        // An inconsistent one has no bits.
        let size = if self.state == BitmapState::Inconsistent { 0 } else { size };
        let mut bitmap = Bitmap::new(&self.name, self.granularity(), size, self.state)?;
        bitmap.id = self.id;
        for (new, old) in bitmap.words.iter().zip(&self.words) {
            new.store(old.load(Relaxed), Relaxed);
        }
        if size > self.size {
            bitmap.mark(self.size..size);
        }
        bitmap.clear_behind();
        Ok(bitmap)
    }

    /// The same, kept up to date or not from now on.
    ///
    /// # Errors
    /// As [`Bitmap::new`].
    pub fn with_state(&self, state: BitmapState) -> Result<Bitmap, Error> {
        let mut bitmap = self.resized(self.size)?;
        bitmap.state = state;
        Ok(bitmap)
    }

    /// Sets the bits of all that is dirty in `other`, a bitmap of the same disk.
    pub(crate) fn merge(&self, other: &Bitmap) {
        if self.granularity_bits == other.granularity_bits {
            for (number, word) in other.words.iter().enumerate() {
                self.set(number as u64, word.load(Relaxed));
            }
            return self.clear_behind();
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
        self.clear_behind();
    }

    /// The same as one that is not up to date, without bits.
    pub fn inconsistent(&self) -> Result<Bitmap, Error> {
        Bitmap::new(&self.name, self.granularity(), 0, BitmapState::Inconsistent)
    }

    /// Its bits, eight in a byte, the lowest first.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            self.words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(bytes_for(self.size, self.granularity()) as usize);
        bytes
    }

    /// Sets the bits that `bytes` have, from the bitmap's byte `at` on, a multiple of 8. Bits that it has no room for
    /// are left out.
    pub fn load(&mut self, at: u64, bytes: &[u8]) {
        let words = self.words.get_mut((at / 8) as usize..).unwrap_or_default();
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(8)) {
            let mut content = [0; 8];
            content[..bytes.len()].copy_from_slice(bytes);
            *word = AtomicU64::new(u64::from_le_bytes(content));
        }
        self.clear_behind();
    }

    /// Clears the bits that stand for nothing.
    fn clear_behind(&self) {
        let bits = self.size.div_ceil(self.granularity());
        if let Some(last) = self.words.last().filter(|_| !bits.is_multiple_of(WORD_BITS)) {
            last.fetch_and(mask(0, bits % WORD_BITS - 1), Relaxed);
        }
    }

    /// Bytes of memory of its bits.
    pub fn memory_bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    /// The same if the disk had `size` bytes.
    pub(crate) fn memory_for(&self, size: u64) -> u64 {
        match self.state {
            BitmapState::Inconsistent => 0,
            _ => bytes_for(size, self.granularity()).next_multiple_of(8),
        }
    }
}

/// The bytes that the bits for a disk of `size` bytes fill.
pub fn bytes_for(size: u64, granularity: u64) -> u64 {
    size.div_ceil(granularity).div_ceil(8)
}

/// The bits from `first` to `last` of a word.
#[inline]
fn mask(first: u64, last: u64) -> u64 {
    u64::MAX << first & u64::MAX >> (WORD_BITS - 1 - last)
}

/// Whether a bitmap can be called `name`.
///
/// # Errors
/// [`ErrorKind::Invalid`]: why not.
pub fn check_name(name: &str) -> Result<(), Error> {
    let why = match name {
        "" => "it is empty",
        _ if name.len() > NAME_MAX_BYTES => "it is longer than 1023 bytes",
        _ if name.contains(char::is_control) => "it has control characters",
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::Invalid, format!("no bitmap can have that name: {why}")))
}
