//! A guest for tests: memory with canaries around each region, and the driver's side of both kinds of ring.
//! The driver was written from the specification, independently of the device's side.
#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]
#![allow(dead_code, reason = "unit tests and the simulation each use a part of this module")]

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::memory::{Cursor, GuestMemory, RegionSpec};
use super::ring::RingSpec;

/// Difference between the front end's address and the guest address of the same byte.
pub const USER_OFFSET: u64 = 0x7f00_0000_0000;
const CANARY: u8 = 0xc5;
const PAGE: u64 = 4096;

pub struct Guest {
    pub memory: Arc<GuestMemory>,
    pub file: File,
    /// For each region: guest address, offset in the file, length.
    places: Vec<(u64, u64, u64)>,
    /// The content of the file, except for what the device has written since the last [`Guest::expect`].
    expected: Mutex<Vec<u8>>,
}

impl Guest {
    pub fn new(regions: &[(u64, u64)]) -> Guest {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        let mut places = Vec::new();
        let mut at = PAGE;
        for (address, length) in regions {
            // An unaligned offset, because the protocol allows it.
            at += 64;
            places.push((*address, at, *length));
            at = (at + length).next_multiple_of(PAGE) + PAGE;
        }
        ftruncate(&file, at).unwrap();
        let specs = places.iter().map(|(guest_start, file_offset, length)| RegionSpec {
            guest_start: *guest_start,
            user_start: guest_start + USER_OFFSET,
            length: *length,
            file: file.as_fd().try_clone_to_owned().unwrap(),
            file_offset: *file_offset,
        });
        let memory = Arc::new(GuestMemory::map(specs.collect()).unwrap());
        let mut expected = vec![CANARY; at as usize];
        places.iter().for_each(|(_, at, length)| expected[*at as usize..(at + length) as usize].fill(0));
        file.write_all_at(&expected, 0).unwrap();
        Guest { memory, file, places, expected: Mutex::new(expected) }
    }

    pub fn places(&self) -> &[(u64, u64, u64)] {
        &self.places
    }

    pub fn assert_intact(&self) {
        let whole: Vec<(u64, u64)> =
            self.places.iter().map(|(address, _, length)| (*address, *length)).collect();
        assert_eq!(self.changed_beside(&whole), None, "written beside a region");
    }

    /// Calls `part` for each part of the file that belongs to the `bytes` bytes from `address` on, with its
    /// range in the file and its offset in the bytes.
    fn parts(&self, address: u64, bytes: u64, mut part: impl FnMut(std::ops::Range<usize>, usize)) {
        for (start, at, length) in &self.places {
            let (from, to) = (address.max(*start), (address + bytes).min(start + length));
            if from < to {
                part((at + from - start) as usize..(at + to - start) as usize, (from - address) as usize);
            }
        }
    }

    /// Accepts what these parts of the memory (address, length) contain, because the device may write them.
    pub fn expect(&self, written: &[(u64, u64)]) {
        let mut expected = self.expected.lock().unwrap();
        for (address, bytes) in written {
            self.parts(*address, *bytes, |range, _| {
                self.file.read_exact_at(&mut expected[range.clone()], range.start as u64).unwrap();
            });
        }
    }

    /// The offset in the file of a byte that has changed, although the guest did not write it and it is not
    /// in `written`. The content of `written` is accepted, as by [`Guest::expect`].
    pub fn changed_beside(&self, written: &[(u64, u64)]) -> Option<usize> {
        self.expect(written);
        let expected = self.expected.lock().unwrap();
        let mut seen = vec![0; expected.len()];
        self.file.read_exact_at(&mut seen, 0).unwrap();
        if seen == *expected {
            return None;
        }
        seen.iter().zip(&*expected).position(|(seen, expected)| seen != expected)
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        assert!(self.memory.write(&mut Cursor::default(), address, bytes), "{address:#x}");
        let mut expected = self.expected.lock().unwrap();
        self.parts(address, bytes.len() as u64, |range, at| {
            let length = range.len();
            expected[range].copy_from_slice(&bytes[at..at + length]);
        });
    }

    /// Writes as a defective device would: the change is not expected.
    pub fn write_unexpected(&self, address: u64, bytes: &[u8]) {
        assert!(self.memory.write(&mut Cursor::default(), address, bytes), "{address:#x}");
    }

    pub fn read_bytes(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut all = vec![0; bytes];
        assert!(self.memory.read(&mut Cursor::default(), address, &mut all), "{address:#x}");
        all
    }

    pub fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        self.memory.load(&mut Cursor::default(), address).unwrap()
    }

    pub fn put16(&self, address: u64, value: u16) {
        self.write(address, &value.to_le_bytes());
    }

    pub fn get16(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.read(address))
    }

    pub fn put_split(&self, table: u64, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(table + u64::from(index) * 16, &bytes);
    }

    pub fn put_packed(&self, table: u64, index: u16, address: u64, length: u32, id: u16, flags: u16) {
        let at = table + u64::from(index) * 16;
        self.write(at, &address.to_le_bytes());
        self.write(at + 8, &length.to_le_bytes());
        self.put16(at + 12, id);
        self.put16(at + 14, flags);
    }
}

/// A buffer that a driver offers: guest address, length, and whether the device writes it.
pub type Offer = (u64, u32, bool);

/// The driver's side of a ring, at fixed addresses of a guest's memory.
#[derive(Clone)]
pub struct Driver {
    pub spec: RingSpec,
    // Guest addresses.
    descriptors: u64,
    driver_area: u64,
    device_area: u64,
    /// Indirect tables of 8 entries, one for each head.
    tables: u64,
    /// Free descriptors of a split ring, or free identifiers of a packed one.
    free: Vec<u16>,
    /// For each head: the descriptors that the chain occupies.
    taken: Vec<Vec<u16>>,
    room: u16,
    next: u16,
    wrap: bool,
    used: u16,
    used_wrap: bool,
    /// The value of `next` at the last call of [`Driver::wants_kick`].
    kicked: u16,
    added: u16,
}

impl Driver {
    pub const BYTES: u64 = 0x10000;

    pub fn new(guest: &Guest, at: u64, size: u16, packed: bool, event_idx: bool) -> Driver {
        let (descriptors, driver_area, device_area) = (at, at + 0x4000, at + 0x5000);
        guest.write(at, &vec![0; 0x8000]);
        let user = |address: u64| address + USER_OFFSET;
        let spec = RingSpec {
            size,
            packed,
            event_idx,
            indirect: true,
            descriptors: user(descriptors),
            driver_area: user(driver_area),
            device_area: user(device_area),
            base: if packed { 0x8000_8000 } else { 0 },
        };
        Driver {
            spec,
            descriptors,
            driver_area,
            device_area,
            tables: at + 0x8000,
            free: (0..size).rev().collect(),
            taken: vec![Vec::new(); usize::from(size)],
            room: size,
            next: 0,
            wrap: true,
            used: 0,
            used_wrap: true,
            kicked: 0,
            added: 0,
        }
    }

    pub fn start_at(&mut self, guest: &Guest, index: u16) {
        assert!(!self.spec.packed);
        (self.next, self.used, self.kicked) = (index, index, index);
        guest.put16(self.driver_area + 2, index);
        guest.put16(self.device_area + 2, index);
        self.spec.base = index.into();
    }

    fn table(&self, head: u16) -> u64 {
        self.tables + u64::from(head % 64) * 128
    }

    pub fn has_room(&self, buffers: usize) -> bool {
        let room = if self.spec.packed { usize::from(self.room) } else { self.free.len() };
        room >= buffers && !self.free.is_empty()
    }

    pub fn add(&mut self, guest: &Guest, buffers: &[Offer], indirect: bool) -> u16 {
        let head = if self.spec.packed {
            self.add_packed(guest, buffers, indirect)
        } else {
            self.add_split(guest, buffers, indirect)
        };
        self.added = self.added.wrapping_add(1);
        head
    }

    fn add_split(&mut self, guest: &Guest, buffers: &[Offer], indirect: bool) -> u16 {
        let count = if indirect { 1 } else { buffers.len() };
        let chain: Vec<u16> = (0..count).map(|_| self.free.pop().unwrap()).collect();
        let head = chain[0];
        let places: Vec<u16> = if indirect { (0..buffers.len() as u16).collect() } else { chain.clone() };
        let table = if indirect { self.table(head) } else { self.descriptors };
        for (index, (address, length, write)) in buffers.iter().enumerate() {
            let next = places.get(index + 1).copied();
            let flags = u16::from(next.is_some()) | u16::from(*write) << 1;
            guest.put_split(table, places[index], *address, *length, flags, next.unwrap_or(0xffff));
        }
        if indirect {
            guest.put_split(self.descriptors, head, table, buffers.len() as u32 * 16, 4, 0);
        }
        self.taken[usize::from(head)] = chain;
        guest.put16(self.driver_area + 4 + u64::from(self.next % self.spec.size) * 2, head);
        self.next = self.next.wrapping_add(1);
        guest.put16(self.driver_area + 2, self.next);
        head
    }

    fn add_packed(&mut self, guest: &Guest, buffers: &[Offer], indirect: bool) -> u16 {
        let id = self.free.pop().unwrap();
        let table = self.table(id);
        let chain: Vec<(u64, u32, u16)> = if indirect {
            for (index, (address, length, write)) in buffers.iter().enumerate() {
                guest.put_packed(table, index as u16, *address, *length, 0, u16::from(*write) << 1);
            }
            vec![(table, buffers.len() as u32 * 16, 4)]
        } else {
            let last = buffers.len() - 1;
            let flags = |index, write| u16::from(index < last) | u16::from(write) << 1;
            buffers.iter().enumerate().map(|(i, (a, l, write))| (*a, *l, flags(i, *write))).collect()
        };
        let mut head = None;
        for (address, length, flags) in &chain {
            let turn = if self.wrap { 0x80 } else { 0x8000 };
            // The flags of the first descriptor are written last, because they make the whole chain
            // available.
            let (now, later) = if head.is_none() {
                (flags | (turn ^ 0x8080), Some(flags | turn))
            } else {
                (flags | turn, None)
            };
            guest.put_packed(self.descriptors, self.next, *address, *length, id, now);
            if let Some(flags) = later {
                head = Some((self.next, flags));
            }
            self.next += 1;
            if self.next == self.spec.size {
                (self.next, self.wrap) = (0, !self.wrap);
            }
        }
        let (place, flags) = head.unwrap();
        guest.put16(self.descriptors + u64::from(place) * 16 + 14, flags);
        self.room -= chain.len() as u16;
        self.taken[usize::from(id)] = vec![0; chain.len()];
        id
    }

    /// Whether the device wants a kick for the chains that were added since the last call.
    pub fn wants_kick(&mut self, guest: &Guest) -> bool {
        let (old, new) = (self.kicked, self.next);
        self.kicked = new;
        let added = std::mem::take(&mut self.added);
        if added == 0 {
            return false;
        }
        if !self.spec.packed {
            if !self.spec.event_idx {
                return guest.get16(self.device_area) & 1 == 0;
            }
            let event = guest.get16(self.device_area + 4 + u64::from(self.spec.size) * 8);
            return (0..added).any(|step| old.wrapping_add(step) == event);
        }
        match guest.get16(self.device_area + 2) {
            0 => true,
            1 => false,
            _ => {
                // Whether `next` has passed the position `event`, checked position by position.
                let event = guest.get16(self.device_area);
                let (mut at, mut wrap) = (new, self.wrap);
                let steps = (new + self.spec.size - old) % self.spec.size;
                let steps = if steps == 0 { self.spec.size } else { steps };
                (0..steps).any(|_| {
                    if at == 0 {
                        (at, wrap) = (self.spec.size, !wrap);
                    }
                    at -= 1;
                    event == at | u16::from(wrap) << 15
                })
            }
        }
    }

    pub fn want_calls(&mut self, guest: &Guest, wanted: bool) {
        if !self.spec.packed {
            if self.spec.event_idx {
                let event = if wanted { self.used } else { self.used.wrapping_sub(1) };
                guest.put16(self.driver_area + 4 + u64::from(self.spec.size) * 2, event);
            } else {
                guest.put16(self.driver_area, (!wanted).into());
            }
            return;
        }
        guest.put16(self.driver_area, self.used | u16::from(self.used_wrap) << 15);
        let flags = if !wanted {
            1
        } else if self.spec.event_idx {
            2
        } else {
            0
        };
        guest.put16(self.driver_area + 2, flags);
    }

    /// The base for a device without a record: after the chains that the driver took as used.
    pub fn used_position(&self) -> u32 {
        let at = u32::from(self.used | u16::from(self.spec.packed && self.used_wrap) << 15);
        if self.spec.packed { at | at << 16 } else { at }
    }

    /// Takes the next chain that the device has used. Returns its head and the number of bytes written.
    pub fn take_used(&mut self, guest: &Guest) -> Option<(u16, u32)> {
        let (head, written) = if self.spec.packed {
            let at = self.descriptors + u64::from(self.used) * 16;
            let turn = if self.used_wrap { 0x8080 } else { 0 };
            if guest.get16(at + 14) & 0x8080 != turn {
                return None;
            }
            (guest.get16(at + 12), u32::from_le_bytes(guest.read(at + 8)))
        } else {
            if guest.get16(self.device_area + 2) == self.used {
                return None;
            }
            let at = self.device_area + 4 + u64::from(self.used % self.spec.size) * 8;
            let head = u32::from_le_bytes(guest.read(at));
            (u16::try_from(head).unwrap(), u32::from_le_bytes(guest.read(at + 4)))
        };
        let taken = std::mem::take(&mut self.taken[usize::from(head)]);
        assert!(!taken.is_empty(), "used without being available: {head}");
        if self.spec.packed {
            self.room += taken.len() as u16;
            self.used += taken.len() as u16;
            if self.used >= self.spec.size {
                (self.used, self.used_wrap) = (self.used - self.spec.size, !self.used_wrap);
            }
            self.free.push(head);
        } else {
            self.used = self.used.wrapping_add(1);
            self.free.extend(taken);
        }
        Some((head, written))
    }
}
