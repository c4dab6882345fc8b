//! Metadata contexts: what a client can ask of ranges, beside their data, and the answers.

use std::ops::Range;
use std::sync::Arc;

use blkq::bitmap::{BITMAPS_MAX, Bitmap, BitmapState, DirtyExtent};
use blkq::{Disk, Driver, Error, Extent, Status};

use super::proto::AllocationFlags;

/// The namespace of QEMU's contexts.
const QEMU: &[u8] = b"qemu:";
const BASE: &[u8] = b"base:";
const ALLOCATION: &[u8] = b"allocation";
const ALLOCATION_DEPTH: &[u8] = b"allocation-depth";
const DIRTY_BITMAP: &[u8] = b"qemu:dirty-bitmap:";

/// The number of the first dirty bitmap.
const BITMAPS_ID: u32 = 3;

/// Some of the metadata contexts of one export: `base:allocation`, `qemu:allocation-depth`, and its dirty bitmaps,
/// in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Contexts(u128);

impl Contexts {
    /// `base:allocation`.
    pub const BASE_ALLOCATION: Contexts = Contexts(1);
    /// `qemu:allocation-depth`.
    pub const ALLOCATION_DEPTH: Contexts = Contexts(1 << 1);

    /// The dirty bitmap of this number, below [`BITMAPS_MAX`].
    pub const fn bitmap(number: usize) -> Contexts {
        Contexts(1 << (2 + number))
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Those that a client's `query` names, of an export with the dirty bitmaps `bitmaps`. A namespace names
    /// all that is in it, if they are to be listed.
    pub(super) fn matching(query: &[u8], bitmaps: &[OfferedBitmap], listing: bool) -> Contexts {
        let all = Contexts::all(bitmaps);
        let lists = listing && [BASE, QEMU, DIRTY_BITMAP].contains(&query);
        let is_named = |id: &u32| {
            let (namespace, leaf) = context_name(*id, bitmaps);
            lists && namespace.starts_with(query) || query.strip_prefix(namespace) == Some(leaf)
        };
        all.ids().filter(is_named).fold(Contexts::default(), |found, id| found.with(Contexts(1 << (id - 1))))
    }

    /// All contexts of an export with the dirty bitmaps `bitmaps`.
    pub(super) fn all(bitmaps: &[OfferedBitmap]) -> Contexts {
        let bitmaps = (0..bitmaps.len().min(BITMAPS_MAX)).map(Contexts::bitmap);
        bitmaps.fold(Contexts::BASE_ALLOCATION.with(Contexts::ALLOCATION_DEPTH), Contexts::with)
    }

    /// These and `others`.
    pub fn with(self, others: Contexts) -> Contexts {
        Contexts(self.0 | others.0)
    }

    /// The numbers by which replies name them, from 1 on.
    pub fn ids(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |bit| self.0 >> bit & 1 != 0).map(|bit| bit + 1)
    }
}

/// A dirty bitmap that clients may choose.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OfferedBitmap {
    /// Its name.
    pub name: String,
    /// Its number ([`Bitmap::id`]): another one may get the name.
    pub id: u64,
}

/// The bitmaps of `disk` that clients may choose.
pub(super) fn offered_bitmaps(disk: &Disk) -> Arc<[OfferedBitmap]> {
    let bitmaps = disk.bitmaps();
    let offered = bitmaps.iter().filter(|bitmap| is_offered(bitmap));
    offered.map(|bitmap| OfferedBitmap { name: bitmap.name().to_owned(), id: bitmap.id() }).collect()
}

fn is_offered(bitmap: &Bitmap) -> bool {
    bitmap.state() != BitmapState::Inconsistent
}

/// The name of the context with this number, of an export with the dirty bitmaps `bitmaps`: its namespace, and the rest.
pub(super) fn context_name(id: u32, bitmaps: &[OfferedBitmap]) -> (&'static [u8], &[u8]) {
    match id {
        1 => (BASE, ALLOCATION),
        2 => (QEMU, ALLOCATION_DEPTH),
        _ => (DIRTY_BITMAP, bitmaps[(id - BITMAPS_ID) as usize].name.as_bytes()),
    }
}

/// A run of bytes with one state in a metadata context.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusExtent {
    /// Length in bytes.
    pub length: u64,
    /// The state, as the context defines it.
    pub flags: u32,
}

impl From<Extent> for StatusExtent {
    fn from(extent: Extent) -> StatusExtent {
        let mut flags = AllocationFlags::empty();
        flags.set(AllocationFlags::HOLE, extent.hole);
        flags.set(AllocationFlags::ZERO, extent.zero);
        StatusExtent { length: extent.length, flags: flags.bits() }
    }
}

/// The extents of a range in one context.
pub struct ContextStatus {
    /// The number of the context.
    pub id: u32,
    /// From the beginning of the range on; at least one, and none of length 0.
    pub extents: Vec<StatusExtent>,
}

/// The contexts that a client chose, to be asked on a thread that may wait.
#[derive(Clone)]
pub(super) struct ChosenContexts {
    pub contexts: Contexts,
    pub bitmaps: Arc<[OfferedBitmap]>,
}

impl ChosenContexts {
    /// The extents of `range` of `disk` in each context, at most `max` each.
    ///
    /// # Errors
    /// The device's.
    pub fn query(&self, disk: &Disk, range: &Range<u64>, max: usize) -> Result<Vec<ContextStatus>, Status> {
        let of = |id: u32| {
            let extents = match id {
                1 => extents(disk, range, max)?,
                2 => depths(disk, range, max)?,
                _ => self.dirty(id, disk, range, max)?,
            };
            Ok(ContextStatus { id, extents: within(extents, range.end - range.start) })
        };
        self.contexts.ids().map(of).collect()
    }

    /// A bitmap that was removed or cleared since has no answer, nor has another one of its name: writes from before
    /// are not in it.
    fn dirty(
        &self,
        id: u32,
        disk: &Disk,
        range: &Range<u64>,
        max: usize,
    ) -> Result<Vec<StatusExtent>, Status> {
        let chosen = self.bitmaps[(id - BITMAPS_ID) as usize].id;
        let bitmap = disk.bitmaps().into_iter().find(|bitmap| bitmap.id() == chosen && is_offered(bitmap));
        let extents = bitmap.ok_or(Status::Io)?.extents(range.clone(), max);
        let status = |run: DirtyExtent| StatusExtent { length: run.length, flags: run.dirty.into() };
        Ok(extents.into_iter().map(status).collect())
    }
}

fn extents(disk: &Disk, range: &Range<u64>, max: usize) -> Result<Vec<StatusExtent>, Status> {
    let extents = ask_present(disk, |driver| driver.extents(range.clone(), max))?;
    Ok(extents.into_iter().map(StatusExtent::from).collect())
}

fn depths(disk: &Disk, range: &Range<u64>, max: usize) -> Result<Vec<StatusExtent>, Status> {
    let depths = ask_present(disk, |driver| driver.allocation_depths(range.clone(), max))?;
    Ok(depths.into_iter().map(|run| StatusExtent { length: run.length, flags: run.depth }).collect())
}

/// Asks the disk's driver, and again if another has replaced it meanwhile: the image of the replaced one may have been
/// emptied since.
fn ask_present<T>(disk: &Disk, ask: impl Fn(&dyn Driver) -> Result<T, Error>) -> Result<T, Status> {
    loop {
        let driver = disk.driver();
        let answer = ask(&*driver);
        if Arc::ptr_eq(&driver, &disk.driver()) {
            return answer.map_err(|_| Status::Io);
        }
    }
}

/// Exactly the first `bytes` bytes, whatever the driver returned.
fn within(mut extents: Vec<StatusExtent>, mut bytes: u64) -> Vec<StatusExtent> {
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
    fn a_bitmap_that_began_anew_has_no_answer() {
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

    /// An image that a commit empties and replaces while it is asked.
    struct Emptied(Arc<OnceLock<Weak<Disk>>>);

    impl Emptied {
        fn replace(&self) {
            let disk = self.0.get().unwrap().upgrade().unwrap();
            let next = Null::new(NullOptions::new(SIZE)).unwrap();
            disk.begin_exchange().unwrap().replace(Box::new(next)).unwrap();
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
    fn a_query_beside_a_commit_is_answered_by_the_new_image() {
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
