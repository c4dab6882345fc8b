//! Changes under a freeze lose no request and take effect on all later requests.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{
    self, Behaviour, Device, DeviceSetting, Finish, Scattered, drain, filled, plain_limits, run,
};
use blkq::drivers::ram::Ram;
use blkq::testing::{assert_stays, within_limit};
use blkq::{
    Bio, BioFlags, Counter, Disk, Driver, DriverQueue, DriverSetting, Error, ErrorKind, LocalQueue,
    OpenContext, Operation, QueueLimits, Sector, Setting, Status,
};

/// A setting that no driver supports.
#[derive(Debug)]
struct Colour;

impl DriverSetting for Colour {
    fn name(&self) -> &'static str {
        "colour"
    }
}

/// Applies a change on another thread while this thread runs its queue.
fn change<'d, R: Send>(
    queue: &mut LocalQueue,
    disk: &'d Disk,
    change: impl FnOnce(&'d Disk) -> R + Send,
) -> R {
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| change(disk));
        while !changing.is_finished() {
            queue.poll();
        }
        changing.join().unwrap()
    })
}

#[test]
fn the_first_write_after_read_only_was_set_is_refused() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(512, 1), 0)).result, Ok(()));
    // The queue is idle: there is nothing to wait for, and no notification wakes it.
    disk.set(Setting::ReadOnly(true)).unwrap();
    assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(512, 2), 0)).result, Err(Status::ReadOnly));
    disk.set(Setting::ReadOnly(false)).unwrap();
    assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(512, 3), 0)).result, Ok(()));
    device.assert_legal();
    assert_eq!(device.state().current[0], 3);
}

#[test]
fn read_only_applies_with_or_without_driver_support() {
    let write = || Bio::write(Sector(0), filled(512, 1), 0);
    let disk =
        Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).read_only(true).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    assert_eq!(run(&mut queue, write()).result, Err(Status::ReadOnly));
    for (read_only, result) in [(false, Ok(())), (true, Err(Status::ReadOnly)), (false, Ok(()))] {
        disk.set(Setting::ReadOnly(read_only)).unwrap();
        assert_eq!(disk.limits().read_only, read_only);
        assert_eq!(run(&mut queue, write()).result, result, "{read_only}");
    }
    // A device that cannot be written stays read-only.
    let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, true).unwrap())).build().unwrap();
    disk.set(Setting::ReadOnly(true)).unwrap();
    assert_eq!(disk.set(Setting::ReadOnly(false)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(disk.limits().read_only);
}

#[test]
fn the_first_bio_after_a_resize_is_held_to_the_new_size() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    for last in [Sector(2047), Sector(1023)] {
        assert_eq!(run(&mut queue, Bio::read(last, filled(512, 1), 0)).result, Ok(()));
    }
    assert_eq!(disk.resize(Some(512 << 10)).unwrap(), 512 << 10);
    assert_eq!(run(&mut queue, Bio::read(Sector(1024), filled(512, 1), 0)).result, Err(Status::Invalid));
    assert_eq!(run(&mut queue, Bio::read(Sector(1023), filled(512, 1), 0)).result, Ok(()));
    disk.resize(Some(1 << 20)).unwrap();
    assert_eq!(run(&mut queue, Bio::read(Sector(2047), filled(512, 1), 0)).result, Ok(()));
    device.assert_legal();
}

#[test]
fn a_no_wait_bio_does_not_wait_for_a_freeze() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    let frozen = disk.freeze();
    let whole = Bio::read(Sector(0), filled(512, 0), 1);
    let pieces = common::Scattered::data(&[0; 1024], &[512], 512, 0);
    let scattered = Bio { data: pieces, sectors: 2, ..Bio::read(Sector(8), filled(512, 0), 2) };
    for bio in [whole, scattered] {
        queue.submit(bio.with_flags(BioFlags::NO_WAIT)).unwrap();
        assert_eq!(queue.take_completion().map(|c| c.result), Some(Err(Status::Again)));
    }
    drop(frozen);
    let bio = Bio::read(Sector(0), filled(512, 0), 1).with_flags(BioFlags::NO_WAIT);
    assert_eq!(run(&mut queue, bio).result, Ok(()));
}

// Contract: declared
#[test]
fn bios_that_wait_across_a_change_are_checked_and_split_again() {
    let device = Device::plain(Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let disk = device.builder().depth(2).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let frozen = change(&mut queue, &disk, |disk| disk.freeze());
    device.state().closed = true;
    // Large bios are submitted whole and must be split after the change; then the other way round.
    for mark in 0..16 {
        let bytes = if mark % 2 == 0 { 64 << 10 } else { 512 };
        queue
            .submit(
                Bio::write(Sector(mark * 128), filled(bytes, mark as u8 + 1), mark)
                    .with_flags(BioFlags::NO_MERGE),
            )
            .unwrap();
    }
    (0..10).for_each(|_| queue.poll());
    assert_eq!((device.log().len(), queue.in_flight()), (0, 16));
    change(&mut queue, &disk, |disk| disk.set_driver(&DeviceSetting::MaxRequest(4096)).unwrap());
    change(&mut queue, &disk, |disk| assert!(disk.resize(Some((15 * 64) << 10)).is_ok()));
    device.state().closed = false;
    drop(frozen);
    let completed = drain(&mut queue);
    assert_eq!(completed.len(), 16);
    for completion in completed {
        let want = if completion.user_data == 15 { Err(Status::Invalid) } else { Ok(()) };
        assert_eq!(completion.result, want, "bio {}", completion.user_data);
    }
    device.assert_legal();
    let state = device.state();
    assert!(state.log.iter().all(|seen| seen.sectors <= 8));
    for mark in 0..15usize {
        assert_eq!(state.current[mark << 16], mark as u8 + 1);
    }
}

// Contract: live-changes
#[test]
fn parts_that_wait_for_a_tag_outlive_a_change() {
    let limits = blkq::QueueLimits { max_request_bytes: 4096, ..plain_limits() };
    let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let disk = device.builder().depth(1).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let mut buffer = filled(256 << 10, 0);
    buffer.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / 512) as u8);
    let want = buffer.to_vec();
    queue.submit(Bio::write(Sector(0), buffer, 1)).unwrap();
    queue.submit(Bio::write_zeroes(Sector(1024), 512, 2)).unwrap();
    queue.poll();
    change(&mut queue, &disk, |disk| disk.set_driver(&DeviceSetting::MaxRequest(2048)).unwrap());
    change(&mut queue, &disk, |disk| disk.set_driver(&DeviceSetting::MaxRequest(16384)).unwrap());
    change(&mut queue, &disk, |disk| disk.set(Setting::Depth(7)).unwrap());
    assert!(drain(&mut queue).into_iter().all(|completion| completion.result == Ok(())));
    device.assert_legal();
    assert!(device.state().current[..want.len()] == want);
}

// Contract: declared
#[test]
fn a_waiting_part_is_split_by_the_segments_of_its_own_range() {
    within_limit(|| {
        // The first part has one segment, the others have eight.
        let bytes: Vec<u8> = (0..1 << 20).map(|index| (index / 512) as u8).collect();
        let cuts = [&[4096][..], &[512; 2040]].concat();
        loop {
            let limits = blkq::QueueLimits { max_request_bytes: 4096, ..plain_limits() };
            let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
            let disk = device.builder().depth(1).build().unwrap();
            let mut queue = disk.open_queue(0).unwrap();
            let data = Scattered::data(&bytes, &cuts, 512, 0);
            queue.submit(Bio { data, ..Bio::write(Sector(0), filled(bytes.len(), 0), 1) }).unwrap();
            change(&mut queue, &disk, |disk| disk.set_driver(&DeviceSetting::MaxSegments(4)).unwrap());
            assert!(drain(&mut queue).into_iter().all(|completion| completion.result == Ok(())));
            device.assert_legal();
            assert!(device.state().current == bytes);
            // Some parts must have been issued before the change, and some after it.
            let has = |segments| device.log().iter().any(|seen| seen.segments == segments);
            if has(8) && has(4) {
                break;
            }
        }
    });
}

#[test]
fn the_rest_of_a_split_bio_is_not_issued_beyond_a_smaller_size() {
    let limits = blkq::QueueLimits { max_request_bytes: 4096, ..plain_limits() };
    let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let (disk, mut queue) = device.open();
    let frozen = change(&mut queue, &disk, |disk| disk.freeze());
    queue.submit(Bio::write(Sector(0), filled(1 << 20, 1), 1)).unwrap();
    change(&mut queue, &disk, |disk| assert!(disk.resize(Some(128 << 10)).is_ok()));
    drop(frozen);
    assert_eq!(drain(&mut queue).pop().unwrap().result, Err(Status::Invalid));
    device.assert_legal();
}

// Contract: live-changes
#[test]
fn nothing_is_in_the_driver_while_frozen_and_all_of_it_after() {
    let device = Device::plain(Behaviour { finish: Finish::Random, busy_every: 20, ..Behaviour::default() });
    let disk = device.builder().depth(4).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let mut completed = 0;
    for round in 0..30u64 {
        for n in 0..20 {
            queue.submit(Bio::write(Sector((round * 20 + n) * 3), filled(512, 1), 0)).unwrap();
        }
        let frozen = change(&mut queue, &disk, |disk| disk.freeze());
        let seen = {
            let mut state = device.state();
            assert_eq!(state.held, 0, "a request is in the driver of a frozen disk");
            state.closed = true;
            state.log.len()
        };
        let nested = disk.freeze();
        (0..5).for_each(|_| queue.poll());
        drop(nested);
        (0..5).for_each(|_| queue.poll());
        assert_eq!(device.log().len(), seen, "freezes nest");
        device.state().closed = false;
        drop(frozen);
        completed += queue.completions().count();
    }
    completed += drain(&mut queue).len();
    assert_eq!(completed, 600);
    device.assert_legal();
    assert_eq!(device.count(Operation::Write), 600);
}

#[test]
fn a_released_disk_completes_what_it_has_and_starts_nothing() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    queue.submit(Bio::read(Sector(0), filled(512, 1), 1)).unwrap();
    queue.poll();
    change(&mut queue, &disk, |disk| {
        device.release(1);
        disk.release()
    })
    .unwrap();
    queue.submit(Bio::read(Sector(9), filled(512, 1), 2)).unwrap();
    (0..3).for_each(|_| queue.poll());
    assert_eq!(queue.completions().map(|c| c.user_data).collect::<Vec<_>>(), [1]);
    device.assert_legal();
}

#[test]
fn a_quiesced_disk_dispatches_nothing_but_takes_completions() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    queue.submit(Bio::read(Sector(0), filled(512, 1), 1)).unwrap();
    queue.poll();
    let quiesced = disk.quiesce();
    device.state().closed = true;
    queue.submit(Bio::read(Sector(9), filled(512, 1), 2)).unwrap();
    device.release(2);
    (0..3).for_each(|_| queue.poll());
    assert_eq!(queue.completions().map(|c| c.user_data).collect::<Vec<_>>(), [1]);
    device.state().closed = false;
    drop(quiesced);
    assert_eq!(drain(&mut queue).len(), 1);
    device.assert_legal();
}

#[test]
fn statistics_turned_on_later_time_no_io_since_the_boot() {
    let device = Device::plain(Behaviour::default());
    let disk = device.builder().iostats(false).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let frozen = change(&mut queue, &disk, |disk| disk.freeze());
    for mark in 0..4 {
        queue.submit(Bio::read(Sector(mark * 8), filled(512, 1), mark)).unwrap();
    }
    change(&mut queue, &disk, |disk| disk.set(Setting::Iostats(true)).unwrap());
    drop(frozen);
    drain(&mut queue);
    disk.set(Setting::Iostats(false)).unwrap();
    run(&mut queue, Bio::read(Sector(0), filled(512, 1), 0));
    disk.set(Setting::Iostats(true)).unwrap();
    run(&mut queue, Bio::read(Sector(0), filled(512, 1), 0));
    let stats = disk.stats();
    assert_eq!((stats.groups[0].ios, stats.in_flight), (5, [0, 0]));
    assert!(stats.groups[0].latency.max_ns < 1_000_000_000, "{} ns", stats.groups[0].latency.max_ns);
    assert!(stats.busy_ns < 1_000_000_000);
    assert_eq!(stats.counter(Counter::NegativeLatencies), 0);
}

#[test]
fn the_depth_in_force_is_the_most_that_the_driver_has() {
    let device = Device::plain(Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let (disk, mut queue) = device.open();
    for depth in [1u16, 2, 5, 128, 3] {
        for scheduler in blkq::SchedulerKind::ALL {
            change(&mut queue, &disk, |disk| {
                disk.set(Setting::Depth(depth)).unwrap();
                disk.set(Setting::Scheduler(scheduler)).unwrap();
            });
            device.state().held_max = 0;
            for n in 0..300 {
                queue.submit(Bio::read(Sector(n * 2), filled(512, 1), n)).unwrap();
            }
            assert_eq!(drain(&mut queue).len(), 300);
            assert!(
                device.state().held_max <= usize::from(depth),
                "{depth} {scheduler}: {}",
                device.state().held_max
            );
            assert!(device.state().held_max >= usize::from(depth.min(30)), "{depth} {scheduler}");
        }
    }
    device.assert_legal();
}

#[test]
fn depths_beyond_the_room_and_unknown_settings_change_nothing() {
    let device = Device::plain(Behaviour::default());
    let disk = device.builder().depth(200).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let before = disk.settings();
    assert_eq!(disk.depth_max(), 400);
    for depth in [0, 401, u16::MAX] {
        assert_eq!(disk.set(Setting::Depth(depth)).unwrap_err().kind(), ErrorKind::Invalid);
    }
    let unknown = disk.set_driver(&Colour).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::NotFound);
    assert_eq!(unknown.to_string(), "the test driver has no setting colour");
    assert_eq!((disk.settings(), device.state().reloads), (before, 0));
    assert_eq!(run(&mut queue, Bio::read(Sector(0), filled(512, 0), 0)).result, Ok(()));
}

#[test]
fn changes_of_several_threads_at_once_are_all_in_force() {
    for _ in 0..50 {
        let device = Device::plain(Behaviour::default());
        let disk = device.builder().build().unwrap();
        std::thread::scope(|scope| {
            for setting in [
                Setting::Depth(7),
                Setting::Merge(false),
                Setting::Iostats(false),
                Setting::Clock(blkq::ClockMode::Precise),
                Setting::Scheduler(blkq::SchedulerKind::MqDeadline),
            ] {
                let disk = &disk;
                scope.spawn(move || disk.set(setting).unwrap());
            }
        });
        let settings = disk.settings();
        assert_eq!((settings.depth, settings.merge, settings.iostats), (7, false, false));
        assert_eq!(
            (settings.clock, settings.scheduler),
            (blkq::ClockMode::Precise, blkq::SchedulerKind::MqDeadline)
        );
    }
}

// Contract: live-changes
#[test]
fn a_change_reports_the_io_that_prevents_it() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    queue.submit(Bio::read(Sector(0), filled(512, 1), 1)).unwrap();
    queue.poll();
    // No request completes, so the change waits. It continues once the I/O has completed.
    change(&mut queue, &disk, |disk| {
        std::thread::scope(|scope| {
            let set = scope.spawn(|| disk.set(Setting::Merge(false)));
            assert_stays("the change waits for the read", || !set.is_finished());
            device.release(1);
            set.join().unwrap().unwrap();
        });
    });
    assert!(!disk.settings().merge);
    assert_eq!(drain(&mut queue).len(), 1);
}

// Contract: live-changes
#[test]
fn a_change_while_a_queue_opens_holds_for_its_first_bio() {
    type Change = fn(&Disk);
    let cases: [(Change, Status); 2] = [
        (|disk| disk.set(Setting::ReadOnly(true)).unwrap(), Status::ReadOnly),
        (|disk| assert_eq!(disk.resize(Some(64 << 10)).unwrap(), 64 << 10), Status::Invalid),
    ];
    for (change, refused) in cases {
        let device = Device::plain(Behaviour::default());
        let disk = device.builder().build().unwrap();
        let changed = disk.clone();
        device.state().on_open = Some(Box::new(move || change(&changed)));
        let mut queue = disk.open_queue(0).unwrap();
        assert_eq!(run(&mut queue, Bio::write(Sector(1024), filled(512, 1), 0)).result, Err(refused));
        device.assert_legal();
    }
}

// Contract: declared
#[test]
fn zeroes_that_wait_across_a_change_stay_zeroes() {
    let limits = blkq::QueueLimits {
        max_write_zeroes_bytes: 0,
        max_write_zeroes_no_unmap_bytes: 0,
        max_request_bytes: 256 << 10,
        ..plain_limits()
    };
    let device = Device::new(limits, Behaviour { finish: Finish::Random, ..Behaviour::default() });
    let disk = device.builder().depth(2).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(512 << 10, 7), 0)).result, Ok(()));
    let (small, large) = (DeviceSetting::MaxRequest(4096), DeviceSetting::MaxRequest(256 << 10));
    for setting in [small, large, DeviceSetting::MaxSegments(1)] {
        device.state().current.fill(7);
        let frozen = change(&mut queue, &disk, |disk| disk.freeze());
        queue.submit(Bio::write_zeroes(Sector(8), 512, 1)).unwrap();
        change(&mut queue, &disk, |disk| disk.set_driver(&setting).unwrap());
        drop(frozen);
        assert_eq!(drain(&mut queue).pop().unwrap().result, Ok(()));
        device.assert_legal();
        let zeroes = 4096..4096 + (256 << 10);
        for (place, byte) in device.state().current.iter().enumerate() {
            assert_eq!(*byte, if zeroes.contains(&place) { 0 } else { 7 }, "{setting:?}, byte {place}");
        }
    }
}

// Contract: live-changes
#[test]
fn a_change_that_panics_leaves_a_disk_that_works() {
    within_limit(|| {
        let device = Device::plain(Behaviour::default());
        let (disk, mut queue) = device.open();
        let changing = || disk.set_driver(&DeviceSetting::Panic);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(changing)).unwrap_err();
        assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(512, 1), 0)).result, Ok(()));
        disk.set(Setting::ReadOnly(true)).unwrap();
        assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(512, 1), 0)).result, Err(Status::ReadOnly));
        // The disk also works after a panic of a thread that freezes or quiesces it.
        let stopping = || {
            let _frozen = disk.freeze();
            let _quiesced = disk.quiesce();
            panic!("a panic for the test");
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(stopping)).unwrap_err();
        assert_eq!(run(&mut queue, Bio::read(Sector(0), filled(512, 1), 0)).result, Ok(()));
        device.assert_legal();
    });
}

// Contract: live-changes
#[test]
fn invalid_settings_are_rejected_without_a_freeze() {
    let device = Device::held();
    let (disk, mut queue) = device.open();
    // This read never completes by itself, so a freeze would have to wait for it.
    queue.submit(Bio::read(Sector(0), filled(512, 0), 0)).unwrap();
    queue.poll();
    device.state().read_only_refused = true;
    let begin = std::time::Instant::now();
    for (setting, kind) in
        [(Setting::Depth(0), ErrorKind::Invalid), (Setting::ReadOnly(true), ErrorKind::Unsupported)]
    {
        assert_eq!(disk.set(setting).unwrap_err().kind(), kind, "{setting:?}");
    }
    assert_eq!(disk.set_driver(&Colour).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(begin.elapsed() < Duration::from_secs(20), "the disk was frozen");
    assert_eq!(device.state().prepared, ["read-only", "colour"]);
    device.release_all();
    drain(&mut queue);
    device.assert_legal();
}

// Contract: live-changes
#[test]
fn contradictory_limits_are_rejected_and_never_used() {
    let device = Device::plain(Behaviour::default());
    let (disk, mut queue) = device.open();
    assert_eq!(disk.set_driver(&DeviceSetting::MaxRequest(100)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(disk.resize(Some(1000)).unwrap_err().kind(), ErrorKind::Invalid);
    let limits = queue.limits().clone();
    assert_eq!(run(&mut queue, Bio::write(Sector(0), filled(4096, 1), 0)).result, Ok(()));
    assert_eq!(
        (queue.limits().max_request_bytes, queue.limits().capacity_bytes),
        (limits.max_request_bytes, 1 << 20)
    );
    drop(queue);
    assert_eq!(disk.open_queue(0).err().unwrap().kind(), ErrorKind::Invalid);
    disk.resize(Some(4096)).unwrap_err();
    disk.set_driver(&DeviceSetting::MaxRequest(4096)).unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    assert_eq!(run(&mut queue, Bio::write(Sector(8), filled(512, 1), 0)).result, Err(Status::Invalid));
}

/// A RAM driver whose queues cannot be opened.
struct Unopened(Ram);

impl Driver for Unopened {
    fn name(&self) -> &'static str {
        "unopened"
    }

    fn limits(&self) -> QueueLimits {
        self.0.limits()
    }

    fn open_queue(&self, _: OpenContext<'_>) -> Result<Box<dyn DriverQueue>, Error> {
        Err(Error::new(ErrorKind::System, "no descriptors left"))
    }
}

#[test]
fn an_open_error_of_a_new_driver_is_reported() {
    let ram = || Ram::new(1 << 20, 512, false).unwrap();
    let disk = Disk::builder(Box::new(ram())).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    let write = || Bio::write(Sector(0), filled(512, 1), 0);
    for (works, driver) in [(false, Arc::new(Unopened(ram())) as Arc<dyn Driver>), (true, Arc::new(ram()))] {
        let exchange = disk.begin_exchange().unwrap();
        exchange.replace(driver).unwrap();
        drop(exchange);
        assert_eq!(run(&mut queue, write()).result.is_ok(), works);
        let why = disk.broken();
        assert_eq!(why.as_deref(), (!works).then_some("queue 0: no descriptors left"));
    }
}
