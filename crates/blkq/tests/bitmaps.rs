//! Dirty bitmaps: every write after a bitmap was added is recorded in it before the driver gets the write.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};

use crate::common::{filled, run};
use blkq::bitmap::{Bitmap, BitmapState};
use blkq::drivers::ram::Ram;
use blkq::testing::wait_until;
use blkq::{
    Bio, BioFlags, Data, Disk, Driver, DriverContext, DriverQueue, EngineThread, Error, OpenContext,
    Operation, QueueLimits, Sector, Tag, Taken,
};
use proptest::prelude::*;

const SIZE: u64 = 1 << 20;

fn bitmap(disk: &Disk, name: &str) -> Arc<Bitmap> {
    disk.bitmaps().into_iter().find(|bitmap| bitmap.name() == name).unwrap()
}

fn is_dirty(bitmap: &Bitmap, range: Range<u64>) -> bool {
    bitmap.extents(range, usize::MAX).iter().all(|extent| extent.dirty)
}

#[derive(Clone, Debug)]
enum Step {
    Write(Operation, Range<u64>),
    Add(u32),
    Clear,
    Remove,
    Record(bool),
}

fn step() -> impl Strategy<Value = Step> {
    let operation = prop_oneof![
        3 => Just(Operation::Write),
        1 => Just(Operation::Discard),
        1 => Just(Operation::WriteZeroes),
        1 => Just(Operation::Read)
    ];
    let range = (0..SIZE >> 9, 1u64..200).prop_map(|(at, length)| at << 9..((at + length) << 9).min(SIZE));
    prop_oneof![
        12 => (operation, range).prop_map(|(operation, range)| Step::Write(operation, range)),
        1 => (9u32..20).prop_map(Step::Add),
        1 => Just(Step::Clear),
        1 => Just(Step::Remove),
        2 => any::<bool>().prop_map(Step::Record),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // Contract: bitmaps
    #[test]
    fn a_bitmap_has_the_granules_that_were_written_to(steps in proptest::collection::vec(step(), 1..60)) {
        let disk = Disk::builder(Box::new(Ram::new(SIZE, 512, false).unwrap())).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        let mut model: Option<(u32, Vec<bool>)> = None;
        let mut records = true;
        for step in steps {
            match step {
                Step::Write(operation, range) => {
                    let length = range.end - range.start;
                    let data = match operation.has_data() {
                        true => filled(length as usize, 1).into(),
                        false => Data::None,
                    };
                    let (sector, sectors) = (Sector(range.start >> 9), length >> 9);
                    let bio =
                        Bio { operation, flags: BioFlags::empty(), sector, sectors, data, user_data: 0 };
                    prop_assert_eq!(run(&mut queue, bio).result, Ok(()));
                    if let Some((shift, model)) = model.as_mut().filter(|_| records && operation != Operation::Read) {
                        let granule = 1u64 << *shift;
                        let end = range.end.div_ceil(granule) as usize;
                        model[(range.start >> *shift) as usize..end].fill(true);
                    }
                }
                Step::Add(shift) => {
                    let added = disk.add_bitmap("b", 1 << shift);
                    prop_assert_eq!(added.is_ok(), model.is_none());
                    records |= added.is_ok();
                    model.get_or_insert_with(|| (shift, vec![false; SIZE.div_ceil(1 << shift) as usize]));
                }
                Step::Clear => {
                    prop_assert_eq!(disk.clear_bitmap("b").is_ok(), model.is_some());
                    model.iter_mut().for_each(|(_, model)| model.fill(false));
                }
                Step::Record(is_on) => {
                    let done = disk.set_bitmap_recording("b", is_on).is_ok();
                    prop_assert_eq!(done, model.is_some());
                    records = if done { is_on } else { records };
                }
                Step::Remove => {
                    prop_assert_eq!(disk.remove_bitmap("b").is_ok(), model.take().is_some());
                }
            }
            if let Some((shift, model)) = &model {
                let bitmap = bitmap(&disk, "b");
                for (at, dirty) in model.iter().enumerate() {
                    let range = (at as u64) << shift..(at as u64 + 1) << shift;
                    let extents = bitmap.extents(range, 9);
                    prop_assert!(extents.len() == 1 && extents[0].dirty == *dirty, "granule {}", at);
                }
            }
        }
    }
}

/// Completes requests immediately, after checking that the bits of a write are set.
struct Checking(Arc<OnceLock<Weak<Disk>>>);

impl Driver for Checking {
    fn name(&self) -> &'static str {
        "checking"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: SIZE, ..QueueLimits::default() }
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(Checking(self.0.clone())))
    }
}

// SAFETY: each request completes once, and its memory is not used.
unsafe impl DriverQueue for Checking {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        let disk = self.0.get().unwrap().upgrade().unwrap();
        for tag in tags {
            let start = cx.request(*tag).sector().0 << 9;
            assert!(is_dirty(&bitmap(&disk, "b"), start..start + 512), "before the driver has it");
        }
        cx.complete_all(tags);
        Taken::All
    }
}

// Contract: bitmaps
#[test]
fn bits_are_set_before_the_driver_gets_the_write() {
    let place = Arc::new(OnceLock::new());
    let disk = Disk::builder(Box::new(Checking(place.clone()))).build().unwrap();
    place.set(Arc::downgrade(&disk)).unwrap();
    disk.add_bitmap("b", 512).unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    for sector in [0, 7, SIZE / 512 - 1] {
        assert_eq!(run(&mut queue, Bio::write(Sector(sector), filled(512, 1), 0)).result, Ok(()));
    }
    assert_eq!(bitmap(&disk, "b").dirty_bytes(), 3 * 512);
}

// Contract: bitmaps
#[test]
fn a_bitmap_added_under_load_has_exactly_later_writes() {
    const QUEUES: usize = 2;
    let disk =
        Disk::builder(Box::new(Ram::new(64 * SIZE, 512, false).unwrap())).queues(QUEUES).build().unwrap();
    let engines: Vec<EngineThread> =
        (0..QUEUES).map(|queue| EngineThread::spawn("test", vec![(disk.clone(), queue)]).unwrap()).collect();
    let (begun, completed) = (AtomicU64::new(0), AtomicU64::new(0));
    let (done, sectors) = (AtomicBool::new(false), (64 * SIZE) >> 9);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut submitter = disk.submitter();
            while !done.load(SeqCst) && begun.load(SeqCst) < sectors {
                let sector = begun.fetch_add(1, SeqCst);
                submitter.write_at(&[1; 512], sector << 9).unwrap();
                completed.store(sector + 1, SeqCst);
            }
        });
        wait_until("the load has begun", || completed.load(SeqCst) >= 10);
        for name in ["a", "b", "c"] {
            let before = completed.load(SeqCst);
            disk.add_bitmap(name, 512).unwrap();
            let after = begun.load(SeqCst);
            wait_until("writes follow", || completed.load(SeqCst) >= after + 10);
            let until = completed.load(SeqCst);
            let bitmap = bitmap(&disk, name);
            assert_eq!(bitmap.state(), BitmapState::Recording);
            assert!(is_dirty(&bitmap, after << 9..until << 9), "{name}: what followed is in it");
            let early = bitmap.extents(0..before << 9, usize::MAX);
            assert!(early.iter().all(|extent| !extent.dirty), "{name}: and nothing that was before");
        }
        done.store(true, SeqCst);
    });
    drop(engines);
}
