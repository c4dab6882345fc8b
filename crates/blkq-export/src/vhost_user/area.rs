//! A part of a ring, in memory that the guest shares: read and written only as atomics, at offsets
//! that are checked.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::mapping::Mapping;

/// Bytes that the guest and this process both access, which stay mapped as long as the value. All
/// words of them are little endian.
pub struct Area {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps the bytes mapped.
    mapping: Arc<Mapping>,
}

// SAFETY: the bytes are shared with another process anyway, and accessed only as atomics.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

macro_rules! word {
    ($load:ident, $store:ident, $word:ty, $atomic:ty) => {
        /// The word at `offset`.
        ///
        /// # Panics
        /// If it is not inside, or not aligned.
        #[inline(always)]
        pub fn $load(&self, offset: usize, order: Ordering) -> $word {
            #[cfg(test)]
            history::load(order);
            // SAFETY: a valid place, see `place`; the guest writes it as another process.
            <$word>::from_le(unsafe { self.place::<$atomic>(offset).as_ref() }.load(order))
        }

        /// Changes the word at `offset`.
        ///
        /// # Panics
        /// If it is not inside, or not aligned.
        #[inline(always)]
        pub fn $store(&self, offset: usize, value: $word, order: Ordering) {
            #[cfg(test)]
            if !crash::survives() {
                return;
            }
            #[cfg(simulation)]
            blkq::simulation::instant();
            #[cfg(test)]
            history::store(self, offset, u64::from(value), size_of::<$word>(), order);
            // SAFETY: a valid place, see `place`; the guest reads it as another process.
            unsafe { self.place::<$atomic>(offset).as_ref() }.store(value.to_le(), order);
        }
    };
}

impl Area {
    /// The `bytes` from `start` on, which is aligned to 8 bytes if words of that size are used, else to
    /// the largest that are.
    ///
    /// # Safety
    /// They must be mapped for reading and writing, for as long as `mapping` lives.
    pub unsafe fn new(mapping: Arc<Mapping>, start: NonNull<u8>, bytes: usize) -> Area {
        Area { start, bytes, mapping }
    }

    /// The mapping that it is part of.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The place of a word, which is inside and aligned, and mapped as long as `self`.
    #[inline(always)]
    fn place<A>(&self, offset: usize) -> NonNull<A> {
        let inside = offset.checked_add(size_of::<A>()).is_some_and(|end| end <= self.bytes);
        assert!(inside, "beside a ring");
        // SAFETY: inside.
        let place = unsafe { self.start.add(offset) }.cast::<A>();
        assert!(place.is_aligned(), "a word of a ring is not aligned");
        place
    }

    word!(load_u8, store_u8, u8, AtomicU8);
    word!(load_u16, store_u16, u16, AtomicU16);
    word!(load_u32, store_u32, u32, AtomicU32);
    word!(load_u64, store_u64, u64, AtomicU64);
}

/// A device that dies between two stores, wherever a test wants.
#[cfg(test)]
pub mod crash {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// From here on `stores` stores of this thread into areas are done, and then none; `None` for all.
    pub fn after(stores: Option<u64>) {
        LEFT.set(stores);
    }

    /// Whether the device is dead.
    pub fn happened() -> bool {
        LEFT.get() == Some(0)
    }

    pub(super) fn survives() -> bool {
        let left = LEFT.get();
        if let Some(stores) = left {
            LEFT.set(Some(stores.saturating_sub(1)));
        }
        left != Some(0)
    }
}

/// The stores of a thread into areas, to be undone, and done again in part.
#[cfg(test)]
pub mod history {
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::Area;

    thread_local! {
        static EVENTS: RefCell<Option<Vec<Event>>> = const { RefCell::new(None) };
    }

    /// A part of what a thread did.
    pub enum Event {
        Store(Store),
        /// It loaded something to acquire.
        Acquire,
    }

    impl Event {
        /// The word that a store replaced.
        pub fn before(&self) -> Option<Word> {
            match self {
                Event::Store(store) => Some(store.before()),
                Event::Acquire => None,
            }
        }
    }

    /// A word of an area.
    pub struct Word {
        area: Area,
        offset: usize,
        value: u64,
        bytes: usize,
    }

    impl Word {
        fn read(area: &Area, offset: usize, bytes: usize) -> Word {
            let area = Area { start: area.start, bytes: area.bytes, mapping: Arc::clone(&area.mapping) };
            let order = Ordering::Relaxed;
            let value = match bytes {
                1 => area.load_u8(offset, order).into(),
                2 => area.load_u16(offset, order).into(),
                4 => area.load_u32(offset, order).into(),
                _ => area.load_u64(offset, order),
            };
            Word { area, offset, value, bytes }
        }

        /// Writes it. Returns the word that it replaced.
        fn write(&self) -> Word {
            let before = Word::read(&self.area, self.offset, self.bytes);
            let order = Ordering::Relaxed;
            match self.bytes {
                1 => self.area.store_u8(self.offset, self.value as u8, order),
                2 => self.area.store_u16(self.offset, self.value as u16, order),
                4 => self.area.store_u32(self.offset, self.value as u32, order),
                _ => self.area.store_u64(self.offset, self.value, order),
            }
            before
        }
    }

    /// A store.
    pub struct Store {
        before: Word,
        after: u64,
        pub releases: bool,
    }

    impl Store {
        /// The word that it replaced.
        pub fn before(&self) -> Word {
            let Word { area, offset, value, bytes } = &self.before;
            Word { value: *value, ..Word::read(area, *offset, *bytes) }
        }

        /// Does it again. Returns the word that it replaced now.
        pub fn apply(&self) -> Word {
            let Word { area, offset, bytes, .. } = &self.before;
            Word { value: self.after, ..Word::read(area, *offset, *bytes) }.write()
        }
    }

    /// Notes what this thread does from now on.
    pub fn begin() {
        EVENTS.set(Some(Vec::new()));
    }

    /// Returns the events of this thread since then; no more are noted.
    pub fn take() -> Vec<Event> {
        EVENTS.take().unwrap_or_default()
    }

    /// Writes words, one after the other.
    pub fn undo(words: Vec<Word>) {
        words.iter().for_each(|word| drop(word.write()));
    }

    fn note(event: impl FnOnce() -> Event) {
        // Its own loads and stores are not noted.
        if let Some(mut events) = EVENTS.take() {
            events.push(event());
            EVENTS.set(Some(events));
        }
    }

    pub(super) fn load(order: Ordering) {
        if order == Ordering::Acquire {
            note(|| Event::Acquire);
        }
    }

    pub(super) fn store(area: &Area, offset: usize, value: u64, bytes: usize, order: Ordering) {
        note(|| {
            let before = Word::read(area, offset, bytes);
            Event::Store(Store { before, after: value, releases: order == Ordering::Release })
        });
    }
}
