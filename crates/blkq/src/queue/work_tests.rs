//! Tests of the clauses of [`Queue::has_work`]: a condition that changes between two turns is work, and one
//! turn makes it no work.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use super::*;
use crate::bio::{Bio, BioFlags};
use crate::buffer::IoBuffer;
use crate::disk::{ErrorPolicy, Setting};
use crate::driver::{Driver, DriverContext, DriverQueue, OpenContext, Taken};
use crate::error::Error;
use crate::sched::SchedulerKind;
use crate::sector::{SECTOR_SHIFT, Sector};
use crate::throttle::Group;

/// A driver that completes requests only after it was released.
#[derive(Clone, Default)]
struct Keeper {
    is_released: Arc<AtomicBool>,
    taken: Vec<Tag>,
}

impl Driver for Keeper {
    fn name(&self) -> &'static str {
        "keeper"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits {
            capacity_bytes: 1 << 20,
            write_cache: true,
            max_discard_bytes: 512,
            discard_granularity: 512,
            ..QueueLimits::default()
        }
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

impl Keeper {
    fn released() -> Keeper {
        let keeper = Keeper::default();
        keeper.release();
        keeper
    }

    fn release(&self) {
        self.is_released.store(true, SeqCst);
    }

    fn disk(&self) -> crate::DiskBuilder {
        Disk::builder(Box::new(self.clone()))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for Keeper {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        self.taken.extend(tags);
        self.poll(cx);
        Taken::All
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if self.is_released.load(SeqCst) {
            cx.complete_all(&self.taken);
            self.taken.clear();
        }
    }
}

/// The length of the largest discard of [`Slow`].
const PART_SECTORS: u64 = (4 << 20) >> SECTOR_SHIFT;

/// A driver that executes each request immediately, in this time or more.
#[derive(Clone)]
struct Slow {
    executed: Arc<AtomicUsize>,
    time: Duration,
    result: IoResult,
}

impl Default for Slow {
    fn default() -> Slow {
        Slow { executed: Arc::default(), time: Duration::from_millis(1), result: Ok(()) }
    }
}

impl Driver for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn limits(&self) -> QueueLimits {
        QueueLimits {
            capacity_bytes: 1 << 30,
            max_discard_bytes: PART_SECTORS << SECTOR_SHIFT,
            discard_granularity: 512,
            ..QueueLimits::default()
        }
    }

    fn open_queue(&self, _cx: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Ok(Box::new(self.clone()))
    }
}

// SAFETY: nothing uses the memory of a request.
unsafe impl DriverQueue for Slow {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        for &tag in tags {
            spin_until(monotonic_ns() + self.time.as_nanos() as u64);
            cx.complete(tag, self.result);
            self.executed.fetch_add(1, SeqCst);
        }
        Taken::All
    }
}

fn spin_until(until_ns: u64) {
    while monotonic_ns() < until_ns {
        std::hint::spin_loop();
    }
}

/// A discard of that number of parts.
fn discard(parts: u64) -> Bio {
    Bio::discard(Sector(0), parts * PART_SECTORS, 0)
}

fn open(disk: &Arc<Disk>) -> Queue {
    let mut queue = Queue::open(disk, 0, 0, None).expect("a queue that is not open");
    turn(&mut queue);
    queue
}

fn read(queue: &mut Queue, block: u64) {
    queue.submit(Bio::read(Sector(block * 16), IoBuffer::zeroed(4096), block), None).expect("room for a bio");
}

/// Runs one turn, in which the owner takes its completions. Returns their number.
fn turn(queue: &mut Queue) -> usize {
    queue.begin_turn(None);
    queue.dispatch_all(None);
    queue.completions_mut().drain(..).count()
}

/// Checks that there is work now, and none after one turn, which completes `completed` bios.
#[track_caller]
fn is_work_once(queue: &mut Queue, completed: usize) {
    assert!(queue.has_work(), "the change is not seen");
    assert_eq!(turn(queue), completed);
    assert!(!queue.has_work(), "the owner would not sleep");
}

/// Runs `meanwhile` after a freeze of `disk` has begun, and before it fails or is lifted.
fn during_freeze(disk: &Arc<Disk>, fails: bool, meanwhile: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    let until = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| {
            // The queue is not kicked: the owner of a running queue would not be woken by a kick either.
            let is_futile = || fails && is_over.load(SeqCst);
            let frozen = disk.control.freeze_timeout(Duration::from_secs(60), is_futile, |_| {});
            assert_eq!(frozen, !fails);
            while !is_over.load(SeqCst) {
                assert!(Instant::now() < until);
                std::thread::yield_now();
            }
            if frozen {
                disk.control.unfreeze(|_| {});
            }
        });
        while !disk.control.is_frozen() {
            assert!(Instant::now() < until && !freezing.is_finished());
            std::thread::yield_now();
        }
        meanwhile();
        is_over.store(true, SeqCst);
        disk.control.wake_waiters();
    });
}

#[test]
fn completions_are_work() {
    let keeper = Keeper::default();
    let disk = keeper.disk().build().unwrap();
    let mut queue = open(&disk);
    read(&mut queue, 0);
    turn(&mut queue);
    assert!(!queue.has_work());
    keeper.release();
    queue.dispatch.call(&mut queue.io, None, |driver, cx| driver.poll(cx));
    is_work_once(&mut queue, 1);
    read(&mut queue, 0);
    queue.dispatch_all(None);
    is_work_once(&mut queue, 1);
}

#[test]
fn being_woken_is_work() {
    let disk = Keeper::default().disk().build().unwrap();
    let mut queue = open(&disk);
    disk.wake_queues();
    is_work_once(&mut queue, 0);
}

// Contract: non-blocking
#[test]
fn the_rest_of_a_turn_that_is_cut_short_is_work() {
    let disk = Keeper::released().disk().build().unwrap();
    let mut queue = open(&disk);
    queue.submit(Bio::discard(Sector(0), 2048, 1), None).unwrap();
    let (mut turns, mut completed) = (0, 0);
    while completed == 0 {
        completed = turn(&mut queue);
        turns += 1;
        assert_eq!(queue.has_work(), completed == 0);
    }
    let parts = 2048 / crate::budget::TURN_BUDGET.items;
    assert!((parts / 2..).contains(&turns), "{turns} turns for 2048 parts");
}

// Contract: non-blocking
#[test]
fn large_parts_are_executed_for_the_time_of_a_turn() {
    for scheduler in SchedulerKind::ALL {
        let slow = Slow::default();
        let disk = Disk::builder(Box::new(slow.clone())).scheduler(scheduler).build().unwrap();
        let mut queue = open(&disk);
        // The first request of a turn starts the turn's time of two milliseconds.
        let most = 3;
        for mark in 0..4 {
            let bio = Bio::discard(Sector(mark * 16 * PART_SECTORS), 16 * PART_SECTORS, mark);
            queue.submit(bio, None).unwrap();
        }
        assert!(slow.executed.swap(0, SeqCst) <= most, "{scheduler}");
        let mut completed = 0;
        while completed < 4 {
            completed += turn(&mut queue);
            let executed = slow.executed.swap(0, SeqCst);
            assert!((1..=most).contains(&executed), "{scheduler}: {executed} in one turn");
            assert_eq!(queue.has_work(), completed < 4, "{scheduler}");
        }
        assert_eq!(disk.stats().counter(Counter::TagWaits), 0);
    }
}

// Contract: non-blocking
#[test]
fn whole_discards_are_executed_for_the_time_of_a_turn() {
    const DISCARDS: usize = 16;
    for scheduler in SchedulerKind::ALL {
        for staged in [false, true] {
            let slow = Slow::default();
            let disk = Disk::builder(Box::new(slow.clone())).scheduler(scheduler).build().unwrap();
            let mut queue = open(&disk);
            let mut submitter = disk.submitter();
            if staged {
                (0..DISCARDS)
                    .for_each(|_| submitter.submit(discard(1), |result, _| assert_eq!(result, Ok(()))));
            }
            queue.begin_turn(None);
            if !staged {
                // An engine runs a source in several rounds of a turn.
                for _ in 0..DISCARDS {
                    queue.submit(discard(1), None).unwrap();
                    queue.dispatch_all(None);
                }
            }
            queue.dispatch_all(None);
            let (mut executed, mut done) = (slow.executed.swap(0, SeqCst), 0);
            while done < DISCARDS {
                assert!((1..=3).contains(&executed), "{scheduler}, {staged}: {executed} in one turn");
                done += executed;
                assert_eq!(queue.has_changed(), done < DISCARDS, "{scheduler}, {staged}");
                turn(&mut queue);
                executed = slow.executed.swap(0, SeqCst);
            }
            assert_eq!((queue.in_flight(), disk.stats().counter(Counter::TagWaits)), (0, 0));
        }
    }
}

#[test]
fn a_discard_after_the_time_of_a_turn_closes_the_fast_path() {
    let slow = Slow { time: Duration::from_millis(3), ..Slow::default() };
    let disk = Disk::builder(Box::new(slow.clone())).build().unwrap();
    let mut queue = open(&disk);
    queue.submit(discard(1), None).unwrap();
    // The second plug has several requests, so the fast path is opened for several bios.
    (0..3).for_each(|block| read(&mut queue, block));
    queue.submit(discard(1), None).unwrap();
    read(&mut queue, 3);
    assert!(queue.plug.is_open());
    queue.submit(discard(1), None).unwrap();
    assert!(!queue.plug.is_open());
    queue.dispatch_all(None);
    assert_eq!(slow.executed.load(SeqCst), 6);
    turn(&mut queue);
    assert_eq!(queue.in_flight(), 0);
}

#[test]
fn the_owner_submits_after_a_turn_whose_time_was_over() {
    let slow = Slow { time: Duration::from_millis(3), ..Slow::default() };
    let disk = Disk::builder(Box::new(slow.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    // The time of each of the two turns is over after two parts.
    queue.submit(discard(4)).unwrap();
    queue.wait(1);
    slow.executed.store(0, SeqCst);
    queue.submit(discard(2)).unwrap();
    assert_eq!(slow.executed.load(SeqCst), 2);
}

#[test]
fn a_nowait_bio_overtakes_bios_that_wait_for_a_turn() {
    let slow = Slow::default();
    let disk = Disk::builder(Box::new(slow.clone())).build().unwrap();
    let mut queue = open(&disk);
    (0..2).for_each(|_| queue.submit(discard(16), None).unwrap());
    assert!(slow.executed.swap(0, SeqCst) < 16);
    for bio in [discard(1), Bio::read(Sector(0), IoBuffer::zeroed(4096), 1)] {
        queue.submit(bio.with_flags(BioFlags::NO_WAIT), None).unwrap();
        queue.flush_plug(None);
        assert_eq!(slow.executed.swap(0, SeqCst), 1);
    }
    let mut completed = 0;
    while queue.in_flight() > 0 {
        queue.begin_turn(None);
        queue.dispatch_all(None);
        queue.completions_mut().drain(..).for_each(|completion| {
            assert_eq!(completion.result, Ok(()));
            completed += 1;
        });
    }
    assert_eq!((completed, disk.stats().counter(Counter::TagWaits)), (4, 0));
}

#[test]
fn a_queue_that_is_dropped_executes_what_waits_for_a_turn() {
    let slow = Slow::default();
    let disk = Disk::builder(Box::new(slow.clone())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(discard(32)).unwrap();
    queue.poll();
    assert!(slow.executed.load(SeqCst) < 32);
    drop(queue);
    assert_eq!(slow.executed.load(SeqCst), 32);
}

// Contract: tags
#[test]
fn a_turn_whose_time_is_over_misses_no_larger_share() {
    let slow = Slow { time: Duration::from_millis(3), result: Err(Status::Io), ..Slow::default() };
    let disk = Disk::builder(Box::new(slow.clone())).queues(2).shared_tags(true).depth(8);
    let disk = disk.error_policy(ErrorPolicy::Hold).build().unwrap();
    let mut queues = [0, 1].map(|index| Queue::open(&disk, index, 0, None).unwrap());
    queues.iter_mut().for_each(|queue| _ = turn(queue));
    let [first, second] = &mut queues;
    // Held, so that the first queue has a share.
    read(first, 0);
    turn(first);
    // The share of the second queue is four of the eight tags.
    second.submit(discard(8), None).unwrap();
    while second.hold.len() < 4 {
        turn(second);
    }
    assert_eq!(slow.executed.load(SeqCst), 5);
    is_work_once(second, 0);
    first.fail_held(|_| true);
    turn(first);
    assert!(disk.hardware_queue(1).kick.is_woken());
    turn(second);
    assert!(slow.executed.load(SeqCst) > 5);
}

#[test]
fn flushes_and_reads_of_a_group_alternate() {
    for scheduler in SchedulerKind::ALL {
        let group = Arc::new(Group::default());
        group.set_limits(&"iops=200".parse().unwrap());
        let [mut other, mut queue] = [(0, 900), (1, 100)].map(|(slot, weight)| {
            let disk = Keeper::released().disk().scheduler(scheduler).build().unwrap();
            disk.join_group(group.clone().join(slot, "member", weight).unwrap());
            open(&disk)
        });
        let turn_has_read = |queue: &mut Queue| {
            queue.begin_turn(None);
            queue.dispatch_all(None);
            queue.completions_mut().drain(..).any(|completion| completion.user_data == 1)
        };
        // The other member is active for the next 100 ms.
        read(&mut other, 0);
        turn(&mut other);
        let (mut flushes, mut has_read) = (0, false);
        while !has_read {
            queue.submit(Bio::flush(0), None).unwrap();
            has_read = turn_has_read(&mut queue);
            if flushes == 0 {
                read(&mut queue, 1);
            }
            flushes += 1;
            assert!(flushes < 10, "{scheduler}");
            // The limit has room half a millisecond before the time at which the read is tried again.
            let is_early =
                |queue: &Queue| queue.deadline_ns().is_some_and(|at_ns| at_ns > monotonic_ns() + 1_000_000);
            while !has_read && (queue.in_flight() > 1 || !is_early(&queue)) {
                has_read = turn_has_read(&mut queue);
            }
            spin_until(queue.deadline_ns().unwrap_or(0).saturating_sub(250_000));
        }
    }
}

#[test]
fn new_reads_of_a_group_do_not_overtake_repeatedly() {
    for round in 0..8 {
        let older = if round % 2 == 0 { Bio::flush(0) } else { Bio::discard(Sector(0), 1, 0) };
        let group = Arc::new(Group::default());
        group.set_limits(&"iops=200".parse().unwrap());
        let [mut other, mut queue] = [(0, 900), (1, 100)].map(|(slot, weight)| {
            let disk = Keeper::released().disk().build().unwrap();
            disk.join_group(group.clone().join(slot, "member", weight).unwrap());
            open(&disk)
        });
        let completes_older = |queue: &mut Queue| {
            queue.begin_turn(None);
            queue.dispatch_all(None);
            queue.completions_mut().drain(..).any(|completion| completion.user_data == 0)
        };
        // The other member is active for the next 100 ms, and this one has used its share.
        read(&mut other, 0);
        turn(&mut other);
        while queue.in_flight() == 0 {
            read(&mut queue, 1);
            turn(&mut queue);
        }
        while queue.in_flight() > 0 {
            turn(&mut queue);
        }
        let operation = older.operation;
        queue.submit(older, None).unwrap();
        let (mut reads, mut tried_ns) = (0, 0);
        while !completes_older(&mut queue) {
            // The limit has room half a millisecond before the time at which the older bio is tried again.
            let next_ns = queue.deadline_ns().unwrap_or(0);
            if next_ns > std::mem::replace(&mut tried_ns, next_ns) {
                spin_until(next_ns - 250_000);
                read(&mut queue, 2);
                reads += 1;
            }
            assert!(reads < 3, "{operation:?}");
        }
    }
}

#[test]
fn staged_bios_are_work_while_there_is_room() {
    let keeper = Keeper::default();
    let disk = keeper.disk().depth(1).build().unwrap();
    let mut queue = open(&disk);
    let mut submitter = disk.submitter();
    let callback = Box::new(|_, _| {});
    let bio = |block: u64| Bio::read(Sector(block * 16), IoBuffer::zeroed(4096), 0);
    submitter.try_submit(bio(0), callback.clone()).map_err(drop).unwrap();
    is_work_once(&mut queue, 0);
    assert!(queue.has_started());
    // The only tag is in use.
    submitter
        .submit(Bio { operation: crate::Operation::Discard, data: crate::Data::None, ..bio(1) }, |_, _| {});
    assert!(!queue.has_work());
    keeper.release();
    turn(&mut queue);
    turn(&mut queue);
    assert!(!queue.has_work() && queue.in_flight() == 0);
}

#[test]
fn a_freeze_is_work_while_requests_wait_for_a_limit() {
    for scheduler in SchedulerKind::ALL {
        let disk = Keeper::released().disk().rate_limits("read-iops=1".parse().unwrap()).scheduler(scheduler);
        let disk = disk.build().unwrap();
        let mut queue = open(&disk);
        (0..8).for_each(|block| read(&mut queue, block));
        let completed = turn(&mut queue);
        assert!(!queue.has_work() && completed < 8, "{scheduler}");
        during_freeze(&disk, false, || is_work_once(&mut queue, 8 - completed));
        turn(&mut queue);
    }
}

#[test]
fn a_freeze_is_not_work_while_the_driver_is_at_its_depth() {
    let keeper = Keeper::default();
    let limits = "read-iops=1".parse().unwrap();
    let disk =
        keeper.disk().depth(1).scheduler(SchedulerKind::MqDeadline).rate_limits(limits).build().unwrap();
    let mut queue = open(&disk);
    (0..2).for_each(|block| read(&mut queue, block));
    turn(&mut queue);
    during_freeze(&disk, true, || {
        turn(&mut queue);
        assert!(queue.has_started() && !queue.has_work());
    });
    keeper.release();
    disk.set_rate_limits(&Default::default());
    while queue.in_flight() > 0 {
        turn(&mut queue);
    }
}

#[test]
fn a_freeze_that_was_lifted_is_work_for_an_idle_queue() {
    let keeper = Keeper::released();
    let disk = keeper.disk().build().unwrap();
    let mut queue = open(&disk);
    // The idle queue applies what was changed.
    disk.set(Setting::Merge(false)).unwrap();
    is_work_once(&mut queue, 0);
    for bio in [Bio::flush(1), Bio::discard(Sector(0), 1, 1)] {
        let frozen = disk.freeze();
        queue.submit(bio, None).unwrap();
        turn(&mut queue);
        assert!(!queue.has_work());
        drop(frozen);
        is_work_once(&mut queue, 1);
    }
}

#[test]
fn a_freeze_that_failed_is_work_for_a_queue_with_requests() {
    for bio in [Bio::flush(1), Bio::discard(Sector(0), 1, 1)] {
        let keeper = Keeper::default();
        let disk = keeper.disk().build().unwrap();
        let mut queue = open(&disk);
        read(&mut queue, 0);
        turn(&mut queue);
        during_freeze(&disk, true, || {
            queue.submit(bio, None).unwrap();
            turn(&mut queue);
            assert!(!queue.has_work());
        });
        is_work_once(&mut queue, 0);
        assert_eq!(queue.dispatch.started, 2);
        keeper.release();
        assert_eq!(turn(&mut queue), 2);
    }
}

// Contract: tags
#[test]
fn a_shared_tag_and_a_larger_share_are_work() {
    let keeper = Keeper::default();
    let disk = keeper.disk().queues(2).shared_tags(true).depth(8).build().unwrap();
    let mut queues = [0, 1].map(|index| Queue::open(&disk, index, 0, None).unwrap());
    queues.iter_mut().for_each(|queue| _ = turn(queue));
    let [first, second] = &mut queues;
    read(first, 0);
    turn(first);
    // Each of the two queues has a share of four of the eight tags.
    (0..5).for_each(|block| read(second, block));
    turn(second);
    assert_eq!(second.dispatch.started, 4);
    assert!(!second.has_work());
    keeper.release();
    assert_eq!(turn(first), 1);
    // Not woken: a queue whose own requests will complete waits for no wake-up.
    assert!(!disk.hardware_queue(1).kick.is_woken());
    assert!(second.has_work());
    assert_eq!(turn(second) + turn(second), 5);
    assert!(!second.has_work());
}

// Contract: tags
#[test]
fn a_queue_that_waits_for_a_tag_keeps_its_share() {
    let keeper = Keeper::default();
    let disk = keeper.disk().queues(2).shared_tags(true).depth(4).build().unwrap();
    let mut queues = [0, 1].map(|index| Queue::open(&disk, index, 0, None).unwrap());
    queues.iter_mut().for_each(|queue| _ = turn(queue));
    let [first, second] = &mut queues;
    (0..4).for_each(|block| read(second, block));
    turn(second);
    assert_eq!(second.dispatch.started, 4);
    read(first, 0);
    // The turns of the queues of an engine are interleaved.
    first.begin_turn(None);
    read(second, 4);
    first.dispatch_all(None);
    // The second queue has its share, although the first one has no request.
    assert!(!second.has_work());
    keeper.release();
    assert_eq!(turn(second) + turn(first) + turn(second) + turn(first), 6);
}

#[test]
fn a_quiesce_that_was_lifted_is_work() {
    let disk = Keeper::released().disk().build().unwrap();
    let mut queue = open(&disk);
    let quiesced = disk.quiesce();
    read(&mut queue, 0);
    turn(&mut queue);
    assert!(!queue.has_work());
    drop(quiesced);
    is_work_once(&mut queue, 1);
}
