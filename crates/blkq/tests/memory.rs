//! Memory of bios: drivers can access only memory that was checked.

use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use crate::common::{Behaviour, Device, filled, plain_limits, run};
use blkq::{
    Bio, BioFlags, Disk, Driver, DriverContext, DriverQueue, Error, ErrorPolicy, IoBuffer, IoResult,
    LocalQueue, OpenContext, Operation, QueueLimits, Sector, Setting, Status, Tag, Taken,
};

#[test]
fn operations_without_data_that_carry_memory_are_rejected() {
    let emulated =
        QueueLimits { max_write_zeroes_bytes: 0, max_write_zeroes_no_unmap_bytes: 0, ..plain_limits() };
    for limits in [plain_limits(), emulated] {
        let device = Device::new(limits, Behaviour::default());
        let (_disk, mut queue) = device.open();
        for operation in [Operation::Discard, Operation::WriteZeroes, Operation::Flush] {
            let sectors = if operation == Operation::Flush { 0 } else { 64 };
            let plain = Bio { operation, sectors, ..Bio::flush(0) };
            assert_eq!(run(&mut queue, plain).result, Ok(()), "{operation:?}");
            let seen = device.log().len();
            // The memory is a 64th of the range.
            let bio = Bio { operation, sectors, ..Bio::write(Sector(0), filled(512, 7), 0) };
            let completion = run(&mut queue, bio);
            assert_eq!(completion.result, Err(Status::Invalid), "{operation:?}");
            assert_eq!(
                completion.data.into_buffer().map(|buffer| buffer.len()),
                Some(512),
                "the memory is returned"
            );
            assert_eq!(device.log().len(), seen, "the driver never sees it");
        }
        device.assert_legal();
    }
}

/// A driver that completes no request, or only the first one of the test, and panics on request.
#[derive(Clone, Default)]
struct Panicking {
    taken: Arc<AtomicBool>,
    offered: Arc<AtomicUsize>,
    panics: Arc<AtomicBool>,
    panics_with_requests: Arc<AtomicBool>,
    first_result: Option<IoResult>,
    /// The first request completes at a poll.
    is_first_kept: bool,
    kept: Option<Tag>,
}

impl Driver for Panicking {
    fn name(&self) -> &'static str {
        "panicking"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits { write_cache: true, max_discard_bytes: 256 << 10, ..plain_limits() }
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for Panicking {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        if let Some(result) = self.first_result.take() {
            cx.complete(tags[0], result);
        }
        if std::mem::take(&mut self.is_first_kept) {
            self.kept = Some(tags[0]);
        }
        self.taken.store(true, SeqCst);
        self.offered.fetch_add(tags.len(), SeqCst);
        assert!(!self.panics_with_requests.load(SeqCst), "a panic for the test");
        Taken::All
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if let Some(tag) = self.kept.take_if(|_| self.panics_with_requests.load(SeqCst)) {
            cx.complete(tag, Ok(()));
        }
        assert!(!self.panics.load(SeqCst), "a panic for the test");
    }
}

const CHILD: &str = "BLKQ_MEMORY_CHILD";
/// The exit code of a child in which memory in flight was returned to its owner.
const RETURNED: i32 = 77;

/// Reads into borrowed memory while the driver keeps the request or panics, then drops the queue.
fn drop_with_lent_memory_in_flight(driver: Panicking) {
    assert!(std::env::var_os(CHILD).is_some());
    let disk = Disk::builder(Box::new(driver.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let mut submitter = disk.submitter();
    let reader = std::thread::spawn(move || {
        let mut memory = vec![0; 512];
        let _ = submitter.read_at(&mut memory, 0);
        drop(memory);
        std::process::exit(RETURNED);
    });
    while !driver.taken.load(SeqCst) {
        let _ = catch_unwind(AssertUnwindSafe(|| queue.poll()));
    }
    driver.panics.store(true, SeqCst);
    let _ = catch_unwind(AssertUnwindSafe(|| drop(queue)));
    let _ = reader.join();
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn a_queue_is_dropped_by_a_panic_with_lent_memory_in_flight() {
    drop_with_lent_memory_in_flight(Panicking::default());
}

#[test]
#[ignore = "run by the test below, in a process of its own"]
fn a_driver_panics_as_it_takes_lent_memory() {
    let driver = Panicking::default();
    driver.panics_with_requests.store(true, SeqCst);
    drop_with_lent_memory_in_flight(driver);
}

#[test]
fn memory_of_a_caller_never_returns_while_it_is_in_flight() {
    for name in [
        "memory::a_queue_is_dropped_by_a_panic_with_lent_memory_in_flight",
        "memory::a_driver_panics_as_it_takes_lent_memory",
    ] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output =
            child.args(["--exact", name, "--ignored", "--nocapture"]).env(CHILD, "1").output().unwrap();
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{name}: {output:?}");
    }
}

#[test]
fn a_driver_that_panics_is_given_no_request_twice() {
    let driver = Panicking::default();
    let disk = Disk::builder(Box::new(driver.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    (0..3).for_each(|n| queue.submit(Bio::read(Sector(n * 16), filled(4096, 0), n)).unwrap());
    driver.panics_with_requests.store(true, SeqCst);
    catch_unwind(AssertUnwindSafe(|| queue.poll())).unwrap_err();
    driver.panics_with_requests.store(false, SeqCst);
    queue.poll();
    assert_eq!(driver.offered.load(SeqCst), 3);
    drop(queue);
}

#[test]
fn a_panic_that_drops_the_queue_calls_the_driver_no_more() {
    for is_first_kept in [false, true] {
        let driver = Panicking { is_first_kept, ..Panicking::default() };
        let disk = Disk::builder(Box::new(driver.clone())).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        // The driver has this request when it panics, so the queue must wait for it. A flush would follow.
        let first = Bio::write(Sector(0), filled(512, 0), 0).with_flags(BioFlags::FUA);
        if is_first_kept {
            queue.submit(first).unwrap();
        }
        queue.poll();
        driver.panics_with_requests.store(true, SeqCst);
        // The first of four parts panics, and the others could get tags.
        catch_unwind(AssertUnwindSafe(move || queue.submit(Bio::discard(Sector(0), 2048, 0)))).unwrap_err();
        assert_eq!(driver.offered.load(SeqCst), 1 + usize::from(is_first_kept));
        // The queue that dispatched as its driver panicked is not waited for.
        drop(disk.quiesce());
    }
}

#[test]
fn a_driver_completes_a_request_and_panics_in_one_call() {
    for (result, polls, completed) in [
        (Ok(()), false, 0),
        (Ok(()), true, 1),
        (Err(Status::Io), false, 0),
        // The failed request is held.
        (Err(Status::Io), true, 0),
    ] {
        let driver = Panicking { first_result: Some(result), ..Panicking::default() };
        let disk = Disk::builder(Box::new(driver.clone())).error_policy(ErrorPolicy::Hold).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        (0..3).for_each(|n| queue.submit(Bio::read(Sector(n * 16), filled(4096, 0), n)).unwrap());
        driver.panics_with_requests.store(true, SeqCst);
        catch_unwind(AssertUnwindSafe(|| queue.poll())).unwrap_err();
        if polls {
            queue.poll();
        }
        assert_eq!(queue.completions().count(), completed, "{result:?}");
        drop(queue);
    }
}

#[test]
fn a_driver_that_panics_loses_no_tag_of_a_shared_set() {
    let driver = Panicking::default();
    let builder = Disk::builder(Box::new(driver.clone())).queues(2).shared_tags(true).depth(4);
    let disk = builder.build().unwrap();
    let [mut first, mut second] = [0, 1].map(|index| disk.open_queue(index).unwrap());
    driver.panics_with_requests.store(true, SeqCst);
    let offered = |queue: &mut LocalQueue| {
        queue.submit(Bio::flush(0)).unwrap();
        (0..8).for_each(|n| queue.submit(Bio::read(Sector(n * 16), filled(4096, 0), n)).unwrap());
        catch_unwind(AssertUnwindSafe(|| queue.poll())).unwrap_err();
        driver.offered.swap(0, SeqCst)
    };
    // Each flush has a tag of its own.
    assert_eq!(offered(&mut first), 1 + 4);
    drop(first);
    // The depth can be changed only while no tag is in use.
    disk.set(Setting::Depth(2)).unwrap();
    assert_eq!(offered(&mut second), 1 + 2);
}

#[test]
fn a_panic_of_the_owner_loses_no_staged_bio() {
    let driver = Panicking::default();
    let disk = Disk::builder(Box::new(driver.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let mut submitter = disk.submitter();
    let (results, completed) = channel();
    // The first bio is so large that it reaches the driver before the queue takes the others.
    for (sector, bytes) in [(0, 128 << 10), (512, 4096), (520, 4096), (1024, 4096)] {
        let results = results.clone();
        let bio = Bio::read(Sector(sector), filled(bytes, 0), 0);
        submitter.submit(bio, move |result, _| results.send(result).unwrap());
    }
    drop(results);
    driver.panics_with_requests.store(true, SeqCst);
    catch_unwind(AssertUnwindSafe(|| queue.poll())).unwrap_err();
    drop(queue);
    assert_eq!(completed.iter().collect::<Vec<_>>(), [Err(Status::Offline); 4]);
}

#[test]
fn bios_that_a_panic_leaks_take_no_room_at_the_request_gate() {
    let driver = Panicking::default();
    let disk = Disk::builder(Box::new(driver.clone())).depth(2).batching(false).build().unwrap();
    let mut submitter = disk.submitter();
    let bio = || Bio::read(Sector(0), filled(4096, 0), 0);
    for _ in 0..4 {
        let mut queue = disk.open_queue(0).unwrap();
        driver.panics_with_requests.store(true, SeqCst);
        let staged =
            submitter.try_submit(bio(), Box::new(|result, _| assert_eq!(result, Err(Status::Offline))));
        assert!(staged.is_ok(), "the gate is full");
        catch_unwind(AssertUnwindSafe(|| queue.poll())).unwrap_err();
        drop(queue);
    }
}

/// Addresses and lengths of memory.
type Segments = Vec<(usize, u32)>;

/// A driver that loses its write cache at the first poll, while it has two requests, and completes the last one then.
/// At the next poll it completes the first one. It records the memory of the first request at each poll.
#[derive(Clone, Default)]
struct Losing {
    polls: Arc<AtomicUsize>,
    segments: Arc<Mutex<Vec<Segments>>>,
    kept: Vec<Tag>,
}

impl Driver for Losing {
    fn name(&self) -> &'static str {
        "losing"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits {
            capacity_bytes: 1 << 20,
            write_cache: self.polls.load(SeqCst) == 0,
            ..Default::default()
        }
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: the memory of a request is not used.
unsafe impl DriverQueue for Losing {
    fn queue_requests(&mut self, _cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        self.kept.extend_from_slice(tags);
        Taken::All
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        let mut segments = Segments::new();
        cx.for_each_segment(self.kept[0], |segment| segments.push((segment.ptr.addr(), segment.len)));
        self.segments.lock().unwrap().push(segments);
        if self.polls.fetch_add(1, SeqCst) == 0 {
            cx.limits_changed();
        }
        cx.complete(self.kept.pop().unwrap(), Ok(()));
    }
}

#[test]
fn zeroes_of_merged_requests_stay_when_the_limits_change() {
    let driver = Losing::default();
    let disk = Disk::builder(Box::new(driver.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(Bio::write(Sector(0), filled(4096, 7), 0)).unwrap();
    queue.submit(Bio::write_zeroes(Sector(8), 8, 1)).unwrap();
    queue.submit(Bio::read(Sector(100), IoBuffer::zeroed(4096), 2)).unwrap();
    queue.wait(3);
    assert_eq!(queue.completions().filter(|completion| completion.result == Ok(())).count(), 3);
    let segments = driver.segments.lock().unwrap();
    assert_eq!(segments[0].iter().map(|(_, len)| *len).collect::<Vec<_>>(), [4096, 4096], "merged");
    assert_eq!(segments[0], segments[1], "the zeroes were exchanged while the driver used them");
}
