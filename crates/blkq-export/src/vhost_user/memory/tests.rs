use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;
use crate::vhost_user::harness::{Guest, USER_OFFSET};

fn file(bytes: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    ftruncate(&file, bytes).unwrap();
    file
}

fn region(guest_start: u64, user_start: u64, length: u64, file: &File, file_offset: u64) -> RegionSpec {
    let file = file.as_fd().try_clone_to_owned().unwrap();
    RegionSpec { guest_start, user_start, length, file, file_offset }
}

fn refusal(regions: Vec<RegionSpec>) -> String {
    let error = GuestMemory::map(regions).err().expect("such memory is refused");
    error.to_string()
}

#[test]
fn addresses_lead_to_the_right_bytes_of_the_file() {
    let file = file(0x10000);
    let memory = GuestMemory::map(vec![
        region(0x8000, 0x700_0000, 0x2000, &file, 0x3040),
        region(0x1000, 0x100_0000, 0x1001, &file, 0x8000),
    ])
    .unwrap();
    assert_eq!((memory.regions.len(), memory.bytes()), (2, 0x3001));
    let cursor = &mut Cursor::default();
    for (address, place) in [(0x8000u64, 0x3040u64), (0x9fff, 0x503f), (0x1000, 0x8000), (0x2000, 0x9000)] {
        assert!(memory.write(cursor, address, &[address as u8 ^ 0x5a]));
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        assert_eq!(byte, [address as u8 ^ 0x5a]);
        assert_eq!(memory.load::<1>(cursor, address), Some(byte));
    }
    for address in [0, 0xfff, 0x2001, 0x7fff, 0xa000, u64::MAX] {
        assert!(memory.span(cursor, address, 1).is_none(), "{address:#x}");
        assert!(!memory.write(cursor, address, &[0]) && memory.load::<2>(cursor, address).is_none());
    }
    // A span ends at the end of its region.
    assert_eq!(memory.span(cursor, 0x9ff0, 100).unwrap().len(), 16);
    assert!(memory.load::<16>(cursor, 0x9ff0).is_some() && memory.load::<17>(cursor, 0x9ff0).is_none());
    // Parts of rings have addresses of the front end, and must lie in one region.
    assert!(memory.area(0x700_0000, 0x2000, 16).is_some());
    assert!(memory.area(0x700_0010, 0x1ff0, 16).is_some());
    assert!(memory.area(0x700_0010, 0x1ff1, 16).is_none() && memory.area(0x700_0008, 16, 16).is_none());
    assert!(memory.area(0x8000, 16, 16).is_none() && memory.area(u64::MAX - 15, 16, 16).is_none());
}

#[test]
fn bytes_of_any_length_cross_adjacent_regions() {
    let guest = Guest::new(&[(0x1000, 100), (0x1064, 50), (0x1064 + 50, 50)]);
    let cursor = &mut Cursor::default();
    for start in 0x1000..0x1000 + 100u64 {
        for length in [1usize, 7, 8, 9, 60, 100] {
            let bytes: Vec<u8> = (0..length).map(|i| (start as usize * 31 + i * 7) as u8).collect();
            let mut back = vec![0; length];
            assert!(guest.memory.write(cursor, start, &bytes) && guest.memory.read(cursor, start, &mut back));
            assert_eq!(bytes, back);
        }
    }
    assert!(!guest.memory.write(cursor, 0x1000 + 150, &[1; 51]));
    guest.assert_intact();
}

#[test]
fn invalid_regions_are_rejected() {
    let file = file(0x10000);
    let one = |start, length, offset| vec![region(start, USER_OFFSET, length, &file, offset)];
    assert!(refusal(one(0, 0, 0)).contains("0 bytes"));
    assert!(refusal(one(0, 0x10001, 0)).contains("end of the file (65536 bytes)"));
    assert!(refusal(one(0, 0x1000, 0xf001)).contains("ends at byte 65537"));
    assert!(refusal(one(0, i64::MAX as u64, 1)).contains("is not valid"));
    assert!(refusal(one(u64::MAX, 1, 0)).contains("guest address"));
    assert!(refusal(one(u64::MAX - 0xfff, 0x1000, 0)).contains("guest address"));
    let user = vec![region(0, u64::MAX - 10, 0x1000, &file, 0)];
    assert!(refusal(user).contains("front end address"));
    for (guest, user) in [(0xfff, 0x5000), (0x5000, 0xfff), (0, 0x5000), (0x5000, 0)] {
        let two = vec![region(0, 0, 0x1000, &file, 0), region(guest, user, 0x1000, &file, 0)];
        assert!(refusal(two).contains("overlap"), "{guest:#x} {user:#x}");
    }
    let many = (0..=REGIONS_MAX as u64).map(|i| region(i << 12, i << 12, 0x1000, &file, 0)).collect();
    assert!(refusal(many).contains("65 regions"));
}

#[test]
fn descriptors_that_are_not_memory_are_rejected() {
    let (pipe, _other) = std::io::pipe().unwrap();
    let device = File::open("/dev/zero").unwrap();
    let directory = File::open("/").unwrap();
    for file in [File::from(OwnedFd::from(pipe)), device, directory] {
        assert!(refusal(vec![region(0, 0, 0x1000, &file, 0)]).contains("not a regular file"));
    }
    let proc = File::open("/proc/self/maps").unwrap();
    let refused = refusal(vec![region(0, 0, 1, &proc, 0)]);
    assert!(refused.contains("end of the file (0 bytes)"), "{refused}");
    // A file that cannot be mapped for writing.
    let sealed = file(0x1000);
    fcntl_add_seals(&sealed, SealFlags::WRITE).unwrap();
    assert!(refusal(vec![region(0, 0, 0x1000, &sealed, 0)]).contains("cannot map"));
}

#[test]
fn a_region_is_mapped_as_long_as_a_table_contains_it() {
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("memfd:counted")).count()
    };
    let file = File::from(memfd_create("counted", MemfdFlags::CLOEXEC).unwrap());
    ftruncate(&file, 0x4000).unwrap();
    let first = GuestMemory::map(vec![region(0, 0, 0x1000, &file, 0)]).unwrap();
    let second = first.with_region(region(0x5000, 0x5000, 0x1000, &file, 0x2000)).unwrap();
    assert_eq!((mapped(), second.regions.len()), (2, 2));
    assert!(first.with_region(region(0xfff, 0x9000, 0x1000, &file, 0)).is_err());
    assert_eq!(mapped(), 2);
    drop(first);
    assert_eq!(mapped(), 2);
    assert!(second.without_region((0x5000, 0x5000, 0x1001)).is_err());
    let third = second.without_region((0, 0, 0x1000)).unwrap();
    assert_eq!(mapped(), 2);
    drop(second);
    assert_eq!((mapped(), third.bytes()), (1, 0x1000));
    drop(third);
    assert_eq!(mapped(), 0);
}
