//! Large reads are split into parts if the client negotiated structured replies.

use std::sync::atomic::Ordering;

use crate::nbd::*;
use blkq::random::Random;
use blkq::testing::wait_until;
use blkq::{Disk, StatGroup};
use blkq_drivers::fault::{Fault, FaultSpec};
use blkq_export::nbd::NbdOptions;
use blkq_export::nbd::reply::ReplyStyle;

const PART: usize = 128 << 10;
const SPLIT_STYLES: [ReplyStyle; 2] = [ReplyStyle::Structured, ReplyStyle::Extended];
/// `NBD_CMD_FLAG_DF`: the reply must not be split.
const DF: u16 = 1 << 2;
const EIO: u32 = 5;

fn pattern(bytes: usize) -> Vec<u8> {
    let mut pattern = vec![0; bytes];
    Random::new(7).fill(&mut pattern);
    pattern
}

#[test]
fn a_large_read_is_split_unless_the_client_forbids_it() {
    let served = serve(ram(), 1, options());
    let data = pattern(2 * PART + 4096);
    for style in SPLIT_STYLES {
        let mut client = served.client(style);
        assert_eq!(client.write(4096, &data), 0);
        for (flags, length, chunks) in
            [(0, data.len(), 3), (0, PART + 512, 2), (0, PART, 1), (DF, data.len(), 1), (0, 512, 1)]
        {
            client.send(0, flags, 9, 4096, length as u64, &[]);
            let (mut seen, mut content) = (0, vec![0; length]);
            loop {
                let (flags, kind, cookie, payload) = client.chunk();
                assert_eq!((kind, cookie), (1, 9));
                let offset = u64::from_be_bytes(payload[..8].try_into().unwrap()) as usize - 4096;
                content[offset..][..payload.len() - 8].copy_from_slice(&payload[8..]);
                seen += 1;
                if flags == 1 {
                    break;
                }
            }
            assert_eq!(seen, chunks, "{style:?} {length} {flags}");
            assert!(content == data[..length], "{style:?} {length} {flags}");
        }
    }
    let mut simple = served.client(ReplyStyle::Simple);
    assert!(simple.read(4096, data.len()) == data);
    wait_until("the split reads are counted", || served.server.counters().split_reads == 4);
}

#[test]
fn switching_off_split_reads_affects_new_clients_only() {
    let options = options();
    let switches = options.switches.clone();
    let served = serve(ram(), 1, options);
    let mut before = served.client(ReplyStyle::Structured);
    before.read(0, 512);
    switches.split_reads.store(false, Ordering::Relaxed);
    let mut after = served.client(ReplyStyle::Structured);
    for (client, parts) in [(&mut before, true), (&mut after, false)] {
        client.send(0, 0, 1, 0, 2 * PART as u64, &[]);
        let (flags, ..) = client.chunk();
        assert_eq!(flags == 0, parts);
    }
}

#[test]
fn parts_that_complete_out_of_order_have_the_right_offset() {
    for style in SPLIT_STYLES {
        let late = "delay=2ms,op=read,rate=1/2".parse::<FaultSpec>().unwrap();
        let served = serve(Box::new(Fault::new(ram().into(), late).unwrap()), 1, options());
        let mut client = served.client(style);
        let data = pattern(8 << 20);
        assert_eq!(client.write(0, &data), 0);
        for cookie in 0..8u64 {
            client.send(0, 0, cookie, cookie * 65536, 7 << 20, &[]);
        }
        for _ in 0..8 {
            let reply = client.reply(|_| 0);
            let from = reply.cookie as usize * 65536;
            assert!(reply.error == 0 && reply.payload == data[from..from + (7 << 20)], "{}", reply.cookie);
        }
    }
}

#[test]
fn a_split_read_reports_exactly_one_error() {
    // The fault hits the first part, one in the middle, the last one, two of them, or all.
    for (fault, parts) in [("0-1", 3), ("300K-301K", 3), ("511K-512K", 3), ("200K-400K", 1), ("0-512K", 0)] {
        let fault = format!("error=EIO,op=read,range={fault}").parse::<FaultSpec>().unwrap();
        let served = serve(Box::new(Fault::new(ram().into(), fault).unwrap()), 1, options());
        for style in SPLIT_STYLES {
            let mut client = served.client(style);
            client.send(0, 0, 1, 0, 512 << 10, &[]);
            let mut content = 0;
            loop {
                let (flags, kind, _, payload) = client.chunk();
                if flags == 1 {
                    assert_eq!((kind, u32::from_be_bytes(payload[..4].try_into().unwrap())), (0x8001, EIO));
                    break;
                }
                assert_eq!((kind, payload.len()), (1, 8 + PART));
                content += 1;
            }
            assert_eq!(content, parts);
            assert_eq!(client.read(1 << 20, 512 << 10), vec![0; 512 << 10], "the client is still served");
            let idle = || served.server.connections().iter().all(|one| one.in_flight == 0);
            wait_until("every request is answered", idle);
        }
    }
}

#[test]
fn more_parts_than_one_send_can_take_are_all_sent() {
    let served = serve(slow(1_000_000..=1_000_000), 1, options());
    let mut client = served.client(ReplyStyle::Structured);
    // The replies need more than 1024 iovecs: each of the 256 replies has three parts with headers.
    let length = 2 * PART + 512;
    for cookie in 0..256u64 {
        client.send(0, 0, cookie, cookie * 4096, length as u64, &[]);
    }
    // The client reads nothing until then.
    wait_until("200 replies are complete", || {
        let reads = &served.disk.stats()[StatGroup::Read];
        reads.ios + reads.merges >= 3 * 200
    });
    for _ in 0..256 {
        let reply = client.reply(|_| 0);
        assert_eq!((reply.error, reply.payload.len()), (0, length));
    }
}

#[test]
fn clients_that_disconnect_in_a_split_read_leak_no_memory() {
    // The memory suffices for one large request, so memory that one client leaks would block another.
    let limits = NbdOptions { buffered_bytes_total: 32 << 20, ..options() };
    let served = serve(slow(10_000..=5_000_000), 1, limits);
    for round in 0..12 {
        let mut client = served.client(SPLIT_STYLES[round % 2]);
        for cookie in 0..4 {
            client.send(0, 0, cookie, cookie << 23, 8 << 20, &[]);
        }
        if round % 3 > 0 {
            client.chunk();
        }
    }
    let mut client = served.client(ReplyStyle::Extended);
    assert_eq!(client.read(0, 32 << 20).len(), 32 << 20);
    wait_until("the others are disconnected", || served.server.connection_count() == 1);
}

#[test]
fn a_client_that_stops_reading_parts_is_disconnected() {
    let limits = NbdOptions { transfer_timeout_s: 1, ..options() };
    let served = serve(ram(), 1, limits);
    let mut stuck = served.client(ReplyStyle::Structured);
    stuck.send(0, 0, 1, 0, 4 << 20, &[]);
    stuck.chunk();
    assert_eq!(served.server.connection_count(), 1);
    wait_until("the stuck client is disconnected", || served.server.connection_count() == 0);
}

#[test]
fn parts_of_a_large_read_do_not_delay_other_clients() {
    let stuck = "stuck=600s,op=read,range=0-32M".parse::<FaultSpec>().unwrap();
    // A disk with fewer tags than a large read has parts.
    let disk = Disk::builder(Box::new(Fault::new(ram().into(), stuck).unwrap())).depth(64).merge(false);
    let served = serve_disk(disk.build().unwrap(), options());
    let mut large = served.client(ReplyStyle::Structured);
    large.send(0, 0, 1, 0, 32 << 20, &[]);
    wait_until("parts of the large read are stuck", || served.disk.stats().in_flight[0] > 0);
    let mut small = served.client(ReplyStyle::Structured);
    for offset in 0..100u64 {
        assert_eq!(small.read((32 << 20) + offset * 4096, 4096).len(), 4096);
    }
    assert!(served.server.connections().iter().any(|one| one.in_flight == 1), "the large read waits");
    served.disk.set_driver(&FaultSpec::default()).unwrap();
    assert_eq!(large.reply(|_| 0).payload.len(), 32 << 20);
    let most = served.disk.stats().in_flight_max[0];
    assert!(most <= 33, "{most} at once: 32 parts of 4 MiB together, and the small read");
}
