//! Front ends that send arbitrary messages. The device must continue to serve others.

use blkq::testing::wait_until;
use std::fs::File;
use std::os::fd::AsFd;

use crate::front_end::*;
use crate::vhost::{Served, ram, serve};
use blkq_export::vhost_user::Event;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn check(served: &Served) {
    wait_until("the place is free", || served.device.connection_count() == 0);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
    drop(front);
    wait_until("it is gone", || served.device.connection_count() == 0);
}

#[test]
fn messages_that_violate_the_protocol_close_the_connection() {
    let served = serve(ram(), 1);
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    let file = File::open("/dev/null").unwrap();
    let (event, file) = (event.as_fd(), file.as_fd());
    let region = longs(&[0, 1 << 20, 0, 0]);
    let cases: Vec<([u32; 3], Vec<u8>, Vec<std::os::fd::BorrowedFd>)> = vec![
        // Invalid versions, flags and lengths.
        ([GET_FEATURES, 0, 0], vec![], vec![]),
        ([GET_FEATURES, 5, 0], vec![], vec![]),
        ([GET_FEATURES, 1, 1 << 20], vec![], vec![]),
        ([GET_FEATURES, 1, 8], vec![0; 8], vec![]),
        ([SET_FEATURES, 1, 4], vec![0; 4], vec![]),
        ([SET_VRING_NUM, 1, 4], vec![0; 4], vec![]),
        // Unknown requests, and requests that were not negotiated.
        ([0, 1, 0], vec![], vec![]),
        ([22, 1, 0], vec![], vec![]),
        ([9999, 1, 0], vec![], vec![]),
        ([RESET_DEVICE, 1, 0], vec![], vec![]),
        ([GET_STATUS, 1, 0], vec![], vec![]),
        ([GET_INFLIGHT_FD, 1, 24], vec![1; 24], vec![]),
        ([SET_BACKEND_REQ_FD, 1, 0], vec![], vec![]),
        // Missing or superfluous descriptors.
        ([SET_VRING_KICK, 1, 8], longs(&[0]), vec![]),
        ([SET_VRING_CALL, 1, 8], longs(&[1 << 8]), vec![event]),
        ([SET_VRING_CALL, 1, 8], longs(&[0]), vec![event, event]),
        ([SET_OWNER, 1, 0], vec![], vec![event]),
        ([SET_MEM_TABLE, 1, 40], [words(&[1, 0]), region.clone()].concat(), vec![]),
        ([SET_MEM_TABLE, 1, 40], [words(&[1, 0]), region.clone()].concat(), vec![file, file]),
        ([SET_MEM_TABLE, 1, 8], words(&[u32::MAX, 0]), vec![]),
        // Invalid files, rings and values.
        ([SET_VRING_KICK, 1, 8], longs(&[0]), vec![file]),
        ([SET_VRING_KICK, 1, 8], longs(&[64]), vec![event]),
        ([SET_VRING_KICK, 1, 8], longs(&[1 << 9]), vec![event]),
        ([SET_MEM_TABLE, 1, 40], [words(&[1, 0]), region.clone()].concat(), vec![file]),
        ([SET_MEM_TABLE, 1, 40], [words(&[1, 0]), region].concat(), vec![event]),
        ([SET_VRING_NUM, 1, 8], words(&[0, 1 << 20]), vec![]),
        ([SET_VRING_NUM, 1, 8], words(&[64, 1]), vec![]),
        ([SET_VRING_NUM, 1, 8], words(&[u32::MAX, 1]), vec![]),
        ([SET_VRING_ENABLE, 1, 8], words(&[0, 2]), vec![]),
        ([SET_FEATURES, 1, 8], longs(&[1 << 33]), vec![]),
        ([SET_PROTOCOL_FEATURES, 1, 8], longs(&[1 << 40]), vec![]),
        ([GET_CONFIG, 1, 12], words(&[0, 0, 0]), vec![]),
        ([GET_CONFIG, 1, 12], words(&[u32::MAX, 8, 0]), vec![]),
        ([GET_CONFIG, 1, 12], words(&[0, 8, 0]), vec![]),
        ([ADD_MEM_REG, 1, 40], vec![0; 40], vec![file]),
        ([REM_MEM_REG, 1, 40], vec![0; 40], vec![]),
    ];
    let before = descriptors();
    for (header, payload, files) in &cases {
        let mut connection = Connection::new(&served.path);
        wait_until("it is let in", || served.device.connection_count() == 1);
        connection.raw(*header, payload, files);
        assert!(connection.is_closed(), "{header:?} {payload:?}");
        wait_until("it is gone", || served.device.connection_count() == 0);
    }
    wait_until("all are counted", || served.device.counters().violations == cases.len() as u64);
    assert!(served.device.take_reports().len() <= 8, "the log is not flooded");
    drop(cases);
    wait_until("no descriptor is left", || descriptors() <= before);
    check(&served);
}

#[test]
fn a_refused_request_is_answered_and_changes_nothing() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let file = File::open("/dev/null").unwrap();
    let file = file.as_fd();
    let mut refused = |code: u32, payload: Vec<u8>, files: &[std::os::fd::BorrowedFd<'_>]| {
        assert_eq!(front.connection.acknowledged(code, &payload, files), 1, "{code}");
    };
    refused(9999, vec![], &[]);
    refused(SET_VRING_NUM, words(&[0, 128]), &[]);
    refused(SET_VRING_BASE, words(&[0, 1]), &[]);
    refused(SET_VRING_KICK, longs(&[0]), &[file]);
    refused(SET_FEATURES, longs(&[F_VERSION_1]), &[]);
    refused(SET_FEATURES, longs(&[1 << 33 | FEATURES]), &[]);
    refused(SET_STATUS, longs(&[256]), &[]);
    refused(ADD_MEM_REG, longs(&[0, 1 << 20, 4096, 0, 0]), &[front.memory.file.as_fd()]);
    refused(SET_INFLIGHT_FD, vec![0; 20], &[file]);
    refused(SET_CONFIG, [words(&[0, 8, 0]), vec![0; 8]].concat(), &[]);
    let report = served.report();
    assert!(matches!(&report.event, Event::Refused(why) if why.contains("unknown request")), "{report:?}");
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
}

/// QEMU does this on one connection, for a disk that is unplugged and plugged in again.
#[test]
fn a_front_end_can_start_again_on_its_connection() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
    // While a ring is served, the memory stays.
    front.connection.send(SET_OWNER, &[], &[]);
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
    let base = front.stop(0);
    front.connection.send(SET_OWNER, &[], &[]);
    let region = longs(&[0, GUEST, MEMORY as u64, front.memory.start.addr() as u64, 0]);
    front.connection.done(ADD_MEM_REG, &region, &[front.memory.file.as_fd()]);
    front.start(0, base);
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
}

#[test]
fn a_second_front_end_is_rejected() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let before = descriptors();
    for _ in 0..100 {
        assert!(Connection::new(&served.path).is_closed());
    }
    assert_eq!(served.device.counters().refused_connections, 100);
    assert_eq!(served.report().event, Event::Occupied);
    wait_until("no descriptor is left", || descriptors() <= before);
    assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
}

#[test]
fn a_silent_front_end_does_not_block_others() {
    for reads in [false, true] {
        let served = serve(ram(), 1);
        let mut front = FrontEnd::started(&served.path, FEATURES, 1);
        if reads {
            // Sends half a message.
            write_all(&mut front.connection, &[1, 0, 0]);
        } else {
            front.connection.0.set_nonblocking(true).unwrap();
            // Until neither side reads.
            let message = words(&[GET_FEATURES, 1, 0]);
            while std::io::Write::write(&mut front.connection.0, &message).is_ok_and(|sent| sent == 12) {}
        }
        // The ring of this front end is served meanwhile.
        assert_eq!(front.run(0, 1, 0, DATA, 512), 0);
        assert!(served.device.stop(false).is_err());
        served.device.stop(true).unwrap();
        assert!(!served.path.exists());
    }
}

/// Each request is followed by a call, which the driver does not read.
#[test]
fn a_front_end_that_fills_its_call_eventfd_blocks_no_engine() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 2);
    // Ring 1 is served by the same engine.
    withstand_refills(&mut front, DATA, || (), || served.device.stop(true).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_messages_leave_the_device_usable(
        messages in proptest::collection::vec(
            (0..45u32, any::<bool>(), proptest::collection::vec(any::<u8>(), 0..48), 0..3usize, 0..4u64),
            0..40,
        ),
        negotiated: bool,
    ) {
        let served = serve(ram(), 2);
        let front = if negotiated {
            FrontEnd::started(&served.path, FEATURES, 2)
        } else {
            FrontEnd { connection: Connection::new(&served.path), memory: Memory::new(), shared: MEMORY, rings: vec![Ring::new(0, FEATURES)] }
        };
        let event = eventfd(0, EventfdFlags::empty()).unwrap();
        let files = [event.as_fd(), front.memory.file.as_fd()];
        front.connection.0.set_nonblocking(true).unwrap();
        for (code, plausible, mut payload, count, number) in messages {
            if plausible {
                payload = longs(&[number, number * 4096, 4096, 0, 0][..[0, 1, 2, 5][number as usize % 4]]);
            }
            front.connection.raw([code, 1 | ((number as u32 & 1) * 8), payload.len() as u32], &payload, &files[..count]);
        }
        drop(front);
        check(&served);
        served.device.stop(false).unwrap();
    }
}
