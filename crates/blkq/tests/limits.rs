//! Rate limits of a queue: waiting requests still merge and follow changes, and are not reported as hung.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::common::{Behaviour, Device, plain_limits};
use blkq::clock::monotonic_ns;
use blkq::drivers::ram::Ram;
use blkq::testing::wait_until;
use blkq::throttle::{Group, RateLimits};
use blkq::{
    Bio, Counter, Disk, EngineThread, IoBuffer, LocalQueue, Operation, QueueLimits, SchedulerKind, Sector,
    Setting, StatGroup,
};

const S: u64 = 1_000_000_000;

fn limits(text: &str) -> RateLimits {
    text.parse().expect("limits")
}

fn disk(text: &str) -> Arc<Disk> {
    let ram = Ram::new(64 << 20, 512, false).expect("memory");
    Disk::builder(Box::new(ram)).rate_limits(limits(text)).build().expect("a disk")
}

fn read(queue: &mut LocalQueue, block: u64) {
    queue.submit(Bio::read(Sector(block * 8), IoBuffer::zeroed(4096), block)).expect("room");
}

fn write(queue: &mut LocalQueue, block: u64) {
    queue.submit(Bio::write(Sector(block * 8), IoBuffer::zeroed(4096), block)).expect("room");
}

fn throttled(disk: &Disk) -> u64 {
    disk.stats().throttled
}

#[test]
fn a_rate_limit_is_enforced() {
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline, SchedulerKind::Kyber] {
        let disk = disk("iops=2000");
        disk.set(Setting::Scheduler(scheduler)).expect("a scheduler");
        let mut queue = disk.open_queue(0).expect("a queue");
        let begin = Instant::now();
        (0..200).for_each(|block| read(&mut queue, block * 2));
        queue.wait(200);
        assert_eq!(queue.completions().len(), 200);
        // At this rate, the reads take 100 ms, less 2 ms for which an idle limit may catch up. How much
        // longer they take depends on the machine.
        assert!(begin.elapsed() >= Duration::from_millis(96), "{scheduler}: {:?}", begin.elapsed());
        let stats = disk.stats();
        assert!(stats.counter(Counter::ThrottledRequests) > 0 && stats.throttled == 0, "{scheduler}");
        assert!(stats.counter(Counter::ThrottledNs) >= 90_000_000, "{scheduler}");
    }
}

#[test]
fn a_limit_of_writes_does_not_delay_reads() {
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline, SchedulerKind::Kyber] {
        let disk = disk("write-iops=1");
        disk.set(Setting::Scheduler(scheduler)).expect("a scheduler");
        let mut queue = disk.open_queue(0).expect("a queue");
        (0..8).for_each(|block| write(&mut queue, block * 2));
        queue.poll();
        (0..8).for_each(|block| read(&mut queue, 100 + block * 2));
        queue.wait(9);
        let done: Vec<u64> = queue.completions().map(|completion| completion.user_data).collect();
        assert_eq!(done.iter().filter(|number| **number >= 100).count(), 8, "{scheduler}: {done:?}");
        assert!(throttled(&disk) >= 6, "{scheduler}");
        let unlimited = disk.bypass_limits();
        queue.wait(7);
        drop(unlimited);
        assert_eq!((queue.in_flight(), throttled(&disk)), (0, 0), "{scheduler}");
    }
}

#[test]
fn a_change_and_a_freeze_wake_waiting_requests() {
    let disk = disk("iops=1");
    let mut queue = disk.open_queue(0).expect("a queue");
    let flood = |queue: &mut LocalQueue| {
        (0..16).for_each(|block| read(queue, block * 2));
        queue.poll();
        queue.completions().count()
    };
    let done = flood(&mut queue);
    assert!(done < 3 && throttled(&disk) >= 13);
    disk.set_rate_limits(&limits("iops=1000000"));
    queue.wait(16 - done);
    assert_eq!(queue.in_flight(), 0);
    queue.completions().for_each(drop);

    // A change under a freeze must not wait for the 16 seconds that the reads need. The limits apply again
    // afterwards.
    disk.set_rate_limits(&limits("iops=1"));
    flood(&mut queue);
    let frozen = std::thread::scope(|scope| {
        let change = scope.spawn(|| disk.set(Setting::Merge(false)));
        while !change.is_finished() {
            queue.poll();
        }
        change.join().expect("no panic")
    });
    frozen.expect("changed");
    assert_eq!(queue.in_flight(), 0);
    flood(&mut queue);
    assert!(throttled(&disk) > 0);
    disk.set_rate_limits(&limits("none"));
    queue.wait(16);
    assert_eq!((queue.in_flight(), throttled(&disk)), (0, 0));
}

#[test]
fn bios_that_waited_for_a_tag_begin_at_the_rate() {
    const BIOS: u64 = 60;
    let device = Device::held();
    let disk = device.builder().depth(1).rate_limits(limits("iops=1000")).build().expect("a disk");
    let mut queue = disk.open_queue(0).expect("a queue");
    // While the device still has its first request, the others start no faster than the limit permits.
    let begin_ns = monotonic_ns();
    for block in 0..BIOS {
        read(&mut queue, block * 2 % 32);
        queue.poll();
        let next_ns = begin_ns + (block + 1) * 1_000_000;
        wait_until("the limit allows the next", || monotonic_ns() >= next_ns);
    }
    let begin = Instant::now();
    let mut done = 0;
    while done < BIOS {
        device.release_all();
        queue.poll();
        done += queue.completions().count() as u64;
    }
    // The request that the device had is done, and the limit may catch up 2 ms.
    let elapsed = begin.elapsed();
    assert!(elapsed >= Duration::from_millis(BIOS - 1 - 4), "{elapsed:?}");
}

#[test]
fn requests_that_wait_are_merged() {
    let disk = disk("write-iops=1");
    let mut queue = disk.open_queue(0).expect("a queue");
    (0..4).for_each(|block| write(&mut queue, 100 + block * 2));
    queue.poll();
    for block in 0..8 {
        write(&mut queue, block);
        queue.poll();
    }
    let merges = disk.stats()[StatGroup::Write].merges;
    assert!(merges >= 7, "{merges}");
    disk.set_rate_limits(&limits("none"));
    queue.wait(12);
    assert_eq!(queue.in_flight(), 0);
}

/// A debug build also compares the counts of a plug with its requests.
#[test]
fn bytes_of_merged_requests_and_of_discards_are_counted() {
    let disk = disk("bps=1T");
    let mut queue = disk.open_queue(0).expect("a queue");
    let mut bios = 0;
    for round in 0..8 {
        // Adjacent bios merge, some of them with the first request of the batch.
        (0..8).for_each(|block| read(&mut queue, round + block));
        (0..4).for_each(|block| write(&mut queue, 100 + block * 2));
        bios += 12;
        queue.wait(queue.in_flight());
        assert!(queue.completions().all(|completion| completion.result.is_ok()));
        // Bios that do not merge are counted as they are submitted.
        (0..4).for_each(|block| write(&mut queue, 100 + block * 2));
        queue.submit(Bio::discard(Sector(4096), 64, 0)).expect("room");
        queue.submit(Bio::write_zeroes(Sector(8192), 64, 0)).expect("room");
        bios += 6;
        queue.wait(queue.in_flight());
        queue.completions().for_each(drop);
    }
    let stats = disk.stats();
    let ios: u64 = stats.groups.iter().map(|group| group.ios + group.merges).sum();
    assert_eq!((ios, stats.counter(Counter::ThrottledRequests)), (bios, 0));
    assert!(stats[StatGroup::Read].merges > 0);
}

#[test]
fn requests_that_wait_for_a_limit_do_not_hang() {
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline] {
        let disk = disk("iops=1");
        disk.set(Setting::Scheduler(scheduler)).expect("a scheduler");
        let mut queue = disk.open_queue(0).expect("a queue");
        // More bios than tags.
        (0..600).for_each(|block| read(&mut queue, block * 2));
        queue.poll();
        let scan = queue.scan_for_hangs(monotonic_ns() + 100 * S, S);
        assert_eq!((scan.hung, scan.hangs.len()), (0, 0), "{scheduler}: {:?}", scan.hangs);
        disk.set_rate_limits(&limits("none"));
        queue.wait(600);
        assert_eq!(queue.in_flight(), 0, "{scheduler}");
    }
}

#[test]
fn removing_a_limit_releases_waiting_requests() {
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline, SchedulerKind::Kyber] {
        let disk = disk("iops=1");
        disk.set(Setting::Scheduler(scheduler)).expect("a scheduler");
        let mut queue = disk.open_queue(0).expect("a queue");
        (0..16).for_each(|block| read(&mut queue, block * 2));
        queue.poll();
        assert!(throttled(&disk) >= 13, "{scheduler}");
        disk.set_rate_limits(&limits("none"));
        queue.wait(queue.in_flight());
        assert_eq!((queue.in_flight(), throttled(&disk)), (0, 0), "{scheduler}");
    }
}

/// The words of a group, as another process could corrupt them.
#[repr(C, align(64))]
struct Damaged([AtomicU64; Group::BYTES / 8]);

#[test]
fn a_group_that_is_damaged_stops_no_queue() {
    const SEQUENCE: usize = 3;
    let words: Arc<Damaged> = Arc::new(Damaged(std::array::from_fn(|_| AtomicU64::new(0))));
    let start = NonNull::from(&words.0).cast();
    // SAFETY: the words are aligned, have the right size, are only accessed atomically, and are kept alive by
    // the group.
    let group = Arc::new(unsafe { Group::over(start, Box::new(words.clone())) });
    group.reset([1, 2], 0, &limits("iops=20"));
    let disk = disk("none");
    disk.join_group(group.clone().join(0, "a", 100).expect("a slot"));
    let mut queue = disk.open_queue(0).expect("a queue");
    // First an interrupted change, then a memory that is not a group.
    for (word, damage) in [(SEQUENCE, 1), (0, u64::MAX)] {
        let mut done = 0;
        (0..4).for_each(|block| write(&mut queue, block * 2));
        (0..4).for_each(|block| read(&mut queue, 100 + block * 2));
        queue.poll();
        words.0[word].fetch_xor(damage, Relaxed);
        // Earlier requests are counted until the group can be read again.
        while done < 8 {
            queue.wait(1);
            done += queue.completions().count();
        }
        words.0[word].fetch_xor(damage, Relaxed);
    }
}

#[test]
fn a_flush_counts_as_one_request_of_the_limit() {
    // A flush reaches the driver only if the device has a write cache.
    let cached = QueueLimits { write_cache: true, ..plain_limits() };
    let device = Device::new(cached, Behaviour::default());
    let disk = device.builder().rate_limits(limits("write-iops=5")).build().expect("a disk");
    let mut queue = disk.open_queue(0).expect("a queue");
    let begin = Instant::now();
    for number in 0..4 {
        queue.submit(Bio::flush(number)).expect("room");
        queue.wait(1);
        queue.completions().for_each(drop);
    }
    // The first flush passes immediately. Each other one passes 200 ms after the previous one, less 2 ms for
    // which an idle limit may catch up.
    let elapsed = begin.elapsed();
    assert_eq!(disk.stats().counter(Counter::FlushesSent), 4);
    assert!(elapsed >= Duration::from_millis(590), "{elapsed:?}");
}

#[test]
fn flushes_and_other_requests_alternate_at_a_limit() {
    const IOS: u64 = 8;
    let cached = QueueLimits { write_cache: true, ..plain_limits() };
    for scheduler in SchedulerKind::ALL {
        for (text, reads) in [("write-iops=400", 0), ("iops=400", 0), ("iops=400", 4), ("iops=400", IOS)] {
            let device = Device::new(cached.clone(), Behaviour::default());
            let builder = device.builder().rate_limits(limits(text)).scheduler(scheduler);
            let disk = builder.build().expect("a disk");
            let mut queue = disk.open_queue(0).expect("a queue");
            let (mut in_flight, mut flushes, mut ios) = (0, 0, 0);
            while ios < IOS {
                // One flush is in the driver or waits for the limit, and the next one is to follow it.
                while in_flight < 2 {
                    queue.submit(Bio::flush(u64::MAX)).expect("room");
                    queue.poll();
                    in_flight += 1;
                }
                if flushes > 0 && queue.in_flight() as u64 + ios <= 2 {
                    (0..reads).for_each(|block| read(&mut queue, block * 2));
                    (reads..IOS).for_each(|block| write(&mut queue, block * 2));
                }
                queue.wait(1);
                for completion in queue.completions() {
                    assert_eq!(completion.result, Ok(()));
                    if completion.user_data == u64::MAX {
                        (flushes, in_flight) = (flushes + 1, in_flight - 1);
                    } else {
                        ios += 1;
                    }
                }
                assert!(
                    flushes <= 2 * IOS,
                    "{scheduler}, {text}, {reads} reads: {ios} after {flushes} flushes"
                );
            }
        }
    }
}

#[test]
fn flushes_do_not_wait_for_a_limit_of_bytes() {
    let cached = QueueLimits { write_cache: true, ..plain_limits() };
    for scheduler in SchedulerKind::ALL {
        for text in ["write-bps=4096", "bps=4096,iops=1000"] {
            let device = Device::new(cached.clone(), Behaviour::default());
            let builder = device.builder().rate_limits(limits(text)).scheduler(scheduler);
            let disk = builder.build().expect("a disk");
            let mut queue = disk.open_queue(0).expect("a queue");
            (0..4).for_each(|block| write(&mut queue, block * 2));
            queue.wait(1);
            assert_eq!(queue.completions().count(), 1);
            let begin = Instant::now();
            for _ in 0..4 {
                queue.submit(Bio::flush(u64::MAX)).expect("room");
                queue.wait(1);
                assert_eq!(
                    queue.take_completion().expect("waited").user_data,
                    u64::MAX,
                    "{scheduler}, {text}"
                );
            }
            assert!(begin.elapsed() < Duration::from_millis(500), "{scheduler}, {text}");
            disk.set_rate_limits(&limits("none"));
            queue.wait(3);
        }
    }
}

#[test]
fn a_queue_that_is_dropped_waits_for_no_limit() {
    for scheduler in SchedulerKind::ALL {
        let device = Device::plain(Behaviour::default());
        let builder = device.builder().rate_limits(limits("write-iops=1")).scheduler(scheduler);
        let disk = builder.build().expect("a disk");
        let mut queue = disk.open_queue(0).expect("a queue");
        (0..32).for_each(|block| write(&mut queue, block * 2));
        queue.poll();
        assert!(throttled(&disk) >= 29, "{scheduler}");
        let begin = Instant::now();
        drop(queue);
        assert!(begin.elapsed() < Duration::from_secs(20), "32 writes at one per second");
        assert_eq!((device.count(Operation::Write), throttled(&disk)), (32, 0), "{scheduler}");
    }
}

#[test]
fn an_engine_that_exits_waits_for_no_limit() {
    let disk = disk("iops=1");
    let engine = EngineThread::spawn("limits", vec![(disk.clone(), 0)]).expect("an engine");
    let mut submitter = disk.submitter();
    for block in 0..32 {
        submitter.submit(Bio::read(Sector(block * 16), IoBuffer::zeroed(4096), 0), |_, _| ());
    }
    wait_until("a read waits", || throttled(&disk) > 0);
    let begin = Instant::now();
    drop(engine);
    assert!(begin.elapsed() < Duration::from_secs(20), "32 reads at one per second");
}

#[test]
fn members_share_the_limit_of_their_group() {
    let group = Arc::new(Group::default());
    group.set_limits(&limits("iops=1"));
    let disks = [disk("none"), disk("none")];
    let mut queues = Vec::new();
    for (slot, disk) in disks.iter().enumerate() {
        disk.join_group(group.clone().join(slot, "member", 100).expect("a slot"));
        queues.push(disk.open_queue(0).expect("a queue"));
    }
    for queue in &mut queues {
        (0..8).for_each(|block| read(queue, block * 2));
        queue.poll();
    }
    assert!(disks.iter().all(|disk| throttled(disk) >= 5));
    // A waiting queue notices the change without being woken.
    group.set_limits(&limits("none"));
    for queue in &mut queues {
        queue.wait(8);
        assert_eq!(queue.in_flight(), 0);
    }
}
