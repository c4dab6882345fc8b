//! A thread that waits on its own queue is woken by everything that it waits for: deadlines that the driver
//! sets while the plug is flushed, and writes of other queues to the same file. A batch reaches the kernel in
//! parts. A driver is polled while it has requests, or when it was woken. A queue has one owner at a time.
// Contract: accepted-once

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::common::filled;
use blkq::testing::within_limit;
use blkq::{
    Bio, Completion, Counter, Cqe, Disk, Driver, DriverContext, DriverQueue, EngineThread, Error, ErrorKind,
    IoBuffer, OpenContext, QueueLimits, Sector, Setting, Source, SourceContext, Status, Tag, Taken, Wake,
};
use blkq_drivers::fault::Fault;
use blkq_drivers::r#loop::{DirectIo, Dispatch, DriverOptions, LoopDevice};

const IMAGE_BYTES: u64 = 1 << 20;

/// An image file that is removed when the value is dropped.
struct Image(std::path::PathBuf);

impl Image {
    fn new(name: &str) -> Image {
        let path = std::env::temp_dir().join(format!("blkq-wait-{}-{name}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(IMAGE_BYTES).unwrap();
        Image(path)
    }

    fn open(&self, direct_io: DirectIo, dispatch: Dispatch) -> LoopDevice {
        LoopDevice::open(&DriverOptions { direct_io, dispatch, ..DriverOptions::new(&self.0) }).unwrap()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

fn disk(driver: impl Driver + 'static, queues: usize) -> Arc<Disk> {
    Disk::builder(Box::new(driver)).queues(queues).build().unwrap()
}

#[test]
fn queues_that_take_turns_at_one_image_are_all_woken() {
    for (name, direct_io, dispatch) in [
        ("buffered", DirectIo::Off, Dispatch::Concurrent),
        ("buffered-serial", DirectIo::Off, Dispatch::Serial),
        ("direct-serial", DirectIo::On, Dispatch::Serial),
    ] {
        let image = Image::new(name);
        let disk = disk(image.open(direct_io, dispatch), 2);
        within_limit(move || {
            let queues = [0, 1].map(|index| {
                let disk = disk.clone();
                std::thread::spawn(move || {
                    let mut queue = disk.open_queue(index).unwrap();
                    for n in 0..400u64 {
                        let sector = Sector((n * 8 + index as u64 * 1024) % (IMAGE_BYTES >> 9));
                        queue.submit(Bio::write(sector, filled(4096, n as u8), n)).unwrap();
                        queue.wait(1);
                        let completion = queue.take_completion().expect("waited for it");
                        assert_eq!((completion.user_data, completion.result), (n, Ok(())));
                    }
                })
            });
            queues.into_iter().for_each(|queue| queue.join().unwrap());
        });
    }
}

#[test]
fn a_deadline_that_is_set_while_the_plug_is_flushed_wakes() {
    let image = Image::new("fault");
    for (spec, result) in [("delay=2ms", Ok(())), ("stuck=2ms", Err(Status::Timeout))] {
        let device = image.open(DirectIo::Auto, Dispatch::Concurrent);
        let disk = disk(Fault::new(Arc::new(device), spec.parse().unwrap()).unwrap(), 1);
        let completion = within_limit(move || {
            let mut queue = disk.open_queue(0).unwrap();
            queue.submit(Bio::read(Sector(0), filled(4096, 0), 7)).unwrap();
            queue.wait(1);
            queue.take_completion().expect("waited for it").result
        });
        assert_eq!(completion, result, "{spec}");
    }
}

#[test]
fn a_batch_is_submitted_early_unless_that_is_turned_off() {
    let image = Image::new("early");
    let disk = disk(image.open(DirectIo::Off, Dispatch::Concurrent), 1);
    let mut queue = disk.open_queue(0).unwrap();
    let mut early = |count: u64| {
        let before = queue.ring_counters().early_submissions;
        for n in 0..count {
            // The reads are not adjacent, so that none of them merge.
            queue.submit(Bio::read(Sector(n * 16), IoBuffer::zeroed(4096), n)).unwrap();
        }
        queue.wait(count as usize);
        assert!(queue.completions().all(|completion| completion.result.is_ok()));
        queue.ring_counters().early_submissions - before
    };
    assert_eq!((early(4), early(9)), (0, 2));
    disk.set(Setting::EarlySubmission(false)).unwrap();
    assert_eq!(early(9), 0);
    disk.set(Setting::EarlySubmission(true)).unwrap();
    assert_eq!(early(9), 2);
}

/// Submits a batch of nine reads to a queue of its engine, and notifies the test when they have completed.
struct NineReads {
    queue: usize,
    completed: Vec<Completion>,
    done: Sender<()>,
}

// SAFETY: the source is never stopped while a bio is in flight.
unsafe impl Source for NineReads {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        for n in 0..9 {
            let bio = Bio::read(Sector(n * 16), IoBuffer::zeroed(4096), n);
            cx.submit(self.queue, bio).expect("there is room");
        }
        Ok(())
    }

    fn on_bio(&mut self, _: &mut SourceContext<'_>, completion: Completion) {
        assert_eq!(completion.result, Ok(()));
        self.completed.push(completion);
        if self.completed.len() == 9 {
            self.done.send(()).unwrap();
        }
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}
    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}

    fn is_stopped(&self) -> bool {
        self.completed.len() == 9
    }
}

#[test]
fn early_submission_is_set_for_each_disk_of_an_engine() {
    let images = [Image::new("first"), Image::new("second")];
    for early in [[false, true], [true, false]] {
        let disks = [0, 1].map(|n| {
            let driver = images[n].open(DirectIo::Off, Dispatch::Concurrent);
            Disk::builder(Box::new(driver)).early_submission(early[n]).build().unwrap()
        });
        let queues = disks.iter().map(|disk| (disk.clone(), 0)).collect();
        let engine = EngineThread::spawn("test-engine", queues).unwrap();
        for (queue, early) in early.into_iter().enumerate() {
            // The ring's counters for both disks are recorded in the statistics of the first one.
            let before = disks[0].stats().counter(Counter::EarlySubmissions);
            let (done, receiver) = channel();
            let reads = NineReads { queue, completed: Vec::new(), done };
            let id = engine.handle().add_source(move || Box::new(reads)).unwrap();
            receiver.recv_timeout(Duration::from_secs(60)).unwrap();
            engine.handle().stop_source(id, false);
            let submissions = disks[0].stats().counter(Counter::EarlySubmissions) - before;
            assert_eq!(submissions, if early { 2 } else { 0 }, "disk {queue}");
        }
    }
}

/// Completes requests when it is polled, and counts the polls.
#[derive(Clone, Default)]
struct Polled {
    polls: Arc<AtomicUsize>,
    wake: Arc<Mutex<Option<Arc<dyn Wake>>>>,
    tags: Vec<Tag>,
}

impl Driver for Polled {
    fn name(&self) -> &'static str {
        "polled"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: IMAGE_BYTES, ..QueueLimits::default() }
    }

    fn open_queue(&self, cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        *self.wake.lock().unwrap() = Some(cx.wake);
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for Polled {
    fn queue_requests(&mut self, _: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        self.tags.extend_from_slice(tags);
        Taken::All
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        self.polls.fetch_add(1, SeqCst);
        cx.complete_all(&std::mem::take(&mut self.tags));
    }
}

#[test]
fn a_driver_is_polled_with_requests_or_when_woken() {
    let driver = Polled::default();
    let mut queue = disk(driver.clone(), 1).open_queue(0).unwrap();
    let mut polls = |submit: bool| {
        if submit {
            queue.submit(Bio::read(Sector(0), IoBuffer::zeroed(512), 0)).unwrap();
        }
        queue.poll();
        let completed = queue.completions().count();
        assert_eq!(completed, usize::from(submit));
        driver.polls.load(SeqCst)
    };
    assert_eq!([polls(false), polls(true), polls(false)], [0, 1, 1]);
    driver.wake.lock().unwrap().as_ref().unwrap().wake();
    assert_eq!([polls(false), polls(false)], [2, 2]);
}

/// Completes requests when it has two.
#[derive(Clone, Default)]
struct Pairs(Vec<Tag>);

impl Driver for Pairs {
    fn name(&self) -> &'static str {
        "pairs"
    }

    fn uses_ring(&self) -> bool {
        true
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: IMAGE_BYTES, ..QueueLimits::default() }
    }

    fn open_queue(&self, _: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for Pairs {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        self.0.extend_from_slice(tags);
        if self.0.len() >= 2 {
            cx.complete_all(&std::mem::take(&mut self.0));
        }
        Taken::All
    }
}

#[test]
fn a_bio_that_is_staged_before_the_owner_waits_is_pulled() {
    within_limit(|| {
        let disk = disk(Pairs::default(), 1);
        let mut queue = disk.open_queue(0).unwrap();
        let read = |sector| Bio::read(Sector(sector), IoBuffer::zeroed(512), 0);
        queue.submit(read(0)).unwrap();
        queue.poll();
        // The owner is running, so that the submitter does not kick it.
        let (completed, is_completed) = channel();
        disk.submitter().submit(read(8), move |result, _| completed.send(result).unwrap());
        queue.wait(1);
        assert_eq!(queue.take_completion().unwrap().result, Ok(()));
        assert_eq!(is_completed.recv().unwrap(), Ok(()));
    });
}

/// A driver whose queue is opened again while it is dropped.
#[derive(Clone, Default)]
struct Reopening {
    disk: Arc<Mutex<Weak<Disk>>>,
    again: Arc<Mutex<Option<ErrorKind>>>,
}

impl Driver for Reopening {
    fn name(&self) -> &'static str {
        "reopening"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { capacity_bytes: IMAGE_BYTES, ..QueueLimits::default() }
    }

    fn open_queue(&self, _: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: the queue takes no request.
unsafe impl DriverQueue for Reopening {
    fn queue_requests(&mut self, _: &mut DriverContext<'_>, _: &[Tag]) -> Taken {
        unreachable!("nothing is submitted")
    }
}

impl Drop for Reopening {
    fn drop(&mut self) {
        let disk = std::mem::take(&mut *self.disk.lock().unwrap());
        if let Some(disk) = disk.upgrade() {
            *self.again.lock().unwrap() = disk.open_queue(0).err().map(|error| error.kind());
        }
    }
}

/// Some drivers have a resource for each queue number, such as loop's turn to write, which two queues must
/// not share.
#[test]
fn a_queue_opens_again_when_its_driver_has_dropped_it() {
    let driver = Reopening::default();
    let disk = disk(driver.clone(), 1);
    let queue = disk.open_queue(0).unwrap();
    *driver.disk.lock().unwrap() = Arc::downgrade(&disk);
    drop(queue);
    assert_eq!(*driver.again.lock().unwrap(), Some(ErrorKind::Busy));
    drop(disk.open_queue(0).unwrap());
}
