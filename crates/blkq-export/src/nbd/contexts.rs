//! Metadata contexts (`NBD_OPT_SET_META_CONTEXT`) and the extents that block status requests return.

use std::ops::Range;
use std::sync::Arc;

use blkq::bitmap::{BITMAPS_MAX, Bitmap, BitmapState};
use blkq::{Disk, Driver, Error, Extent, Status};

use super::proto::{STATE_HOLE, STATE_ZERO};

/// Namespace of the contexts that QEMU defined.
const QEMU: &[u8] = b"qemu:";
const BASE: &[u8] = b"base:";
const ALLOCATION: &[u8] = b"allocation";
const ALLOCATION_DEPTH: &[u8] = b"allocation-depth";
const DIRTY_BITMAP: &[u8] = b"qemu:dirty-bitmap:";

/// Context ID of the first dirty bitmap.
const BITMAPS_ID: u32 = 3;

/// A set of metadata contexts of one export. The bits are, in this order: `base:allocation`,
/// `qemu:allocation-depth`, and the dirty bitmaps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Contexts(u128);

impl Contexts {
    /// The context `base:allocation`, which each export has.
    pub const BASE_ALLOCATION: Contexts = Contexts(1);
    /// The context `qemu:allocation-depth`, which each export has.
    pub const ALLOCATION_DEPTH: Contexts = Contexts(1 << 1);

    /// The context of the dirty bitmap with this index, which must be below [`BITMAPS_MAX`].
    pub const fn bitmap(number: usize) -> Contexts {
        Contexts(1 << (2 + number))
    }

    /// Whether the set contains no context.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The contexts that a client's `query` matches; if `listing`, a namespace matches all its contexts.
    pub(super) fn matching(query: &[u8], bitmaps: &[OfferedBitmap], listing: bool) -> Contexts {
        let all = Contexts::all(bitmaps);
        let lists = listing && [BASE, QEMU, DIRTY_BITMAP].contains(&query);
        let is_named = |id: &u32| {
            let (namespace, leaf) = context_name(*id, bitmaps);
            lists && namespace.starts_with(query) || query.strip_prefix(namespace) == Some(leaf)
        };
        all.ids().filter(is_named).fold(Contexts::default(), |found, id| found.with(Contexts(1 << (id - 1))))
    }

    /// All contexts of an export that offers `bitmaps`.
    pub(super) fn all(bitmaps: &[OfferedBitmap]) -> Contexts {
        let bitmaps = (0..bitmaps.len().min(BITMAPS_MAX)).map(Contexts::bitmap);
        bitmaps.fold(Contexts::BASE_ALLOCATION.with(Contexts::ALLOCATION_DEPTH), Contexts::with)
    }

    /// The union of this set and `others`.
    pub fn with(self, others: Contexts) -> Contexts {
        Contexts(self.0 | others.0)
    }

    /// The context IDs, by which replies identify the contexts. They begin at 1.
    pub fn ids(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |bit| self.0 >> bit & 1 != 0).map(|bit| bit + 1)
    }
}

/// A dirty bitmap that clients may choose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OfferedBitmap {
    /// Name of the bitmap, which follows `qemu:dirty-bitmap:` in the name of the context.
    pub name: String,
    /// [`Bitmap::id`]. A bitmap that replaces a removed one may get the same name but not the same ID.
    pub id: u64,
}

pub(super) fn offered_bitmaps(disk: &Disk) -> Arc<[OfferedBitmap]> {
    let bitmaps = disk.bitmaps();
    let offered = bitmaps.iter().filter(|bitmap| is_offered(bitmap));
    offered.map(|bitmap| OfferedBitmap { name: bitmap.name().to_owned(), id: bitmap.id() }).collect()
}

fn is_offered(bitmap: &Bitmap) -> bool {
    bitmap.state() != BitmapState::Inconsistent
}

pub(super) fn context_name(id: u32, bitmaps: &[OfferedBitmap]) -> (&'static [u8], &[u8]) {
    match id {
        1 => (BASE, ALLOCATION),
        2 => (QEMU, ALLOCATION_DEPTH),
        _ => (DIRTY_BITMAP, bitmaps[(id - BITMAPS_ID) as usize].name.as_bytes()),
    }
}

/// A range of bytes with the same state in a metadata context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusExtent {
    /// Length of the extent in bytes.
    pub length: u64,
    /// State of the extent, as its metadata context defines it.
    pub flags: u32,
}

/// The extents of a range in one metadata context.
pub struct ContextStatus {
    /// ID of the context, as in [`Contexts::ids`].
    pub id: u32,
    /// The extents in order, none of length 0. Empty only if the range is beyond the end of the device.
    pub extents: Vec<StatusExtent>,
}

/// The contexts that a client chose. Queries of them run on a worker, because drivers may block.
#[derive(Clone, Default)]
pub(super) struct ChosenContexts {
    pub contexts: Contexts,
    pub bitmaps: Arc<[OfferedBitmap]>,
}

impl ChosenContexts {
    /// Returns at most `max` extents of `range` in each context. Fails with [`Status::Io`] if the driver
    /// fails, or if a chosen bitmap was removed or cleared.
    pub fn query(&self, disk: &Disk, range: &Range<u64>, max: usize) -> Result<Vec<ContextStatus>, Status> {
        let of = |id: u32| {
            let extents = match id {
                1 => query_current_driver(disk, |driver| driver.extents(range.clone(), max))?
                    .into_iter()
                    .map(|Extent { length, hole, zero }| {
                        let flags = (u32::from(hole) * STATE_HOLE) | (u32::from(zero) * STATE_ZERO);
                        StatusExtent { length, flags }
                    })
                    .collect(),
                2 => query_current_driver(disk, |driver| driver.allocation_depths(range.clone(), max))?
                    .into_iter()
                    .map(|run| StatusExtent { length: run.length, flags: run.depth })
                    .collect(),
                _ => {
                    let chosen = self.bitmaps[(id - BITMAPS_ID) as usize].id;
                    let bitmaps = disk.bitmaps();
                    let bitmap = bitmaps.iter().find(|bitmap| bitmap.id() == chosen && is_offered(bitmap));
                    // If the bitmap was removed or cleared, the client would treat written blocks as clean.
                    let extents = bitmap.ok_or(Status::Io)?.extents(range.clone(), max).into_iter();
                    extents.map(|run| StatusExtent { length: run.length, flags: run.dirty.into() }).collect()
                }
            };
            Ok(ContextStatus { id, extents: clip(extents, range.end - range.start) })
        };
        self.contexts.ids().map(of).collect()
    }
}

/// Queries the driver, again if it was replaced meanwhile: a block commit may have emptied the old image.
fn query_current_driver<T>(disk: &Disk, ask: impl Fn(&dyn Driver) -> Result<T, Error>) -> Result<T, Status> {
    loop {
        let driver = disk.driver();
        let answer = ask(&*driver);
        if Arc::ptr_eq(&driver, &disk.driver()) {
            return answer.map_err(|_| Status::Io);
        }
    }
}

/// Limits the extents to the first `bytes` bytes, as a driver may return more than the range.
fn clip(mut extents: Vec<StatusExtent>, mut bytes: u64) -> Vec<StatusExtent> {
    extents.retain_mut(|extent| {
        extent.length = extent.length.min(bytes);
        bytes -= extent.length;
        extent.length > 0
    });
    extents
}

#[cfg(test)]
mod tests {
    use std::sync::{OnceLock, Weak};

    use blkq::drivers::null::{Null, NullOptions};
    use blkq::drivers::ram::Ram;
    use blkq::{DepthExtent, DriverQueue, ErrorKind, OpenContext, QueueLimits};

    use super::*;

    #[test]
    fn a_bitmap_that_was_cleared_or_replaced_is_an_error() {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        disk.add_bitmap("b", 512).unwrap();
        let choose = || ChosenContexts { contexts: Contexts::bitmap(0), bitmaps: offered_bitmaps(&disk) };
        let is_answered = |chosen: &ChosenContexts| chosen.query(&disk, &(0..4096), 9).is_ok();
        let chosen = choose();
        assert!(is_answered(&chosen));
        disk.clear_bitmap("b").unwrap();
        assert!(!is_answered(&chosen) && is_answered(&choose()));
        let chosen = choose();
        disk.remove_bitmap("b").unwrap();
        disk.add_bitmap("b", 512).unwrap();
        assert!(!is_answered(&chosen) && is_answered(&choose()));
    }

    const SIZE: u64 = 1 << 20;

    /// A driver whose image a block commit empties and replaces during the query.
    struct Emptied(Arc<OnceLock<Weak<Disk>>>);

    impl Emptied {
        fn replace(&self) {
            let disk = self.0.get().unwrap().upgrade().unwrap();
            let next = Null::new(NullOptions::new(SIZE)).unwrap();
            disk.begin_exchange().unwrap().replace(Arc::new(next)).unwrap();
        }
    }

    impl Driver for Emptied {
        fn name(&self) -> &'static str {
            "emptied"
        }

        fn limits(&self) -> QueueLimits {
            NullOptions::new(SIZE).limits
        }

        fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
            Err(Error::new(ErrorKind::Unsupported, "no queue"))
        }

        fn extents(&self, range: Range<u64>, _max: usize) -> Result<Vec<Extent>, Error> {
            self.replace();
            Ok(vec![Extent { length: range.end - range.start, hole: true, zero: true }])
        }

        fn allocation_depths(&self, _: Range<u64>, _max: usize) -> Result<Vec<DepthExtent>, Error> {
            self.replace();
            Err(Error::new(ErrorKind::Format, "a table was emptied"))
        }
    }

    #[test]
    fn a_query_during_a_commit_is_answered_by_the_new_image() {
        for context in [Contexts::BASE_ALLOCATION, Contexts::ALLOCATION_DEPTH] {
            let place = Arc::new(OnceLock::new());
            let disk = Disk::builder(Box::new(Emptied(place.clone()))).build().unwrap();
            place.set(Arc::downgrade(&disk)).unwrap();
            let chosen = ChosenContexts { contexts: context, bitmaps: Arc::default() };
            let answer = chosen.query(&disk, &(0..4096), 9).unwrap();
            let flags = if context == Contexts::BASE_ALLOCATION { 0 } else { 1 };
            assert_eq!(answer[0].extents, [StatusExtent { length: 4096, flags }]);
        }
    }
}
