//! Data in memory that only operations of the ring can access: splitting, not merging, the flush machine, and
//! rejection for drivers without support.

use crate::common::{Behaviour, Device, Finish, drain, filled, plain_limits};
use blkq::random::Random;
use blkq::{Bio, BioFlags, Data, KernelPages, Operation, QueueLimits, SchedulerKind, Sector, Status};

fn limits() -> QueueLimits {
    QueueLimits { kernel_pages: true, ..plain_limits() }
}

/// A bio of `sectors` with the buffer `index`, and `index` as its `user_data`.
fn bio(operation: Operation, sector: u64, sectors: u64, index: u16) -> Bio {
    // SAFETY: the device of the tests has no ring, and checks index and length itself.
    let pages = unsafe { KernelPages::new(index, (sectors << 9) as u32) };
    Bio {
        operation,
        flags: BioFlags::empty(),
        sector: Sector(sector),
        sectors,
        data: Data::Kernel(pages),
        user_data: u64::from(index),
    }
}

/// Bytes that depend on their position and on `seed`.
fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    Random::new(seed).fill(&mut bytes);
    bytes
}

// Contract: declared
#[test]
fn the_parts_of_a_split_bio_are_parts_of_the_buffer() {
    let limits =
        QueueLimits { max_request_bytes: 5 << 9, chunk_bytes: 8 << 9, max_segment_bytes: 3 << 9, ..limits() };
    for finish in [Finish::AtOnce, Finish::Random] {
        let device = Device::new(limits.clone(), Behaviour { finish, ..Behaviour::default() });
        let (_disk, mut queue) = device.open();
        device.state().kernel_buffers = vec![pattern(100 << 9, 1), vec![0; 100 << 9]];
        queue.submit(bio(Operation::Write, 13, 100, 0)).unwrap();
        assert!(
            drain(&mut queue)
                .iter()
                .all(|done| done.result == Ok(()) && matches!(done.data, Data::Kernel(_)))
        );
        assert!(device.log().len() > 30, "three sectors each");
        assert_eq!(device.state().current[13 << 9..113 << 9], pattern(100 << 9, 1));
        queue.submit(bio(Operation::Read, 13, 100, 1)).unwrap();
        drain(&mut queue);
        assert_eq!(device.state().kernel_buffers[1], pattern(100 << 9, 1));
        device.assert_legal();
    }
}

// Contract: data
#[test]
fn bios_with_kernel_pages_never_merge() {
    for scheduler in SchedulerKind::ALL {
        let device = Device::new(limits(), Behaviour::default());
        let disk = device.builder().scheduler(scheduler).build().unwrap();
        let mut queue = disk.open_queue(0).unwrap();
        device.state().kernel_buffers = (0..12).map(|index| pattern(512, index)).collect();
        // Forwards, backwards, and between ordinary bios.
        for sector in [4, 5, 6, 3, 2, 8, 10] {
            queue.submit(bio(Operation::Write, sector, 1, sector as u16)).unwrap();
        }
        for sector in [7, 9, 11] {
            queue.submit(Bio::write(Sector(sector), filled(512, 0xee), sector)).unwrap();
        }
        drain(&mut queue);
        assert_eq!((device.log().len(), disk.stats().groups[1].merges), (10, 0), "{scheduler}");
        for sector in [4, 5, 6, 3, 2, 8, 10] {
            assert_eq!(device.state().current[sector << 9..(sector + 1) << 9], pattern(512, sector as u64));
        }
        device.assert_legal();
    }
}

#[test]
fn the_flush_machine_supports_kernel_pages() {
    for fua in [true, false] {
        let limits = QueueLimits { write_cache: true, fua, ..limits() };
        let device = Device::new(limits, Behaviour::default());
        let (_disk, mut queue) = device.open();
        device.state().kernel_buffers = vec![pattern(4096, 3)];
        queue.submit(bio(Operation::Write, 8, 8, 0).with_flags(BioFlags::FUA | BioFlags::PREFLUSH)).unwrap();
        assert_eq!(drain(&mut queue)[0].result, Ok(()));
        assert_eq!(device.state().durable[8 << 9..16 << 9], pattern(4096, 3));
        assert_eq!(device.log().iter().filter(|seen| seen.pages.is_some()).count(), 1);
        device.assert_legal();
    }
}

// Contract: declared
#[test]
fn kernel_pages_need_driver_support_and_enough_length() {
    for (limits, sectors, want) in [(plain_limits(), 8, Status::NotSupported), (limits(), 9, Status::Invalid)]
    {
        let device = Device::new(limits, Behaviour::default());
        let (_disk, mut queue) = device.open();
        let bio = Bio { sectors, ..bio(Operation::Read, 0, 8, 0) };
        queue.submit(bio).unwrap();
        assert_eq!(drain(&mut queue)[0].result, Err(want));
        assert!(device.log().is_empty());
    }
}
