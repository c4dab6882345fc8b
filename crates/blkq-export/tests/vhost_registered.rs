//! Guest memory that is registered with the engines' rings.

use std::os::fd::AsFd;

use crate::front_end::*;
use blkq::testing::wait_until;
use blkq_drivers::r#loop::DirectIo;
use blkq_export::vhost_user::{Event, RegistrationLimits};
use rustix::fs::{FallocateFlags, fallocate, ftruncate};

use crate::vhost::{Served, SharedMemory, image, serve_registered};

const IN: u32 = 0;
const OUT: u32 = 1;
/// Guest address of a second region, directly after the first one.
const SECOND: u64 = GUEST + MEMORY as u64;
const PAGE: usize = 4096;

fn serve(queues: usize) -> Served {
    serve_registered(image(DirectIo::On, None), queues, RegistrationLimits::default())
}

fn registered(served: &Served) -> u64 {
    served.device.counters().registered
}

/// Whether the kernel's vectored calls can use registered memory (Linux 6.15).
fn has_vectors() -> bool {
    let probe = || blkq::ring::probe().unwrap()(blkq::io_uring::opcode::ReadvFixed::CODE);
    // On a thread of its own, because the kernel interrupts system calls of a thread that had a ring.
    std::thread::spawn(probe).join().unwrap()
}

/// Number of requests with registered memory in `count` calls of [`exchange`].
fn of_exchanges(count: u64) -> u64 {
    if has_vectors() { 3 * count } else { count }
}

fn registered_bytes(served: &Served) -> Result<u64, String> {
    served.device.front_end().unwrap().registered_memory.unwrap()
}

/// Writes two pages that are not adjacent in memory, and reads them again to other pages, adjacent and not.
fn exchange(front: &mut FrontEnd, ring: usize, value: u8) {
    let page = |at: usize| (FrontEnd::guest(at), PAGE as u32);
    let (one, two) = (DATA, DATA + 4 * PAGE);
    front.memory.bytes(one, PAGE).fill(value);
    front.memory.bytes(two, PAGE).fill(value ^ 0xff);
    assert_eq!(front.run_pieces(ring, OUT, 64, &[page(one), page(two)]), 0);
    let (back, again) = (2 * DATA, 2 * DATA + 8 * PAGE);
    assert_eq!(front.run(ring, IN, 64, back, 2 * PAGE as u32), 0);
    assert!(front.memory.bytes(back, PAGE).iter().all(|byte| *byte == value));
    assert!(front.memory.bytes(back + PAGE, PAGE).iter().all(|byte| *byte == value ^ 0xff));
    assert_eq!(front.run_pieces(ring, IN, 64, &[page(again), page(again + 2 * PAGE)]), 0);
    assert!(front.memory.bytes(again, PAGE).iter().all(|byte| *byte == value));
    assert!(front.memory.bytes(again + 2 * PAGE, PAGE).iter().all(|byte| *byte == value ^ 0xff));
}

#[test]
fn all_engines_move_bytes_through_registered_memory() {
    let served = serve(2);
    let mut front = FrontEnd::started(&served.path, FEATURES, 2);
    assert_eq!(registered_bytes(&served), Ok(MEMORY as u64));
    for round in 0..10u8 {
        exchange(&mut front, usize::from(round % 2), round);
    }
    wait_until("the requests are counted", || registered(&served) == of_exchanges(10));
    // Data that is not aligned is copied, although its memory is registered.
    front.memory.bytes(DATA + 8, PAGE).fill(3);
    assert_eq!(front.run(0, OUT, 0, DATA + 8, PAGE as u32), 0);
    assert_eq!(front.run(1, IN, 0, 2 * DATA, PAGE as u32), 0);
    assert!(front.memory.bytes(2 * DATA, PAGE).iter().all(|byte| *byte == 3));
    wait_until("the requests are counted", || registered(&served) == of_exchanges(10) + 1);
    assert_eq!(served.device.counters().bounced, 1);
}

/// Shows the risk that docs/vhost-user.md warns of, and that these requests use the registration.
#[test]
fn i_o_reaches_pinned_pages_after_the_guest_freed_them() {
    let served = serve(1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let (one, two, old, new) = (DATA, DATA + 2 * PAGE, 5, 6);
    let page = |at: usize| (FrontEnd::guest(at), PAGE as u32);
    front.memory.bytes(one, 3 * PAGE).fill(old);
    let free_pages = |front: &mut FrontEnd| {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&front.memory.file, hole, one as u64, 3 * PAGE as u64).unwrap();
        front.memory.bytes(one, 3 * PAGE).fill(new);
    };
    let content = |front: &mut FrontEnd, sector: u64| {
        assert_eq!(front.run(0, IN, sector, 2 * DATA, PAGE as u32), 0);
        front.memory.bytes(2 * DATA, PAGE).to_vec()
    };
    free_pages(&mut front);
    assert_eq!(front.run(0, OUT, 0, one, PAGE as u32), 0);
    assert_eq!(content(&mut front, 0), [old; PAGE]);
    assert_eq!(front.run_pieces(0, OUT, 16, &[page(one), page(two)]), 0);
    let vectored = if has_vectors() { old } else { new };
    assert_eq!(content(&mut front, 24), [vectored; PAGE]);
    // If the front end passes the table of memory again, the pages that exist now are registered.
    front.begin(FEATURES);
    assert_eq!(front.run(0, OUT, 0, one, PAGE as u32), 0);
    assert_eq!(content(&mut front, 0), [new; PAGE]);
}

#[test]
fn regions_are_added_and_removed_under_load() {
    let served = serve(2);
    let mut front = FrontEnd::started(&served.path, FEATURES, 2);
    for round in 0..8u8 {
        let second = SharedMemory::new(MEMORY);
        for ring in 0..2 {
            for number in 0..8 {
                front.submit(ring, IN, 512 * ring as u64, DATA * (2 + ring) + number * PAGE, PAGE as u32);
            }
            front.kick(ring);
        }
        assert_eq!(front.add_region(SECOND, MEMORY as u64, second.file.as_fd()), 0);
        assert_eq!(registered_bytes(&served), Ok(2 * MEMORY as u64));
        (0..2).for_each(|ring| assert!(front.wait(ring, 8).iter().all(|it| it.1 == 0)));
        // Across the border of the two regions, and only in the second one.
        front.memory.bytes(MEMORY - PAGE, PAGE).fill(round);
        second.slice(0, 2 * PAGE).fill(round + 100);
        assert_eq!(front.run_pieces(0, OUT, 64, &[(SECOND - PAGE as u64, 3 * PAGE as u32)]), 0);
        assert_eq!(front.run_pieces(1, IN, 64, &[(SECOND + 8 * PAGE as u64, 3 * PAGE as u32)]), 0);
        assert!(second.slice(8 * PAGE, PAGE).iter().all(|byte| *byte == round));
        assert!(second.slice(9 * PAGE, 2 * PAGE).iter().all(|byte| *byte == round + 100));
        for _ in 0..4 {
            front.submit_pieces(1, IN, 64, &[(SECOND + 16 * PAGE as u64, 3 * PAGE as u32)]);
        }
        front.kick(1);
        let taken = 25 * u64::from(round) + 22;
        wait_until("the requests are taken", || served.device.counters().requests == taken);
        front.remove_region(SECOND, MEMORY as u64);
        assert!(front.wait(1, 4).iter().all(|it| it.1 == 0), "the ring was drained before the removal");
        assert_eq!(registered_bytes(&served), Ok(MEMORY as u64));
        exchange(&mut front, 0, round);
    }
    // All requests are counted but those across the border.
    wait_until("the requests are counted", || registered(&served) == 8 * (21 + of_exchanges(1)));
}

#[test]
fn memory_that_does_not_fit_is_served_unregistered() {
    let (locked, all) = (Some(3 * MEMORY as u64), Some(MEMORY as u64 + 1));
    for (limits, says) in [
        (
            RegistrationLimits { locked_max: locked, memory_left: None },
            "32 MiB of locked memory, but 24 MiB may be",
        ),
        (
            RegistrationLimits { locked_max: None, memory_left: all },
            "8 MiB are left to the cgroup of this process",
        ),
    ] {
        let served = serve_registered(image(DirectIo::On, None), 2, limits);
        let mut front = FrontEnd::started(&served.path, FEATURES, 2);
        assert_eq!(registered_bytes(&served), Ok(MEMORY as u64));
        exchange(&mut front, 0, 1);
        let second = SharedMemory::new(MEMORY);
        assert_eq!(front.add_region(SECOND, MEMORY as u64, second.file.as_fd()), 0);
        let report = served.report();
        assert!(
            matches!(&report.event, Event::MemoryUnregistered(why) if why.contains(says)),
            "{:?}",
            report.event
        );
        assert!(registered_bytes(&served).unwrap_err().contains(says));
        exchange(&mut front, 0, 2);
        exchange(&mut front, 1, 3);
        wait_until("the requests are counted", || registered(&served) == of_exchanges(1));
        // Without the second region, the memory is within the limits again.
        front.remove_region(SECOND, MEMORY as u64);
        assert_eq!(registered_bytes(&served), Ok(MEMORY as u64));
        exchange(&mut front, 1, 4);
        wait_until("the requests are counted", || registered(&served) == of_exchanges(2));
    }
}

#[test]
fn memory_of_a_file_on_disk_is_served_unregistered() {
    let served = serve(1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let path = format!("vhost-registered-{}", std::process::id());
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(MEMORY as u64).unwrap();
    if front.add_region(SECOND, MEMORY as u64, file.as_fd()) != 0 {
        // The file system of this directory is not allowed for guest memory.
        return;
    }
    let report = served.report();
    assert!(
        matches!(&report.event, Event::MemoryUnregistered(why) if why.contains("tmpfs")),
        "{:?}",
        report.event
    );
    exchange(&mut front, 0, 1);
}

#[test]
fn a_region_is_registered_in_pieces_of_1_gib() {
    const GIB: usize = 1 << 30;
    const BYTES: usize = GIB + MEMORY;
    let served = serve(1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let (base, memory) = (4 << 30, SharedMemory::new(BYTES));
    assert_eq!(front.add_region(base, BYTES as u64, memory.file.as_fd()), 0);
    assert_eq!(registered_bytes(&served), Ok((BYTES + MEMORY) as u64));
    let piece = |at: usize| (base + at as u64, 4 * PAGE as u32);
    for (number, at) in [0, GIB - 4 * PAGE, GIB - 2 * PAGE, GIB, BYTES - 4 * PAGE].into_iter().enumerate() {
        for (page, bytes) in memory.slice(at, 4 * PAGE).chunks_mut(PAGE).enumerate() {
            bytes.fill((16 * number + page) as u8);
        }
        assert_eq!(front.run_pieces(0, OUT, 128, &[piece(at)]), 0);
        assert_eq!(front.run_pieces(0, IN, 128, &[piece(GIB / 2)]), 0);
        assert_eq!(memory.slice(at, 4 * PAGE), memory.slice(GIB / 2, 4 * PAGE), "{at:#x}");
    }
    // One of the ten requests is across the border of two registrations.
    wait_until("the requests are counted", || registered(&served) == 9);
}

/// Pinned pages stay when the file is truncated: their requests complete without access to the mapping.
#[test]
fn registered_memory_that_is_truncated_stops_no_daemon() {
    let served = serve(1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let second = SharedMemory::new(MEMORY);
    assert_eq!(front.add_region(SECOND, MEMORY as u64, second.file.as_fd()), 0);
    second.slice(0, PAGE).fill(9);
    ftruncate(&second.file, 0).unwrap();
    assert_eq!(front.run_pieces(0, OUT, 0, &[(SECOND, PAGE as u32)]), 0);
    assert_eq!(front.run(0, IN, 0, DATA, PAGE as u32), 0);
    assert!(front.memory.bytes(DATA, PAGE).iter().all(|byte| *byte == 9));
    // Data that is copied is accessed through the mapping, so the ring stops.
    front.submit_pieces(0, OUT, 0, &[(SECOND + 8, PAGE as u32)]);
    front.kick(0);
    served.until_truncated(0);
    drop(front);
    served.until_idle();
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    exchange(&mut front, 0, 7);
}

#[test]
fn the_memory_of_a_disconnected_front_end_is_unpinned() {
    let pinned = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let served = serve(2);
    for _ in 0..5 {
        let front = FrontEnd::started(&served.path, FEATURES, 2);
        assert!(pinned() >= 2 * (MEMORY as u64 >> 10), "{}", pinned());
        drop(front);
        served.until_idle();
    }
    // In a process with other tests, pages may be pinned by those.
    if std::env::var_os("NEXTEST").is_some() {
        wait_until("the memory is unpinned", || pinned() < MEMORY as u64 >> 10);
    }
    served.device.stop(true).unwrap();
}
