//! Runs `AutoLimit` in virtual time, with clients that each have one request in flight, on models of disks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use blkq::disk::AutoLimiter;
use blkq::random::Random;
use blkq::stats::Histogram;
use blkq::throttle::{AutoLimit, Ceiling, DeviceLoad, LimitKey, RateLimits};
use blkq::{Bio, Disk, ErrorKind, IoBuffer, SchedulerKind, Sector, Setting};
use blkq_drivers::model::{Model, ModelCompletion, ModelOptions, RateBucket, RateModel};

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;
const TICK_NS: u64 = 50 * MS;

/// When a request that is issued at a time in nanoseconds, with a size in bytes, completes.
type DiskModel<'a> = Box<dyn FnMut(u64, u64) -> u64 + 'a>;

/// The measurements of the clients over some time.
struct Seen {
    iops: f64,
    p99_ms: f64,
}

struct World<'a> {
    now_ns: u64,
    disk: DiskModel<'a>,
    auto: Option<AutoLimit>,
    bytes: u64,
    /// The number of requests that a limit counts for each I/O: a flush may follow.
    ios: u64,
    /// For each client that waits for the limit, the time since when it waits.
    waiting: VecDeque<u64>,
    /// For each client without a request, the time of its next request; and the length of all pauses.
    pausing: VecDeque<u64>,
    pause_ns: u64,
    /// For each request in the disk, the times when it completes, was submitted, and was issued.
    issued: BinaryHeap<Reverse<(u64, u64, u64)>>,
    next_issue_ns: f64,
    next_tick_ns: u64,
    throttled_since_ns: Option<u64>,
    late_until_ns: u64,
    load: DeviceLoad,
}

impl<'a> World<'a> {
    fn new(clients: usize, disk: DiskModel<'a>, auto: bool) -> World<'a> {
        World {
            now_ns: 0,
            disk,
            auto: auto.then(AutoLimit::default),
            bytes: 4096,
            ios: 1,
            waiting: vec![0; clients].into(),
            pausing: VecDeque::new(),
            pause_ns: 0,
            issued: BinaryHeap::new(),
            next_issue_ns: 0.0,
            next_tick_ns: 0,
            throttled_since_ns: None,
            late_until_ns: 0,
            load: DeviceLoad::default(),
        }
    }

    fn gap_ns(&self) -> Option<f64> {
        let limits = self.auto.as_ref()?.limits();
        let rate = |key| limits.get(key).map(|limit| limit.rate as f64);
        let iops = [rate(LimitKey::Iops), rate(LimitKey::Bps).map(|bps| bps / self.bytes as f64)];
        iops.into_iter().flatten().map(|iops| 1e9 * self.ios as f64 / iops).reduce(f64::max)
    }

    fn issue(&mut self) {
        while let Some(since_ns) = self.waiting.front().copied() {
            if let Some(gap_ns) = self.gap_ns() {
                if self.next_issue_ns > self.now_ns as f64 {
                    self.late_until_ns = self.now_ns + 50 * MS;
                    self.throttled_since_ns.get_or_insert(self.now_ns);
                    return;
                }
                // A queue whose requests had to wait may catch up 100 ms, any other queue 2 ms.
                let credit_ns = if self.now_ns < self.late_until_ns { 100e6 } else { 2e6 };
                self.next_issue_ns = self.next_issue_ns.max(self.now_ns as f64 - credit_ns) + gap_ns;
            }
            self.waiting.pop_front();
            let due_ns = (self.disk)(self.now_ns, self.bytes);
            self.issued.push(Reverse((due_ns, since_ns, self.now_ns)));
        }
        if let Some(since_ns) = self.throttled_since_ns.take() {
            self.load.throttled_ns += self.now_ns - since_ns;
        }
    }

    /// Runs the clients, which each have one request in flight except during their pauses.
    fn run(&mut self, length_ns: u64) -> Seen {
        let (end_ns, mut seen) = (self.now_ns + length_ns, Histogram::default());
        loop {
            while let Some(since_ns) = self.pausing.pop_front_if(|until_ns| *until_ns <= self.now_ns) {
                self.waiting.push_back(since_ns);
            }
            self.issue();
            let due_ns = self.issued.peek().map_or(u64::MAX, |Reverse((due_ns, ..))| *due_ns);
            let issue_ns = if self.waiting.is_empty() { u64::MAX } else { self.next_issue_ns.ceil() as u64 };
            let paused_ns = self.pausing.front().copied().unwrap_or(u64::MAX);
            self.now_ns = due_ns.min(issue_ns).min(paused_ns).min(self.next_tick_ns).max(self.now_ns);
            if self.now_ns >= end_ns {
                let iops = seen.count() as f64 * 1e9 / length_ns as f64;
                return Seen { iops, p99_ms: seen.percentile_ns(99.0) as f64 / 1e6 };
            }
            while let Some(Reverse((due_ns, since_ns, issued_ns))) = self.issued.peek().copied()
                && due_ns <= self.now_ns
            {
                self.issued.pop();
                seen.record(self.now_ns - since_ns);
                self.load.latency.record(self.now_ns - issued_ns);
                self.load.bytes += self.bytes;
                self.load.ios += self.ios;
                self.pausing.push_back(self.now_ns + self.pause_ns);
            }
            if self.now_ns >= self.next_tick_ns {
                self.next_tick_ns += TICK_NS;
                if let Some(since_ns) = &mut self.throttled_since_ns {
                    self.load.throttled_ns += self.now_ns - *since_ns;
                    *since_ns = self.now_ns;
                }
                (self.load.now_ns, self.load.in_flight) = (self.now_ns, self.issued.len() as u64);
                if let Some(auto) = &mut self.auto {
                    auto.update(&self.load);
                }
            }
        }
    }

    /// Replaces the clients by others, which pause for `pause_ns` between two requests.
    fn replace_clients(&mut self, clients: usize, pause_ns: u64) {
        (self.issued, self.pausing, self.pause_ns) = (BinaryHeap::new(), VecDeque::new(), pause_ns);
        self.waiting = vec![self.now_ns; clients].into();
    }

    fn has_ceiling(&self) -> bool {
        self.auto.as_ref().is_some_and(|auto| auto.ceiling().is_some())
    }
}

fn limited<'a>(model: RateModel) -> DiskModel<'a> {
    let mut bucket = RateBucket::new(model);
    Box::new(move |now_ns, bytes| bucket.due_ns(now_ns, bytes))
}

/// A disk that executes `channels` requests in parallel, each in about `mean_ns`.
fn plain<'a>(channels: usize, mean_ns: u64) -> DiskModel<'a> {
    let (mut random, mut free_ns) = (Random::new(7), vec![0; channels]);
    Box::new(move |now_ns, _| {
        let channel = free_ns.iter_mut().min().expect("a channel");
        *channel = now_ns.max(*channel) + mean_ns / 2 + random.below(mean_ns);
        *channel
    })
}

#[test]
fn a_rate_limited_disk_is_paced_just_under_its_ceiling() {
    for (iops, refill_ms, clients) in [(10_000, 50, 32), (3_000, 100, 16), (20_000, 20, 64), (500, 200, 4)] {
        let model = RateModel { iops, refill_ns: refill_ms * MS, ..RateModel::default() };
        let off = World::new(clients, limited(model), false).run(20 * S);
        let mut world = World::new(clients, limited(model), true);
        world.run(20 * S);
        assert!(world.has_ceiling(), "{iops}: {:?}", world.auto);
        let on = world.run(40 * S);
        assert!(on.p99_ms * 3.0 < off.p99_ms, "{iops}: p99 {} of {} ms", on.p99_ms, off.p99_ms);
        assert!(on.iops > 0.96 * off.iops, "{iops}: {} of {} IOPS", on.iops, off.iops);
    }
}

#[test]
fn a_ceiling_of_bytes_is_found_too() {
    let model = RateModel { iops: 0, bytes_per_second: 200 << 20, ..RateModel::default() };
    let mut off = World::new(16, limited(model), false);
    off.bytes = 256 << 10;
    let off = off.run(20 * S);
    let mut world = World::new(16, limited(model), true);
    world.bytes = 256 << 10;
    world.run(20 * S);
    let limits = *world.auto.as_ref().expect("auto").limits();
    assert!(limits.get(LimitKey::Bps).is_some() && limits.get(LimitKey::Iops).is_none(), "{limits}");
    // 800 I/Os a second from 16 clients take 20 ms each, with or without the limit.
    let on = world.run(60 * S);
    assert!(on.iops > 0.96 * off.iops && on.p99_ms < off.p99_ms, "{} {}", on.iops, on.p99_ms);
}

#[test]
fn a_burst_is_used_before_the_ceiling_counts() {
    let model = RateModel { burst_ns: 30 * S, iops: 2_000, ..RateModel::default() };
    // 16 clients complete up to 80,000 I/Os a second until the bucket is empty.
    let mut world = World::new(16, limited(model), true);
    let burst = world.run(S);
    assert!(burst.iops > 20_000.0, "{}", burst.iops);
    world.run(45 * S);
    assert!(world.has_ceiling(), "{:?}", world.auto);
    let on = world.run(30 * S);
    assert!((1_900.0..2_100.0).contains(&on.iops) && on.p99_ms < 25.0, "{} {}", on.iops, on.p99_ms);
}

#[test]
fn a_plain_fast_disk_keeps_its_throughput() {
    for (channels, clients) in [(8, 32), (8, 8), (32, 32), (4, 128), (32, 4)] {
        let off = World::new(clients, plain(channels, MS), false).run(20 * S);
        let mut world = World::new(clients, plain(channels, MS), true);
        let on = world.run(60 * S);
        assert!(on.iops > 0.97 * off.iops, "{channels} {clients}: {} of {} IOPS", on.iops, off.iops);
    }
}

#[test]
fn flushes_are_part_of_the_rate_that_is_found() {
    let model = RateModel { iops: 3_000, ..RateModel::default() };
    let off = World::new(16, limited(model), false).run(20 * S);
    let mut world = World::new(16, limited(model), true);
    world.ios = 2;
    world.run(20 * S);
    assert!(world.has_ceiling(), "{:?}", world.auto);
    let on = world.run(20 * S);
    assert!(on.iops > 0.96 * off.iops, "{} of {} IOPS", on.iops, off.iops);
}

/// A disk on which no request completes in the first `length_ms` of each `every_ms`.
fn disturbed(mut disk: DiskModel<'_>, every_ms: u64, length_ms: u64) -> DiskModel<'_> {
    Box::new(move |now_ns, bytes| {
        let due_ns = disk(now_ns, bytes);
        due_ns + (length_ms * MS).saturating_sub(due_ns % (every_ms * MS))
    })
}

#[test]
fn a_disturbed_disk_keeps_its_throughput() {
    let limited = || limited(RateModel { iops: 2_000, refill_ns: 100 * MS, ..RateModel::default() });
    type Open<'a> = &'a dyn Fn() -> DiskModel<'static>;
    let disks: [Open<'_>; 2] = [&limited, &|| plain(8, MS)];
    for (index, open) in disks.into_iter().enumerate() {
        for (every_ms, length_ms) in [(700, 15), (3_100, 60), (300, 25), (1_100, 200)] {
            let disk = || disturbed(open(), every_ms, length_ms);
            let off = World::new(4, disk(), false).run(20 * S);
            let mut world = World::new(4, disk(), true);
            world.run(20 * S);
            for second in 0..6 {
                let on = world.run(20 * S);
                let what = format!("{index}: {length_ms} of {every_ms} ms, {second}");
                assert!(on.iops > 0.93 * off.iops, "{what}: {} of {} IOPS", on.iops, off.iops);
            }
        }
    }
}

#[test]
fn an_unreached_limit_is_removed() {
    let mut world = World::new(16, limited(RateModel::default()), true);
    world.run(20 * S);
    assert!(world.has_ceiling(), "{:?}", world.auto);
    // One client is left, which completes half of the limit.
    world.replace_clients(1, 0);
    world.run(40 * S);
    let on = world.run(40 * S);
    assert!(!world.has_ceiling() && on.iops > 4_850.0, "{} {:?}", on.iops, world.auto);
}

#[test]
fn the_limit_of_a_device_with_little_to_do_is_removed() {
    for (clients, pause_ms) in [(0, 0), (1, 1_000), (1, 300), (1, 100), (1, 50)] {
        let mut world = World::new(16, limited(RateModel::default()), true);
        world.run(20 * S);
        assert!(world.has_ceiling(), "{:?}", world.auto);
        world.replace_clients(clients, pause_ms * MS);
        world.run(25 * S);
        assert!(world.has_ceiling(), "too early: {clients} {pause_ms}");
        world.run(25 * S);
        let limits = *world.auto.as_ref().expect("auto").limits();
        assert!(!world.has_ceiling() && limits.is_none(), "{clients} {pause_ms}: {limits}");
    }
}

#[test]
fn an_untested_raise_is_undone() {
    for (clients, pause_ms) in [(0, 0), (1, 1_000)] {
        let mut world = World::new(16, limited(RateModel::default()), true);
        world.run(10 * S);
        let limits = |world: &World<'_>| {
            let auto = world.auto.as_ref().expect("auto");
            let rate = |limits: RateLimits| limits.get(LimitKey::Iops).map_or(0, |limit| limit.rate);
            (auto.ceiling().map_or(u64::MAX, rate), rate(*auto.limits()))
        };
        let found = loop {
            world.run(MS);
            let (ceiling, tried) = limits(&world);
            if tried > ceiling {
                break ceiling;
            }
            assert!(world.now_ns < 200 * S, "{:?}", world.auto);
        };
        world.replace_clients(clients, pause_ms * MS);
        // Some I/Os are those of the previous clients.
        world.run(15 * S);
        assert_eq!(limits(&world), (found, found), "{clients} {pause_ms}");
    }
}

#[test]
fn a_ceiling_that_changes_is_followed() {
    let model = RateModel::default();
    let mut bucket = RateBucket::new(model);
    let rate = std::cell::Cell::new(model.iops);
    let disk: DiskModel<'_> = Box::new(|now_ns, bytes| {
        bucket.set_rates(rate.get(), 0);
        bucket.due_ns(now_ns, bytes)
    });
    let mut world = World::new(32, disk, true);
    world.run(20 * S);
    for iops in [4_000, 20_000, 5_000, 10_000] {
        rate.set(iops);
        world.run(90 * S);
        let on = world.run(30 * S);
        let ratio = on.iops / iops as f64;
        assert!((0.95..=1.001).contains(&ratio), "{} of {iops} IOPS", on.iops);
        assert!(on.p99_ms < 20.0, "{iops}: {} ms", on.p99_ms);
    }
}

#[test]
fn a_load_below_the_ceiling_is_not_slowed() {
    // One client completes 5,000 I/Os a second.
    let mut world = World::new(1, limited(RateModel::default()), true);
    let on = world.run(60 * S);
    assert!(on.iops > 4_850.0, "{}", on.iops);
    let mut world = World::new(0, limited(RateModel::default()), true);
    world.run(10 * S);
    assert!(!world.has_ceiling());
}

#[test]
fn a_low_steady_load_is_seldom_in_a_trial() {
    // A client that writes a log: about 45 I/Os a second, and usually none in flight.
    for (pause_ms, per_second) in [(29, 33), (20, 45), (17, 52)] {
        let mut world = World::new(1, plain(1, 2 * MS), true);
        world.pause_ns = pause_ms * MS;
        world.run(300 * S);
        let (mut ticks, mut ios) = (0, 0.0);
        for _ in 0..6_000 {
            ios += world.run(TICK_NS).iops / 20.0;
            let auto = world.auto.as_ref().expect("auto");
            ticks += u32::from(!auto.limits().is_none());
        }
        assert!(ticks < 600, "{per_second}: in {ticks} of 6,000 ticks");
        assert!((ios / 300.0).round() as u64 >= per_second - 3, "{per_second}: {ios}");
    }
}

#[test]
fn one_searches_a_disk_at_a_time_and_leaves_no_limit() {
    let mut options = ModelOptions::new(1 << 30);
    options.completion = ModelCompletion::RateLimited(RateModel { refill_ns: MS, ..RateModel::default() });
    let disk = Disk::builder(Box::new(Model::new(options).expect("a model"))).build().expect("a disk");
    let mut queue = disk.open_queue(0).expect("a queue");
    assert_eq!(disk.ceiling(), Ceiling::NotSearched);
    disk.set_rate_limits(&"iops=1".parse().expect("limits"));
    for scheduler in [SchedulerKind::None, SchedulerKind::MqDeadline] {
        disk.set(Setting::Scheduler(scheduler)).expect("a scheduler");
        let limiter = AutoLimiter::start(&disk).expect("a thread");
        assert_eq!(disk.ceiling(), Ceiling::Unknown);
        assert!(disk.rate_limits().is_none());
        assert_eq!(AutoLimiter::start(&disk).err().expect("another one").kind(), ErrorKind::Busy);
        for block in 0..200 {
            queue.submit(Bio::read(Sector(block * 16), IoBuffer::zeroed(4096), block)).expect("room");
            if block % 10 == 9 {
                queue.wait(10);
                assert!(queue.completions().all(|completion| completion.result.is_ok()));
            }
        }
        drop(limiter);
        assert_eq!(disk.ceiling(), Ceiling::NotSearched);
    }
}
