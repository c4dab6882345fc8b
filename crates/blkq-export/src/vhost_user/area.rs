//! A part of a ring, in memory that the guest shares, accessed only as atomic words at checked offsets.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::mapping::Mapping;

/// Bytes that the guest and this process access, mapped while the value exists. Words are little endian.
pub struct Area {
    start: NonNull<u8>,
    bytes: usize,
    mapping: Arc<Mapping>,
}

// SAFETY: the bytes are shared with another process in any case, and are only accessed as atomics.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

macro_rules! word {
    ($load:ident, $store:ident, $word:ty, $atomic:ty) => {
        /// Panics if the word is not inside the area, or not aligned.
        #[inline(always)]
        pub fn $load(&self, offset: usize, order: Ordering) -> $word {
            #[cfg(test)]
            history::load(order);
            // SAFETY: `place` returns a valid address. The guest writes the word from another process.
            <$word>::from_le(unsafe { self.place::<$atomic>(offset).as_ref() }.load(order))
        }

        /// Panics if the word is not inside the area, or not aligned.
        #[inline(always)]
        pub fn $store(&self, offset: usize, value: $word, order: Ordering) {
            #[cfg(test)]
            if !crash::survives() {
                return;
            }
            #[cfg(simulation)]
            blkq::simulation::world().instant();
            #[cfg(test)]
            history::store(self, offset, u64::from(value), size_of::<$word>(), order);
            // SAFETY: `place` returns a valid address. The guest reads the word from another process.
            unsafe { self.place::<$atomic>(offset).as_ref() }.store(value.to_le(), order);
        }
    };
}

impl Area {
    /// `start` must be aligned to the largest word that is accessed.
    ///
    /// # Safety
    /// The bytes must be mapped for reading and writing as long as `mapping` exists.
    pub unsafe fn new(mapping: Arc<Mapping>, start: NonNull<u8>, bytes: usize) -> Area {
        Area { start, bytes, mapping }
    }

    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The word at `offset` is inside the area, aligned, and mapped as long as `self` exists.
    #[inline(always)]
    fn place<A>(&self, offset: usize) -> NonNull<A> {
        let inside = offset.checked_add(size_of::<A>()).is_some_and(|end| end <= self.bytes);
        assert!(inside, "a word is outside of its ring");
        // SAFETY: the offset is inside the area.
        let place = unsafe { self.start.add(offset) }.cast::<A>();
        assert!(place.is_aligned(), "a word of a ring is not aligned");
        place
    }

    word!(load_u8, store_u8, u8, AtomicU8);
    word!(load_u16, store_u16, u16, AtomicU16);
    word!(load_u32, store_u32, u32, AtomicU32);
    word!(load_u64, store_u64, u64, AtomicU64);
}

/// Simulates a device that is killed between two stores.
#[cfg(test)]
pub mod crash {
    use std::cell::Cell;

    thread_local! {
        static STORES_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Executes the next `stores` stores of this thread into areas, and ignores all later ones. `None`
    /// executes all.
    pub fn after(stores: Option<u64>) {
        STORES_LEFT.set(stores);
    }

    pub fn happened() -> bool {
        STORES_LEFT.get() == Some(0)
    }

    pub(super) fn survives() -> bool {
        let left = STORES_LEFT.get();
        if let Some(stores) = left {
            STORES_LEFT.set(Some(stores.saturating_sub(1)));
        }
        left != Some(0)
    }
}

/// Records the stores of a thread into areas, so that a test can undo them and repeat some of them.
#[cfg(test)]
pub mod history {
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::Area;

    thread_local! {
        static EVENTS: RefCell<Option<Vec<Event>>> = const { RefCell::new(None) };
    }

    pub enum Event {
        Store(Store),
        /// A load with acquire ordering.
        Acquire,
    }

    impl Event {
        pub fn before(&self) -> Option<Word> {
            match self {
                Event::Store(store) => Some(store.before()),
                Event::Acquire => None,
            }
        }
    }

    /// The value of a word of an area.
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

    pub struct Store {
        before: Word,
        after: u64,
        pub releases: bool,
    }

    impl Store {
        pub fn before(&self) -> Word {
            let Word { area, offset, value, bytes } = &self.before;
            Word { value: *value, ..Word::read(area, *offset, *bytes) }
        }

        pub fn apply(&self) -> Word {
            let Word { area, offset, bytes, .. } = &self.before;
            Word { value: self.after, ..Word::read(area, *offset, *bytes) }.write()
        }
    }

    pub fn begin() {
        EVENTS.set(Some(Vec::new()));
    }

    pub fn take() -> Vec<Event> {
        EVENTS.take().unwrap_or_default()
    }

    pub fn undo(words: Vec<Word>) {
        words.iter().for_each(|word| drop(word.write()));
    }

    fn note(event: impl FnOnce() -> Event) {
        // The events are taken out meanwhile, so that the accesses of `event` itself are not recorded.
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
