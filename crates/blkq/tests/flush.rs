//! Flushes, FUA and PREFLUSH: in order, and not more flushes than needed.

use std::time::{Duration, Instant};

use crate::common::{Behaviour, Device, Finish, drain, filled, plain_limits, run};
use blkq::{Bio, BioFlags, Operation, QueueLimits, Sector, Status};

fn cached(fua: bool, finish: Finish) -> Device {
    let limits = QueueLimits { write_cache: true, fua, ..plain_limits() };
    Device::new(limits, Behaviour { finish, ..Behaviour::default() })
}

fn write(sector: u64, flags: BioFlags, mark: u64) -> Bio {
    Bio::write(Sector(sector), filled(512, mark as u8), mark).with_flags(flags)
}

fn operations(device: &Device) -> Vec<(Operation, bool)> {
    device.log().iter().map(|seen| (seen.operation, seen.flags.contains(BioFlags::FUA))).collect()
}

const W: (Operation, bool) = (Operation::Write, false);
const WF: (Operation, bool) = (Operation::Write, true);
const F: (Operation, bool) = (Operation::Flush, false);

// Contract: declared, durability
#[test]
fn each_kind_of_write_costs_the_steps_that_it_needs() {
    let (fua, preflush) = (BioFlags::FUA, BioFlags::PREFLUSH);
    #[allow(clippy::type_complexity, reason = "a table")]
    let cases: [(bool, BioFlags, &[(Operation, bool)]); 6] = [
        (true, fua, &[WF]),
        (false, fua, &[W, F]),
        (true, preflush, &[F, W]),
        (false, preflush, &[F, W]),
        (true, preflush | fua, &[F, WF]),
        (false, preflush | fua, &[F, W, F]),
    ];
    for (has_fua, flags, steps) in cases {
        let device = cached(has_fua, Finish::Random);
        let (_disk, mut queue) = device.open();
        assert_eq!(run(&mut queue, write(3, flags, 5)).result, Ok(()));
        assert_eq!(operations(&device), steps, "{flags:?} with fua {has_fua}");
        device.assert_legal();
        let durable = device.state().durable[3 << 9];
        assert_eq!(durable == 5, flags.contains(fua));
    }
}

// Contract: durability
#[test]
fn fua_of_write_zeroes_and_discard_flushes_after() {
    let device = cached(true, Finish::AtOnce);
    let (_disk, mut queue) = device.open();
    run(&mut queue, write(3, BioFlags::FUA, 5));
    assert_eq!(run(&mut queue, Bio::write_zeroes(Sector(3), 1, 0).with_flags(BioFlags::FUA)).result, Ok(()));
    assert_eq!(device.state().durable[3 << 9], 0);
    assert_eq!(run(&mut queue, Bio::discard(Sector(3), 1, 0).with_flags(BioFlags::FUA)).result, Ok(()));
    assert_eq!(device.count(Operation::Flush), 2);
    device.assert_legal();
}

#[test]
fn an_empty_write_with_preflush_is_a_flush() {
    let device = cached(true, Finish::AtOnce);
    let (_disk, mut queue) = device.open();
    run(&mut queue, write(3, BioFlags::empty(), 5));
    let empty = Bio { sectors: 0, ..write(0, BioFlags::PREFLUSH, 1) };
    assert_eq!(run(&mut queue, empty).result, Ok(()));
    assert_eq!(operations(&device), [W, F]);
    assert_eq!(device.state().durable[3 << 9], 5);
}

// Contract: durability
#[test]
fn without_a_write_cache_nothing_flushes() {
    let device = Device::plain(Behaviour::default());
    let (_disk, mut queue) = device.open();
    assert_eq!(run(&mut queue, write(0, BioFlags::FUA | BioFlags::PREFLUSH, 1)).result, Ok(()));
    assert_eq!(run(&mut queue, Bio::flush(2)).result, Ok(()));
    assert_eq!(operations(&device), [W]);
}

// Contract: durability
#[test]
fn simultaneous_flushes_share_one_and_later_ones_do_not() {
    let device = cached(false, Finish::Held);
    let (_disk, mut queue) = device.open();
    (0..10).for_each(|mark| queue.submit(Bio::flush(mark)).unwrap());
    queue.poll();
    assert_eq!(device.count(Operation::Flush), 1);
    // This write completes while the flush is running, so that flush does not cover it.
    queue.submit(write(0, BioFlags::empty(), 99)).unwrap();
    queue.poll();
    assert_eq!(operations(&device), [F, W]);
    (10..20).for_each(|mark| queue.submit(Bio::flush(mark)).unwrap());
    queue.poll();
    assert_eq!(device.count(Operation::Flush), 1, "one at a time");
    device.release(2);
    queue.wait(11);
    let completed: Vec<_> = queue.completions().map(|completion| completion.user_data).collect();
    assert_eq!(completed.len(), 11);
    assert!(completed.iter().all(|mark| *mark < 10 || *mark == 99), "{completed:?}");
    queue.poll();
    assert_eq!(device.count(Operation::Flush), 2);
    device.release_all();
    assert_eq!(drain(&mut queue).len(), 10);
    assert_eq!(device.count(Operation::Flush), 2);
    assert_eq!(device.state().durable[0], 99);
    device.assert_legal();
}

#[test]
fn writes_that_must_not_wait_for_a_tag_share_a_flush() {
    for shared in [false, true] {
        let device = cached(false, Finish::AtOnce);
        let disk = device.builder().shared_tags(shared).depth(4).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        for mark in 0..3 {
            queue.submit(write(mark * 2, BioFlags::PREFLUSH | BioFlags::NO_WAIT, mark)).unwrap();
        }
        assert!(drain(&mut queue).iter().all(|completion| completion.result == Ok(())), "{shared}");
        assert_eq!(operations(&device), [F, W, W, W]);
    }
}

#[test]
fn writes_that_ask_for_durability_share_flushes() {
    let device = cached(false, Finish::Random);
    let (_disk, mut queue) = device.open();
    (0..64).for_each(|mark| queue.submit(write(mark * 2, BioFlags::FUA, mark + 1)).unwrap());
    assert!(drain(&mut queue).iter().all(|completion| completion.result == Ok(())));
    let flushes = device.count(Operation::Flush);
    assert!((1..=32).contains(&flushes), "{flushes} flushes for 64 writes");
    assert!((0..64).all(|mark| device.state().durable[(mark as usize) << 10] == mark as u8 + 1));
}

#[test]
fn a_steady_stream_of_fua_writes_does_not_delay_a_flush() {
    let device = cached(true, Finish::Random);
    let (_disk, mut queue) = device.open();
    let mut flushed = false;
    let begin = Instant::now();
    queue.submit(write(0, BioFlags::FUA, 0)).unwrap();
    queue.submit(Bio::flush(1_000_000)).unwrap();
    let mut mark = 0;
    while !flushed {
        assert!(begin.elapsed() < Duration::from_secs(20), "the flush waits for later writes");
        while queue.in_flight() < 20 {
            mark += 1;
            queue.submit(write(mark % 1000 * 2, BioFlags::FUA, mark)).unwrap();
        }
        queue.poll();
        flushed |= queue.completions().any(|completion| completion.user_data == 1_000_000);
    }
    drain(&mut queue);
}

// Contract: durability
#[test]
fn a_failed_flush_fails_its_bios_and_their_data_does_not_follow() {
    let device = cached(false, Finish::Random);
    let (disk, mut queue) = device.open();
    for status in [Status::Io, Status::NotSupported] {
        device.state().log.clear();
        device.state().flush_result = Err(status);
        queue.submit(Bio::flush(1)).unwrap();
        queue.submit(write(0, BioFlags::PREFLUSH, 2)).unwrap();
        queue.submit(Bio::write_zeroes(Sector(9), 1, 3).with_flags(BioFlags::PREFLUSH)).unwrap();
        let completed = drain(&mut queue);
        assert!(
            completed.len() == 3 && completed.iter().all(|completion| completion.result == Err(status)),
            "{completed:?}"
        );
        assert_eq!(operations(&device), [F]);
        // If the flush after the data fails, the data was written, but is not durable.
        assert_eq!(run(&mut queue, write(0, BioFlags::FUA, 2)).result, Err(status));
        assert_eq!(
            run(&mut queue, Bio::write_zeroes(Sector(9), 1, 3).with_flags(BioFlags::FUA)).result,
            Err(status)
        );
        device.state().flush_result = Ok(());
        assert_eq!(run(&mut queue, Bio::flush(1)).result, Ok(()));
    }
    let stats = disk.stats();
    assert_eq!((stats.groups[3].ios, stats.groups[3].failed(), stats.in_flight), (8, 6, [0, 0]));
}

#[test]
fn failed_data_is_not_followed_by_a_flush() {
    let device = cached(false, Finish::Random);
    let (_disk, mut queue) = device.open();
    device.state().bad.push((0..1, Status::NoSpace));
    assert_eq!(run(&mut queue, write(0, BioFlags::FUA, 1)).result, Err(Status::NoSpace));
    assert_eq!(operations(&device), [W]);
    assert_eq!(run(&mut queue, Bio::flush(1)).result, Ok(()));
}

// Contract: durability
#[test]
fn a_split_fua_write_is_durable_as_a_whole() {
    for fua in [true, false] {
        let limits = QueueLimits { write_cache: true, fua, max_request_bytes: 4096, ..plain_limits() };
        let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
        let (_disk, mut queue) = device.open();
        let bio = Bio::write(Sector(1), filled(256 << 10, 7), 0).with_flags(BioFlags::FUA);
        assert_eq!(run(&mut queue, bio).result, Ok(()));
        assert!(device.state().durable[512..512 + (256 << 10)].iter().all(|byte| *byte == 7));
        assert_eq!(device.count(Operation::Flush), usize::from(!fua));
        device.assert_legal();
    }
}

#[test]
fn flushes_pass_any_scheduler_and_a_full_queue() {
    for scheduler in blkq::SchedulerKind::ALL {
        let device = cached(false, Finish::Random);
        let disk = device.builder().depth(1).scheduler(scheduler).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        for mark in 0..50 {
            queue.submit(write(mark * 4, BioFlags::empty(), mark)).unwrap();
            queue.submit(Bio::flush(mark)).unwrap();
        }
        assert_eq!(drain(&mut queue).len(), 100);
        device.assert_legal();
    }
}

#[test]
fn flushes_are_counted_in_and_out_of_flight() {
    let device = cached(false, Finish::Held);
    let (disk, mut queue) = device.open();
    queue.submit(Bio::flush(0)).unwrap();
    queue.poll();
    assert_eq!(disk.stats().in_flight, [0, 1]);
    device.release(1);
    drain(&mut queue);
    let stats = disk.stats();
    assert_eq!((stats.in_flight, stats.groups[3].ios), ([0, 0], 1));
}
