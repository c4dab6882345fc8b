//! Tests of devices whose size is not a multiple of their sector size.

use std::any::Any;

use blkq::{Bio, BioFlags, Data, Disk, IoBuffer, Operation, Sector, Segment, SegmentOwner, Status};

use super::*;

fn partial(path: &Path, direct_io: DirectIo, sector: u32) -> DriverOptions {
    DriverOptions { partial_block: true, logical_block_bytes: Some(sector), ..options(path, direct_io) }
}

/// Copies `data` into two segments of memory, or one if it is short. Each has at least `sector` bytes.
fn pieces(data: &[u8], sector: usize) -> Vec<IoBuffer> {
    let half = (data.len() / 2).next_multiple_of(sector).min(data.len());
    let (head, tail) = data.split_at(half);
    [head, tail]
        .iter()
        .filter(|piece| !piece.is_empty())
        .map(|piece| {
            let mut buffer = IoBuffer::zeroed(piece.len());
            buffer.copy_from_slice(piece);
            buffer
        })
        .collect()
}

/// Covers every combination of size, sector size and mode.
// Contract: durability
#[test]
fn the_last_bytes_are_served_and_the_file_stays_as_long() {
    for (size, sector, direct_io) in [1, 511, 513, 4095, 4097, 9000, 1_000_003]
        .into_iter()
        .flat_map(|size| [(size, 512), (size, 4096)])
        .flat_map(|(size, sector)| [DirectIo::Off, DirectIo::On].map(|mode| (size, sector, mode)))
    {
        let what = format!("{size} bytes, sectors of {sector}, {direct_io:?}");
        let directory = Directory::new();
        let path = directory.file("image");
        let mut model = pattern(size as usize, size).to_vec();
        std::fs::write(&path, &model).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let device = LoopDevice::open(&partial(&path, direct_io, sector)).unwrap();
        let limits = device.limits();
        limits.validate().unwrap();
        assert_eq!((limits.size_bytes(), device.warnings()), (size, vec![]), "{what}");
        let (sector, capacity) = (u64::from(sector), limits.capacity_bytes);
        assert_eq!(capacity, size.next_multiple_of(sector));
        model.resize(capacity as usize, 0);
        let mut h = Harness::open(&device).unwrap();
        assert_eq!(h.read_back(0, capacity as usize), model, "{what}");
        for round in 0..12u64 {
            // Each write reaches the end of the device, and each is twice as long as the one before.
            let offset = capacity - (sector << round).min(capacity);
            let data = pattern((capacity - offset) as usize, round + 100);
            let flags = if round % 2 == 0 { BioFlags::FUA } else { BioFlags::empty() };
            let pieces = pieces(&data, sector as usize);
            let tag = h.build(Operation::Write, flags, offset, data.len() as u64, pieces);
            assert_eq!(h.run(tag).0, Ok(()), "{what}");
            model[offset as usize..].copy_from_slice(&data);
            model[size as usize..].fill(0);
            assert_eq!(std::fs::metadata(&path).unwrap().len(), size, "{what}, round {round}");
            assert_eq!(h.read_back(0, capacity as usize), model, "{what}, round {round}");
            if flags == BioFlags::FUA {
                assert_eq!(cached(&path).1, 0, "{what}, round {round}: dirty pages after FUA");
            }
            let tag = h.bare(Operation::Flush, BioFlags::empty(), 0, 0);
            assert_eq!(h.run(tag).0, Ok(()));
            assert_eq!(cached(&path).1, 0, "{what}, round {round}: dirty pages after a flush");
        }
        for (operation, flags) in [
            (Operation::WriteZeroes, BioFlags::NO_UNMAP),
            (Operation::WriteZeroes, BioFlags::empty()),
            (Operation::Discard, BioFlags::empty()),
        ] {
            let offset = capacity - (3 * sector).min(capacity);
            let data = pattern((capacity - offset) as usize, 7);
            let tag = h.write(offset, pieces(&data, sector as usize));
            assert_eq!(h.run(tag).0, Ok(()), "{what}");
            let tag = h.bare(operation, flags, offset, capacity - offset);
            assert_eq!(h.run(tag).0, Ok(()), "{what}, {operation:?}");
            model[offset as usize..].fill(0);
            assert_eq!(h.read_back(0, capacity as usize), model, "{what}, {operation:?}");
            assert_eq!(std::fs::metadata(&path).unwrap().len(), size, "{what}");
        }
        drop(h);
        assert_eq!(std::fs::read(&path).unwrap(), model[..size as usize], "{what}");
    }
}

/// The rest of the file after a window is neither readable nor changed.
#[test]
fn a_window_up_to_the_middle_of_a_sector_hides_the_rest() {
    for direct_io in [DirectIo::Off, DirectIo::On] {
        let directory = Directory::new();
        let path = directory.file("image");
        let content = pattern(20_000, 1).to_vec();
        std::fs::write(&path, &content).unwrap();
        let options =
            DriverOptions { offset: 512, size_limit: Some(10_000), ..partial(&path, direct_io, 512) };
        let device = LoopDevice::open(&options).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let mut wanted = content[512..10_512].to_vec();
        wanted.resize(10_240, 0);
        assert_eq!(h.read_back(0, 10_240), wanted);
        let tag = h.write(0, pieces(&[7; 10_240], 512));
        assert_eq!(h.run(tag).0, Ok(()));
        let tag = h.bare(Operation::WriteZeroes, BioFlags::NO_UNMAP, 9728, 512);
        assert_eq!(h.run(tag).0, Ok(()));
        drop(h);
        let file = std::fs::read(&path).unwrap();
        assert_eq!(file[..512], content[..512]);
        assert!(file[512..10_240].iter().all(|byte| *byte == 7));
        assert!(file[10_240..10_512].iter().all(|byte| *byte == 0));
        assert_eq!(file[10_512..], content[10_512..]);
    }
}

// Contract: complete
#[test]
fn a_file_that_lost_its_last_bytes_is_an_error() {
    for direct_io in [DirectIo::Off, DirectIo::On] {
        let directory = Directory::new();
        let path = directory.file("image");
        std::fs::write(&path, &*pattern(9000, 1)).unwrap();
        let device = LoopDevice::open(&partial(&path, direct_io, 512)).unwrap();
        let mut h = Harness::open(&device).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(8999).unwrap();
        let read = |h: &mut Harness, offset, bytes| {
            let tag = h.read(offset, &[bytes]);
            h.run(tag).0
        };
        assert_eq!(read(&mut h, 8704, 512), Err(Status::Io), "{direct_io:?}");
        assert_eq!(read(&mut h, 0, 9216), Err(Status::Io), "{direct_io:?}");
        assert_eq!(read(&mut h, 0, 8704), Ok(()), "{direct_io:?}");
        let tag = h.bare(Operation::WriteZeroes, BioFlags::empty(), 8704, 512);
        assert_eq!(h.run(tag).0, Err(Status::Io), "{direct_io:?}");
    }
}

/// A buffer that is transferred as many short segments.
struct Scattered(IoBuffer, Vec<Segment>);

// SAFETY: the segments are parts of the buffer, which is not accessed while a bio carries them.
unsafe impl SegmentOwner for Scattered {
    fn segments(&self) -> &[Segment] {
        &self.1
    }
}

// Contract: complete
#[test]
fn a_bio_of_many_segments_is_transferred_up_to_the_last_byte() {
    for (direct_io, length) in
        [(DirectIo::Off, 7), (DirectIo::Off, 20), (DirectIo::Off, 512), (DirectIo::On, 512)]
    {
        let directory = Directory::new();
        let path = directory.file("image");
        let size = 80_100;
        std::fs::write(&path, vec![0; size]).unwrap();
        let device = LoopDevice::open(&partial(&path, direct_io, 512)).unwrap();
        let capacity = device.limits().capacity_bytes as usize;
        let mut queue = Disk::builder(Box::new(device)).build().unwrap().open_queue(0).unwrap();
        let mut transfer = |operation, mut buffer: IoBuffer| {
            let parts = buffer.chunks_mut(length);
            let segments = parts.map(|part| Segment::new(part.as_mut_ptr(), part.len() as u32)).collect();
            let data = Data::Segments(Box::new(Box::new(Scattered(buffer, segments))));
            let sectors = capacity as u64 >> 9;
            let bio =
                Bio { operation, flags: BioFlags::empty(), sector: Sector(0), sectors, data, user_data: 0 };
            queue.submit(bio).unwrap();
            queue.wait(1);
            let completion = queue.take_completion().unwrap();
            assert_eq!(completion.result, Ok(()), "{direct_io:?} {length}");
            let Data::Segments(mut owner) = completion.data else { panic!("the memory is returned") };
            (&mut **owner as &mut dyn Any).downcast_mut::<Scattered>().unwrap().0.to_vec()
        };
        let mut expected = transfer(Operation::Write, pattern(capacity, 1));
        assert_eq!(std::fs::read(&path).unwrap(), expected[..size], "{direct_io:?} {length}");
        expected[size..].fill(0);
        assert_eq!(transfer(Operation::Read, filled(capacity, 0xEE)), expected, "{direct_io:?} {length}");
    }
}

#[test]
fn a_resize_may_set_any_number_of_bytes() {
    for direct_io in [DirectIo::Off, DirectIo::On] {
        let directory = Directory::new();
        let path = directory.image(10_000);
        let device = LoopDevice::open(&partial(&path, direct_io, 512)).unwrap();
        let mut h = Harness::open(&device).unwrap();
        let sizes = || (device.limits().size_bytes(), std::fs::metadata(&path).unwrap().len());
        for (bytes, size, length) in [
            (Some(12_345), 12_345, 12_345),
            (Some(7), 7, 12_345),
            (None, 12_345, 12_345),
            (Some(12_800), 12_800, 12_800),
            (Some(12_801), 12_801, 12_801),
        ] {
            device.resize(bytes).unwrap();
            h.reload();
            assert_eq!(sizes(), (size, length), "{direct_io:?}");
            let capacity = device.limits().capacity_bytes;
            let tag = h.write(0, pieces(&vec![size as u8; capacity as usize], 512));
            assert_eq!(h.run(tag).0, Ok(()));
            assert_eq!(sizes(), (size, length), "{direct_io:?}");
            let found = h.read_back(0, capacity as usize);
            assert!(found[..size as usize].iter().all(|byte| *byte == size as u8));
            assert!(found[size as usize..].iter().all(|byte| *byte == 0));
        }
        for direct_io in [DirectIo::Off, DirectIo::On, DirectIo::Off] {
            device.set(&LoopSetting::DirectIo(direct_io)).unwrap();
            h.reload();
            let tag = h.write(12_288, pieces(&[9; 1024], 512));
            assert_eq!(h.run(tag).0, Ok(()));
            assert_eq!(h.read_back(12_288, 1024), [&[9; 513][..], &[0; 511]].concat());
        }
    }
}

/// The page cache must never contain a page that direct I/O uses, because the two would be read and written apart.
// Contract: direct-io
#[test]
fn zeroes_up_to_the_last_page_are_not_read_into_the_page_cache() {
    let directory = Directory::new();
    let path = directory.file("image");
    std::fs::write(&path, &*pattern(9000, 1)).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    let device = LoopDevice::open(&partial(&path, DirectIo::On, 512)).unwrap();
    let mut h = Harness::open(&device).unwrap();
    // Evicts the pages of the writes above.
    let tag = h.write(0, vec![pattern(8192, 2)]);
    assert_eq!(h.run(tag).0, Ok(()));
    let before = cached(&path).0;
    for flags in [BioFlags::empty(), BioFlags::NO_UNMAP] {
        let tag = h.bare(Operation::WriteZeroes, flags, 4096, 4096);
        assert_eq!(h.run(tag).0, Ok(()));
        assert_eq!(cached(&path).0, before, "{flags:?}");
    }
}

#[test]
fn without_the_option_a_partial_last_sector_is_not_served() {
    let directory = Directory::new();
    let path = directory.image(10_000);
    let device = open(&path, DirectIo::Off);
    assert_eq!((device.limits().capacity_bytes, device.limits().padding_bytes), (9728, 0));
    assert!(device.warnings().iter().any(|warning| warning.contains("272 bytes")), "{:?}", device.warnings());
}
