//! Requests that the driver fails are held instead of being reported, until the operator resumes the disk.

use std::any::Any;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use crate::common::{Behaviour, Device, Finish, drain, filled, plain_limits};
use blkq::clock::monotonic_ns;
use blkq::hang::Place;
use blkq::testing::{wait_until, within_limit};
use blkq::{
    Bio, BioFlags, Completion, Counter, Cqe, Disk, EngineThread, Error, ErrorKind, ErrorPolicy, IoBuffer,
    LocalQueue, Operation, QueueLimits, Resume, SchedulerKind, Sector, Setting, Source, SourceContext,
    StatGroup, Status,
};
use blkq_drivers::fault::FaultSpec;
use blkq_drivers::{DriverOptions, DriverSpec, open};

/// A device with a write cache and `policy` that completes requests immediately and in random order.
fn device(policy: ErrorPolicy) -> (Device, Arc<Disk>, LocalQueue) {
    let limits = QueueLimits { write_cache: true, ..plain_limits() };
    let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let disk = device.builder().error_policy(policy).build().unwrap();
    let queue = disk.open_queue(0).unwrap();
    (device, disk, queue)
}

fn write(sector: u64, mark: u64) -> Bio {
    Bio::write(Sector(sector), filled(512, mark as u8), mark)
}

fn hold(disk: &Disk, queue: &mut LocalQueue, count: u64) {
    wait_until(&format!("{count} requests are held"), || {
        queue.poll();
        disk.held() == count
    });
}

/// Runs turns until nothing changes, and returns the marks of the completed bios with their results.
fn settle(queue: &mut LocalQueue) -> Vec<(u64, Result<(), Status>)> {
    for _ in 0..50 {
        queue.poll();
    }
    let mut done: Vec<_> = queue.completions().map(|one| (one.user_data, one.result)).collect();
    done.sort_unstable_by_key(|(mark, _)| *mark);
    done
}

// Contract: errors
#[test]
fn failed_requests_are_held_and_reissued_with_their_data() {
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline, SchedulerKind::Kyber] {
        let (device, disk, mut queue) = device(ErrorPolicy::HoldNoSpace);
        disk.set(Setting::Scheduler(scheduler)).unwrap();
        device.state().bad.push((8..16, Status::NoSpace));
        // The writes at 8 to 11 merge, and fail as one request; the others succeed.
        for sector in [8, 9, 10, 11, 40, 14] {
            queue.submit(write(sector, sector)).unwrap();
        }
        queue.submit(Bio::read(Sector(40), filled(512, 0), 100)).unwrap();
        let done = settle(&mut queue);
        assert_eq!(done, [(40, Ok(())), (100, Ok(()))], "{scheduler}");
        assert_eq!((disk.held(), disk.stats().in_flight), (2, [0, 2]), "{scheduler}");
        assert_eq!(disk.stats().counter(Counter::HeldRequests), 2);
        // The sectors still fail: the requests are held again, and no error is reported.
        assert_eq!(disk.resume(Resume::Reissue), 2);
        assert_eq!(settle(&mut queue), [], "{scheduler}");
        assert_eq!((disk.held(), disk.stats().counter(Counter::HeldRequests)), (2, 4));
        device.state().bad.clear();
        // If two threads resume at the same time, one of them reissues the requests.
        assert_eq!(disk.resume(Resume::Reissue), 2);
        assert_eq!(disk.resume(Resume::Reissue), 0);
        let done: Vec<u64> = settle(&mut queue).iter().map(|(mark, _)| *mark).collect();
        assert_eq!(done, [8, 9, 10, 11, 14], "{scheduler}");
        assert_eq!((disk.held(), disk.stats().in_flight), (0, [0, 0]), "{scheduler}");
        assert_eq!(disk.stats()[StatGroup::Write].failed(), 0);
        for sector in [8, 9, 10, 11, 40, 14] {
            assert_eq!(device.state().current[sector << 9], sector as u8, "{scheduler}");
        }
        device.assert_legal();
        assert_eq!(disk.resume(Resume::Reissue), 0);
    }
}

// Contract: errors
#[test]
fn errors_of_the_request_itself_are_reported() {
    let own = [Status::NotSupported, Status::Invalid, Status::ReadOnly];
    for (policy, status, is_held) in [
        (ErrorPolicy::Report, Status::NoSpace, false),
        (ErrorPolicy::HoldNoSpace, Status::NoSpace, true),
        (ErrorPolicy::HoldNoSpace, Status::Io, false),
        (ErrorPolicy::Hold, Status::Io, true),
        (ErrorPolicy::Hold, Status::Offline, true),
    ]
    .into_iter()
    .chain(own.map(|status| (ErrorPolicy::Hold, status, false)))
    {
        let (device, disk, mut queue) = device(policy);
        device.state().bad.push((0..8, status));
        queue.submit(write(0, 1)).unwrap();
        queue.submit(Bio::read(Sector(1), filled(512, 0), 2)).unwrap();
        let done = settle(&mut queue);
        match is_held {
            true => assert_eq!((done.len(), disk.held()), (0, 2), "{policy} {status}"),
            false => {
                assert_eq!(done, [(1, Err(status)), (2, Err(status))], "{policy}");
                assert_eq!(disk.held(), 0);
            }
        }
        assert_eq!(disk.resume(Resume::Fail), if is_held { 2 } else { 0 });
        let done = settle(&mut queue);
        assert_eq!(done.len(), if is_held { 2 } else { 0 });
        assert!(done.iter().all(|(_, result)| *result == Err(status)));
        assert_eq!((disk.held(), queue.in_flight()), (0, 0));
        // The queue itself rejects this request.
        queue.submit(write(1 << 40, 3)).unwrap();
        assert_eq!(settle(&mut queue).len(), 1);
    }
}

// Contract: durability
#[test]
fn a_flush_waits_for_writes_that_are_held() {
    let limits = QueueLimits { write_cache: true, ..plain_limits() };
    let device = Device::new(limits, Behaviour { finish: Finish::AtOnce, ..Behaviour::default() });
    let disk = device.builder().queues(2).error_policy(ErrorPolicy::Hold).build().unwrap();
    let (mut first, mut second) = (disk.open_queue(0).unwrap(), disk.open_queue(1).unwrap());
    device.state().bad.push((8..16, Status::Io));
    first.submit(write(8, 8)).unwrap();
    hold(&disk, &mut first, 1);
    first.submit(Bio::flush(1)).unwrap();
    // Flushes of another queue wait too, and so do those that FUA needs.
    second.submit(Bio::flush(2)).unwrap();
    second.submit(write(40, 3).with_flags(BioFlags::FUA)).unwrap();
    assert_eq!((settle(&mut first).len(), settle(&mut second).len()), (0, 0));
    assert_eq!(device.count(Operation::Flush), 0);
    let scan = first.scan_for_hangs(monotonic_ns() + 31_000_000_000, 30_000_000_000);
    let places: Vec<&Place> = scan.hangs.iter().map(|hang| &hang.place).collect();
    assert_eq!(places, [&Place::Held(Status::Io), &Place::ForHeldWrites]);
    // Held reads delay no flush.
    device.state().bad = vec![(60..61, Status::Io)];
    second.submit(Bio::read(Sector(60), filled(512, 0), 4)).unwrap();
    assert_eq!(settle(&mut second).len(), 0);
    disk.resume(Resume::Reissue);
    assert_eq!(settle(&mut first), [(1, Ok(())), (8, Ok(()))]);
    assert_eq!(settle(&mut second), [(2, Ok(())), (3, Ok(()))]);
    let log = device.log();
    let at = |operation| log.iter().position(|seen| seen.operation == operation);
    assert!(log.iter().rposition(|seen| seen.sector == 8) < at(Operation::Flush), "{log:?}");
    disk.resume(Resume::Fail);
    assert_eq!(settle(&mut second), [(4, Err(Status::Io))]);
}

// Contract: durability
#[test]
fn a_failed_flush_is_reported_and_not_tried_again() {
    let (device, disk, mut queue) = device(ErrorPolicy::Hold);
    device.state().flush_result = Err(Status::Io);
    queue.submit(Bio::flush(1)).unwrap();
    queue.submit(write(8, 2).with_flags(BioFlags::FUA)).unwrap();
    assert_eq!(settle(&mut queue), [(1, Err(Status::Io)), (2, Err(Status::Io))]);
    assert_eq!(disk.held(), 0);
}

// Contract: live-changes
#[test]
fn a_freeze_fails_immediately_while_requests_are_held() {
    let (device, disk, mut queue) = device(ErrorPolicy::Hold);
    device.state().bad.push((8..16, Status::Io));
    queue.submit(write(8, 8)).unwrap();
    hold(&disk, &mut queue, 1);
    let begin = Instant::now();
    for change in [Setting::Merge(false), Setting::Depth(4), Setting::ReadOnly(true)] {
        let error = disk.set(change).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        assert!(error.to_string().contains("1 request is held after I/O errors"), "{error}");
    }
    assert_eq!(disk.resize(None).unwrap_err().kind(), ErrorKind::Held);
    assert!(begin.elapsed() < Duration::from_secs(20), "the change waited for 30 seconds");
    // The change also fails if requests are held while the freeze waits for it.
    device.state().bad.clear();
    disk.resume(Resume::Reissue);
    assert_eq!(settle(&mut queue), [(8, Ok(()))]);
    device.state().bad.push((8..16, Status::Io));
    device.state().behaviour.finish = Finish::Held;
    queue.submit(write(8, 9)).unwrap();
    queue.poll();
    let changed = std::thread::scope(|scope| {
        let change = scope.spawn(|| disk.set(Setting::Merge(false)));
        device.release_all();
        hold(&disk, &mut queue, 1);
        while !change.is_finished() {
            queue.poll();
        }
        change.join().unwrap()
    });
    // The change fails unless it was done before the request was held.
    assert_eq!(changed.unwrap_err().kind(), ErrorKind::Held);
    disk.resume(Resume::Fail);
    assert_eq!(settle(&mut queue), [(9, Err(Status::Io))]);
    disk.set(Setting::Merge(false)).unwrap();
}

#[test]
fn held_requests_fail_when_the_disk_stops() {
    let (device, disk, mut queue) = device(ErrorPolicy::Hold);
    device.state().bad.push((8..16, Status::Io));
    queue.submit(write(8, 8)).unwrap();
    hold(&disk, &mut queue, 1);
    let reporting = disk.report_errors();
    assert_eq!(settle(&mut queue), [(8, Err(Status::Io))]);
    queue.submit(write(9, 9)).unwrap();
    assert_eq!(settle(&mut queue), [(9, Err(Status::Io))], "nothing is held meanwhile");
    drop(reporting);
    queue.submit(write(10, 10)).unwrap();
    hold(&disk, &mut queue, 1);
    // A dropped queue leaves no held requests, and no flush waits for them.
    drop(queue);
    assert_eq!(disk.held(), 0);
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(Bio::flush(1)).unwrap();
    assert_eq!(settle(&mut queue), [(1, Ok(()))]);
}

#[test]
fn bios_without_a_tag_continue_after_a_resume() {
    let (device, disk, mut queue) = device(ErrorPolicy::Hold);
    disk.set(Setting::Depth(2)).unwrap();
    device.state().bad.push((0..1 << 10, Status::Io));
    for sector in 0..8 {
        queue.submit(write(sector * 8, sector)).unwrap();
    }
    hold(&disk, &mut queue, 2);
    assert_eq!(settle(&mut queue), []);
    let scan = queue.scan_for_hangs(monotonic_ns() + 31_000_000_000, 30_000_000_000);
    assert!(scan.hangs.iter().any(|hang| matches!(hang.place, Place::ForTag(_))), "{scan:?}");
    device.state().bad.clear();
    disk.resume(Resume::Reissue);
    assert_eq!(drain(&mut queue).iter().filter(|one| one.result.is_ok()).count(), 8);
}

/// With an engine: writers wait until the rules of the driver change.
#[test]
fn writers_wait_until_held_requests_succeed() {
    within_limit(|| {
        let fault: FaultSpec = "error=ENOSPC,op=write".parse().unwrap();
        let options = DriverOptions { fault: Some(fault), ..DriverOptions::default() };
        let driver = open(&DriverSpec::Ram(8 << 20), &options).unwrap().driver;
        let disk = Disk::builder_shared(driver).error_policy(ErrorPolicy::HoldNoSpace).build().unwrap();
        let engine = EngineThread::spawn("hold", vec![(disk.clone(), 0)]).unwrap();
        let writers: Vec<_> = (0..4u8)
            .map(|writer| {
                let mut submitter = disk.submitter();
                std::thread::spawn(move || {
                    (0..16u64).try_for_each(|block| {
                        submitter.write_at(&[writer; 4096], (u64::from(writer) * 16 + block) * 8192)
                    })
                })
            })
            .collect();
        wait_until("each writer has a held write", || disk.held() >= 4);
        disk.submitter().read_at(&mut [0; 512], 0).unwrap();
        // Many threads resume at the same time, while the sectors still fail.
        std::thread::scope(|scope| {
            (0..4).for_each(|_| _ = scope.spawn(|| disk.resume(Resume::Reissue)));
        });
        disk.set_driver(&FaultSpec::default()).unwrap();
        wait_until("all writers are done", || {
            disk.resume(Resume::Reissue);
            writers.iter().all(|writer| writer.is_finished())
        });
        for (number, writer) in writers.into_iter().enumerate() {
            writer.join().unwrap().unwrap();
            let mut read = IoBuffer::zeroed(512);
            disk.submitter().read_at(&mut read, number as u64 * 16 * 8192).unwrap();
            assert!(read.iter().all(|byte| *byte == number as u8));
        }
        drop(engine);
    });
}

/// Clients 1 and 2, each of which writes and reads one of two blocks that merge.
struct TwoClients {
    completed: Sender<(u64, Result<(), Status>)>,
    in_flight: usize,
    disconnected: Vec<u64>,
}

// SAFETY: the source reports that it is stopped only when no bio is in flight.
unsafe impl Source for TwoClients {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        for bio in [write(8, 1), write(9, 2)]
            .into_iter()
            .chain([(16, 11), (17, 12)].map(|(sector, mark)| Bio::read(Sector(sector), filled(512, 0), mark)))
        {
            cx.submit(0, bio).map_err(|_| Error::new(ErrorKind::Busy, "no room"))?;
            self.in_flight += 1;
        }
        Ok(())
    }

    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}

    fn on_bio(&mut self, _: &mut SourceContext<'_>, completion: Completion) {
        self.in_flight -= 1;
        self.completed.send((completion.user_data, completion.result)).unwrap();
    }

    fn on_message(&mut self, _: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        self.disconnected.push(*message.downcast::<u64>().unwrap());
    }

    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}

    fn is_abandoned(&self, user_data: u64) -> bool {
        self.disconnected.contains(&(user_data % 10))
    }

    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {
        self.disconnected = vec![1, 2];
    }

    fn is_stopped(&self) -> bool {
        self.in_flight == 0
    }
}

/// If the write were reissued, it could overwrite what the client has written since over another connection.
// Contract: errors
#[test]
fn held_writes_fail_with_one_client_and_reads_with_all() {
    within_limit(|| {
        let fault: FaultSpec = "error=EIO".parse().unwrap();
        let options = DriverOptions { fault: Some(fault), ..DriverOptions::default() };
        let driver = open(&DriverSpec::Ram(8 << 20), &options).unwrap().driver;
        let disk = Disk::builder_shared(driver).error_policy(ErrorPolicy::Hold).build().unwrap();
        let engine = EngineThread::spawn("hold", vec![(disk.clone(), 0)]).unwrap();
        let (completed, completions) = channel();
        let source =
            move || Box::new(TwoClients { completed, in_flight: 0, disconnected: Vec::new() }) as Box<_>;
        let id = engine.handle().add_source(source).unwrap();
        let wait_for_held = |count| wait_until("requests are held", || disk.held() == count);
        wait_for_held(2);
        let next = || {
            let mut both = [completions.recv().unwrap(), completions.recv().unwrap()];
            both.sort_unstable_by_key(|(mark, _)| *mark);
            both
        };
        engine.handle().send(id, Box::new(1u64));
        assert_eq!(next(), [(1, Err(Status::Io)), (2, Err(Status::Io))]);
        wait_for_held(1);
        engine.handle().send(id, Box::new(2u64));
        assert_eq!(next(), [(11, Err(Status::Io)), (12, Err(Status::Io))]);
        wait_for_held(0);
        engine.handle().stop_source(id, true);
    });
}

// Contract: durability
#[test]
fn flushes_that_are_ignored_do_not_reach_the_driver() {
    let limits = QueueLimits { write_cache: true, fua: true, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    let disk = device.builder().ignore_flushes(true).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(write(8, 1).with_flags(BioFlags::FUA | BioFlags::PREFLUSH)).unwrap();
    queue.submit(Bio::flush(2)).unwrap();
    assert!(drain(&mut queue).iter().all(|one| one.result.is_ok()));
    assert_eq!(device.count(Operation::Flush), 0);
    assert!(device.log().iter().all(|seen| !seen.flags.contains(BioFlags::FUA)));
    assert!(!disk.limits().write_cache);
}

// Contract: errors
#[test]
fn held_requests_do_not_block_other_requests() {
    for scheduler in SchedulerKind::ALL {
        let limits = QueueLimits { write_cache: true, ..plain_limits() };
        let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
        let disk = device.builder().depth(256).scheduler(scheduler).error_policy(ErrorPolicy::Hold);
        let disk = disk.build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        device.state().bad.push((0..1024, Status::NoSpace));
        // More bios of each operation than kyber permits in the driver at a time.
        for mark in 0..140 {
            queue.submit(write(mark * 2, mark)).unwrap();
        }
        for mark in 140..180 {
            queue
                .submit(Bio::write_zeroes(Sector(mark * 2), 1, mark).with_flags(BioFlags::NO_MERGE))
                .unwrap();
        }
        hold(&disk, &mut queue, 180);
        queue.submit(write(1100, 1000)).unwrap();
        queue.submit(Bio::write_zeroes(Sector(1200), 1, 1001)).unwrap();
        assert_eq!(settle(&mut queue), [(1000, Ok(())), (1001, Ok(()))], "{scheduler}");
        device.state().bad.clear();
        disk.resume(Resume::Reissue);
        assert!(drain(&mut queue).iter().all(|one| one.result.is_ok()));
        device.assert_legal();
    }
}

// Contract: errors
#[test]
fn an_engine_that_exits_waits_for_no_held_writes_of_others() {
    within_limit(|| {
        let limits = QueueLimits { write_cache: true, ..plain_limits() };
        let device = Device::new(limits, Behaviour::default());
        device.state().bad.push((0..8, Status::NoSpace));
        let disk = device.builder().queues(2).error_policy(ErrorPolicy::Hold).build().unwrap();
        let [first, second] =
            [0, 1].map(|queue| EngineThread::spawn("hold", vec![(disk.clone(), queue)]).unwrap());
        let (mut flusher, mut writer) = (disk.submitter(), disk.submitter());
        let (results, completed) = channel();
        for (submitter, bio) in [(&mut writer, write(0, 1)), (&mut flusher, Bio::flush(2))] {
            let results = results.clone();
            let mark = bio.user_data;
            submitter.submit(bio, move |result, _| results.send((mark, result)).unwrap());
            // The write is held, and the queue of the flush has taken the flush.
            while disk.held() == 0 || mark == 2 && disk.stats().counter(Counter::FlushesAsked) == 0 {
                std::thread::yield_now();
            }
        }
        // The flush is on the first queue, and waits for the write that the second queue holds.
        drop(first);
        assert_eq!(completed.try_iter().collect::<Vec<_>>(), [(2, Err(Status::Offline))]);
        drop(second);
        assert_eq!(completed.try_iter().collect::<Vec<_>>(), [(1, Err(Status::NoSpace))]);
    });
}

// Contract: errors
#[test]
fn a_flush_of_another_thread_needs_none_of_the_held_tags() {
    let (device, disk, mut queue) = device(ErrorPolicy::Hold);
    disk.set(Setting::Depth(2)).unwrap();
    device.state().bad.push((0..1024, Status::Medium));
    for mark in 0..4 {
        queue.submit(Bio::read(Sector(mark * 8), filled(512, 0), mark)).unwrap();
    }
    hold(&disk, &mut queue, 2);
    let (results, completed) = channel();
    let mut submitter = disk.submitter();
    // The flush is submitted after a read that has to wait for a tag.
    for bio in [Bio::read(Sector(0), filled(512, 0), 0), Bio::flush(0)] {
        let (results, operation) = (results.clone(), bio.operation);
        submitter.submit(bio, move |result, _| results.send((operation, result)).unwrap());
    }
    assert_eq!(settle(&mut queue), []);
    assert_eq!(completed.try_iter().collect::<Vec<_>>(), [(Operation::Flush, Ok(()))]);
    device.state().bad.clear();
    disk.resume(Resume::Reissue);
    assert_eq!(drain(&mut queue).len(), 4);
}
