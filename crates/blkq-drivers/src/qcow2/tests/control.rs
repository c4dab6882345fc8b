//! The control plane: block status, sizes, read-only.

use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::qcow2::io::env::{BOUNCE_MAX_BYTES, Env};
use crate::qcow2::io::operations::{Action, Executor, Op};
use crate::qcow2::io::write::{Source, write};
use crate::{DriverOptions, DriverSpec, ImageFormat};

fn run(h: &mut Harness, operation: Operation, offset: u64, bytes: u64) {
    let tag = h.bare(operation, BioFlags::empty(), offset, bytes);
    assert_eq!(h.run(tag).0, Ok(()));
}

#[test]
fn extents_are_right_before_the_tables_are_written() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let base = std::fs::File::create(directory.0.join("base")).unwrap();
    base.set_len(MIB).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&base, &[1; 65536], 0).unwrap();
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "d.qcow2", "2M"]);
    let device = open(&directory.0.join("d.qcow2"));
    let mut h = Harness::open(&device).unwrap();
    let extents = |device: &Qcow2| -> Vec<(u64, bool)> {
        let extents = device.extents(0..2 * MIB, 100).unwrap();
        extents.iter().map(|extent| (extent.length, extent.hole)).collect()
    };
    let (data, hole) = (false, true);
    assert_eq!(extents(&device), [(65536, data), (2 * MIB - 65536, hole)]);
    let tag = h.write(MIB + 4096, vec![pattern(4096, 1)]);
    assert_eq!(h.run(tag).0, Ok(()));
    run(&mut h, Operation::WriteZeroes, 0, 65536);
    assert_eq!(extents(&device), [(MIB, hole), (65536, data), (MIB - 65536, hole)]);
    assert_eq!(device.extents(0..2 * MIB, 1).unwrap().len(), 1);
    let again = extents(&device);
    drop(h);
    drop(device);
    assert_eq!(extents(&open(&directory.0.join("d.qcow2"))), again);
}

#[test]
fn a_query_of_extents_has_a_time_limit() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let device = open(&directory.image("d.qcow2", "cluster_size=64k", 1 << 30));
    let (mut at, mut queries) = (0, 0);
    while at < 1 << 30 {
        let mut reader = BlockingReader::new(&device.shared);
        let extents = reader.extents(at..1 << 30, 9, 0).unwrap();
        let depths = reader.depths(at..1 << 30, 9, 0).unwrap();
        assert_eq!(extents[0].length, depths[0].length);
        at += extents[0].length;
        queries += 1;
    }
    assert!(queries > 1, "a query whose time has passed looks up one run");
    assert_eq!(device.extents(0..1 << 30, 9).unwrap()[0].length, 1 << 30);
}

// Contract: complete
#[test]
fn bytes_that_a_truncation_removed_are_not_a_hole() {
    if !has_qemu() {
        return;
    }
    let truncate = |path: &Path, bytes| {
        std::fs::File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
    };
    let map = |device: &Qcow2| -> Vec<(u64, bool)> {
        let extents = device.extents(0..MIB, 100).unwrap();
        extents.iter().map(|extent| (extent.length, extent.hole)).collect()
    };
    // The raw backing file of an overlay.
    let directory = Directory::new();
    let base = directory.0.join("base");
    std::fs::write(&base, vec![1; 65536]).unwrap();
    truncate(&base, MIB);
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "d.qcow2"]);
    let device = open(&directory.0.join("d.qcow2"));
    assert_eq!(map(&device), [(65536, false), (MIB - 65536, true)]);
    truncate(&base, MIB / 2);
    assert_eq!(map(&device), [(65536, false), (MIB / 2 - 65536, true), (MIB / 2, false)]);
    assert_eq!(device.overlay_base().err().unwrap().kind(), ErrorKind::Mismatch);
    // The L2 table of an image, which is not in memory.
    let path = directory.image("q.qcow2", "cluster_size=64k", MIB);
    directory.qemu_io(&path, "write -P 1 0 1M");
    let device = open(&path);
    truncate(&path, 256 << 10);
    assert!(device.extents(0..MIB, 9).is_err() && device.allocation_depths(0..MIB, 9).is_err());
}

#[test]
fn a_grown_image_does_not_show_its_backing_file() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    std::fs::write(directory.0.join("base"), vec![7; 2 << 20]).unwrap();
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "d.qcow2", "1000448"]);
    let path = directory.0.join("d.qcow2");
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    assert_eq!(device.prepare_resize(Some(512)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(device.prepare_resize(Some(64 << 40)).unwrap_err().kind(), ErrorKind::Unsupported);
    device.resize(Some(3 << 30)).unwrap();
    h.reload();
    assert_eq!(device.limits().capacity_bytes, 3 << 30);
    assert_eq!(h.read_back(1_000_448 - 512, 1024), [[7; 512], [0; 512]].concat());
    let tag = h.write((3 << 30) - 4096, vec![pattern(4096, 2)]);
    assert_eq!(h.run(tag).0, Ok(()));
    drop(h);
    drop(device);
    directory.check(&path);
    let mut h = Harness::open(&open(&path)).unwrap();
    assert_eq!(h.read_back((3 << 30) - 4096, 4096), pattern(4096, 2).to_vec());
}

// Contract: data
#[test]
fn the_new_size_is_recorded_after_the_backing_file_is_hidden() {
    if !has_qemu() {
        return;
    }
    for kind in ["cluster_size=512", "compat=0.10"] {
        let directory = Directory::new();
        std::fs::write(directory.0.join("base"), vec![7; 2 << 20]).unwrap();
        let size = "1000448";
        directory.qemu_img(&[
            "create", "-q", "-f", "qcow2", "-o", kind, "-b", "base", "-F", "raw", "d.qcow2", size,
        ]);
        let path = directory.0.join("d.qcow2");
        let device = open(&path);
        let (env, mut executor) = (Env::new(Arc::clone(&device.shared), None), Executor::default());
        let larger = room(&env.state()).min(4 << 20);
        let (tasks_env, result) = (Rc::clone(&env), Rc::new(Cell::new(None)));
        let kept = Rc::clone(&result);
        executor.spawn(&env.io, async move { kept.set(Some(grow(&tasks_env, larger).await)) });
        while result.get().is_none() {
            executor.run(&env.io);
            let perform = |op: &Op| {
                let done = op.perform(&device.shared.files);
                if op.action == Action::Write && op.offset == 0 { -libc::EIO } else { done }
            };
            while let Some((place, done)) = env.io.next(perform) {
                env.io.complete(place, done);
            }
        }
        assert_eq!(result.get(), Some(Err(blkq::Status::Io)));
        assert!(env.state().writer.failed && env.state().size == 1_000_448);
        drop((executor, env, device));
        // The header was written last.
        directory.check(&path);
        let device = open(&path);
        assert_eq!(device.limits().capacity_bytes, larger);
        let content = Harness::open(&device).unwrap().read_back(0, larger as usize);
        assert!(content[..1_000_448].iter().all(|byte| *byte == 7), "{kind}");
        assert!(content[1_000_448..].iter().all(|byte| *byte == 0), "{kind}");
    }
}

// Contract: data
#[test]
fn discarded_clusters_are_reused_before_space_runs_out() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 16 * MIB);
    let device = open(&path);
    locked(&device.shared.state).writer.clusters_max = 40;
    let mut h = Harness::open(&device).unwrap();
    let write_at = |h: &mut Harness, at: u64| {
        let tag = h.write(at, vec![pattern(2 << 20, at)]);
        h.run(tag).0
    };
    assert_eq!(write_at(&mut h, 0), Ok(()));
    assert_eq!(write_at(&mut h, 2 * MIB), Err(blkq::Status::NoSpace));
    run(&mut h, Operation::Discard, 0, 2 * MIB);
    assert_eq!(write_at(&mut h, 4 * MIB), Ok(()));
    assert!(h.read_back(4 * MIB, 2 << 20) == pattern(2 << 20, 4 * MIB).to_vec());
    drop(h);
    drop(device);
    directory.check(&path);
}

#[test]
fn a_bounded_number_of_discarded_clusters_waits_to_be_freed() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=4k", 16 * MIB);
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    for number in 0..8 {
        let tag = h.write(number * MIB, vec![pattern(1 << 20, number)]);
        assert_eq!(h.run(tag).0, Ok(()));
    }
    run(&mut h, Operation::Discard, 0, 8 * MIB);
    let released = locked(&device.shared.state).writer.released.len();
    assert!((1..=1024).contains(&released), "{released}");
}

// Contract: non-blocking
#[test]
fn a_discard_of_clear_clusters_takes_several_turns() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=2k", 16 * MIB);
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    // Each L2 table is allocated, and maps 512 KiB.
    for number in 0..32 {
        let tag = h.write(number << 19, vec![pattern(2048, number)]);
        assert_eq!(h.run(tag).0, Ok(()));
    }
    for operation in [Operation::Discard, Operation::Discard, Operation::WriteZeroes] {
        let tag = h.bare(operation, BioFlags::empty(), 0, 16 * MIB);
        h.start(&[tag]);
        // The request has 8192 clusters.
        for _ in 0..2 {
            assert!(!h.has_completed(tag) && h.deadline_ns() == Some(0));
            h.turn();
        }
        assert_eq!(h.wait(tag).0, Ok(()));
    }
}

#[test]
fn the_copies_of_many_writes_take_bounded_memory() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    std::fs::write(directory.0.join("base"), vec![7; 64 << 20]).unwrap();
    let options = "cluster_size=2M";
    directory.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", "raw", "d.qcow2"]);
    let path = directory.0.join("d.qcow2");
    let device = open(&path);
    let (env, mut executor) = (Env::new(Arc::clone(&device.shared), None), Executor::default());
    let written = Rc::new(Cell::new(0));
    for number in 0..32 {
        let (tasks_env, written) = (Rc::clone(&env), Rc::clone(&written));
        executor.spawn(&env.io, async move {
            write(&tasks_env, number * 2 * MIB + MIB, 4096, Source::Zeroes).await.unwrap();
            written.set(written.get() + 1);
        });
    }
    let mut most = 0;
    while !executor.is_idle() {
        executor.run(&env.io);
        most = most.max(env.bounce.get());
        // Operations complete one at a time, so that as many as possible are in flight.
        let Some((place, done)) = env.io.next(|op| op.perform(&device.shared.files)) else { break };
        env.io.complete(place, done);
    }
    assert_eq!((written.get(), env.bounce.get()), (32, 0));
    assert!((BOUNCE_MAX_BYTES / 2..=BOUNCE_MAX_BYTES).contains(&most), "{most}");
    drop((executor, env, device));
    directory.check(&path);
    let content = Harness::open(&open(&path)).unwrap().read_back(62 * MIB, 2 << 20);
    assert!(content.iter().enumerate().all(|(at, byte)| *byte == if at >> 12 == 256 { 0 } else { 7 }));
}

// Contract: data
#[test]
fn tables_that_name_the_header_are_not_written() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", MIB);
    let whole = std::fs::read(&path).unwrap();
    // Entries of the L1 table and of the refcount table that name the refcount table.
    for (field, flag) in [(40, 1 << 63), (48, 0)] {
        let mut bytes = whole.clone();
        let at = u64::from_be_bytes(bytes[field..field + 8].try_into().unwrap()) as usize;
        bytes[at..at + 8].copy_from_slice(&(0x10000_u64 | flag).to_be_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let device = open(&path);
        let mut h = Harness::open(&device).unwrap();
        let tag = h.write(0, vec![pattern(4096, 1)]);
        assert_eq!(h.run(tag).0, Err(blkq::Status::Io), "{field}");
        drop(h);
        drop(device);
        assert!(std::fs::read(&path).unwrap()[..0x20000] == bytes[..0x20000], "{field}");
    }
}

#[test]
fn growing_an_image_hides_the_rest_of_its_last_cluster() {
    if !has_qemu() {
        return;
    }
    for compat in ["compat=0.10", "compat=1.1"] {
        let directory = Directory::new();
        let path = directory.image("d.qcow2", compat, 65536);
        directory.qemu_img(&[
            "bench",
            "-f",
            "qcow2",
            "-w",
            "-c",
            "1",
            "-s",
            "65536",
            "--pattern=7",
            "d.qcow2",
        ]);
        directory.qemu_img(&["resize", "-q", "-f", "qcow2", "--shrink", "d.qcow2", "4096"]);
        let device = open(&path);
        let mut h = Harness::open(&device).unwrap();
        device.resize(Some(128 << 10)).unwrap();
        h.reload();
        assert_eq!(h.read_back(0, 128 << 10), [vec![7; 4096], vec![0; 124 << 10]].concat());
        drop(h);
        drop(device);
        directory.check(&path);
    }
}

#[test]
fn entries_that_name_no_table_do_not_stop_the_queue() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "compat=1.1", MIB);
    let set = |at: u64, entry: u64| {
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &entry.to_be_bytes(), at).unwrap();
    };
    // The first entry of the L1 table, with the COPIED bit but without a table.
    set(0x30000, 1 << 63);
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    let tag = h.write(4096, vec![pattern(4096, 1)]);
    assert_eq!(h.run(tag).0, Ok(()));
    assert_eq!(h.read_back(4096, 4096), pattern(4096, 1).to_vec());
    drop(h);
    drop(device);
    directory.check(&path);
    // The first entry of the refcount table, with reserved bits only: if these counted as an offset, the
    // header's cluster would be the block.
    set(0x10000, 0xe2);
    let mut h = Harness::open(&open(&path)).unwrap();
    let tag = h.write(512 << 10, vec![pattern(4096, 1)]);
    assert_eq!(h.run(tag).0, Err(blkq::Status::Io));
}

#[test]
fn a_read_only_device_writes_nothing() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "compat=1.1", MIB);
    let before = std::fs::read(&path).unwrap();
    let device = Qcow2::open(&DriverOptions { read_only: true, ..DriverOptions::new(&path) }).unwrap();
    let mut h = Harness::open(&device).unwrap();
    let tag = h.write(0, vec![pattern(512, 1)]);
    assert_eq!(h.run(tag).0, Err(blkq::Status::ReadOnly));
    run(&mut h, Operation::Flush, 0, 0);
    assert_eq!(device.set_read_only(false).unwrap_err().kind(), ErrorKind::Unsupported);
    drop(h);
    drop(device);
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

/// Detach frees reserved space by the state of a writer, which a reader does not have.
#[test]
fn a_read_only_device_frees_no_space() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    std::fs::write(directory.0.join("raw"), vec![1; 8 << 20]).unwrap();
    directory.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k", "raw", "d.qcow2"]);
    let path = directory.0.join("d.qcow2");
    let before = std::fs::read(&path).unwrap();
    let open = || Qcow2::open(&DriverOptions { read_only: true, ..DriverOptions::new(&path) }).unwrap();
    let (mut device, other) = (open(), open());
    device.bitmaps = ImageBitmaps(Qcow2Bitmaps::new(&other.shared, false));
    // If detach tried to free space, only the access mode of the descriptor would prevent it.
    let shared = Arc::get_mut(&mut device.shared).unwrap();
    shared.files[0] = Arc::new(ImageFile::open(&path, false).unwrap());
    drop(device);
    assert!(std::fs::read(&path).unwrap() == before);
}

/// As after a kill between the resize of the image and that of the kernel's block device.
// Contract: live-changes
#[test]
fn a_larger_image_is_served_up_to_the_size_of_its_device() {
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 4 * MIB);
    std::fs::write(directory.0.join("raw"), vec![0; 4 << 20]).unwrap();
    for (name, format) in [("d.qcow2", ImageFormat::Qcow2), ("raw", ImageFormat::Raw)] {
        let spec = DriverSpec::Image(directory.0.join(name));
        let options = DriverOptions { format, device_bytes: Some(2 * MIB), ..DriverOptions::default() };
        let device = crate::open(&spec, &options).unwrap();
        assert_eq!(device.driver.limits().size_bytes(), 2 * MIB, "{name}");
    }
    let options = DriverOptions { device_bytes: Some(2 * MIB), ..DriverOptions::new(&path) };
    for size in [3 * MIB, 4 * MIB, 5 * MIB] {
        let device = Qcow2::open(&options).unwrap();
        device.resize(Some(size)).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let tag = h.write(size - 4096, vec![pattern(4096, 1)]);
        assert_eq!(h.run(tag).0, Ok(()));
        drop(h);
        drop(device);
        directory.check(&path);
    }
    let device = Qcow2::open(&options).unwrap();
    device.resize(None).unwrap();
    assert_eq!(device.limits().size_bytes(), 5 * MIB, "the size of the image");
}

// Contract: data
#[test]
fn concurrent_requests_to_few_clusters_keep_their_data() {
    if !has_qemu() {
        return;
    }
    for kind in ["cluster_size=64k", "cluster_size=512", "cluster_size=4k,refcount_bits=1"] {
        let directory = Directory::new();
        let path = directory.image("d.qcow2", kind, 4 * MIB);
        let device = open(&path);
        let mut h = Harness::open(&device).unwrap();
        for round in 0..20 {
            // The writes do not overlap, but share clusters. Discards and a flush are in between.
            let parts: Vec<u64> = (0..40).map(|number| number * 6144 + round * 512).collect();
            let mut tags: Vec<_> =
                parts.iter().map(|at| h.write(*at, vec![pattern(4096, *at + round)])).collect();
            let far = 2 * MIB;
            let discard = h.bare(Operation::Discard, BioFlags::empty(), far, MIB);
            let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
            let write = h.write(far + round * 4096, vec![pattern(70_144, round)]);
            tags.extend([flush, discard, write]);
            h.start(&tags);
            for tag in tags {
                assert_eq!(h.wait(tag).0, Ok(()), "{kind}");
            }
            for at in &parts {
                assert!(h.read_back(*at, 4096) == pattern(4096, *at + round).to_vec(), "{kind} {at}");
            }
        }
        drop(h);
        drop(device);
        directory.check(&path);
    }
}

#[test]
fn space_is_reserved_for_new_clusters_and_freed() {
    use std::os::unix::fs::MetadataExt;
    if !has_qemu() {
        return;
    }
    let directory = Directory::new();
    let path = directory.image("d.qcow2", "cluster_size=64k", 64 << 20);
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    let space = || std::fs::metadata(&path).unwrap().blocks() * 512;
    for number in 0..4 {
        let tag = h.write(number * MIB, vec![pattern(4096, 1)]);
        assert_eq!(h.run(tag).0, Ok(()));
    }
    run(&mut h, Operation::Flush, 0, 0);
    // This holds only where the file system can reserve space. The rest of each cluster reads as zeroes.
    assert!(space() > 4 * MIB);
    drop(h);
    drop(device);
    assert!(space() < MIB, "{}", space());
    directory.check(&path);
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    assert_eq!(h.read_back(3 * MIB, 8192), [&pattern(4096, 1)[..], &[0; 4096]].concat());
}

#[test]
fn clusters_beyond_the_end_of_the_file_get_no_extra_space() {
    use std::os::unix::fs::MetadataExt;
    if !has_qemu() {
        return;
    }
    const CLUSTER: u64 = 64 << 10;
    let directory = Directory::new();
    // Clusters are allocated in the order of the device. The file loses those from 1 MiB on.
    let path = directory.image("d.qcow2", "preallocation=metadata", 512 * MIB);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB).unwrap();
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    let (freed, kept, last) = (8 * MIB, 10 * MIB, 512 * MIB - CLUSTER);
    for at in [kept, freed] {
        let tag = h.write(at, vec![pattern(4096, 1)]);
        assert_eq!(h.run(tag).0, Ok(()));
    }
    // The freed cluster is allocated again. Space is reserved after it, where another cluster lies.
    run(&mut h, Operation::Discard, freed, CLUSTER);
    run(&mut h, Operation::Flush, 0, 0);
    run(&mut h, Operation::Discard, last, CLUSTER);
    for at in [freed, last] {
        let tag = h.write(at, vec![pattern(4096, 2)]);
        assert_eq!(h.run(tag).0, Ok(()));
    }
    run(&mut h, Operation::Flush, 0, 0);
    let space = std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(space < 256 * MIB, "{space} bytes are allocated for space that was never written");
    drop(h);
    drop(device);
    directory.check(&path);
    let device = open(&path);
    let mut h = Harness::open(&device).unwrap();
    assert_eq!(h.read_back(kept, 4096), pattern(4096, 1)[..]);
    assert_eq!(h.read_back(freed, 4096), pattern(4096, 2)[..]);
    assert_eq!(h.read_back(last, 4096), pattern(4096, 2)[..]);
}
