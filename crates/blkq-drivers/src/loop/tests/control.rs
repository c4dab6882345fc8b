//! Tests of live changes, resizes, extents and block devices.

use blkq::bitmap::{Bitmap, BitmapState, BitmapStore};
use blkq::{BioFlags, Operation, Status};

use super::*;
use crate::fault::FaultSpec;

// Contract: live-changes, durability
#[test]
fn direct_io_is_switched_without_losing_a_byte() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    for (round, mode) in [DirectIo::On, DirectIo::Off, DirectIo::Auto, DirectIo::On].into_iter().enumerate() {
        let round = round as u64;
        let write = h.write(round * 65536, vec![pattern(65536, round)]);
        assert_eq!(h.run(write).0, Ok(()));
        device.set(&LoopSetting::DirectIo(mode)).unwrap();
        assert_eq!(cached(&path).1, 0, "the switch makes the page cache's content durable");
        h.reload();
        let direct = mode != DirectIo::Off;
        assert_eq!(fact(&device, "direct-io-requested"), mode.name());
        assert_eq!(fact(&device, "direct-io").starts_with("on"), direct);
        assert_eq!(device.limits().memory_align > 1, direct);
        for earlier in 0..=round {
            assert_eq!(h.read_back(earlier * 65536, 65536), pattern(65536, earlier).to_vec());
        }
    }
    drop(device);
    // The switch changes the flag of the open file, not only the reported mode.
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    device.set(&LoopSetting::DirectIo(DirectIo::On)).unwrap();
    h.reload();
    let file = File::open(&path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert_eq!(cached(&path).0, 0);
    let write = h.write(0, vec![pattern(65536, 9)]);
    assert_eq!(h.run(write).0, Ok(()));
    assert_eq!(cached(&path).0, 0, "a direct write adds nothing to the page cache");
}

#[test]
fn settings_are_checked() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    // A setting of another driver.
    let foreign = FaultSpec::default();
    assert_eq!(device.prepare_set(&foreign).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(device.set(&foreign).unwrap_err().to_string(), "the loop driver has no setting fault");
    for bad in ["maybe", "", "On"] {
        assert_eq!(bad.parse::<DirectIo>().unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(bad.parse::<Dispatch>().unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn an_image_opened_read_only_with_bitmaps_stays_read_only() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let bitmap = Arc::new(Bitmap::new("b", 512, MIB, BitmapState::Recording).unwrap());
    for bitmaps in [vec![], vec![bitmap]] {
        let device = open(&path, DirectIo::Off);
        device.bitmaps.load().unwrap();
        let mut create = OpenOptions::new();
        let file = create.read(true).write(true).create(true).truncate(false);
        device.bitmaps.set_file(file.open(directory.file("image.bitmaps")).unwrap()).unwrap();
        device.bitmaps.store(&bitmaps).unwrap();
        drop(device);
        let read_only = DriverOptions { read_only: true, ..options(&path, DirectIo::Off) };
        let device = LoopDevice::open(&read_only).unwrap();
        assert_eq!(device.bitmaps.load().unwrap().0.len(), bitmaps.len());
        assert_eq!(device.set_read_only(false).is_err(), !bitmaps.is_empty());
    }
}

fn prepare_direct_io(device: &LoopDevice, mode: DirectIo) {
    assert_eq!(device.prepare_set(&LoopSetting::DirectIo(mode)).unwrap(), Change::Frozen);
}

// Contract: live-changes
#[test]
fn dirty_pages_are_written_before_the_freeze() {
    let directory = Directory::new();
    let path = directory.image(16 * MIB);
    type Prepare = fn(&LoopDevice);
    let changes: [(&str, Prepare); 3] = [
        ("direct-io=on", |device| prepare_direct_io(device, DirectIo::On)),
        ("direct-io=off", |device| prepare_direct_io(device, DirectIo::Off)),
        ("read-only=on", |device| device.prepare_read_only(true).unwrap()),
    ];
    for (what, prepare) in changes {
        let device = open(&path, DirectIo::Off);
        let mut h = Harness::open(&device).unwrap();
        let write = h.write(0, vec![pattern(MIB as usize, 1)]);
        assert_eq!(h.run(write).0, Ok(()));
        assert!(cached(&path).1 > 0, "nothing is dirty");
        prepare(&device);
        assert_eq!(cached(&path).1, 0, "{what}");
        // The preparation has not changed the settings.
        assert_eq!(
            (fact(&device, "direct-io-requested").as_str(), device.limits().read_only),
            ("off", false)
        );
    }
}

#[test]
fn dispatch_changes_how_many_run_at_once() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = open(&path, DirectIo::Off);
    let mut h = Harness::open(&device).unwrap();
    for (dispatch, most) in [(Dispatch::Serial, 1), (Dispatch::Concurrent, 8)] {
        device.set(&LoopSetting::Dispatch(dispatch)).unwrap();
        h.reload();
        let tags: Vec<_> = (0..8).map(|i| h.read(i * 4096, &[4096])).collect();
        h.start(&tags);
        for tag in tags {
            assert_eq!(h.wait(tag).0, Ok(()));
        }
        assert_eq!(count(&device, "reads-in-flight-max"), most);
        assert_eq!(fact(&device, "dispatch"), dispatch.name());
    }
}

// Contract: live-changes
#[test]
fn read_only_is_switched_on_and_off_from_either_start() {
    for read_only in [false, true] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let given = DriverOptions { read_only, ..options(&path, DirectIo::On) };
        let device = LoopDevice::open(&given).unwrap();
        let mut h = Harness::open(&device).unwrap();
        for (on, result) in [(true, Err(Status::ReadOnly)), (false, Ok(())), (true, Err(Status::ReadOnly))] {
            device.set_read_only(on).unwrap();
            h.reload();
            let limits = device.limits();
            assert_eq!((limits.read_only, limits.write_cache), (on, !on));
            let write = h.write(0, vec![filled(512, 1)]);
            assert_eq!(h.run(write).0, result);
            // The lock follows the setting: another reader is admitted only while the device is read-only.
            let reader = LoopDevice::open(&DriverOptions { read_only: true, ..DriverOptions::new(&path) });
            assert_eq!(reader.is_ok(), on);
        }
        let reader =
            LoopDevice::open(&DriverOptions { read_only: true, ..DriverOptions::new(&path) }).unwrap();
        assert_eq!(device.set_read_only(false).unwrap_err().kind(), ErrorKind::Busy);
        drop(reader);
        device.set_read_only(false).unwrap();
    }
}

#[test]
fn the_size_follows_the_file_or_the_file_the_size() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = LoopDevice::open(&DriverOptions { offset: 4096, ..options(&path, DirectIo::Off) }).unwrap();
    let capacity = || device.limits().capacity_bytes;
    let set_len = |bytes| OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
    assert_eq!(capacity(), MIB - 4096);
    set_len(2 * MIB + 100);
    device.resize(None).unwrap();
    assert_eq!(capacity(), 2 * MIB - 4096);
    device.resize(Some(65536)).unwrap();
    assert_eq!((capacity(), std::fs::metadata(&path).unwrap().len()), (65536, 2 * MIB + 100));
    // Bytes that are no longer served are no longer locked.
    let tail = DriverOptions { offset: 4096 + 65536, size_limit: Some(512), ..DriverOptions::new(&path) };
    let other = LoopDevice::open(&tail).unwrap();
    assert_eq!(device.resize(Some(MIB)).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(capacity(), 65536);
    drop(other);
    device.resize(Some(4 * MIB)).unwrap();
    assert_eq!((capacity(), std::fs::metadata(&path).unwrap().len()), (4 * MIB, 4 * MIB + 4096));
    refusal(&tail);
    let mut h = Harness::open(&device).unwrap();
    let write = h.write(4 * MIB - 512, vec![filled(512, 1)]);
    assert_eq!(h.run(write).0, Ok(()));
    assert_eq!(device.resize(Some(1000)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(device.resize(Some(0)).unwrap_err().kind(), ErrorKind::Invalid);
    assert!(device.resize(Some(u64::MAX)).is_err() && device.resize(Some(1 << 62)).is_err());
    set_len(4096);
    assert!(device.resize(None).is_err());
    assert_eq!(capacity(), 4 * MIB, "a failed change changes nothing");
    set_len(8192);
    device.resize(None).unwrap();
    assert_eq!(capacity(), 4096);
}

#[test]
fn a_size_limit_stays_one_when_the_file_grows_or_shrinks() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let limited = DriverOptions { offset: 4096, size_limit: Some(65536), ..options(&path, DirectIo::Off) };
    let device = LoopDevice::open(&limited).unwrap();
    let capacity = || device.limits().capacity_bytes;
    let set_len = |bytes| OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes).unwrap();
    for (bytes, expected) in [(2 * MIB, 65536), (16384, 12288), (MIB, 65536)] {
        set_len(bytes);
        device.resize(None).unwrap();
        assert_eq!(capacity(), expected);
    }
    device.resize(Some(131072)).unwrap();
    set_len(4 * MIB);
    device.resize(None).unwrap();
    assert_eq!(capacity(), 131072);
}

#[test]
fn extents_distinguish_data_from_holes() {
    let directory = Directory::new();
    let path = directory.image(MIB);
    let device = LoopDevice::open(&DriverOptions { offset: 65536, ..options(&path, DirectIo::Off) }).unwrap();
    let mut h = Harness::open(&device).unwrap();
    for place in [131072, 262144] {
        let write = h.write(place, vec![filled(65536, 1)]);
        assert_eq!(h.run(write).0, Ok(()));
    }
    let hole = |length| Extent { length, hole: true, zero: true };
    let data = |length| Extent { length, hole: false, zero: false };
    let size = device.limits().capacity_bytes;
    let all = [hole(131072), data(65536), hole(65536), data(65536), hole(size - 327680)];
    assert_eq!(device.extents(0..size, 100).unwrap(), all);
    assert_eq!(device.extents(0..size, 3).unwrap(), all[..3]);
    assert_eq!(device.extents(131584..262656, 9).unwrap(), [data(65024), hole(65536), data(512)]);
    assert_eq!(device.extents(512..1024, 9).unwrap(), [hole(512)]);
    assert_eq!(device.extents(size..size + 4096, 9).unwrap(), []);
    let discard = h.bare(Operation::Discard, BioFlags::empty(), 131072, 65536);
    assert_eq!(h.run(discard).0, Ok(()));
    assert_eq!(device.extents(0..size, 1).unwrap(), [hole(262144)]);
}

// Contract: complete
#[test]
fn a_truncated_image_has_no_hole_beyond_its_end() {
    let hole = |length| Extent { length, hole: true, zero: true };
    let data = |length| Extent { length, hole: false, zero: false };
    for (offset, direct_io) in [(0, DirectIo::On), (0, DirectIo::Off), (65536, DirectIo::Off)] {
        let directory = Directory::new();
        let path = directory.image(MIB + offset);
        let device = LoopDevice::open(&DriverOptions { offset, ..options(&path, direct_io) }).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let write = h.write(0, vec![filled(65536, 1)]);
        assert_eq!(h.run(write).0, Ok(()));
        assert_eq!(device.extents(0..MIB, 9).unwrap(), [data(65536), hole(MIB - 65536)]);
        let truncate = |bytes| File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
        // The new end is within a sector of a hole. That sector can no longer be read, so it is not a hole.
        truncate(offset + 131_072 + 700);
        assert_eq!(device.extents(0..MIB, 9).unwrap(), [data(65536), hole(66048), data(MIB - 131_584)]);
        assert_eq!(device.extents(0..MIB, 2).unwrap(), [data(65536), hole(66048)]);
        assert_eq!(device.extents(131_072..131_584, 9).unwrap(), [hole(512)]);
        assert_eq!(device.extents(131_584..MIB, 9).unwrap(), [data(MIB - 131_584)]);
        let read = h.read(131_584, &[512]);
        assert_eq!(h.run(read).0, Err(Status::Io));
        if offset == 0 {
            let refused = device.raw_image().err().unwrap();
            assert_eq!(refused.kind(), ErrorKind::Mismatch, "an overlay would read zeroes: {refused}");
        }
        // The new end is before the beginning of the device.
        truncate(offset / 2);
        assert_eq!(device.extents(0..MIB, 9).unwrap(), [data(MIB)]);
    }
}

// Contract: exclusive
#[test]
fn a_switch_to_writing_that_fails_leaves_a_readers_lock() {
    for opened_read_only in [false, true] {
        let directory = Directory::new();
        let path = directory.image(MIB);
        let reader = |offset| DriverOptions { offset, read_only: true, ..options(&path, DirectIo::Off) };
        let device = LoopDevice::open(&DriverOptions { read_only: opened_read_only, ..reader(0) }).unwrap();
        device.set_read_only(true).unwrap();
        // This reader conflicts only in the second half of the range.
        let other = LoopDevice::open(&reader(MIB / 2)).unwrap();
        assert_eq!(device.set_read_only(false).unwrap_err().kind(), ErrorKind::Busy);
        assert!(device.limits().read_only);
        let whole = LoopDevice::open(&reader(0)).unwrap();
        refusal(&DriverOptions { read_only: false, ..reader(0) });
        drop((other, whole));
        device.set_read_only(false).unwrap();
        refusal(&reader(0));
    }
}

struct BlockDevice {
    node: PathBuf,
    _directory: Directory,
    image: PathBuf,
}

impl BlockDevice {
    fn new(bytes: u64, sector: u32) -> BlockDevice {
        let directory = Directory::new();
        let image = directory.image(bytes);
        let sector = sector.to_string();
        let node = run("losetup", &["--find", "--show", "--sector-size", &sector, image.to_str().unwrap()]);
        BlockDevice { node: node.trim().into(), _directory: directory, image }
    }
}

impl Drop for BlockDevice {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.node.to_str().unwrap()]);
    }
}

#[test]
fn a_block_device_is_served_with_its_own_discard() {
    let block = BlockDevice::new(4 * MIB, 512);
    for direct_io in [DirectIo::On, DirectIo::Off] {
        let device = open(&block.node, direct_io);
        let limits = device.limits();
        limits.validate().unwrap();
        assert_eq!((limits.capacity_bytes, limits.logical_block_bytes), (4 * MIB, 512));
        assert!(limits.max_discard_bytes > 0 && !limits.discard_zeroes);
        let mut h = Harness::open(&device).unwrap();
        let write = h.write(0, vec![pattern(MIB as usize, 1)]);
        assert_eq!(h.run(write).0, Ok(()));
        assert_eq!(h.read_back(0, MIB as usize), pattern(MIB as usize, 1).to_vec());
        let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
        assert_eq!(h.run(flush).0, Ok(()));
        let before = allocated(&block.image);
        let discard = h.bare(Operation::Discard, BioFlags::empty(), 65536, 65536);
        assert_eq!(h.run(discard).0, Ok(()));
        assert!(device.shared.discard_by_command.load(Relaxed), "discards use the command, not fallocate");
        assert!(allocated(&block.image) <= before - 65536);
        for flags in [BioFlags::NO_UNMAP, BioFlags::empty()] {
            let zeroes = h.bare(Operation::WriteZeroes, flags, 131072, 65536);
            assert_eq!(h.run(zeroes).0, Ok(()));
        }
        assert_eq!(h.read_back(131072, 65536), vec![0; 65536]);
        // The kernel does not report whether it would write the zeroes itself, so the driver must not promise to
        // be fast.
        let fast = h.bare(Operation::WriteZeroes, BioFlags::NO_UNMAP | BioFlags::NO_FALLBACK, 131072, 65536);
        assert_eq!(h.run(fast).0, Err(Status::NotSupported));
        let fast = h.bare(Operation::WriteZeroes, BioFlags::NO_FALLBACK, 131072, 65536);
        assert_eq!(h.run(fast).0, Ok(()));
        assert!(device.limits().max_write_zeroes_no_unmap_bytes > 0, "all others still work");
        assert_eq!(device.extents(0..MIB, 9).unwrap(), [Extent { length: MIB, hole: false, zero: false }]);
        if direct_io == DirectIo::On {
            // A misaligned request, which the layers above never let through, fails, and the device still works.
            let misaligned = h.read(0, &[4096]);
            h.set_pdu(misaligned, [100, 0]);
            assert_eq!(h.run(misaligned).0, Err(Status::Invalid));
            // Short transfers that end within a sector: the kernel's completion of the first attempt is dropped and
            // replaced by an injected one of an odd length.
            for (short, expected) in [(700, Ok(())), (512, Ok(())), (200, Err(Status::Io))] {
                let read = h.read(0, &[4096]);
                h.start(&[read]);
                h.swallow += 1;
                h.inject(u64::from(read.0), short);
                // The kernel may write to the memory until its completion has arrived.
                while h.swallow > 0 {
                    h.turn();
                }
                let (result, bytes) = h.wait(read);
                assert_eq!(result, expected, "{short}");
                if expected.is_ok() {
                    assert_eq!(bytes, pattern(MIB as usize, 1)[..4096]);
                }
                let write = h.write(0, vec![pattern(4096, 1)]);
                h.start(&[write]);
                h.swallow += 1;
                h.inject(u64::from(write.0), short);
                assert_eq!(h.wait(write).0, Ok(()), "a write without a whole step is made again");
            }
            assert_eq!(h.read_back(131072, 512), vec![0; 512]);
        }
        assert_eq!(device.resize(Some(8 * MIB)).unwrap_err().kind(), ErrorKind::Unsupported);
        device.resize(Some(2 * MIB)).unwrap();
        device.resize(None).unwrap();
        assert_eq!(device.limits().capacity_bytes, 4 * MIB);
    }
}

#[test]
fn the_sector_size_follows_the_block_of_a_block_device() {
    let block = BlockDevice::new(4 * MIB, 4096);
    let device = open(&block.node, DirectIo::Auto);
    assert_eq!(device.limits().logical_block_bytes, 4096);
    assert!(fact(&device, "direct-io").starts_with("on"));
    drop(device);
    let small = DriverOptions { logical_block_bytes: Some(512), ..options(&block.node, DirectIo::On) };
    let needed = ErrorKind::DirectIoSector { needed_bytes: 4096, sector_bytes: 512 };
    assert_eq!(LoopDevice::open(&small).err().map(|error| error.kind()), Some(needed));
    let small = DriverOptions { direct_io: DirectIo::Auto, ..small };
    let device = LoopDevice::open(&small).unwrap();
    let limits = device.limits();
    assert_eq!((limits.logical_block_bytes, limits.max_write_zeroes_bytes), (512, 0));
    limits.validate().unwrap();
    let mut h = Harness::open(&device).unwrap();
    // Only whole blocks of the block device are discarded.
    for by_command in [true, false] {
        device.shared.discard_by_command.store(by_command, Relaxed);
        let write = h.write(0, vec![filled(65536, 7)]);
        assert_eq!(h.run(write).0, Ok(()));
        let flush = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
        assert_eq!(h.run(flush).0, Ok(()));
        let before = allocated(&block.image);
        for (offset, bytes) in [(0, 512), (512, 4096), (4096 - 512, 1024), (8192 - 512, 8192)] {
            let discard = h.bare(Operation::Discard, BioFlags::empty(), offset, bytes);
            assert_eq!(h.run(discard).0, Ok(()), "{offset} {bytes}");
        }
        assert_eq!(allocated(&block.image), before - 4096, "by command: {by_command}");
        let content = h.read_back(0, 65536);
        assert!(content[..8192].iter().chain(&content[12288..]).all(|byte| *byte == 7));
        let discard = h.bare(Operation::Discard, BioFlags::empty(), 512, 65536 - 1024);
        assert_eq!(h.run(discard).0, Ok(()));
        assert_eq!(allocated(&block.image), before - 65536 + 8192);
    }
    let write = h.write(512, vec![pattern(512, 1)]);
    assert_eq!(h.run(write).0, Ok(()));
    assert_eq!(h.read_back(512, 512), pattern(512, 1).to_vec());
}
