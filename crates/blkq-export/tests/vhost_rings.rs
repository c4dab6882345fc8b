//! vhost-user-blk with a front end that behaves in unusual ways.

use std::os::fd::AsFd;

use crate::front_end::*;
use crate::vhost::{self, image, ram, serve, serve_disk, unique};
use blkq::testing::wait_until;
use blkq::{Disk, ErrorPolicy, Setting};
use blkq_drivers::fault::{Fault, FaultSpec};
use blkq_drivers::r#loop::{DirectIo, LoopSetting};
use blkq_export::vhost_user::Event;
use rustix::event::{EventfdFlags, eventfd};

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const F_RO: u64 = 1 << 5;

#[test]
fn all_types_of_requests_complete() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    front.memory.bytes(DATA, 4096).fill(9);
    assert_eq!(front.run(0, OUT, 8, DATA, 4096), 0);
    assert_eq!(front.run(0, IN, 8, DATA + 8192, 4096), 0);
    assert_eq!(front.memory.bytes(DATA + 8192, 4096), &[9; 4096]);
    assert_eq!(front.run(0, FLUSH, 0, 0, 0), 0);
    assert_eq!(front.run(0, GET_ID, 0, DATA, 20), 0);
    assert_eq!(front.memory.bytes(DATA, 20), b"a disk of a test wit");
    // An unknown type; beyond the end of the disk; a partial sector; no data.
    assert_eq!(front.run(0, 77, 0, DATA, 512), 2);
    assert_eq!(front.run(0, IN, vhost::SIZE >> 9, DATA, 512), 1);
    assert_eq!(front.run(0, IN, 0, DATA, 100), 1);
    assert_eq!(front.run(0, IN, 0, DATA, 0), 0);
    let counted = || (served.device.counters().errors, served.device.counters().requests);
    wait_until("the requests are counted", || counted() == (3, 8));
}

/// The driver virtio_uml of Linux waits for the acknowledgement of this very message.
#[test]
fn the_message_that_negotiates_replies_gets_one() {
    let served = serve(ram(), 1);
    let mut connection = Connection::new(&served.path);
    connection.send(SET_OWNER, &[], &[]);
    let offered = connection.ask(GET_PROTOCOL_FEATURES, &[]).number();
    connection.done(SET_PROTOCOL_FEATURES, &offered.to_ne_bytes(), &[]);
    // Without the feature there is no acknowledgement: the next message is the reply to the next request.
    connection.raw([SET_PROTOCOL_FEATURES, 1 | NEED_REPLY, 8], &0u64.to_ne_bytes(), &[]);
    assert_eq!(connection.ask(GET_PROTOCOL_FEATURES, &[]).number(), offered);
}

/// Buffers that are aligned to 512 bytes, for a file that requires 4096.
#[test]
fn misaligned_memory_is_copied_and_counted() {
    let served = serve(image(DirectIo::Auto, Some(4096)), 1);
    let align = served.disk.limits().memory_align as usize;
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    for (number, at) in [DATA, DATA + align / 2, DATA + 4096 + 8].into_iter().enumerate() {
        let value = number as u8 + 1;
        front.memory.bytes(at, 8192).fill(value);
        assert_eq!(front.run(0, OUT, number as u64 * 16, at, 8192), 0);
        front.memory.bytes(at, 8192).fill(0);
        assert_eq!(front.run(0, IN, number as u64 * 16, at, 8192), 0);
        assert!(front.memory.bytes(at, 8192).iter().all(|byte| *byte == value));
        // An aligned read returns the same data.
        assert_eq!(front.run(0, IN, number as u64 * 16, DATA + (1 << 20), 8192), 0);
        assert!(front.memory.bytes(DATA + (1 << 20), 8192).iter().all(|byte| *byte == value));
    }
    let expected = if align > 8 { 4 } else { 0 };
    wait_until("the requests are counted", || served.device.counters().bounced == expected);
}

#[test]
fn misaligned_requests_survive_a_switch_to_direct_io() {
    let image = image(DirectIo::Off, Some(4096));
    let fault = Fault::new(image.into(), "delay=20ms".parse::<FaultSpec>().unwrap()).unwrap();
    let disk = Disk::builder(Box::new(fault)).depth(1).build().unwrap();
    let served = serve_disk(disk, std::env::temp_dir().join(format!("blkq-direct-{}", std::process::id())));
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    for number in 0..8 {
        // All requests but the first wait for the only tag.
        front.submit(0, IN, number * 8, DATA + 8, 4096);
    }
    front.kick(0);
    wait_until("requests are in flight", || served.device.front_end().unwrap().in_flight > 0);
    served.disk.set_driver(&LoopSetting::DirectIo(DirectIo::On)).unwrap();
    assert!(front.wait(0, 8).iter().all(|(_, status, _)| *status == 0));
}

#[test]
fn a_stopped_ring_is_drained_and_can_be_restarted() {
    let spec: FaultSpec = "delay=30ms".parse().unwrap();
    let served = serve(Box::new(Fault::new(ram().into(), spec).unwrap()), 2);
    let mut front = FrontEnd::started(&served.path, FEATURES, 2);
    for _ in 0..3 {
        for ring in 0..2 {
            for number in 0..8 {
                front.submit(ring, OUT, number * 8, DATA, 4096);
            }
            front.kick(ring);
        }
        // Requests that were taken complete before the stop.
        wait_until("a request is in flight", || served.device.front_end().unwrap().in_flight > 0);
        let bases = [front.stop(0), front.stop(1)];
        for (ring, base) in bases.into_iter().enumerate() {
            assert_eq!(front.used_index(ring), base, "all requests that were taken have completed");
            front.start(ring as u32, base);
            assert!(front.wait(ring, 8).iter().all(|(_, status, _)| *status == 0));
        }
        // A new table of memory in between has no effect.
        front.begin(FEATURES);
    }
}

#[test]
fn writes_are_durable_when_the_write_cache_is_off() {
    let served = serve(image(DirectIo::Off, None), 1);
    let flushes = || served.disk.stats().counter(blkq::Counter::FlushesSent);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let write_flushes = |front: &mut FrontEnd| {
        let before = flushes();
        assert_eq!(front.run(0, OUT, 0, DATA, 4096), 0);
        flushes() - before
    };
    assert!(served.disk.limits().write_cache);
    let fua = u64::from(!served.disk.limits().fua);
    assert_eq!(write_flushes(&mut front), 0, "a write cache, unless the driver says otherwise");
    let writeback = |value: u8| [words(&[32, 1, 0]), vec![value]].concat();
    front.connection.done(SET_CONFIG, &writeback(0), &[]);
    assert_eq!(write_flushes(&mut front), fua);
    let config = front.connection.ask(GET_CONFIG, &[words(&[32, 1, 0]), vec![0]].concat());
    assert_eq!(config.payload[12..], [0]);
    // A reset keeps the setting, because front ends continue to show drivers the last value.
    for (code, payload) in [(SET_STATUS, longs(&[0])), (RESET_DEVICE, vec![])] {
        front.stop(0);
        front.connection.done(code, &payload, &[]);
        front.connection.done(SET_FEATURES, &FEATURES.to_ne_bytes(), &[]);
        let base = front.used_index(0);
        front.start(0, base);
        assert_eq!(write_flushes(&mut front), fua, "{code}");
    }
    front.connection.done(SET_CONFIG, &writeback(1), &[]);
    assert_eq!(write_flushes(&mut front), 0);
    // Other fields and other values cannot be written.
    for payload in
        [writeback(2), [words(&[31, 1, 0]), vec![0]].concat(), [words(&[32, 2, 0]), vec![0; 2]].concat()]
    {
        assert_eq!(front.connection.acknowledged(SET_CONFIG, &payload, &[]), 1);
    }
    drop(front);
    served.until_idle();
    // For a driver without flushes there is no write cache.
    let without_flush = [F_VERSION_1 | F_PROTOCOL, F_VERSION_1 | F_PROTOCOL | F_CONFIG_WCE];
    for features in without_flush {
        let mut front = FrontEnd::started(&served.path, features, 1);
        assert_eq!(write_flushes(&mut front), fua);
        let config = front.connection.ask(GET_CONFIG, &[words(&[32, 1, 0]), vec![0]].concat());
        assert_eq!(config.payload[12..], [0], "{features:#x}");
        drop(front);
        served.until_idle();
    }
}

#[test]
fn requests_beyond_what_was_advertised_fail() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let capacity = served.disk.limits().capacity_bytes >> 9;
    assert_eq!(front.run(0, OUT, capacity - 8, DATA, 4096), 0);
    for sector in [capacity - 7, capacity, u64::MAX - 7] {
        assert_eq!(front.run(0, OUT, sector, DATA, 4096), 1, "{sector}");
        assert_eq!(front.run(0, IN, sector, DATA, 4096), 1, "{sector}");
    }
    let config = front.connection.ask(GET_CONFIG, &[words(&[0, 60, 0]), vec![0; 60]].concat());
    let word = |at: usize| u32::from_ne_bytes(config.payload[12 + at..16 + at].try_into().unwrap());
    for (kind, most) in [(DISCARD, word(36)), (WRITE_ZEROES, word(48))] {
        let mut range = |sector: u64, sectors: u32| {
            front.memory.bytes(DATA, 16).copy_from_slice(&[longs(&[sector]), words(&[sectors, 0])].concat());
            front.run(0, kind, 0, DATA, 16)
        };
        assert!(most > 0);
        assert_eq!(range(0, 8), 0);
        assert_eq!(range(capacity - 8, 16), 1);
        assert_eq!(range(0, most.saturating_add(1)), 1);
    }
}

/// A killed daemon may have offered other features, because its disk was read-only, or was not.
#[test]
fn features_of_another_daemon_are_acknowledged() {
    let served = serve(ram(), 1);
    for (read_only, feature) in [(false, F_RO), (true, F_WRITE_ZEROES)] {
        served.disk.set(Setting::ReadOnly(read_only)).unwrap();
        let mut front = FrontEnd::new(&served.path, F_FLUSH | F_PROTOCOL | F_VERSION_1, 1);
        assert_eq!(front.connection.ask(GET_FEATURES, &[]).number() & feature, 0, "it is not offered");
        let features = F_FLUSH | F_PROTOCOL | F_VERSION_1 | feature;
        front.connection.done(SET_FEATURES, &features.to_ne_bytes(), &[]);
        front.start(0, 0);
        assert_eq!(front.run(0, IN, 0, DATA, 512), 0);
        assert_eq!(front.run(0, OUT, 0, DATA, 512), u8::from(read_only), "as the disk has it");
        drop(front);
        served.until_idle();
    }
}

#[test]
fn a_full_error_eventfd_has_no_effect() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let error = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    front.connection.done(SET_VRING_ERR, &longs(&[0]), &[error.as_fd()]);
    // The front end can clear O_NONBLOCK, because it shares the open file description.
    rustix::fs::fcntl_setfl(&error, rustix::fs::OFlags::empty()).unwrap();
    rustix::io::write(&error, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    front.make_available(0, SIZE);
    front.kick(0);
    assert!(matches!(served.report().event, Event::RingRejected(0, _)));
    assert!(front.connection.ask(GET_FEATURES, &[]).number() != 0);
}

#[test]
fn only_the_ring_that_breaks_a_rule_is_stopped() {
    let served = serve(ram(), 2);
    let mut front = FrontEnd::started(&served.path, FEATURES, 2);
    let error = eventfd(0, EventfdFlags::empty()).unwrap();
    front.connection.done(SET_VRING_ERR, &longs(&[0]), &[error.as_fd()]);
    // A chain with a loop.
    front.descriptor(0, 0, FrontEnd::guest(DATA), 16, 1, 1);
    front.descriptor(0, 1, FrontEnd::guest(DATA), 16, 1, 0);
    front.make_available(0, 0);
    front.kick(0);
    let report = served.report();
    assert!(matches!(&report.event, Event::RingRejected(0, why) if why.contains("loop")), "{report:?}");
    rustix::io::read(&error, &mut [0; 8]).unwrap();
    assert_eq!(front.connection.ask(GET_STATUS, &[]).number(), 0x40, "it needs a reset");
    let rings = served.device.front_end().unwrap().rings;
    assert!(rings[0].1.is_some() && rings[1].1.is_none());
    // The other ring is served; after a reset both are.
    assert_eq!(front.run(1, OUT, 0, DATA, 512), 0);
    front.connection.done(RESET_DEVICE, &[], &[]);
    let mut front = FrontEnd { rings: vec![Ring::new(0, FEATURES)], ..front };
    front.memory.bytes(0, 64 << 10).fill(0);
    front.connection.done(SET_FEATURES, &FEATURES.to_ne_bytes(), &[]);
    front.start(0, 0);
    assert_eq!(front.run(0, OUT, 0, DATA, 512), 0);
}

/// The front end fills its call eventfd and never reads it. The engine must not block.
#[test]
fn a_full_call_eventfd_has_no_effect() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    for _ in 0..50 {
        rustix::io::write(&front.rings[0].call, &(u64::MAX - 2).to_ne_bytes()).unwrap();
        let _ = rustix::io::write(&front.rings[0].call, &1u64.to_ne_bytes());
        front.submit(0, OUT, 0, DATA, 512);
        front.kick(0);
        wait_until("the request completes", || !front.completed(0).is_empty());
        rustix::io::read(&front.rings[0].call, &mut [0; 8]).unwrap();
    }
    rustix::io::write(&front.rings[0].call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    front.submit(0, OUT, 0, DATA, 512);
    front.kick(0);
    wait_until("the request completes", || !front.completed(0).is_empty());
    served.device.stop(true).unwrap();
}

/// The guest reads the ring only after a call, and does not know that its front end replaces descriptors.
#[test]
fn no_call_is_lost_when_its_descriptor_is_replaced() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    for round in 0..2000 {
        front.rings[0].want_call(&front.memory);
        front.submit(0, OUT, 0, DATA, 512);
        front.kick(0);
        let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        if round % 3 == 0 {
            front.connection.done(SET_VRING_CALL, &longs(&[1 << 8]), &[]);
        }
        front.connection.done(SET_VRING_CALL, &longs(&[0]), &[call.as_fd()]);
        front.rings[0].call = call;
        loop {
            assert!(front.is_called(0, 20), "round {round}: no call");
            if !front.completed(0).is_empty() {
                break;
            }
        }
    }
    served.device.stop(true).unwrap();
}

/// User-mode Linux uses a stream socket, on which each call is a message of 8 bytes.
#[test]
fn calls_can_go_to_a_socket_even_if_it_is_full_or_closed() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    let (reader, writer) = std::os::unix::net::UnixStream::pair().unwrap();
    front.connection.done(SET_VRING_CALL, &longs(&[0]), &[writer.as_fd()]);
    front.rings[0].call = reader.into();
    for _ in 0..3 {
        assert_eq!(front.run(0, OUT, 0, DATA, 512), 0);
    }
    writer.set_nonblocking(true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    writer.set_nonblocking(false).unwrap();
    let completes = |front: &mut FrontEnd| {
        front.submit(0, OUT, 0, DATA, 512);
        front.kick(0);
        wait_until("the request completes", || !front.completed(0).is_empty());
    };
    completes(&mut front);
    front.rings[0].call = eventfd(0, EventfdFlags::empty()).unwrap();
    completes(&mut front);
    served.device.stop(true).unwrap();
}

#[test]
fn truncated_memory_stops_only_its_ring() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    assert_eq!(front.run(0, OUT, 0, DATA, 512), 0);
    front.submit(0, OUT, 0, DATA, 512);
    rustix::fs::ftruncate(&front.memory.file, 0).unwrap();
    front.kick(0);
    served.until_truncated(0);
    drop(front);
    served.until_idle();
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    assert_eq!(front.run(0, IN, 0, DATA, 512), 0);
}

#[test]
fn a_ring_without_a_kick_eventfd_is_polled() {
    let served = serve(ram(), 1);
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    front.connection.done(SET_VRING_KICK, &longs(&[1 << 8]), &[]);
    for _ in 0..3 {
        front.submit(0, OUT, 0, DATA, 512);
        assert_eq!(front.wait(0, 1)[0].1, 0);
    }
}

/// A front end pauses directly after it connects, while other rings fill the engine's queue.
#[test]
fn a_ring_that_stops_begins_recovered_requests_first() {
    const WRITE_ZEROES: u32 = 13;
    const RANGES: usize = 32;
    const BUSY: u32 = 4;
    let fault = Fault::new(ram().into(), "delay=50ms".parse::<FaultSpec>().unwrap()).unwrap();
    let served = serve(Box::new(fault), 1);
    let mut front = FrontEnd::new(&served.path, FEATURES, BUSY + 1);
    let ranges: Vec<u8> =
        (0..RANGES as u64).flat_map(|number| [longs(&[number * 16]), words(&[8, 0])].concat()).collect();
    front.memory.bytes(DATA, ranges.len()).copy_from_slice(&ranges);
    let submit = |front: &mut FrontEnd, ring| front.submit(ring, WRITE_ZEROES, 0, DATA, ranges.len() as u32);
    for ring in 1..=BUSY as usize {
        (0..SIZE / 4).for_each(|_| _ = submit(&mut front, ring));
    }
    let sizes = [BUSY as u16 + 1, SIZE].map(u16::to_ne_bytes).concat();
    let inflight = front.connection.ask(GET_INFLIGHT_FD, &[longs(&[0, 0]), sizes, vec![0; 4]].concat());
    let file = inflight.file.as_ref().unwrap().as_fd();
    // A daemon has taken three requests and completed none of them. It has not taken a fourth one.
    let heads = [0; 4].map(|_| submit(&mut front, 0));
    let mut record = vec![0; 16 + 16 * usize::from(SIZE)];
    record[8..16].copy_from_slice(&[1, SIZE, 0, 0].map(u16::to_ne_bytes).concat());
    for (number, head) in heads.into_iter().take(3).enumerate() {
        let at = 16 + 16 * usize::from(head);
        record[at] = 1;
        record[at + 8..at + 16].copy_from_slice(&(number as u64).to_ne_bytes());
    }
    assert_eq!(rustix::io::pwrite(file, &record, 0).unwrap(), record.len());
    front.connection.done(SET_INFLIGHT_FD, &inflight.payload, &[file]);
    front.prepare(0, 0);
    (1..=BUSY).for_each(|ring| front.start(ring, 0));
    let in_flight = || served.device.front_end().unwrap().in_flight;
    wait_until("requests wait for room", || in_flight() > u64::from(SIZE / 2));
    // The messages that start and stop the ring arrive together.
    let start = [words(&[SET_VRING_ENABLE, 1, 8, 0, 1]), words(&[GET_VRING_BASE, 1, 8, 0, 0])].concat();
    front.connection.bytes(&start, &[]);
    let base = u32::from_ne_bytes(front.connection.reply().unwrap().payload[4..8].try_into().unwrap());
    assert!((3..=4).contains(&base), "{base}");
    let done: Vec<u16> = front.completed(0).iter().map(|it| it.0).collect();
    assert_eq!(done, heads[..base as usize], "all requests that were taken have completed");
}

/// QEMU's microvm asks for a record for smaller rings than its driver then uses.
#[test]
fn a_driver_may_use_larger_rings_than_its_record_is_for() {
    for features in [FEATURES, FEATURES | F_PACKED] {
        let served = serve(ram(), 1);
        let mut front = FrontEnd::new(&served.path, features, 2);
        let record = front.keep_record_of(SIZE / 4);
        front.start_all();
        for ring in 0..2 {
            // Enough requests to use each descriptor.
            (0..SIZE).for_each(|_| assert_eq!(front.run(ring, 1, 0, DATA, 512), 0));
        }
        assert_eq!(served.device.front_end().unwrap().rings[1].1, None);
        // The next daemon recognizes the size of the record.
        served.device.stop(true).unwrap();
        let next = serve(ram(), 1);
        front.reconnect(&next.path, features, &record);
        (0..2).for_each(|ring| assert_eq!(front.run(ring, 1, 0, DATA, 512), 0));
    }
}

/// crosvm asks for no acknowledgements, sets the socket for requests of the back end before it negotiates
/// features, has no record of requests in flight, and disables a ring before it stops the ring.
#[test]
fn a_front_end_without_acknowledgements_can_sleep_and_reset() {
    let served = serve(ram(), 2);
    let mut front = FrontEnd {
        connection: Connection::new(&served.path),
        memory: Memory::new(),
        shared: MEMORY,
        rings: (0..2).map(|ring| Ring::new(ring, FEATURES)).collect(),
    };
    // The protocol features CONFIG, MQ, BACKEND_REQ and REPLY_ACK.
    const WANTED: u64 = 1 << 9 | 1 | 1 << 5 | 1 << 3;
    let (_channel, its) = std::os::unix::net::UnixStream::pair().unwrap();
    front.connection.send(SET_OWNER, &[], &[]);
    assert_eq!(front.connection.ask(GET_FEATURES, &[]).number() & FEATURES, FEATURES);
    assert_eq!(front.connection.ask(GET_PROTOCOL_FEATURES, &[]).number() & WANTED, WANTED);
    front.connection.send(SET_PROTOCOL_FEATURES, &longs(&[WANTED]), &[]);
    front.connection.send(SET_BACKEND_REQ_FD, &[], &[its.as_fd()]);
    assert!(front.connection.ask(GET_QUEUE_NUM, &[]).number() >= 2);
    // The flag marks a field that the driver may write.
    let config = front.connection.ask(GET_CONFIG, &[words(&[0, 8, 1]), vec![0; 8]].concat());
    assert_eq!(config.payload[12..], (vhost::SIZE >> 9).to_ne_bytes());
    for round in 0..6u8 {
        front.connection.send(SET_FEATURES, &longs(&[FEATURES]), &[]);
        let region = longs(&[GUEST, MEMORY as u64, front.memory.user(), 0]);
        let table = [words(&[1, 0]), region].concat();
        front.connection.send(SET_MEM_TABLE, &table, &[front.memory.file.as_fd()]);
        for ring in 0..2u32 {
            let base = front.used_index(ring as usize);
            front.describe(ring, base, |connection, code, payload, files| {
                connection.send(code, payload, files)
            });
            front.connection.send(SET_VRING_ENABLE, &words(&[ring, 1]), &[]);
        }
        for ring in 0..2 {
            front.memory.bytes(DATA, 4096).fill(round + 1);
            assert_eq!(front.run(ring, OUT, 8, DATA, 4096), 0);
            assert_eq!(front.run(ring, IN, 8, DATA + 8192, 4096), 0);
            assert!(front.memory.bytes(DATA + 8192, 4096).iter().all(|byte| *byte == round + 1));
        }
        for ring in 0..2 {
            front.connection.send(SET_VRING_ENABLE, &words(&[ring, 0]), &[]);
            assert_eq!(front.stop(ring), front.used_index(ring as usize));
        }
        if round % 2 == 1 {
            front.rings.iter_mut().for_each(|ring| ring.clear(&front.memory));
        }
    }
    assert_eq!(served.device.counters().violations, 0);
    assert_eq!(served.device.take_reports(), []);
}

/// A front end stops its rings one at a time, and waits for each.
// Contract: errors
#[test]
fn a_ring_stops_while_another_one_holds_requests() {
    let rules: FaultSpec = "error=ENOSPC,op=write".parse().unwrap();
    let driver = Fault::new(image(DirectIo::Off, None).into(), rules).unwrap();
    let disk = Disk::builder(Box::new(driver)).queues(2).error_policy(ErrorPolicy::Hold).build().unwrap();
    let served = serve_disk(disk, unique("sock"));
    for (requests, disconnects) in [(2, false), (4, true)] {
        let mut front = FrontEnd::started(&served.path, FEATURES, 2);
        front.submit(1, OUT, 0, DATA, 4096);
        front.kick(1);
        wait_until("the write is held", || served.disk.held() == 1);
        // The flush waits for that write.
        front.submit(0, FLUSH, 0, 0, 0);
        front.kick(0);
        wait_until("the flush is taken", || served.device.counters().requests == requests);
        if !disconnects {
            assert_eq!((front.stop(0), front.stop(1)), (1, 1));
            assert_eq!(front.wait(0, 1)[0].1, 0);
            assert_eq!(front.wait(1, 1)[0].1, 1);
        }
        drop(front);
        served.until_idle();
        assert_eq!(served.disk.held(), 0);
    }
    // Errors are reported instead of held only during the stop.
    let mut front = FrontEnd::started(&served.path, FEATURES, 1);
    front.submit(0, OUT, 0, DATA, 4096);
    front.kick(0);
    wait_until("the write is held", || served.disk.held() == 1);
}
