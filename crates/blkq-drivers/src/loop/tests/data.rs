//! Tests of the data path: transfers, flushes, discards, ordering and errors.

use std::time::Duration;

use blkq::{BioFlags, Operation, Status, Tag};

use super::*;

const PLAIN: BioFlags = BioFlags::empty();

fn modes() -> [(DirectIo, Dispatch); 4] {
    let (concurrent, serial) = (Dispatch::Concurrent, Dispatch::Serial);
    [(DirectIo::Off, concurrent), (DirectIo::Off, serial), (DirectIo::On, concurrent), (DirectIo::On, serial)]
}

// Contract: data
#[test]
fn written_data_is_in_the_file_and_read_back_in_every_mode() {
    for (direct_io, dispatch) in modes() {
        let directory = Directory::new();
        let path = directory.image(4 * MIB);
        let offset = 8192;
        let device = LoopDevice::open(&DriverOptions {
            offset,
            size_limit: Some(2 * MIB),
            dispatch,
            ..options(&path, direct_io)
        })
        .unwrap();
        assert_eq!(device.limits().capacity_bytes, 2 * MIB);
        let mut h = Harness::open(&device).unwrap();
        let parts = [pattern(4096, 1), pattern(512, 2), pattern(1536, 3), pattern(65536, 4)];
        let want: Vec<u8> = parts.iter().flat_map(|p| p.to_vec()).collect();
        let several = h.write(512, parts.into());
        let single = h.write(MIB, vec![pattern(8192, 5)]);
        let last = h.write(2 * MIB - 512, vec![pattern(512, 6)]);
        h.start(&[several, single, last]);
        for tag in [last, single, several] {
            assert_eq!(h.wait(tag).0, Ok(()), "{direct_io:?} {dispatch:?}");
        }
        assert_eq!(bytes_of(&path, offset + 512, want.len()), want, "{direct_io:?} {dispatch:?}");
        assert_eq!(bytes_of(&path, offset + MIB, 8192), pattern(8192, 5).to_vec());
        let several = h.read(512, &[1024, 512, 4096, want.len() - 5632]);
        assert_eq!(h.run(several), (Ok(()), want));
        assert_eq!(h.read_back(2 * MIB - 512, 512), pattern(512, 6).to_vec());
        assert_eq!(bytes_of(&path, offset + 2 * MIB, 512), vec![0; 512], "nothing beyond the limit");
    }
}

// Contract: direct-io
#[test]
fn direct_io_leaves_nothing_in_the_page_cache() {
    for (direct_io, expected) in [(DirectIo::On, true), (DirectIo::Auto, true), (DirectIo::Off, false)] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        let write = h.write(0, vec![pattern(256 << 10, 1)]);
        assert_eq!(h.run(write).0, Ok(()));
        assert_eq!(h.read_back(0, 256 << 10), pattern(256 << 10, 1).to_vec());
        assert_eq!(cached(&path).0 == 0, expected, "{direct_io:?}");
    }
}

#[test]
fn registered_memory_is_used_in_place() {
    for direct_io in [DirectIo::Off, DirectIo::On] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        let mut buffers = [pattern(8192, 1), filled(8192, 0xEE)];
        for buffer in &mut buffers {
            h.registrar().unwrap().register_buffer(buffer);
            assert!(buffer.is_registered());
        }
        let [source, target] = buffers;
        let write = h.write(4096, vec![source]);
        assert_eq!(h.run(write).0, Ok(()));
        let read = h.build(Operation::Read, PLAIN, 4096, 0, vec![target]);
        assert_eq!(h.run(read), (Ok(()), pattern(8192, 1).to_vec()));
    }
}

// Contract: complete
#[test]
fn a_transfer_continues_in_the_middle_of_a_segment() {
    // The state after a short transfer: the first `done` bytes were transferred, and must not be touched again.
    for (direct_io, done) in [(DirectIo::Off, 700), (DirectIo::Off, 4096), (DirectIo::On, 1024)] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let content: Vec<u8> = pattern(8192, 1).to_vec();
        std::fs::write(&path, &content).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB).unwrap();
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        let read = h.read(0, &[512, 3584, 4096]);
        h.set_pdu(read, [done as u64, 0]);
        let (result, bytes) = h.run(read);
        assert_eq!(result, Ok(()));
        assert!(bytes[..done].iter().all(|b| *b == 0xEE) && bytes[done..] == content[done..]);
        let write = h.write(0, vec![filled(512, 9), filled(3584, 9), filled(4096, 9)]);
        h.set_pdu(write, [done as u64, 0]);
        assert_eq!(h.run(write).0, Ok(()));
        let after = bytes_of(&path, 0, 8192);
        assert!(after[..done] == content[..done] && after[done..].iter().all(|b| *b == 9));
    }
}

// Contract: complete
#[test]
fn more_segments_than_fit_into_a_call_take_several_calls() {
    for (direct_io, dispatch) in modes() {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = LoopDevice::open(&DriverOptions { dispatch, ..options(&path, direct_io) }).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let parts: Vec<_> = (0..150).map(|i| pattern(512, i)).collect();
        let want: Vec<u8> = parts.iter().flat_map(|p| p.to_vec()).collect();
        let write = h.write(512, parts);
        assert_eq!(h.run(write).0, Ok(()));
        let read = h.read(512, &[512; 150]);
        assert_eq!(h.run(read), (Ok(()), want));
        assert!(count(&device, "short-transfers") >= 2);
    }
}

// Contract: complete
#[test]
fn reading_past_a_truncated_file_is_an_error_not_zeroes() {
    for (direct_io, left) in [(DirectIo::Off, 1000), (DirectIo::On, 1000), (DirectIo::On, 1024)] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(8192 + left).unwrap();
        let across = h.read(8192, &[4096, 4096]);
        let beyond = h.read(65536, &[4096]);
        let inside = h.read(0, &[4096]);
        h.start(&[across, beyond, inside]);
        assert_eq!(h.wait(across).0, Err(Status::Io), "{direct_io:?} {left}");
        assert_eq!(h.wait(beyond).0, Err(Status::Io));
        assert_eq!(h.wait(inside).0, Ok(()));
        assert!(count(&device, "short-transfers") > 0);
    }
}

// Contract: complete
#[test]
fn a_full_file_system_is_reported_as_no_space() {
    let directory = Directory::tmpfs("size=64k");
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    let small = h.write(0, vec![pattern(4096, 1)]);
    assert_eq!(h.run(small).0, Ok(()));
    let large = h.write(4096, vec![pattern(128 << 10, 2), pattern(128 << 10, 3)]);
    assert_eq!(h.run(large).0, Err(Status::NoSpace));
    assert!(count(&device, "short-transfers") > 0, "it wrote what fits first");
    assert_eq!(h.read_back(0, 4096), pattern(4096, 1).to_vec(), "the device still works");
}

#[test]
fn waiting_adjacent_writes_are_one_call_and_others_are_not() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    let mut tags: Vec<Tag> = (0..8).map(|i| h.write(i * 4096, vec![pattern(4096, i)])).collect();
    tags.push(h.build(Operation::Write, BioFlags::FUA, 32768, 0, vec![pattern(4096, 8)]));
    tags.push(h.build(Operation::Write, BioFlags::NO_MERGE, 36864, 0, vec![pattern(4096, 9)]));
    tags.push(h.write(40960, vec![pattern(4096, 10)]));
    tags.push(h.write(65536, vec![pattern(4096, 11)]));
    // Two writes to the same offset: the later one must win.
    tags.push(h.write(65536, vec![pattern(4096, 12)]));
    // In two batches, and the first is not committed before the second arrives.
    assert_eq!(h.queue(&tags[..3]), blkq::Taken::All);
    h.start(&tags[3..]);
    for tag in tags {
        assert_eq!(h.wait(tag).0, Ok(()));
    }
    for i in 0..11 {
        assert_eq!(bytes_of(&path, i * 4096, 4096), pattern(4096, i).to_vec(), "{i}");
    }
    assert_eq!(bytes_of(&path, 65536, 4096), pattern(4096, 12).to_vec());
    assert_eq!(count(&device, "writes-joined"), 7);
    assert_eq!((writers(&device), count(&device, "writers-max")), (0, 1));
}

// Contract: data
#[test]
fn an_error_of_joined_writes_fails_each_of_them() {
    let directory = Directory::tmpfs("size=16k");
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    let tags: Vec<Tag> = (0..16).map(|i| h.write(i * 8192, vec![pattern(8192, i)])).collect();
    h.start(&tags);
    for tag in tags {
        assert_eq!(h.wait(tag).0, Err(Status::NoSpace));
    }
    assert_eq!(count(&device, "writes-joined"), 15);
}

// Contract: durability
#[test]
fn flush_and_fua_leave_nothing_dirty() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    let write = h.write(0, vec![pattern(65536, 1)]);
    assert_eq!(h.run(write).0, Ok(()));
    assert!(cached(&path).1 > 0, "a plain write stays in the page cache");
    let flush = h.bare(Operation::Flush, PLAIN, 0, 0);
    assert_eq!(h.run(flush).0, Ok(()));
    assert_eq!(cached(&path).1, 0);
    for parts in [vec![pattern(65536, 2)], vec![pattern(4096, 3), pattern(4096, 4)]] {
        let fua = h.build(Operation::Write, BioFlags::FUA, 0, 0, parts);
        assert_eq!(h.run(fua).0, Ok(()));
        assert_eq!(cached(&path).1, 0);
    }
    assert_eq!(count(&device, "fdatasyncs"), 1);
}

// Contract: no-unmap
#[test]
fn discard_frees_blocks_and_no_unmap_keeps_them() {
    for direct_io in [DirectIo::Off, DirectIo::On] {
        let directory = Directory::new();
        let path = directory.image(4 * MIB);
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        let all = [filled(MIB as usize, 7), filled(MIB as usize, 7), filled(MIB as usize, 7)];
        for (i, buffer) in all.into_iter().enumerate() {
            let write = h.write(i as u64 * MIB, vec![buffer]);
            assert_eq!(h.run(write).0, Ok(()));
        }
        let full = allocated(&path);
        assert!(full >= 3 * MIB);
        let kept = h.bare(Operation::WriteZeroes, BioFlags::NO_UNMAP, 0, MIB);
        assert_eq!(h.run(kept).0, Ok(()));
        assert!(allocated(&path) >= full, "no-unmap deallocated");
        let freed = h.bare(Operation::WriteZeroes, PLAIN, MIB, MIB);
        assert_eq!(h.run(freed).0, Ok(()));
        assert!(allocated(&path) <= full - MIB);
        let discarded = h.bare(Operation::Discard, PLAIN, 2 * MIB + 512, MIB - 1024);
        assert_eq!(h.run(discarded).0, Ok(()));
        assert!(allocated(&path) < full - MIB - MIB / 2);
        assert_eq!(h.read_back(0, 2 * MIB as usize), vec![0; 2 * MIB as usize]);
        let last = h.read_back(2 * MIB, MIB as usize);
        let (edge, inner) = (512, MIB as usize - 512);
        assert!(last[..edge].iter().chain(&last[inner..]).all(|b| *b == 7));
        assert!(last[edge..inner].iter().all(|b| *b == 0));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * MIB, "the size is kept");
    }
}

#[test]
fn write_zeroes_past_the_end_of_a_truncated_file_is_an_error() {
    for (direct_io, dispatch) in modes() {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = LoopDevice::open(&DriverOptions { dispatch, ..options(&path, direct_io) }).unwrap();
        let mut h = Harness::open(&device).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(65536 + 512).unwrap();
        for flags in [PLAIN, BioFlags::NO_UNMAP] {
            for (offset, bytes, result) in [
                (0, 65536, Ok(())),
                (61440, 4096, Ok(())),
                (65536, 4096, Err(Status::Io)),
                (61440, 8192, Err(Status::Io)),
                (0, MIB, Err(Status::Io)),
                (MIB / 2, 4096, Err(Status::Io)),
            ] {
                let zeroes = h.bare(Operation::WriteZeroes, flags, offset, bytes);
                assert_eq!(h.run(zeroes).0, result, "{direct_io:?} {dispatch:?} {flags:?} {offset}+{bytes}");
            }
        }
        // A discard beyond the end succeeds, because it is only advice.
        let discard = h.bare(Operation::Discard, PLAIN, MIB / 2, 4096);
        assert_eq!(h.run(discard).0, Ok(()));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 65536 + 512);
    }
}

#[test]
fn an_unsupported_operation_is_reported_once_then_not_offered() {
    // tmpfs supports punching holes, but not FALLOC_FL_ZERO_RANGE.
    let directory = Directory::tmpfs("size=4m");
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    assert!(device.limits().max_write_zeroes_no_unmap_bytes > 0);
    let zeroes = h.bare(Operation::WriteZeroes, BioFlags::NO_UNMAP, 0, 4096);
    assert_eq!(h.run(zeroes).0, Err(Status::NotSupported));
    assert!(h.limits_changed);
    let limits = device.limits();
    assert_eq!(limits.max_write_zeroes_no_unmap_bytes, 0);
    assert!(limits.max_discard_bytes > 0 && limits.max_write_zeroes_bytes > 0);
    let zeroes = h.bare(Operation::WriteZeroes, PLAIN, 0, 4096);
    assert_eq!(h.run(zeroes).0, Ok(()));
}

/// Lets a flush complete with `EIO`, as if the kernel had failed the sync.
fn fail_a_flush(h: &mut Harness) {
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    h.start(&[flush]);
    // The kernel's own completion, which follows the injected one, is dropped.
    h.inject(u64::from(flush.0), -libc::EIO);
    h.swallow = 1;
    assert_eq!(h.wait(flush).0, Err(Status::Io));
    while h.swallow > 0 {
        h.turn();
    }
}

// Contract: durability
#[test]
fn once_a_sync_of_the_page_cache_failed_no_flush_succeeds() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    for (direct_io, later) in [(DirectIo::Off, Err(Status::Io)), (DirectIo::On, Ok(()))] {
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        fail_a_flush(&mut h);
        let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
        assert_eq!(h.run(flush).0, later);
    }
}

// Contract: durability
#[test]
fn a_failed_sync_fails_later_live_changes() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    for (direct_io, lost) in [(DirectIo::Off, true), (DirectIo::On, false)] {
        let device = open(&path, direct_io);
        let mut h = Harness::open(&device).unwrap();
        fail_a_flush(&mut h);
        // After the change a flush would succeed: a read-only device need not sync, and with direct I/O nothing is
        // cached. So the change itself must fail.
        let want = lost.then_some(ErrorKind::Lost);
        assert_eq!(device.set_read_only(true).err().map(|e| e.kind()), want, "read-only");
        let on = LoopSetting::DirectIo(DirectIo::On);
        assert_eq!(device.set(&on).err().map(|e| e.kind()), want, "direct I/O");
    }
}

// Contract: durability
#[test]
fn a_write_back_error_reported_to_a_fua_write_fails_flushes_too() {
    let disk = FullDisk::new();
    let path = disk.image();
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    assert_eq!(h.run(flush).0, Ok(()));
    disk.fill();
    let lost = h.write(4 * MIB, vec![pattern(MIB as usize, 1)]);
    assert_eq!(h.run(lost).0, Ok(()));
    // A sync through another open file attempts the write-back, which fails.
    assert!(File::open(&path).unwrap().sync_data().is_err());
    let fua = h.build(Operation::Write, BioFlags::FUA, 0, 0, vec![filled(4096, 2)]);
    assert!(h.run(fua).0.is_err(), "the kernel reports it to this open file");
    let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
    assert!(h.run(flush).0.is_err(), "an answered write is lost, and the flush does not report it");
}

/// The kernel reports lost pages once to each open file description, and a queue that got the report may reap the
/// completion later than another queue reaps its own.
// Contract: durability
#[test]
fn lost_pages_fail_the_syncs_of_all_queues_and_threads() {
    let disk = FullDisk::new();
    let device = open(&disk.image(), DirectIo::Off);
    let mut queues = [0, 1].map(|index| Harness::open_index(&device, index).unwrap());
    disk.fill();
    for (h, offset) in queues.iter_mut().zip([4 * MIB, 8 * MIB]) {
        let lost = h.write(offset, vec![pattern(MIB as usize, 1)]);
        assert_eq!(h.run(lost).0, Ok(()));
    }
    let flushes = queues.each_mut().map(|h| h.bare(Operation::Flush, PLAIN, 0, 0));
    let [first, second] = &mut queues;
    first.start(&flushes[..1]);
    // The kernel completes this flush, and the queue does not reap the completion yet.
    first.ring.as_mut().unwrap().enter(1, Some(Duration::from_secs(60)));
    assert!(second.run(flushes[1]).0.is_err(), "the flush does not report that an answered write is lost");
    // `Lost` would be the report of an earlier failure, which a control thread may not see yet.
    assert!(device.sync().is_err_and(|error| error.kind() != ErrorKind::Lost));
    assert!(first.wait(flushes[0]).0.is_err());
}

// Contract: complete
#[test]
fn interrupted_calls_are_repeated_but_not_forever() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    for (errno, times) in [(libc::EINTR, 3), (libc::EAGAIN, 10)] {
        let mut h = Harness::open(&device).unwrap();
        let before = count(&device, "retries");
        let read = h.read(0, &[4096]);
        h.start(&[read]);
        for _ in 0..times {
            h.inject(u64::from(read.0), -errno);
            assert!(!h.has_completed(read));
        }
        // Each injected interruption made the driver submit the call again. All kernel completions but the last are
        // dropped, because the injected ones replace them.
        h.swallow = times;
        assert_eq!(h.wait(read), (Ok(()), vec![0; 4096]));
        assert_eq!(count(&device, "retries") - before, times as u64);
    }
    let mut h = Harness::open(&device).unwrap();
    let read = h.read(0, &[4096]);
    h.start(&[read]);
    while !h.has_completed(read) {
        h.inject(u64::from(read.0), -libc::EAGAIN);
        h.swallow += 1;
    }
    assert!(h.swallow < 1000);
    while h.swallow > 0 {
        h.turn();
    }
    assert_eq!(h.wait(read).0, Err(Status::Resource));
}

#[test]
fn reads_run_together_and_serial_dispatch_does_one_at_a_time() {
    for (direct_io, dispatch) in modes() {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = LoopDevice::open(&DriverOptions { dispatch, ..options(&path, direct_io) }).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let reads: Vec<Tag> = (0..16).map(|i| h.read(i * 8192, &[4096])).collect();
        h.start(&reads);
        for tag in reads {
            assert_eq!(h.wait(tag).0, Ok(()));
        }
        let most = count(&device, "reads-in-flight-max");
        assert_eq!(most, if dispatch == Dispatch::Serial { 1 } else { 16 });
    }
}

#[test]
fn serial_dispatch_has_one_call_of_any_kind_in_flight() {
    for (direct_io, dispatch) in modes() {
        let directory = Directory::new();
        let path = directory.image(4 * MIB);
        let device = LoopDevice::open(&DriverOptions { dispatch, ..options(&path, direct_io) }).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let tags: Vec<Tag> = (0..48)
            .map(|i| match i % 4 {
                0 => h.read(i * 65536, &[4096]),
                3 => h.bare(Operation::Discard, PLAIN, i * 65536, 4096),
                _ => h.write(i * 65536, vec![filled(4096, i as u8)]),
            })
            .collect();
        h.start(&tags);
        for tag in tags {
            assert_eq!(h.wait(tag).0, Ok(()));
        }
        let most = count(&device, "turns-in-flight-max");
        match (direct_io, dispatch) {
            (_, Dispatch::Serial) => assert_eq!(most, 1),
            (DirectIo::Off, _) => assert!(most > 1, "{most}: the kernel's worker has nothing queued"),
            _ => assert_eq!(most, 0, "nothing takes turns"),
        }
    }
}

#[test]
fn two_queues_have_one_writer_and_neither_starves() {
    let directory = Directory::new();
    let path = directory.image(4 * MIB);
    let device = open(&path, DirectIo::Off);
    std::thread::scope(|scope| {
        for index in 0..2_u16 {
            let device = &device;
            scope.spawn(move || {
                let mut h = Harness::open_index(device, index).unwrap();
                for round in 0..50 {
                    let value = (round * 2 + u64::from(index)) as u8;
                    let place = u64::from(index) * 2 * MIB + round * 4096;
                    let parts: Vec<Tag> =
                        (0..8).map(|i| h.write(place + i * 8192, vec![filled(4096, value)])).collect();
                    h.start(&parts);
                    for tag in parts {
                        assert_eq!(h.wait(tag).0, Ok(()));
                    }
                    assert_eq!(h.read_back(place, 4096), vec![value; 4096]);
                }
            });
        }
    });
    assert_eq!(count(&device, "writers-max"), 1);
    assert_eq!(writers(&device), 0);
}

#[test]
fn the_writer_hands_over_and_kicks() {
    let directory = Directory::new();
    let path = directory.image(4 * MIB);
    let device = open(&path, DirectIo::Off);
    let kicks = std::sync::Arc::new(blkq::testing::harness::CountWakes::default());
    let counted = std::sync::Arc::clone(&kicks);
    let mut first = Harness::open_index(&device, 0).unwrap();
    let mut second = Harness::open_waking(&device, 1, counted).unwrap();
    let ours: Vec<Tag> = (0..40).map(|i| first.write(i * 8192, vec![filled(4096, 1)])).collect();
    let theirs = second.write(2 * MIB, vec![filled(4096, 2)]);
    first.start(&ours);
    second.start(&[theirs]);
    second.turn();
    assert!(!second.has_completed(theirs) && kicks.0.load(Relaxed) == 0);
    // The first queue still has writes waiting when it passes the token to the second one.
    while kicks.0.load(Relaxed) == 0 {
        first.turn();
    }
    assert!(!first.has_completed(ours[39]), "it gave way in between");
    assert_eq!(second.wait(theirs).0, Ok(()));
    for tag in ours {
        assert_eq!(first.wait(tag).0, Ok(()));
    }
    assert_eq!(count(&device, "writers-max"), 1);
    // Closing a queue that has the token or waits for it leaves no other queue waiting.
    let theirs = second.write(2 * MIB, vec![filled(4096, 3)]);
    second.start(&[theirs]);
    assert_eq!(second.wait(theirs).0, Ok(()));
    drop(second.close());
    let ours = first.write(0, vec![filled(4096, 4)]);
    assert_eq!(first.run(ours).0, Ok(()));
}

#[test]
fn writes_to_the_same_place_are_done_in_order() {
    for dispatch in [Dispatch::Concurrent, Dispatch::Serial] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let device = LoopDevice::open(&DriverOptions { dispatch, ..options(&path, DirectIo::Off) }).unwrap();
        let mut h = Harness::open(&device).unwrap();
        // Successive writes do not overlap, so that several are in flight together, but each overlaps some
        // earlier ones.
        let place = |i: u8| u64::from(i) * 7 % 31 * 2048;
        let tags: Vec<Tag> = (0..60).map(|i| h.write(place(i), vec![filled(4096, i + 1)])).collect();
        h.start(&tags);
        for tag in tags {
            assert_eq!(h.wait(tag).0, Ok(()));
        }
        let mut want = vec![0; 32 * 2048];
        for i in 0..60_u8 {
            want[place(i) as usize..][..4096].fill(i + 1);
        }
        assert!(bytes_of(&path, 0, want.len()) == want, "{dispatch:?}");
        assert_eq!(count(&device, "writers-max"), 1);
    }
}

#[test]
fn writes_to_a_read_only_device_are_refused() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device =
        LoopDevice::open(&DriverOptions { read_only: true, ..options(&path, DirectIo::Off) }).unwrap();
    let mut h = Harness::open(&device).unwrap();
    let tags = [
        h.write(0, vec![filled(512, 1)]),
        h.bare(Operation::Discard, PLAIN, 0, 512),
        h.bare(Operation::WriteZeroes, PLAIN, 0, 512),
    ];
    h.start(&tags);
    for tag in tags {
        assert_eq!(h.wait(tag).0, Err(Status::ReadOnly));
    }
    let flush = h.bare(Operation::Flush, PLAIN, 0, 0);
    assert_eq!(h.run(flush).0, Ok(()));
}

#[test]
fn the_state_of_a_hanging_request_has_its_progress() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device =
        LoopDevice::open(&DriverOptions { dispatch: Dispatch::Serial, ..DriverOptions::new(&path) }).unwrap();
    let mut harness = Harness::open(&device).unwrap();
    let (first, second) = (harness.read(0, &[8192]), harness.read(65536, &[4096]));
    // The entries reach the kernel only when the ring turns, which happens in `wait`.
    harness.start(&[first, second]);
    assert_eq!(harness.state(first), "in the kernel's io_uring");
    assert_eq!(harness.state(second), "in the driver, waiting for its turn at the file");
    harness.set_pdu(first, [4096, 3]);
    assert_eq!(harness.state(first), "in the kernel's io_uring, 4096 of 8192 bytes done, retried 3 times");
    harness.set_pdu(first, [0, 0]);
    assert_eq!(harness.wait(first).0, Ok(()));
    assert_eq!(harness.wait(second).0, Ok(()));
}
