//! The 17 fields of /sys/block/X/stat after a known sequence of I/O.
// Contract: statistics

use crate::common::{self, Behaviour, Device, Finish, drain, filled, plain_limits, run};
use blkq::testing::{assert_stays, wait_until};
use blkq::{Bio, BioFlags, Counter, Operation, QueueLimits, Sector, Setting, StatGroup, Status};

#[test]
fn the_fields_are_those_of_the_kernel() {
    let limits = QueueLimits { write_cache: true, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    let (disk, mut queue) = device.open();
    // Three bios in two read requests of 3 and 1 sectors.
    queue.submit(Bio::read(Sector(0), filled(512, 0), 0)).unwrap();
    queue.submit(Bio::read(Sector(1), filled(1024, 0), 0)).unwrap();
    queue.submit(Bio::read(Sector(9), filled(512, 0), 0)).unwrap();
    drain(&mut queue);
    // A write, write zeroes (counted as a write), a discard, a flush, and a write with its flush.
    run(&mut queue, Bio::write(Sector(0), filled(2048, 0), 0));
    run(&mut queue, Bio::write_zeroes(Sector(0), 16, 0));
    run(&mut queue, Bio::discard(Sector(0), 32, 0));
    run(&mut queue, Bio::flush(0));
    run(&mut queue, Bio::write(Sector(0), filled(512, 0), 0).with_flags(BioFlags::FUA));
    let f = disk.stats().fields();
    assert_eq!((f[0], f[1], f[2]), (2, 1, 4), "reads");
    assert_eq!((f[4], f[5], f[6]), (3, 0, 4 + 16 + 1), "writes");
    assert_eq!(f[8], 0, "in flight");
    assert_eq!((f[11], f[12], f[13]), (1, 0, 32), "discards");
    assert_eq!(f[15], 2, "flushes");
    assert_eq!(f[10], f[3] + f[7] + f[14] + f[16]);
}

#[test]
fn in_flight_busy_time_and_latency_count_from_submission() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    queue.submit(Bio::read(Sector(0), filled(512, 0), 0)).unwrap();
    queue.submit(Bio::write(Sector(9), filled(512, 0), 0)).unwrap();
    queue.submit(Bio::write(Sector(30), filled(512, 0), 0)).unwrap();
    queue.poll();
    assert_eq!((disk.stats().in_flight, disk.stats().fields()[8]), ([1, 2], 3));
    wait_until("the busy time counts while it lasts", || disk.stats().fields()[9] >= 30);
    device.release(3);
    drain(&mut queue);
    let (stats, rest) = (disk.stats(), disk.stats().fields()[9]);
    assert_eq!((stats.in_flight, stats.in_flight_max), ([0, 0], [1, 2]));
    let f = stats.fields();
    assert!(f[3] >= 30 && f[7] >= 60 && f[10] >= 90 && (30..f[10]).contains(&f[9]), "{f:?}");
    for group in [StatGroup::Read, StatGroup::Write] {
        assert_eq!(stats[group].latency.count(), stats[group].ios);
        assert!(stats[group].latency.percentile_ns(0.0) >= 30_000_000);
    }
    assert_stays("an idle disk is not busy", || disk.stats().fields()[9] == rest);
}

// Contract: errors
#[test]
fn errors_are_counted_by_kind_and_leave_the_device_working() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    device.state().bad = vec![(0..1, Status::Medium), (9..10, Status::NoSpace)];
    for _ in 0..3 {
        assert_eq!(run(&mut queue, Bio::read(Sector(0), filled(512, 0), 0)).result, Err(Status::Medium));
        assert_eq!(run(&mut queue, Bio::write(Sector(9), filled(512, 0), 0)).result, Err(Status::NoSpace));
        assert_eq!(run(&mut queue, Bio::read(Sector(5), filled(512, 0), 0)).result, Ok(()));
    }
    let stats = disk.stats();
    assert_eq!((stats[StatGroup::Read].failed_with(Status::Medium), stats[StatGroup::Read].ios), (3, 6));
    assert_eq!(
        (stats[StatGroup::Write].failed_with(Status::NoSpace), stats[StatGroup::Write].failed()),
        (3, 3)
    );
    assert_eq!(stats.in_flight, [0, 0]);
}

#[test]
fn counters_show_each_part_at_work() {
    let limits = QueueLimits { max_request_bytes: 4096, ..plain_limits() };
    let device =
        Device::new(limits, Behaviour { finish: Finish::Random, busy_every: 5, ..Behaviour::default() });
    let disk = device.builder().depth(4).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    for n in 0..40 {
        queue.submit(Bio::write(Sector(n * 40), filled(16 << 10, 1), n)).unwrap();
    }
    drain(&mut queue);
    let stats = disk.stats();
    assert_eq!(stats.counter(Counter::Splits), 160);
    assert!(stats.counter(Counter::Requeues) >= device.state().busy_count && device.state().busy_count > 0);
    assert!(stats.counter(Counter::TagWaits) > 0);
    assert_eq!(stats.counter(Counter::DispatchBatches), device.state().commits as u64);
}

#[test]
fn statistics_off_count_nothing_and_on_again_know_inflight_ios() {
    let device = Device::plain(Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let disk = device.builder().iostats(false).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    for round in 0..4u64 {
        for n in 0..100 {
            queue.submit(Bio::read(Sector(n * 3), filled(512, 0), 0)).unwrap();
        }
        drain(&mut queue);
        let stats = disk.stats();
        assert_eq!(stats[StatGroup::Read].ios, round.div_ceil(2) * 100);
        assert_eq!(stats.in_flight, [0, 0]);
        queue.poll();
        disk.set(Setting::Iostats(round % 2 == 0)).unwrap();
    }
    assert!(disk.stats().in_flight_max[0] <= 128, "{:?}", disk.stats().in_flight_max);
    assert_eq!(device.count(Operation::Read), 400);
}

#[test]
fn each_io_that_finds_no_tag_is_counted_once() {
    let device = Device::held();
    let disk = device.builder().depth(1).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let waits = || disk.stats().counter(Counter::TagWaits);
    let read = |mark: u64| Bio::read(Sector(mark * 16), filled(4096, 0), mark);
    (0..5).for_each(|mark| queue.submit(read(mark)).unwrap());
    // Neither turns of the queue nor rejected I/Os are counted.
    for mark in 0..20 {
        queue.submit(Bio::read(Sector(1 << 40), filled(512, 0), mark)).unwrap();
        queue.poll();
    }
    let without_no_wait = waits();
    queue.submit(read(6).with_flags(BioFlags::NO_WAIT)).unwrap();
    let with_no_wait = waits();
    device.release_all();
    common::drain(&mut queue);
    assert_eq!((without_no_wait, with_no_wait, waits()), (4, 5, 5));
    // I/Os that wait because of a freeze are not counted.
    let frozen = disk.freeze();
    queue.submit(read(7)).unwrap();
    queue.poll();
    drop(frozen);
    common::drain(&mut queue);
    assert_eq!(waits(), 5);
}

#[test]
fn the_wait_for_a_tag_stays_counted_when_limits_change() {
    let behaviour = Behaviour { finish: Finish::Held, revoke_after: Some(0), ..Behaviour::default() };
    let device = Device::plain(behaviour);
    let disk = device.builder().depth(1).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(Bio::discard(Sector(0), 8, 0)).unwrap();
    (1..5).for_each(|mark| queue.submit(Bio::read(Sector(mark * 16), filled(4096, 0), mark)).unwrap());
    queue.poll();
    device.release(1);
    queue.wait(1);
    assert_eq!(queue.take_completion().unwrap().result, Err(Status::NotSupported));
    assert_eq!((queue.in_flight(), queue.limits().max_discard_bytes), (4, 0));
    let waits = disk.stats().counter(Counter::TagWaits);
    device.release_all();
    common::drain(&mut queue);
    assert_eq!((waits, disk.stats().counter(Counter::TagWaits)), (4, 4));
}
