//! The plug merges adjacent bios, hands the driver batches, and is flushed in time. The clock keeps its
//! cached reading for a plug.

use blkq::{Bio, BioFlags, ClockMode, Counter, LocalQueue, Operation, Sector, Status};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crate::common::{self, Behaviour, Device, drain, filled, plain_limits};
use blkq::testing::wait_until;

fn read(queue: &mut LocalQueue, sector: u64, bytes: usize) {
    queue.submit(Bio::read(Sector(sector), filled(bytes, 0), sector)).unwrap();
}

#[test]
fn the_driver_sees_nothing_before_a_flush_and_then_one_batch() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    (0..20).for_each(|n| read(&mut queue, n * 16, 4096));
    assert_eq!(device.log().len(), 0);
    queue.poll();
    let state = device.state();
    assert_eq!((state.log.len(), state.batches.clone(), state.commits), (20, vec![20], 1));
    let stats = disk.stats();
    assert_eq!((stats.counter(Counter::PlugFlushes), stats.counter(Counter::DispatchBatches)), (1, 1));
}

#[test]
fn thirty_two_requests_flush_the_plug() {
    let device = Device::plain(Behaviour::default());
    let (_disk, mut queue) = device.open();
    (0..31).for_each(|n| read(&mut queue, n * 16, 4096));
    assert_eq!(device.log().len(), 0);
    read(&mut queue, 31 * 16, 4096);
    assert_eq!(device.state().batches, [32]);
    (0..31).for_each(|n| read(&mut queue, n * 16, 4096));
    assert_eq!(device.state().batches, [32]);
    assert_eq!(drain(&mut queue).len(), 63);
}

#[test]
fn a_request_of_128_kib_flushes_the_plug_unless_merging_is_off() {
    for merge in [true, false] {
        let device = Device::plain(Behaviour::default());
        let disk = device.builder().merge(merge).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        read(&mut queue, 1024, 4096);
        read(&mut queue, 0, (128 << 10) - 512);
        assert_eq!(device.log().len(), 0);
        read(&mut queue, 1536, 128 << 10);
        assert_eq!(device.log().len(), if merge { 3 } else { 0 });
        drain(&mut queue);
    }
}

#[test]
fn a_large_merged_request_is_sent_before_the_next_bio() {
    let device = Device::plain(Behaviour::default());
    let (_disk, mut queue) = device.open();
    // The plug expects this number of bios next time.
    (0..8).for_each(|n| read(&mut queue, n * 16, 4096));
    drain(&mut queue);
    (0..4).for_each(|n| read(&mut queue, 1024 + n * 64, 32 << 10));
    assert_eq!(device.log().len(), 8);
    read(&mut queue, 0, 4096);
    assert_eq!(device.log().len(), 9);
    drain(&mut queue);
    assert_eq!(device.log().len(), 10);
}

// Contract: data
#[test]
fn neighbours_merge_on_both_sides_and_in_order() {
    for operation in [Operation::Read, Operation::Write] {
        let device = Device::plain(Behaviour::default());
        let (disk, mut queue) = device.open();
        device.state().current[..16 << 9].iter_mut().enumerate().for_each(|(i, byte)| *byte = (i >> 9) as u8);
        for sector in [8, 9, 7, 10, 6, 5] {
            let bio = Bio::read(Sector(sector), filled(512, sector as u8 + 100), sector);
            queue.submit(Bio { operation, ..bio }).unwrap();
        }
        queue.poll();
        let log = device.log();
        assert_eq!((log.len(), log[0].sector, log[0].sectors, log[0].segments), (1, 5, 6, 6));
        for completion in drain(&mut queue) {
            let sector = completion.user_data;
            let byte = match operation {
                Operation::Read => completion.data.into_buffer().unwrap()[0],
                _ => device.state().current[(sector as usize) << 9] - 100,
            };
            assert_eq!(u64::from(byte), sector);
        }
        let group = if operation == Operation::Read { 0 } else { 1 };
        assert_eq!((disk.stats().groups[group].ios, disk.stats().groups[group].merges), (1, 5));
    }
}

// Contract: data
#[test]
fn bios_that_must_not_merge_stay_separate() {
    let limits = blkq::QueueLimits { write_cache: true, fua: true, ..common::plain_limits() };
    #[allow(clippy::type_complexity, reason = "a table")]
    let kinds: [(&str, fn(u64) -> Bio); 7] = [
        ("no-merge", |s| Bio::write(Sector(s), filled(512, 1), 0).with_flags(BioFlags::NO_MERGE)),
        ("fua", |s| Bio::write(Sector(s), filled(512, 1), 0).with_flags(BioFlags::FUA)),
        ("preflush", |s| Bio::write(Sector(s), filled(512, 1), 0).with_flags(BioFlags::PREFLUSH)),
        ("discard", |s| Bio::discard(Sector(s), 1, 0)),
        ("zeroes", |s| Bio::write_zeroes(Sector(s), 1, 0)),
        ("keep", |s| Bio::write_zeroes(Sector(s), 1, 0).with_flags(BioFlags::NO_UNMAP)),
        ("read", |s| Bio::read(Sector(s), filled(512, 1), 0)),
    ];
    for (name, kind) in kinds {
        for scheduler in blkq::SchedulerKind::ALL {
            let device = Device::new(limits.clone(), Behaviour::default());
            let disk = device.builder().scheduler(scheduler).build().unwrap();
            let mut queue = disk.open_queue(0).unwrap();
            for sector in 10..20 {
                // Plain writes are next to the bio on both sides.
                let bio = if sector % 2 == 0 {
                    kind(sector)
                } else {
                    Bio::write(Sector(sector), filled(512, 1), 0)
                };
                queue.submit(bio).unwrap();
            }
            assert!(drain(&mut queue).iter().all(|completion| completion.result == Ok(())));
            let data = device.log().iter().filter(|seen| seen.operation != Operation::Flush).count();
            assert_eq!(data, 10, "{name} merged");
            device.assert_legal();
        }
    }
}

// Contract: data
#[test]
fn an_error_of_a_merged_request_is_that_of_exactly_its_bios() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    device.state().bad.push((12..13, Status::Medium));
    (10..14).for_each(|sector| read(&mut queue, sector, 512));
    (20..24).for_each(|sector| read(&mut queue, sector, 512));
    let completed = drain(&mut queue);
    assert_eq!((completed.len(), device.log().len()), (8, 2));
    for completion in completed {
        let want = if completion.user_data < 14 { Err(Status::Medium) } else { Ok(()) };
        assert_eq!(completion.result, want);
    }
    assert_eq!(disk.stats().groups[0].failed_with(Status::Medium), 1);
}

#[test]
fn merging_off_leaves_each_bio_alone() {
    let device = Device::plain(Behaviour::default());
    let disk = device.builder().merge(false).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    (0..10).for_each(|sector| read(&mut queue, sector, 512));
    drain(&mut queue);
    assert_eq!(device.log().len(), 10);
}

fn clock_reads(clock: ClockMode, iostats: bool, bios: u64, batch: u64) -> f64 {
    let device = Device::plain(Behaviour::default());
    let disk = device.builder().clock(clock).iostats(iostats).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    for n in 0..bios {
        read(&mut queue, n % 64 * 16, 512);
        if (n + 1) % batch == 0 {
            queue.poll();
            queue.completions();
        }
    }
    drain(&mut queue);
    let stats = disk.stats();
    assert_eq!(stats.counter(Counter::NegativeLatencies), 0);
    assert_eq!(stats.groups[0].ios, if iostats { bios } else { 0 });
    stats.counter(Counter::ClockReads) as f64 / bios as f64
}

#[test]
fn the_cached_clock_is_read_once_per_plug_and_completion_batch() {
    assert_eq!(clock_reads(ClockMode::Cached, true, 3200, 32), 2.0 / 32.0);
    assert_eq!(clock_reads(ClockMode::Cached, true, 800, 8), 2.0 / 8.0);
    assert_eq!(clock_reads(ClockMode::Cached, true, 100, 1), 2.0);
    assert!(clock_reads(ClockMode::Precise, true, 3200, 32) >= 1.0);
}

#[test]
fn counters_continue_when_a_queue_is_reopened() {
    let device = Device::plain(Behaviour::default());
    let disk = device.open().0;
    for opened in 1..=3 {
        let mut queue = disk.open_queue(0).unwrap();
        read(&mut queue, 0, 4096);
        drain(&mut queue);
        drop(queue);
        assert_eq!(disk.stats().counter(Counter::ClockReads), 2 * opened);
    }
}

// Contract: statistics
#[test]
fn without_statistics_the_clock_is_never_read() {
    assert_eq!(clock_reads(ClockMode::Cached, false, 320, 32), 0.0);
    assert_eq!(clock_reads(ClockMode::Precise, false, 320, 7), 0.0);
}

#[test]
fn a_forced_flush_of_the_plug_drops_the_cached_time() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    (0..32).for_each(|n| read(&mut queue, n * 16, 512));
    assert_eq!(device.state().batches, [32], "the plug flushed itself");
    read(&mut queue, 1000, 512);
    queue.poll();
    device.release(33);
    drain(&mut queue);
    // The clock is read once for the first 32 requests, once for the last one, and once for the batch of
    // completions.
    assert_eq!(disk.stats().counter(Counter::ClockReads), 3);
}

// Contract: accepted-once
#[test]
fn a_no_wait_bio_completes_immediately() {
    let device = Device::held();
    let disk = device.builder().depth(2).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    for n in 0..4 {
        read(&mut queue, n * 16, 512);
    }
    queue.poll();
    queue.submit(Bio::read(Sector(999), filled(512, 0), 77).with_flags(BioFlags::NO_WAIT)).unwrap();
    let cut = common::Scattered::data(&[0; 1024], &[512], 512, 0);
    let scattered = Bio { data: cut, sectors: 2, ..Bio::read(Sector(900), filled(512, 0), 78) };
    queue.submit(scattered.with_flags(BioFlags::NO_WAIT)).unwrap();
    queue.poll();
    let completed: Vec<_> = queue.completions().map(|c| (c.user_data, c.result)).collect();
    assert_eq!(completed, [(77, Err(Status::Again)), (78, Err(Status::Again))]);
    device.release_all();
    assert_eq!(drain(&mut queue).len(), 4);
    // With room, the bio succeeds.
    queue.submit(Bio::read(Sector(999), filled(512, 0), 77).with_flags(BioFlags::NO_WAIT)).unwrap();
    assert_eq!(drain(&mut queue)[0].result, Ok(()));
}

#[test]
fn a_no_wait_bio_leaves_a_shared_tag_to_one_that_waits() {
    let device = Device::held();
    let disk = device.builder().queues(2).shared_tags(true).depth(4).build().unwrap();
    let [mut other, mut queue] = [0, 1].map(|index| disk.open_queue(index).unwrap());
    (0..4).for_each(|n| read(&mut other, n * 16, 512));
    other.poll();
    read(&mut queue, 100, 512);
    queue.poll();
    device.release(1);
    other.wait(1);
    queue.submit(Bio::discard(Sector(200), 8, 77).with_flags(BioFlags::NO_WAIT)).unwrap();
    queue.poll();
    let completed: Vec<_> = queue.completions().map(|c| (c.user_data, c.result)).collect();
    assert_eq!(completed, [(77, Err(Status::Again))]);
    device.release_all();
    assert_eq!((drain(&mut queue).len(), drain(&mut other).len()), (1, 4));
}

// Contract: accepted-once
#[test]
fn a_full_queue_hands_the_bio_back_and_completes_the_rest() {
    let device = Device::held();
    let disk = device.builder().depth(1).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let mut accepted = 0;
    let refused = loop {
        match queue.submit(Bio::read(Sector(accepted % 100 * 16), filled(512, 9), accepted)) {
            Ok(()) => accepted += 1,
            Err(bio) => break bio,
        }
        assert!(accepted < 1_000_000, "a queue accepts an unlimited number of bios");
    };
    assert_eq!(refused.user_data, accepted);
    assert_eq!(refused.data.into_buffer().unwrap()[0], 9);
    device.release_all();
    let mut marks: Vec<_> = drain(&mut queue).iter().map(|completion| completion.user_data).collect();
    marks.sort_unstable();
    assert_eq!(marks, (0..accepted).collect::<Vec<_>>());
}

#[test]
fn waiting_for_several_sleeps_between_completions() {
    let device = Device::held();
    let (_disk, mut queue) = device.open();
    read(&mut queue, 0, 512);
    read(&mut queue, 64, 512);
    queue.poll();
    device.release(1);
    let released = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            wait_until("the first read completes", || device.state().held == 1);
            released.store(true, SeqCst);
            device.release(1);
        });
        queue.wait(2);
    });
    assert!(released.load(SeqCst), "one completion is not enough");
    assert_eq!(queue.completions().count(), 2);
}

// Contract: declared
#[test]
fn a_buffer_that_is_longer_than_its_bio_may_end_anywhere() {
    let limits = blkq::QueueLimits { memory_align: 512, ..plain_limits() };
    let device = Device::new(limits, Behaviour::default());
    let (_disk, mut queue) = device.open();
    // On the fast path and on the slow path.
    for flags in [BioFlags::empty(), BioFlags::FUA] {
        let bio = Bio { sectors: 8, ..Bio::write(Sector(0), filled(4097, 1), 1) };
        assert_eq!(common::run(&mut queue, bio.with_flags(flags)).result, Ok(()), "{flags:?}");
    }
    device.assert_legal();
}
