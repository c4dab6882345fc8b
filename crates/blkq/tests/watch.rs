//! Each hang is found where it is and reported once, and so is its completion.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::common::{self, Behaviour, Device, Finish, drain, filled, plain_limits};
use blkq::clock::monotonic_ns;
use blkq::hang::{HangScan, Place, REPORTED_MAX};
use blkq::testing::wait_until;
use blkq::{
    Bio, BioFlags, Completion, Counter, Cqe, EngineThread, Error, ErrorPolicy, Operation, QueueLimits,
    Resume, Sector, Source, SourceContext, StatGroup, Status,
};

const SECOND_NS: u64 = 1_000_000_000;
const LIMIT_NS: u64 = 30 * SECOND_NS;

fn read(sector: u64, mark: u64) -> Bio {
    Bio::read(Sector(sector), filled(512, 0), mark)
}

fn after(seconds: u64) -> u64 {
    monotonic_ns() + seconds * SECOND_NS
}

/// The scan of a queue in which `hung` requests hang, all of which were reported before.
fn nothing_new(hung: u64) -> HangScan {
    let mut scan = HangScan::default();
    scan.hung = hung;
    scan
}

// Contract: statistics
#[test]
fn a_hung_request_is_reported_once_then_its_completion() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    let fua = Bio::write(Sector(8), filled(4096, 1), 7).with_flags(BioFlags::NO_MERGE);
    queue.submit(fua).unwrap();
    queue.poll();
    assert_eq!(queue.scan_for_hangs(after(29), LIMIT_NS), HangScan::default(), "not yet");
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    assert_eq!((scan.hangs.len(), scan.more, scan.hung), (1, 0, 1));
    let hang = &scan.hangs[0];
    let io = &hang.io;
    assert_eq!((io.operation, io.sector, io.sectors), (Operation::Write, Sector(8), 8));
    assert_eq!((io.queue, io.tag.is_some(), hang.bios), (0, true, 1));
    assert_eq!(hang.place, Place::Driver("in the driver".into()));
    assert_eq!(hang.client.as_deref(), Some("user_data 7"));
    assert!((30 * SECOND_NS..35 * SECOND_NS).contains(&hang.age_ns), "{}", hang.age_ns);
    let tag = io.tag.unwrap().0;
    assert_eq!(io.to_string(), format!("#0.1 write sector 8 + 8 (no-merge), queue 0, tag {tag}"));
    // The hang is reported once, independently of the number of scans.
    for _ in 0..3 {
        assert_eq!(queue.scan_for_hangs(after(60), LIMIT_NS), nothing_new(1));
    }
    assert_eq!((disk.stats().counter(Counter::Hangs), disk.stats().hung), (1, 1));
    device.release(1);
    drain(&mut queue);
    let scan = queue.scan_for_hangs(after(60), LIMIT_NS);
    assert_eq!((scan.hung, scan.hangs.len(), scan.completed.len()), (0, 0, 1));
    let completion = &scan.completed[0];
    assert_eq!((&completion.io, completion.result), (io, Some(Ok(()))));
    assert!(
        completion.age_ns < 20 * SECOND_NS,
        "the real age, not the one at the time of the simulated scan: {}",
        completion.age_ns
    );
    assert_eq!(
        queue.scan_for_hangs(after(60), LIMIT_NS),
        HangScan::default(),
        "its completion is reported once too"
    );
    assert_eq!((disk.stats().counter(Counter::Hangs), disk.stats().hung), (1, 0));
    // The next bio in the same slot is a different one.
    queue.submit(read(0, 8)).unwrap();
    queue.poll();
    assert_eq!(queue.scan_for_hangs(after(31), LIMIT_NS).hangs[0].io.number, 2);
    device.release(1);
    drain(&mut queue);
}

#[test]
fn a_bio_without_a_tag_hangs_too_and_is_reported_once() {
    let device = Device::held();
    let disk = device.builder().depth(2).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    (0..5).for_each(|n| queue.submit(read(n * 16, n)).unwrap());
    queue.poll();
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    let places: Vec<&Place> = scan.hangs.iter().map(|hang| &hang.place).collect();
    let driver = Place::Driver("in the driver".into());
    assert_eq!(places, [&driver, &driver, &Place::ForTag(0), &Place::ForTag(1), &Place::ForTag(2)]);
    assert!(scan.hangs[2..].iter().all(|hang| hang.io.tag.is_none()));
    device.release(2);
    while queue.in_flight() > 3 {
        queue.poll();
    }
    queue.poll();
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    assert_eq!((scan.hangs.len(), scan.hung, scan.completed.len()), (0, 3, 2));
    device.release(3);
    drain(&mut queue);
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    assert_eq!((scan.hung, scan.completed.len()), (0, 3));
    assert!(scan.completed.iter().all(|done| done.io.tag.is_some()), "the bios got tags in the end");
    assert_eq!(disk.stats().counter(Counter::Hangs), 5);
}

// Contract: statistics
#[test]
fn a_hung_flush_is_reported_with_the_bios_that_it_serves() {
    let device = Device::new(
        QueueLimits { write_cache: true, ..plain_limits() },
        Behaviour { finish: Finish::Held, ..Behaviour::default() },
    );
    let (disk, mut queue) = device.open();
    (0..3).for_each(|n| queue.submit(Bio::flush(n)).unwrap());
    queue.poll();
    (3..5).for_each(|n| queue.submit(Bio::flush(n)).unwrap());
    queue.poll();
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    let reported: Vec<_> = scan.hangs.iter().map(|h| (h.io.operation, h.bios, h.place.clone())).collect();
    let driver = Place::Driver("in the driver".into());
    assert_eq!(reported[0], (Operation::Flush, 3, driver));
    assert_eq!(
        reported[1..],
        [(Operation::Flush, 1, Place::ForFlush), (Operation::Flush, 1, Place::ForFlush)]
    );
    assert_eq!(scan.hangs[0].client.as_deref(), Some("user_data 0"));
    assert!(scan.hangs[0].io.to_string().starts_with("#0.1 flush, queue 0, tag "));
    device.release(1);
    while queue.in_flight() > 2 {
        queue.poll();
    }
    queue.poll();
    // The two bios that waited are in the next flush now, and have not completed.
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    assert_eq!((scan.completed.len(), scan.completed[0].result), (1, Some(Ok(()))));
    device.release(1);
    drain(&mut queue);
    let stats = disk.stats();
    let counters = [Counter::FlushesAsked, Counter::FlushesSent, Counter::FlushesCoalesced];
    assert_eq!(counters.map(|counter| stats.counter(counter)), [5, 2, 3]);
}

#[test]
fn of_many_hung_requests_all_are_counted_and_few_reported() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    let all = REPORTED_MAX as u64 + 40;
    (0..all).for_each(|n| queue.submit(read(n * 16, n)).unwrap());
    queue.poll();
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    assert_eq!((scan.hangs.len(), scan.more, scan.hung), (REPORTED_MAX, 40, all));
    assert_eq!(queue.scan_for_hangs(after(32), LIMIT_NS), nothing_new(all));
    device.release(all as usize);
    drain(&mut queue);
    assert_eq!(queue.scan_for_hangs(after(32), LIMIT_NS).completed.len(), REPORTED_MAX);
    assert_eq!((disk.stats().counter(Counter::Hangs), disk.stats().hung), (all, 0));
}

// Contract: statistics
#[test]
fn without_statistics_age_counts_from_the_first_scan() {
    let device = Device::held();
    let disk = device.builder().iostats(false).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(read(0, 1)).unwrap();
    queue.submit(read(16, 2)).unwrap();
    queue.poll();
    // The clock of the watcher does not have to be the monotonic clock.
    let hour_ns = 3600 * SECOND_NS;
    assert_eq!(queue.scan_for_hangs(hour_ns, LIMIT_NS), HangScan::default(), "found, and of no age yet");
    assert_eq!(queue.scan_for_hangs(hour_ns + LIMIT_NS, LIMIT_NS), HangScan::default());
    let scan = queue.scan_for_hangs(hour_ns + LIMIT_NS + 1, LIMIT_NS);
    assert_eq!((scan.hangs.len(), scan.hangs[0].age_ns), (2, LIMIT_NS + 1));
    device.release(2);
    drain(&mut queue);
    let scan = queue.scan_for_hangs(hour_ns + 40 * SECOND_NS, LIMIT_NS);
    let completions: Vec<_> = scan.completed.iter().map(|done| (done.age_ns, done.result)).collect();
    assert_eq!(completions, [(40 * SECOND_NS, Some(Ok(()))); 2]);
    // The next bio in the same slots has no start time, and does not inherit that of the previous bio.
    queue.submit(read(0, 3)).unwrap();
    queue.poll();
    assert_eq!(queue.scan_for_hangs(2 * hour_ns, LIMIT_NS), HangScan::default());
    device.release(1);
    drain(&mut queue);
    assert_eq!(disk.stats().counter(Counter::ClockReads), 0);
    assert_eq!(disk.stats()[StatGroup::Read].ios, 0);
}

#[test]
fn hangs_are_found_in_merged_requests_and_schedulers() {
    let device = Device::held();
    let disk = device.builder().depth(1).scheduler("mq-deadline".parse().unwrap()).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(read(100, 0)).unwrap();
    queue.poll();
    queue.submit(read(0, 1)).unwrap();
    queue.submit(read(1, 2)).unwrap();
    queue.poll();
    let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
    let mut reported: Vec<_> = scan.hangs.iter().map(|h| (h.place.clone(), h.bios, h.io.sectors)).collect();
    reported.sort_by_key(|(_, bios, _)| *bios);
    assert_eq!(reported, [(Place::Driver("in the driver".into()), 1, 1), (Place::Scheduler, 2, 2)]);
    device.release(2);
    drain(&mut queue);
}

#[test]
fn the_place_of_a_request_outside_the_driver_is_reported() {
    let busy = Behaviour { busy_every: 1, ..Behaviour::default() };
    let device = Device::plain(busy);
    let (disk, mut queue) = device.open();
    let mut place = |bio: Option<Bio>| {
        bio.into_iter().for_each(|bio| queue.submit(bio).unwrap());
        let scan = queue.scan_for_hangs(after(31), LIMIT_NS);
        queue.poll();
        scan.hangs.last().map(|hang| hang.place.clone())
    };
    assert_eq!(place(Some(read(0, 0))), Some(Place::Plug));
    assert_eq!(place(None), None, "it was reported");
    assert_eq!(place(Some(read(100, 1))), Some(Place::Plug));
    device.state().behaviour.busy_every = 0;
    drain(&mut queue);
    device.state().behaviour.busy_every = 1;
    queue.submit(read(0, 0)).unwrap();
    queue.poll();
    assert_eq!(queue.scan_for_hangs(after(31), LIMIT_NS).hangs[0].place, Place::Dispatch);
    device.state().behaviour.busy_every = 0;
    drain(&mut queue);
    let quiesced = disk.quiesce();
    queue.submit(read(0, 0)).unwrap();
    queue.poll();
    assert_eq!(queue.scan_for_hangs(after(31), LIMIT_NS).hangs[0].place, Place::Quiesced);
    drop(quiesced);
    drain(&mut queue);
    let frozen = disk.freeze();
    queue.submit(read(0, 0)).unwrap();
    queue.poll();
    assert!(!disk.has_nothing_to_scan(0));
    assert_eq!(queue.scan_for_hangs(after(31), LIMIT_NS).hangs[0].place, Place::Frozen);
    drop(frozen);
    drain(&mut queue);
    assert_eq!((disk.stats().counter(Counter::Hangs), disk.has_nothing_to_scan(0)), (5, true));
}

// Contract: statistics
#[test]
fn rejected_bios_are_counted_by_kind() {
    let device = Device::held();
    let disk = device.builder().depth(1).read_only(true).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(Bio::write(Sector(0), filled(512, 0), 0)).unwrap();
    queue.submit(read(1 << 40, 0)).unwrap();
    queue.submit(read(0, 0)).unwrap();
    queue.submit(read(16, 0).with_flags(BioFlags::NO_WAIT)).unwrap();
    queue.poll();
    device.release(1);
    drain(&mut queue);
    let stats = disk.stats();
    let refused = |group, status| stats[group].refused_with(status);
    assert_eq!(refused(StatGroup::Write, Status::ReadOnly), 1);
    assert_eq!(refused(StatGroup::Read, Status::Invalid), 1);
    assert_eq!(refused(StatGroup::Read, Status::Again), 1);
    assert_eq!(stats.groups.iter().map(|group| group.refused.iter().sum::<u64>()).sum::<u64>(), 3);
    assert_eq!((stats[StatGroup::Read].ios, stats[StatGroup::Write].failed()), (1, 0));
}

/// Submits one read, and blocks the engine's thread when a message requests it.
struct Sleeper;

// SAFETY: its engine has no other source.
unsafe impl Source for Sleeper {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        cx.submit(0, read(0, 42)).map_err(|_| Error::new(blkq::ErrorKind::Busy, "no room"))
    }
    fn on_cqe(&mut self, _: &mut SourceContext<'_>, _: Cqe) {}
    fn on_bio(&mut self, _: &mut SourceContext<'_>, _: Completion) {}
    fn on_turn(&mut self, _: &mut SourceContext<'_>) {}
    fn on_message(&mut self, _: &mut SourceContext<'_>, wait: Box<dyn std::any::Any + Send>) {
        let wait: Box<std::sync::mpsc::Receiver<()>> = wait.downcast().unwrap();
        let _ = wait.recv();
    }
    fn write_client(&self, mark: u64, text: &mut dyn std::fmt::Write) -> std::fmt::Result {
        write!(text, "sleeper {mark}")
    }
    fn stop(&mut self, _: &mut SourceContext<'_>, _: bool) {}
    fn is_stopped(&self) -> bool {
        true
    }
}

#[test]
fn an_engine_reports_the_client_and_its_own_delay() {
    let device = Device::held();
    let disk = device.builder().build().unwrap();
    assert!(disk.has_nothing_to_scan(0));
    let engine = EngineThread::spawn("watched", vec![(disk.clone(), 0)]).unwrap();
    let source = engine.handle().add_source(|| Box::new(Sleeper)).unwrap();
    wait_until("the read is submitted", || !disk.has_nothing_to_scan(0));
    let scan = engine.handle().scan_for_hangs(after(31), LIMIT_NS).recv().unwrap();
    assert_eq!(scan.hangs[0].client.as_deref(), Some("sleeper 42"));
    let (wake, wait) = channel::<()>();
    engine.handle().send(source, Box::new(wait));
    let scanned = engine.handle().scan_for_hangs(after(31), LIMIT_NS);
    assert_eq!(scanned.recv_timeout(Duration::from_millis(100)), Err(RecvTimeoutError::Timeout));
    drop(wake);
    assert_eq!(scanned.recv().unwrap().hung, 1);
    device.release(1);
    drop(engine);
    assert!(disk.has_nothing_to_scan(0));
}

// Contract: statistics
#[test]
fn a_flush_that_waits_in_an_idle_queue_is_scanned_for() {
    let limits = QueueLimits { write_cache: true, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    device.state().bad.push((0..8, Status::NoSpace));
    let disk = device.builder().queues(2).error_policy(ErrorPolicy::Hold).build().unwrap();
    let [mut first, mut second] = [0, 1].map(|queue| disk.open_queue(queue).unwrap());
    first.submit(Bio::write(Sector(0), filled(512, 1), 1)).unwrap();
    first.poll();
    assert!(disk.has_nothing_to_scan(1) == (disk.held() == 0));
    second.submit(Bio::flush(2)).unwrap();
    second.poll();
    assert!(!disk.has_nothing_to_scan(1));
    let scan = second.scan_for_hangs(after(31), 30_000_000_000);
    assert_eq!((scan.hung, &scan.hangs[0].place), (1, &Place::ForHeldWrites));
    disk.resume(Resume::Fail);
    first.poll();
    assert!(disk.has_nothing_to_scan(0));
    common::drain(&mut second);
    assert!(disk.has_nothing_to_scan(1));
}
