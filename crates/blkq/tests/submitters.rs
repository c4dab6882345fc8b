//! Many threads on one disk: no I/O is lost and no thread hangs while the disk changes.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::{self, Behaviour, Device, DeviceSetting, Finish, filled, plain_limits};
use blkq::drivers::ram::Ram;
use blkq::gate::Direction;
use blkq::testing::{wait_until, within_limit};
use blkq::{
    Bio, BioFlags, ClockMode, Data, Disk, EngineThread, Operation, QueueLimits, SchedulerKind, Sector,
    Setting, Status,
};
use blkq_drivers::model::{Model, ModelCompletion, ModelOptions};

fn engine(disk: &Arc<Disk>) -> EngineThread {
    EngineThread::spawn("test", (0..disk.queue_count()).map(|index| (disk.clone(), index)).collect()).unwrap()
}

#[derive(Default)]
struct Load {
    stop: AtomicBool,
    /// The number of rounds, each a write and a read, of all threads together.
    rounds: AtomicU64,
}

impl Load {
    fn wait_for_rounds(&self, count: u64) {
        wait_until("the load makes progress", || self.rounds.load(Ordering::Relaxed) >= count);
    }
}

/// One thread that writes and reads its own part of the disk until the test stops it or an I/O fails.
fn work(disk: &Arc<Disk>, number: u64, load: &Load) -> std::io::Result<()> {
    let mut submitter = disk.submitter();
    let base = number * (32 << 10);
    let mut rounds = 0;
    while !load.stop.load(Ordering::Relaxed) {
        let value = (number * 31 + rounds) as u8 | 1;
        let out = vec![value; 4096 + 512 * (rounds as usize % 9)];
        // Data at an odd address is copied.
        let mut back = vec![0; out.len() + 1];
        let shift = rounds as usize % 2;
        submitter.write_at(&out, base)?;
        if rounds % 7 == 0 {
            submitter.flush()?;
        }
        submitter.read_at(&mut back[shift..shift + out.len()], base)?;
        assert_eq!(back[shift..shift + out.len()], out);
        if rounds % 5 == 0 {
            submitter.write_zeroes(base + 512, 1024, rounds % 2 == 0)?;
            submitter.discard(base + 2048, 512)?;
            submitter.read_at(&mut back[..4096], base)?;
            assert!(
                back[..512].iter().all(|byte| *byte == value)
                    && back[512..1536].iter().all(|byte| *byte == 0)
            );
        }
        rounds += 1;
        load.rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Runs `threads` threads of load while `meanwhile` runs.
fn under_load(disk: &Arc<Disk>, threads: u64, meanwhile: impl FnOnce(&Load)) {
    let load = Load::default();
    std::thread::scope(|scope| {
        let load = &load;
        let workers: Vec<_> = (0..threads).map(|n| scope.spawn(move || work(disk, n, load))).collect();
        meanwhile(load);
        load.stop.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|worker| worker.join().unwrap().unwrap());
    });
}

fn cached_device(seed: u64) -> Device {
    let limits = QueueLimits { write_cache: true, max_request_bytes: 6144, ..plain_limits() };
    Device::new(limits, Behaviour { finish: Finish::Random, seed, busy_every: 500, ..Behaviour::default() })
}

fn at_rest(disk: &Disk) {
    let stats = disk.stats();
    assert_eq!(stats.in_flight, [0, 0]);
    assert_eq!(stats.counter(blkq::Counter::NegativeLatencies), 0);
}

#[test]
fn threads_get_back_what_they_wrote() {
    within_limit(|| {
        let ram = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).depth(3).build().unwrap();
        let device = cached_device(3);
        let ordered = device.builder().depth(5).scheduler(blkq::SchedulerKind::MqDeadline).build().unwrap();
        let limited = cached_device(4).builder().scheduler(blkq::SchedulerKind::Kyber).build().unwrap();
        for disk in [ram, ordered, limited] {
            let engine = engine(&disk);
            under_load(&disk, 16, |load| load.wait_for_rounds(1000));
            drop(engine);
            at_rest(&disk);
        }
        device.assert_legal();
    });
}

// Contract: accepted-once
#[test]
fn callbacks_come_once_each_through_a_full_device() {
    within_limit(|| {
        let mut options = ModelOptions::new(1 << 30);
        options.completion = ModelCompletion::Random(0..=50_000, 7);
        let disk = Disk::builder(Box::new(Model::new(options).unwrap())).depth(4).build().unwrap();
        let engine = engine(&disk);
        let calls: Arc<Vec<AtomicUsize>> = Arc::new((0..8000).map(|_| AtomicUsize::new(0)).collect());
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (disk, calls) = (&disk, calls.clone());
                scope.spawn(move || {
                    let mut submitter = disk.submitter();
                    for n in 0..1000usize {
                        let (index, calls) = (thread * 1000 + n, calls.clone());
                        let bio = Bio::read(Sector(index as u64 * 3 / 2), filled(512, 0), 0);
                        submitter.submit(bio, move |result, data| {
                            assert!(result.is_ok() && matches!(data, Data::Buffer(_)));
                            calls[index].fetch_add(1, Ordering::Relaxed);
                        });
                    }
                    // A thread that waits for I/O gets its result after, or soon after, its earlier
                    // callbacks.
                    submitter.read_at(&mut [0; 512], 0).unwrap();
                });
            }
        });
        let is_called = |count: &AtomicUsize| count.load(Ordering::Relaxed) > 0;
        wait_until("every callback is called", || calls.iter().all(is_called));
        assert!(calls.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        // The counters of the last batch may be updated after its callbacks ran.
        drop(engine);
        let stats = disk.stats();
        assert_eq!(stats.groups[0].ios + stats.groups[0].merges, 8008);
    });
}

#[test]
fn neighbours_of_a_submitter_merge_unless_merging_is_off() {
    within_limit(|| {
        for merge in [true, false] {
            let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap()));
            let disk = disk.merge(merge).build().unwrap();
            let engine = engine(&disk);
            let mut submitter = disk.submitter();
            // While the disk is frozen, the engine takes no bios, so adjacent ones are staged together.
            let frozen = disk.freeze();
            for block in 0..8 {
                submitter.submit(Bio::write(Sector(8 * block), filled(4096, 1), 0), |result, _| {
                    assert_eq!(result, Ok(()));
                });
            }
            assert_eq!(disk.gate_counters().largest_in_flight[1], if merge { 1 } else { 8 });
            drop(frozen);
            submitter.flush().unwrap();
            drop(engine);
            let writes = &disk.stats().groups[1];
            assert_eq!((writes.ios, writes.merges), if merge { (1, 7) } else { (8, 0) });
        }
    });
}

// Contract: live-changes
#[test]
fn freezes_and_quiesces_in_a_storm_of_io_lose_nothing() {
    within_limit(|| {
        let device = cached_device(5);
        let disk = device.builder().depth(6).queues(2).build().unwrap();
        let engine = engine(&disk);
        under_load(&disk, 8, |load| {
            for round in 0..150 {
                let (mut frozen, mut quiesced) = (None, None);
                if round % 2 == 0 {
                    frozen = Some(disk.freeze());
                    let mut state = device.state();
                    assert_eq!(state.held, 0);
                    state.closed = true;
                } else {
                    quiesced = Some(disk.quiesce());
                    device.state().closed = true;
                }
                std::thread::sleep(Duration::from_micros(300));
                device.state().closed = false;
                let before = load.rounds.load(Ordering::Relaxed);
                drop((frozen, quiesced));
                load.wait_for_rounds(before + round % 4);
            }
        });
        drop(engine);
        device.assert_legal();
        at_rest(&disk);
    });
}

#[test]
fn a_single_submitter_continues_after_freeze_and_quiesce() {
    // With one bio at a time, only the wake-up under test makes the engine continue.
    within_limit(|| {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let _engine = engine(&disk);
        under_load(&disk, 1, |load| {
            let mut stops = 0;
            while stops < 2000 || load.rounds.load(Ordering::Relaxed) <= 10 {
                drop(disk.quiesce());
                drop(disk.freeze());
                stops += 1;
            }
        });
    });
}

// Contract: live-changes
#[test]
fn every_setting_can_change_under_load() {
    within_limit(|| {
        let device = cached_device(9);
        let disk = device.builder().queues(2).build().unwrap();
        let engine = engine(&disk);
        under_load(&disk, 8, |_| {
            use SchedulerKind::{Kyber, MqDeadline, None};
            for round in 0..8 {
                let on = round % 2 == 1;
                for setting in [
                    Setting::Depth([1, 2, 64, 128][round % 4]),
                    Setting::Scheduler([None, MqDeadline, Kyber, MqDeadline][round % 4]),
                    Setting::Merge(on),
                    Setting::Iostats(on),
                    Setting::Clock(if on { ClockMode::Cached } else { ClockMode::Precise }),
                    Setting::Batching(on),
                ] {
                    disk.set(setting).unwrap();
                }
                let bytes = [512, 4096, 1536, 8192][round % 4];
                disk.set_driver(&DeviceSetting::MaxRequest(bytes)).unwrap();
                assert_eq!(
                    disk.resize(Some((1 << 20) - 512 * round as u64)).unwrap(),
                    (1 << 20) - 512 * round as u64
                );
            }
        });
        drop(engine);
        device.assert_legal();
        at_rest(&disk);
        assert!(device.state().reloads >= 2);
    });
}

// Contract: tags
#[test]
fn queues_that_share_tags_use_each_once_and_make_progress() {
    within_limit(|| {
        for depth in [1, 2, 8] {
            let device = cached_device(11).with_shared_tags();
            let disk = device.builder().queues(3).shared_tags(true).depth(depth).build().unwrap();
            let engines: Vec<_> = (0..3)
                .map(|index| EngineThread::spawn("test", vec![(disk.clone(), index)]).unwrap())
                .collect();
            let refused = Arc::new(AtomicUsize::new(0));
            under_load(&disk, 9, |load| {
                // Submitters that do not wait must not use up the wake-ups of those that do.
                let mut submitter = disk.submitter();
                for n in 0..2000 {
                    let refused = refused.clone();
                    let bio = Bio::read(Sector(n % 64), filled(512, 0), 0).with_flags(BioFlags::NO_WAIT);
                    submitter.submit(bio, move |result, _| {
                        // Offline is possible because the engines are dropped before all bios have completed.
                        assert!(matches!(result, Ok(()) | Err(Status::Again | Status::Offline)));
                        refused.fetch_add(usize::from(result.is_err()), Ordering::Relaxed);
                    });
                }
                // This submitter could be done before the other threads have started.
                load.wait_for_rounds(100);
            });
            drop(engines);
            device.assert_legal();
            assert!(device.state().held_max <= usize::from(depth) + 3, "the flushes have slots of their own");
            at_rest(&disk);
        }
    });
}

/// Clock ticks (usually 10 ms each) for which threads of this name have run.
fn ticks_of(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let stats = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
    let fields = stats.filter_map(|stat| {
        let (begin, rest) = stat.rsplit_once(") ")?;
        begin.ends_with(name).then(|| rest.split(' ').map(str::to_owned).collect::<Vec<_>>())
    });
    fields.map(|fields| fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()).sum()
}

#[test]
fn a_queue_without_a_tag_sleeps_until_another_frees_one() {
    within_limit(|| {
        let completion = ModelCompletion::Timer(500_000_000);
        let model = Model::new(ModelOptions { completion, ..ModelOptions::new(1 << 20) }).unwrap();
        let disk = Disk::builder(Box::new(model)).queues(2).shared_tags(true).depth(1).build().unwrap();
        let _engines: Vec<_> = (0..2)
            .map(|index| EngineThread::spawn("sleeper", vec![(disk.clone(), index)]).unwrap())
            .collect();
        let (sender, results) = channel();
        for mut submitter in [disk.submitter(), disk.submitter()] {
            let sender = sender.clone();
            let read = Bio::read(Sector(0), filled(512, 0), 0);
            submitter.submit(read, move |result, _| sender.send(result).unwrap());
        }
        let before = ticks_of("sleeper");
        assert_eq!((results.recv().unwrap(), results.recv().unwrap()), (Ok(()), Ok(())));
        assert!(ticks_of("sleeper") < before + 10, "the thread does not sleep");
    });
}

// Contract: accepted-once
#[test]
fn a_closed_queue_fails_staged_bios_and_all_that_follow() {
    within_limit(|| {
        for round in 0..6 {
            let device = Device::held();
            let disk = device.builder().depth(2).build().unwrap();
            let mut queue = disk.open_queue(0).unwrap();
            let results = Arc::new(Mutex::new(Vec::new()));
            let mut stops = (None, None);
            std::thread::scope(|scope| {
                for thread in 0..12u64 {
                    let (disk, results) = (&disk, results.clone());
                    scope.spawn(move || {
                        let mut submitter = disk.submitter();
                        let bio = match thread % 4 {
                            0 => Bio::flush(0),
                            1 => Bio::write_zeroes(Sector(thread * 100), 8, 0),
                            _ => {
                                Bio::write(Sector(thread * 100), filled(4096, 1), 0).with_flags(BioFlags::FUA)
                            }
                        };
                        let result = submitter.submit_and_wait(bio).0;
                        results.lock().unwrap().push(result);
                        let again = submitter.submit_and_wait(Bio::read(Sector(0), filled(512, 0), 0)).0;
                        // The queue may still exist if the first bio completed quickly.
                        assert!(matches!(again, Ok(()) | Err(Status::Offline)));
                    });
                }
                let begin = Instant::now();
                stops.0 = (round == 3).then(|| disk.freeze());
                stops.1 = (round == 4).then(|| disk.quiesce());
                // Some bios are with the driver, some wait for tags, and some are staged.
                while begin.elapsed() < Duration::from_millis(20) {
                    if round > 0 {
                        queue.poll();
                    }
                }
                device.release_all();
                drop(queue);
            });
            let late = disk.submitter().submit_and_wait(Bio::read(Sector(0), filled(512, 0), 0)).0;
            assert_eq!(late, Err(Status::Offline));
            let results = results.lock().unwrap();
            assert_eq!(results.len(), 12);
            assert!(results.iter().all(|result| matches!(result, Ok(()) | Err(Status::Offline))));
            assert!(results.contains(&Err(Status::Offline)));
            drop(stops);
            device.assert_legal();
            at_rest(&disk);
            // The queue can be opened again, and all its tags are free.
            let mut queue = disk.open_queue(0).unwrap();
            for n in 0..10 {
                queue.submit(Bio::read(Sector(n * 9), filled(512, 0), n)).unwrap();
            }
            assert_eq!(common::drain(&mut queue).len(), 10);
            drop(queue);
            disk.set(Setting::Depth(1)).unwrap();
        }
    });
}

#[test]
fn a_closed_queue_fails_what_its_scheduler_has() {
    within_limit(|| {
        for scheduler in blkq::SchedulerKind::ALL {
            let device = cached_device(5);
            let disk = device.builder().scheduler(scheduler).build().unwrap();
            let mut queue = disk.open_queue(0).unwrap();
            let _quiesced = disk.quiesce();
            let (sender, results) = channel();
            let mut submitter = disk.submitter();
            for n in 0..40 {
                let sender = sender.clone();
                submitter.submit(Bio::write_zeroes(Sector(n * 16), 8, 0), move |result, _| {
                    let _ = sender.send(result);
                });
            }
            drop((submitter, sender));
            (0..10).for_each(|_| queue.poll());
            // More bios than kyber permits in flight are in the queue. The others are still staged.
            assert!(queue.in_flight() > 16);
            drop(queue);
            assert_eq!(results.iter().collect::<Vec<_>>(), [Err(Status::Offline); 40], "{scheduler}");
            device.assert_legal();
        }
    });
}

// Contract: accepted-once
#[test]
fn an_engine_dropped_under_load_exits_and_so_do_all_waiters() {
    within_limit(|| {
        for round in 0..10 {
            let device = cached_device(round);
            let disk = device.builder().depth(4).build().unwrap();
            let engine = engine(&disk);
            let load = Load::default();
            std::thread::scope(|scope| {
                for n in 0..12 {
                    let (disk, load) = (&disk, &load);
                    scope.spawn(move || {
                        // The thread stops by itself, with an error.
                        let error = work(disk, n, load).unwrap_err();
                        assert_eq!(error.raw_os_error(), Some(Status::Offline.errno()));
                    });
                }
                load.wait_for_rounds(12 + round * 10);
                let _frozen = (round == 9).then(|| disk.freeze());
                drop(engine);
            });
            device.assert_legal();
            at_rest(&disk);
        }
    });
}

#[test]
fn bios_that_never_become_requests_do_not_use_the_device_up() {
    within_limit(|| {
        let ram = Ram::new(1 << 20, 512, true).unwrap();
        let disk = Disk::builder(Box::new(ram)).depth(1).build().unwrap();
        let _engine = engine(&disk);
        let mut submitter = disk.submitter();
        for _ in 0..300 {
            assert!(submitter.write_at(&[0; 512], 0).is_err());
            assert!(submitter.read_at(&mut [0; 512], 1 << 20).is_err());
            submitter.read_at(&mut [], 0).unwrap();
        }
        let completed = Arc::new(AtomicUsize::new(0));
        for _ in 0..300 {
            let completed = completed.clone();
            submitter.submit(Bio::discard(Sector(0), 1, 0), move |result, _| {
                assert_eq!(result, Err(Status::ReadOnly));
                completed.fetch_add(1, Ordering::Relaxed);
            });
        }
        submitter.read_at(&mut [0; 512], 0).unwrap();
        wait_until("all complete", || completed.load(Ordering::Relaxed) == 300);
    });
}

// Contract: errors
#[test]
fn invalid_bios_complete_with_an_error() {
    within_limit(|| {
        let disk = Disk::builder(Box::new(Ram::new(1 << 20, 512, false).unwrap())).build().unwrap();
        let _engine = engine(&disk);
        let mut submitter = disk.submitter();
        let results = Arc::new(AtomicUsize::new(0));
        let mut submitted = 0;
        for operation in Operation::ALL {
            for sector in [0, 1, 2047, 2048, 1 << 55, u64::MAX - 1, u64::MAX] {
                for sectors in [0, 1, 3, 1 << 23, 1 << 55, u64::MAX] {
                    for flags in [BioFlags::empty(), BioFlags::all(), BioFlags::FUA, BioFlags::NO_MERGE] {
                        let bio = Bio {
                            operation,
                            flags,
                            sector: Sector(sector),
                            sectors,
                            data: filled(512, 0).into(),
                            user_data: 0,
                        };
                        let good = sector.checked_add(sectors).is_some_and(|end| end <= 2048);
                        let results = results.clone();
                        submitted += 1;
                        submitter.submit(bio, move |result, _| {
                            assert!(
                                good || result.is_err() || operation == Operation::Flush,
                                "{operation:?} {sector} {sectors}"
                            );
                            results.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                }
            }
        }
        let (mut few, offset) = ([0; 512], 1u64 << 40);
        assert!(submitter.read_at(&mut few, 100).is_err());
        assert!(submitter.read_at(&mut few[..100], 0).is_err());
        assert!(submitter.read_at(&mut few, offset).is_err());
        assert!(submitter.discard(u64::MAX - 511, 512).is_err());
        assert!(submitter.write_zeroes(0, u64::MAX - 511, false).is_err());
        submitter.read_at(&mut few, 0).unwrap();
        wait_until("all complete", || results.load(Ordering::Relaxed) == submitted);
    });
}

// Contract: accepted-once
#[test]
fn a_no_wait_bio_is_returned_or_fails_when_full() {
    within_limit(|| {
        let device = Device::held();
        let disk = device.builder().depth(2).build().unwrap();
        let _engine = engine(&disk);
        let completed = Arc::new(AtomicUsize::new(0));
        let mut submitter = disk.submitter();
        let mut accepted = 0;
        for n in 0..200u64 {
            let completed = completed.clone();
            let callback = Box::new(move |_, _| _ = completed.fetch_add(1, Ordering::Relaxed));
            match submitter.try_submit(Bio::read(Sector(n * 9), filled(512, 7), 0), callback) {
                Ok(()) => accepted += 1,
                Err((bio, _)) => assert_eq!(bio.data.into_buffer().unwrap()[0], 7),
            }
        }
        device.release_all();
        submitter.read_at(&mut [0; 512], 0).unwrap();
        wait_until("all complete", || completed.load(Ordering::Relaxed) >= accepted);
        assert!(accepted >= 2);
    });
}

#[test]
fn memory_that_a_live_change_makes_unfit_is_copied() {
    within_limit(|| {
        let mut memory = vec![5; 1025];
        let shift = usize::from((memory.as_ptr() as usize).is_multiple_of(512));
        let odd = &mut memory[shift..shift + 1024];
        for direction in [Direction::Read, Direction::Write] {
            let device = Device::plain(Behaviour::default());
            let disk = device.builder().build().unwrap();
            let _engine = engine(&disk);
            let mut submitter = disk.submitter();
            let mut io = |odd: &mut [u8]| match direction {
                Direction::Read => submitter.read_at(odd, 512),
                Direction::Write => submitter.write_at(odd, 512),
            };
            // The bio is in flight: it was submitted as it is, and waits for the freeze to end.
            let frozen = disk.freeze();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| io(odd));
                wait_until("it is submitted", || {
                    disk.gate_counters().largest_in_flight[direction as usize] > 0
                });
                disk.set_driver(&DeviceSetting::MemoryAlign(512)).unwrap();
                drop(frozen);
                waiting.join().unwrap().unwrap();
            });
            // The alignment changes before the bio is submitted.
            disk.set_driver(&DeviceSetting::MemoryAlign(1)).unwrap();
            io(odd).unwrap();
            disk.set_driver(&DeviceSetting::MemoryAlign(512)).unwrap();
            io(odd).unwrap();
            device.assert_legal();
        }
    });
}

#[test]
fn without_an_owner_a_callback_runs_before_submit_returns() {
    let disk = Device::plain(Behaviour::default()).builder().build().unwrap();
    let here = std::thread::current().id();
    let (sender, results) = channel();
    disk.submitter().submit(Bio::read(Sector(0), filled(512, 0), 0), move |result, _| {
        sender.send((result, std::thread::current().id())).unwrap();
    });
    assert_eq!(results.try_recv(), Ok((Err(Status::Offline), here)));
    assert!(results.try_recv().is_err(), "the callback is called once");
}
