//! Exchanging a disk's driver, and limits that a driver loses: decisions about bios in flight are made again.
// Contract: declared

use std::sync::Arc;

use crate::common::{self, Behaviour, Device, Finish, drain, filled, plain_limits};
use blkq::testing::within_limit;
use blkq::{
    Bio, BioFlags, Data, Disk, KernelPages, LocalQueue, Operation, QueueLimits, SchedulerKind, Sector, Status,
};

/// The limits of a device whose writes need a flush or FUA to be durable, or neither.
fn cached(write_cache: bool, fua: bool) -> QueueLimits {
    QueueLimits { write_cache, fua, max_request_bytes: 8192, ..plain_limits() }
}

fn device(limits: QueueLimits, finish: Finish) -> Device {
    Device::new(limits, Behaviour { finish, ..Behaviour::default() })
}

fn fua(sector: u64, bytes: usize, mark: u8) -> Bio {
    Bio::write(Sector(sector), filled(bytes, mark), u64::from(mark)).with_flags(BioFlags::FUA)
}

/// Makes the disk continue with `device` while its queue runs. Calls `frozen` while the disk is frozen,
/// before the exchange.
fn exchange(queue: &mut LocalQueue, disk: &Disk, device: &Device, frozen: impl FnOnce(&mut LocalQueue)) {
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| disk.freeze());
        while !freezing.is_finished() {
            queue.poll();
        }
        let freeze = freezing.join().unwrap();
        frozen(queue);
        disk.begin_exchange().unwrap().replace(Arc::new(device.clone())).unwrap();
        drop(freeze);
    });
}

/// Checks that all bios succeeded, and that `writes`, each of `bytes` and filled with its mark, are durable
/// on `device`.
#[track_caller]
fn assert_durable(device: &Device, bytes: usize, writes: impl Iterator<Item = (u64, u8)>) {
    device.assert_legal();
    for (sector, mark) in writes {
        let start = sector as usize * 512;
        let durable = &device.state().durable[start..start + bytes];
        assert!(durable.iter().all(|byte| *byte == mark), "write {mark} is not durable");
    }
}

// Contract: durability
#[test]
fn writes_that_wait_during_an_exchange_are_durable_after_it() {
    for (before, after) in [
        ((true, true), (true, false)),
        ((true, true), (false, false)),
        ((true, false), (true, true)),
        ((false, false), (true, false)),
        ((false, true), (true, true)),
    ] {
        for flags in [BioFlags::FUA, BioFlags::FUA | BioFlags::PREFLUSH] {
            // As one request, and split into parts.
            for bytes in [4096, 64 << 10] {
                let old = device(cached(before.0, before.1), Finish::Random);
                let new = device(cached(after.0, after.1), Finish::Random);
                let disk = old.builder().depth(4).build().unwrap();
                let mut queue = disk.open_queue(0).unwrap();
                exchange(&mut queue, &disk, &new, |queue| {
                    for mark in 0..8 {
                        queue.submit(fua(u64::from(mark) * 128, bytes, mark + 1).with_flags(flags)).unwrap();
                    }
                });
                let completed = drain(&mut queue);
                assert!(completed.iter().all(|completion| completion.result == Ok(())), "{completed:?}");
                assert_durable(&new, bytes, (0..8).map(|mark| (u64::from(mark) * 128, mark + 1)));
                assert_eq!(old.log().len(), 0, "{before:?} to {after:?}: frozen");
            }
        }
    }
}

/// Exchanges the driver during a write. Returns false if the write completed before.
fn interrupt(flags: BioFlags) -> bool {
    const BYTES: u64 = 1 << 20;
    let (old, new) = (device(cached(true, true), Finish::Held), device(cached(true, false), Finish::Random));
    let disk = old.builder().depth(2).build().unwrap();
    let mut queue = disk.open_queue(0).unwrap();
    queue.submit(fua(0, BYTES as usize, 1).with_flags(flags)).unwrap();
    // Continues until the driver has the data, or a part of it.
    while old.count(Operation::Write) == 0 {
        old.release(1);
        queue.poll();
    }
    let freeze = std::thread::scope(|scope| {
        let freezing = scope.spawn(|| disk.freeze());
        while !freezing.is_finished() {
            old.release(1);
            queue.poll();
            std::thread::yield_now();
        }
        freezing.join().unwrap()
    });
    disk.begin_exchange().unwrap().replace(Arc::new(new.clone())).unwrap();
    drop(freeze);
    assert_eq!(drain(&mut queue).pop().unwrap().result, Ok(()));
    old.assert_legal();
    let begin = old.log().iter().map(|seen| seen.sector + seen.sectors).max().unwrap() * 512;
    if begin == BYTES {
        return false;
    }
    assert_durable(&new, (BYTES - begin) as usize, [(begin / 512, 1)].into_iter());
    assert_eq!(new.count(Operation::Flush), 1);
    true
}

// Contract: durability
#[test]
fn a_write_that_an_exchange_interrupts_is_durable() {
    within_limit(|| {
        for flags in [BioFlags::FUA, BioFlags::FUA | BioFlags::PREFLUSH] {
            while !interrupt(flags) {}
        }
    });
}

// Contract: durability
#[test]
fn writes_are_durable_when_the_driver_loses_fua() {
    for scheduler in SchedulerKind::ALL {
        let device = device(cached(true, true), Finish::Held);
        device.state().behaviour.revoke_fua = true;
        let disk = device.builder().depth(4).scheduler(scheduler).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        for mark in 0..24 {
            queue.submit(fua(u64::from(mark) * 64, 8192, mark + 1)).unwrap();
        }
        // The driver has some of the requests that were built with the flag, and the others wait for it.
        queue.poll();
        assert_eq!(device.log().len(), 4, "{scheduler}");
        device.release_all();
        assert!(drain(&mut queue).iter().all(|completion| completion.result == Ok(())));
        let flagged = device.log().iter().filter(|seen| seen.flags.contains(BioFlags::FUA)).count();
        assert_eq!(flagged, 4, "{scheduler}");
        assert_durable(&device, 8192, (0..24).map(|mark| (u64::from(mark) * 64, mark + 1)));
    }
}

#[test]
fn parts_whose_memory_the_new_driver_cannot_use_fail() {
    let old = device(QueueLimits { kernel_pages: true, ..cached(false, false) }, Finish::Random);
    let new = device(cached(false, false), Finish::Random);
    let (disk, mut queue) = old.open();
    exchange(&mut queue, &disk, &new, |queue| {
        // SAFETY: the device of the tests has no ring, and checks index and length itself.
        let pages = unsafe { KernelPages::new(0, 64 << 10) };
        let bio = Bio { data: Data::Kernel(pages), ..Bio::write(Sector(0), filled(64 << 10, 0), 1) };
        queue.submit(bio).unwrap();
    });
    assert_eq!(drain(&mut queue).pop().unwrap().result, Err(Status::NotSupported));
    assert_eq!(new.log(), []);
}

#[test]
fn parts_whose_memory_has_become_misaligned_fail() {
    let device = device(cached(false, false), Finish::Random);
    let (disk, mut queue) = device.open();
    let frozen = disk.freeze();
    let data = common::Scattered::data(&[7; 64 << 10], &[64 << 10], 1, 1);
    queue.submit(Bio { data, ..Bio::write(Sector(0), filled(64 << 10, 0), 1) }).unwrap();
    disk.set_driver(&common::DeviceSetting::MemoryAlign(512)).unwrap();
    drop(frozen);
    assert_eq!(drain(&mut queue).pop().unwrap().result, Err(Status::Invalid));
    assert_eq!(device.log(), []);
    device.assert_legal();
}
