//! Unaligned NBD requests, compared with an array of bytes, and several of them at the same time.
// Contract: data

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::nbd::*;
use blkq::drivers::ram::Ram;
use blkq::random::Random;
use blkq::testing::wait_until;
use blkq::{Driver, SchedulerKind, Setting, StatGroup};
use blkq_drivers::fault::{Fault, FaultSpec};
use blkq_drivers::r#loop::{DirectIo, DriverOptions, LoopDevice};
use blkq_export::nbd::reply::ReplyStyle;
use blkq_export::nbd::{NbdOptions, RangeLock};
use proptest::prelude::*;

const STYLES: [ReplyStyle; 3] = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended];
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;

fn bytes() -> NbdOptions {
    NbdOptions { unaligned: Some(Arc::new(RangeLock::default())), ..options() }
}

fn ram_of(bytes: u64, block: u32) -> Box<dyn Driver> {
    Box::new(Ram::new(bytes, block, false).unwrap())
}

fn faulty(bytes: u64, block: u32, spec: &str) -> Box<dyn Driver> {
    Box::new(Fault::new(ram_of(bytes, block).into(), spec.parse::<FaultSpec>().unwrap()).unwrap())
}

/// An image file whose size need not be a multiple of a block. It is removed when this is dropped.
struct Image(PathBuf);

impl Image {
    fn new(bytes: u64) -> Image {
        let path = socket_path().with_extension("img");
        File::create(&path).unwrap().set_len(bytes).unwrap();
        Image(path)
    }

    fn driver(&self, sector: u32, direct_io: DirectIo) -> Box<dyn Driver> {
        let options = DriverOptions {
            logical_block_bytes: Some(sector),
            partial_block: true,
            direct_io,
            ..DriverOptions::new(&self.0)
        };
        Box::new(LoopDevice::open(&options).unwrap())
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Read,
    Write { value: u8, fua: bool },
    Zeroes { no_hole: bool, fast: bool },
    Trim,
    Cache,
    Status,
    Flush,
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64, u64, usize)>> {
    let step = prop_oneof![
        3 => Just(Step::Read),
        4 => (1u8.., any::<bool>()).prop_map(|(value, fua)| Step::Write { value, fua }),
        2 => (any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(no_hole, fast)| Step::Zeroes { no_hole, fast }),
        1 => Just(Step::Trim),
        1 => Just(Step::Cache),
        1 => Just(Step::Status),
        1 => Just(Step::Flush),
    ];
    prop::collection::vec((step, any::<u64>(), any::<u64>(), 0usize..3), 1..40)
}

fn take_step(client: &mut Client<UnixStream>, model: &mut [u8], block: u64, step: &(Step, u64, u64, usize)) {
    let (step, offset, length, _) = step;
    let size = model.len() as u64;
    let offset = offset % size;
    // Most ranges are short, some are long, some are whole blocks.
    let length = match length % 4 {
        0 => length >> 2,
        1 => (length >> 2) % (3 * block),
        2 => (length >> 2) % 100,
        _ => (length >> 2) / block * block,
    };
    let length = length % (size - offset) + 1;
    let range = offset as usize..(offset + length) as usize;
    match *step {
        Step::Read => assert_eq!(client.read(offset, length as usize), model[range.clone()], "{range:?}"),
        Step::Write { value, fua } => {
            let data: Vec<u8> = range.clone().map(|at| value ^ at as u8).collect();
            assert_eq!(client.call(1, u16::from(fua), offset, length, &data).0, 0);
            model[range].copy_from_slice(&data);
        }
        Step::Zeroes { no_hole, fast } => {
            let flags = u16::from(no_hole) << 1 | u16::from(fast) << 4;
            let error = client.call(6, flags, offset, length, &[]).0;
            if fast && (offset | length) & (block - 1) != 0 {
                assert_eq!(error, ENOTSUP);
            } else {
                assert_eq!(error, 0);
                model[range].fill(0);
            }
        }
        Step::Trim => {
            assert_eq!(client.call(4, 0, offset, length, &[]).0, 0);
            // A trim leaves each byte as it was or makes it zero. The final comparison shows that it changed
            // nothing outside.
            let now = client.read(offset, length as usize);
            for (old, new) in model[range].iter_mut().zip(now) {
                assert!(new == 0 || new == *old);
                *old = new;
            }
        }
        Step::Cache => assert_eq!(client.call(5, 0, offset, length, &[]).0, 0),
        Step::Status if client.style == ReplyStyle::Simple => {}
        Step::Status => check_status(client, model, offset, length),
        Step::Flush => assert_eq!(client.call(3, 0, 0, 0, &[]).0, 0),
    }
}

/// Checks that the extents do not exceed the requested range, and that extents of zeroes contain zeroes.
fn check_status(client: &mut Client<UnixStream>, model: &[u8], offset: u64, length: u64) {
    let (error, status) = client.call(7, 0, offset, length, &[]);
    assert_eq!(error, 0);
    let (head, width) = if client.style == ReplyStyle::Extended { (8, 8) } else { (4, 4) };
    let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let mut at = offset;
    for extent in status[head..].chunks(2 * width) {
        let (bytes, flags) = (number(&extent[..width]), number(&extent[width..]));
        assert!(bytes > 0 && at + bytes <= offset + length);
        let range = at as usize..(at + bytes) as usize;
        assert!(flags & 2 == 0 || model[range].iter().all(|byte| *byte == 0));
        at += bytes;
    }
    assert!(at > offset);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// Three clients on one or two queues take their steps one after the other.
    #[test]
    fn unaligned_requests_behave_like_an_array_of_bytes(
        steps in steps(), blocks in 1u64..40, block_log2 in 9u32..13, two_queues: bool,
    ) {
        let block = 1u64 << block_log2;
        let served = serve(ram_of(blocks * block, block as u32), 1 + usize::from(two_queues), bytes());
        let mut clients = STYLES.map(|style| served.client(style));
        let mut model = vec![0; (blocks * block) as usize];
        for step in &steps {
            take_step(&mut clients[step.3], &mut model, block, step);
        }
        for client in &mut clients {
            prop_assert_eq!(&client.read(0, model.len()), &model);
        }
    }

    /// As the test before, with files whose end is not the end of a block. The files must keep their size.
    #[test]
    fn a_file_is_served_to_its_last_byte(
        steps in steps(), size in prop::sample::select(vec![1u64, 511, 513, 4095, 10_001, 1_000_003]),
        large: bool, direct: bool, queues in 1usize..3,
    ) {
        let image = Image::new(size);
        let (block, mode) = (if large { 4096 } else { 512 }, if direct { DirectIo::On } else { DirectIo::Off });
        let served = serve(image.driver(block, mode), queues, bytes());
        let mut clients = STYLES.map(|style| served.client(style));
        prop_assert!(clients.iter().all(|client| client.size == size));
        let mut model = vec![0; size as usize];
        for step in &steps {
            take_step(&mut clients[step.3], &mut model, u64::from(block), step);
        }
        for client in &mut clients {
            prop_assert_eq!(client.call(3, 0, 0, 0, &[]).0, 0);
            prop_assert_eq!(&client.read(0, model.len()), &model);
            prop_assert_eq!(client.call(0, 0, size, 1, &[]).0, EINVAL);
            prop_assert_eq!(client.write(size, &[1]), ENOSPC);
        }
        drop((clients, served));
        prop_assert_eq!(std::fs::read(&image.0).unwrap(), model);
    }
}

/// The file grows and the device is resized during a write to a byte of the incomplete last block.
#[test]
fn a_write_to_the_end_keeps_bytes_that_a_resize_adds() {
    const SIZE: u64 = 10_001;
    for (queues, direct_io) in [(1, DirectIo::Off), (2, DirectIo::Off), (1, DirectIo::On)] {
        let image = Image::new(SIZE);
        let driver = Fault::new(
            image.driver(4096, direct_io).into(),
            "delay=100ms,op=read".parse::<FaultSpec>().unwrap(),
        );
        let options = bytes();
        let lock = options.unaligned.clone().unwrap();
        let served = serve(Box::new(driver.unwrap()), queues, options);
        let mut client = served.client(ReplyStyle::Structured);
        client.send(1, 0, 1, SIZE - 1, 1, &[1]);
        wait_until("the last block is being read", || served.disk.stats().in_flight[0] == 1);
        let mut file = File::options().append(true).open(&image.0).unwrap();
        std::io::Write::write_all(&mut file, &[2; 10_000]).unwrap();
        assert_eq!(lock.resize(&served.disk, None).unwrap(), SIZE + 10_000);
        assert_eq!(client.reply(|_| 0).error, 0);
        assert_eq!(served.client(ReplyStyle::Simple).call(3, 0, 0, 0, &[]).0, 0);
        let found = std::fs::read(&image.0).unwrap();
        assert!(
            found[SIZE as usize - 1..] == [&[1][..], &[2; 10_000]].concat(),
            "{queues} queues, {direct_io:?}"
        );
    }
}

/// Clients on several engines write neighboring bytes of the same blocks, and must read what they wrote.
#[test]
fn writes_to_parts_of_one_block_do_not_undo_each_other() {
    const SIZE: u64 = 64 << 10;
    for queues in [1, 3] {
        write_neighboring_ranges(faulty(SIZE, 4096, "seed=1;delay=200us,p99=2ms"), SIZE, queues);
        for mode in [DirectIo::On, DirectIo::Off] {
            let image = Image::new(SIZE + 97 * 3);
            write_neighboring_ranges(image.driver(512, mode), SIZE + 97 * 3, queues);
        }
    }
}

fn write_neighboring_ranges(driver: Box<dyn Driver>, size: u64, queues: usize) {
    const CLIENTS: u64 = 4;
    const STRIDE: u64 = 97;
    let served = serve(driver, queues, bytes());
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let served = &served;
            scope.spawn(move || {
                let mut client = served.client(STYLES[number as usize % 3]);
                let ranges: Vec<u64> = (0..size / STRIDE).filter(|index| index % CLIENTS == number).collect();
                for round in 1..4u64 {
                    let value = (number << 4 | round) as u8;
                    for ranges in ranges.chunks(32) {
                        let mut stream = Vec::new();
                        for index in ranges {
                            // Some of the ranges are zeroed instead, which changes incomplete blocks as well.
                            let command = if (index + round) % 5 == 0 { 6 } else { 1 };
                            let data = vec![value; if command == 1 { STRIDE as usize } else { 0 }];
                            stream.extend(client.bytes(command, 0, *index, index * STRIDE, STRIDE, &data));
                        }
                        std::io::Write::write_all(&mut client.stream, &stream).unwrap();
                        for _ in ranges {
                            assert_eq!(client.reply(|_| 0).error, 0);
                        }
                    }
                    for index in &ranges {
                        let wanted = if (index + round) % 5 == 0 { 0 } else { value };
                        let found = client.read(index * STRIDE, STRIDE as usize);
                        assert!(
                            found.iter().all(|byte| *byte == wanted),
                            "client {number}, round {round}, {index}: {found:x?}"
                        );
                    }
                }
            });
        }
    });
}

/// One client writes whole blocks and reads them back, while others on other engines change a few bytes of
/// each block. The bytes that only the first client writes must be those of its last write.
#[test]
fn an_aligned_write_is_not_undone_by_unaligned_ones() {
    const BLOCK: usize = 4096;
    for queues in [1, 2] {
        let served = serve(faulty(1 << 20, BLOCK as u32, "seed=3;delay=100us,p99=1ms"), queues, bytes());
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for number in 0..3u64 {
                let (served, stop) = (&served, &stop);
                scope.spawn(move || {
                    let mut client = served.client(ReplyStyle::Structured);
                    while !stop.load(Ordering::Relaxed) {
                        for block in 0..4u64 {
                            let offset = block * BLOCK as u64 + number * 100 + 1;
                            client.send(1, 0, block, offset, 50, &[0xaa; 50]);
                        }
                        (0..4).for_each(|_| assert_eq!(client.reply(|_| 0).error, 0));
                    }
                });
            }
            // The other clients stop as well if an assertion fails.
            struct Stop<'a>(&'a AtomicBool);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::Relaxed);
                }
            }
            let _stop = Stop(&stop);
            let mut client = served.client(ReplyStyle::Structured);
            for round in 1..120u8 {
                // The blocks are alternately written and zeroed.
                let value = if round % 3 == 0 { 0 } else { round };
                let error = match value {
                    0 => client.call(6, 0, 0, 4 * BLOCK as u64, &[]).0,
                    value => client.write(0, &[value; 4 * BLOCK]),
                };
                assert_eq!(error, 0);
                let found = client.read(0, 4 * BLOCK);
                for block in found.chunks(BLOCK) {
                    let own = block[400..].iter().position(|byte| *byte != value);
                    assert_eq!(own, None, "round {round}: {:#x?}", own.map(|at| block[400 + at]));
                    assert!(block[..400].iter().all(|byte| [value, 0xaa].contains(byte)));
                }
            }
        });
    }
}

/// A write of whole blocks is in flight, and no range is locked, when a write to a part of a block arrives.
#[test]
fn an_unaligned_write_waits_for_aligned_ones_in_flight() {
    for queues in [1, 2] {
        let spec = "delay=50ms,op=write,count=1;delay=150ms,op=write,after=1";
        let served = serve(faulty(1 << 20, 4096, spec), queues, bytes());
        let mut whole = served.client(ReplyStyle::Structured);
        let mut part = served.client(ReplyStyle::Structured);
        whole.send(1, 0, 1, 0, 8192, &[1; 8192]);
        wait_until("the write is in flight", || served.disk.stats().in_flight[1] == 1);
        assert_eq!(part.write(4000, &[2; 200]), 0);
        assert_eq!(whole.reply(|_| 0).error, 0);
        let found = part.read(0, 8192);
        assert!(found == [&[1; 4000][..], &[2; 200], &[1; 3992]].concat(), "{queues} queues");
    }
}

/// Live changes of settings wait for the I/O in flight, which must not wait for the changes.
#[test]
fn settings_can_change_during_unaligned_writes() {
    let served = serve(faulty(1 << 20, 512, "seed=5;delay=100us"), 2, bytes());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..2u64 {
            let (served, stop) = (&served, &stop);
            scope.spawn(move || {
                let mut client = served.client(ReplyStyle::Simple);
                while !stop.load(Ordering::Relaxed) {
                    for request in 0..20u64 {
                        client.send(1, 0, request, request * 700 + number, 700, &[7; 700]);
                    }
                    (0..20).for_each(|_| assert_eq!(client.reply(|_| 0).error, 0));
                }
            });
        }
        for round in 0..30 {
            let writes = served.disk.stats()[StatGroup::Write].ios;
            wait_until("some writes have completed", || served.disk.stats()[StatGroup::Write].ios > writes);
            let scheduler = [SchedulerKind::MqDeadline, SchedulerKind::None][round % 2];
            served.disk.set(Setting::Scheduler(scheduler)).unwrap();
            drop(served.disk.quiesce());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn the_largest_unaligned_requests_are_served() {
    const LARGE: usize = 32 << 20;
    let served = serve(ram(), 1, bytes());
    for (style, offset) in STYLES.into_iter().zip([1, 511, 4095]) {
        let mut client = served.client(style);
        let mut data = vec![0; LARGE];
        Random::new(offset).fill(&mut data);
        data.iter_mut().for_each(|byte| *byte |= 1);
        assert_eq!(client.write(offset, &data), 0);
        assert!(client.read(offset, LARGE) == data, "{style:?}");
        assert_eq!(client.read(0, offset as usize), vec![0; offset as usize]);
        assert_eq!(client.read(offset + LARGE as u64, 512), [0; 512]);
        assert_eq!(client.call(6, 0, offset, LARGE as u64, &[]).0, 0);
        assert!(client.read(offset, LARGE).iter().all(|byte| *byte == 0));
    }
}

#[test]
fn an_error_in_an_incomplete_block_leaves_no_range_locked() {
    let served = serve(faulty(1 << 20, 4096, "none"), 2, bytes());
    let mut client = served.client(ReplyStyle::Structured);
    let mut other = served.client(ReplyStyle::Structured);
    assert_eq!(client.write(0, &[1; 64 << 10]), 0);
    for fault in ["error=EIO,op=read", "error=EIO,op=read,range=4K-8K", "error=EIO,op=write"] {
        served.disk.set_driver(&fault.parse::<FaultSpec>().unwrap()).unwrap();
        assert_eq!(client.write(100, &[2; 6000]), 5, "{fault}");
        assert_eq!(client.call(6, 0, 100, 6000, &[]).0, 5, "{fault}");
        served.disk.set_driver(&FaultSpec::default()).unwrap();
        assert_eq!(other.write(0, &[1; 64 << 10]), 0);
        assert_eq!(other.write(100, &[3; 6000]), 0);
        assert_eq!(client.read(99, 6002), [&[1][..], &[3; 6000], &[1]].concat());
    }
}

#[test]
fn a_client_that_disconnects_leaves_no_range_locked() {
    let served = serve(faulty(1 << 20, 4096, "delay=20ms"), 2, bytes());
    for round in 0..10 {
        let mut leaves = served.client(ReplyStyle::Structured);
        for request in 0..5u64 {
            leaves.send(1, 0, request, 10 + request, 5000, &[round; 5000]);
        }
        drop(leaves);
        let mut stays = served.client(ReplyStyle::Structured);
        assert_eq!(stays.write(1, &[round; 5]), 0);
        assert_eq!(stays.write(0, &[round; 8192]), 0);
        assert_eq!(stays.read(4000, 200), [round; 200]);
    }
}

#[test]
fn unaligned_requests_are_rejected_unless_they_are_enabled() {
    let served = serve(ram_of(8192, 512), 1, bytes());
    let mut client = served.client(ReplyStyle::Structured);
    assert_eq!(client.write(8191, &[1]), 0);
    assert_eq!(client.write(8191, &[1, 1]), ENOSPC);
    assert_eq!(client.call(6, 0, 8191, 2, &[]).0, ENOSPC);
    for command in [0, 4, 5, 7] {
        assert_eq!(client.call(command, 0, 8191, 2, &[]).0, EINVAL, "{command}");
        assert_eq!(client.call(command, 0, 1, 0, &[]).0, EINVAL, "{command}");
    }
    assert_eq!(client.read(8000, 192), [&[0; 191][..], &[1]].concat());
    drop(client);
    let served = serve(ram_of(8192, 512), 1, options());
    let mut client = served.client(ReplyStyle::Structured);
    for (command, data) in [(0, &[][..]), (1, &[1; 511]), (4, &[]), (5, &[]), (6, &[]), (7, &[])] {
        assert_eq!(client.call(command, 0, 512, 511, data).0, EINVAL, "{command}");
    }
}
