//! The rings of a virtual machine. A guest writes arbitrary data to its memory, and to the front end's record of requests
//! in flight, before and between the steps of the device. No step may touch a byte outside of the memory, find more chains
//! in flight than the ring has entries, or take a chain twice. Every segment of a request must be in the guest's memory and
//! have the length that the request says.
//!
//! Input: six bytes that choose ring and record, then steps of eight bytes each: of the guest, which writes words,
//! descriptors and requests; and of the device, which pops, parses, completes, publishes, stops, and is killed.
// Contract: bounded-input

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use blkq::Data;
use blkq_export::vhost_user::fuzzing::{
    Action, BlockRequest, Chain, Cursor, GuestMemory, Head, InflightRegion, Parser, RANGES_MAX, RegionSpec,
    Ring, RingSpec, S_OK,
};
use rustix::fs::{MemfdFlags, memfd_create};

/// The guest's memory: the rings, and two adjacent data regions; nothing in between.
const RINGS: u64 = 0x1_0000;
const DATA: u64 = 0x4_0000;
const REGIONS: [(u64, u64); 3] = [(RINGS, 0x2000), (DATA, 0x1400), (DATA + 0x1400, 0xc00)];
/// The front end's addresses of these regions.
const USER: u64 = 0x7000_0000_0000;
const DESCRIPTORS: u64 = RINGS;
const DRIVER: u64 = RINGS + 0x800;
const DEVICE: u64 = RINGS + 0xa00;
const TABLE: u64 = RINGS + 0x1000;
const CANARY: u8 = 0xc5;
const PAGE: u64 = 4096;

struct Guest {
    memory: Arc<GuestMemory>,
    file: File,
    /// The initial content of the file, with canaries between the regions; and the ranges of these.
    image: Vec<u8>,
    gaps: Vec<(u64, u64)>,
    /// The content of the file after an input.
    seen: Vec<u8>,
    ranges: Vec<(usize, usize)>,
    parser: Parser,
    records: [(InflightRegion, File); 2],
}

fn memfd(bytes: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

impl Guest {
    fn new() -> Guest {
        let mut places = Vec::new();
        let mut at = PAGE;
        for (_, length) in REGIONS {
            places.push((at + 64, length));
            at = (at + 64 + length).next_multiple_of(PAGE) + PAGE;
        }
        let file = memfd(at);
        let specs = REGIONS.iter().zip(&places).map(|((start, length), (offset, _))| RegionSpec {
            guest_start: *start,
            user_start: USER + start,
            length: *length,
            file: file.try_clone().unwrap().into(),
            file_offset: *offset,
        });
        let memory = Arc::new(GuestMemory::map(specs.collect()).unwrap());
        let starts = std::iter::once(0).chain(places.iter().map(|(at, length)| at + length));
        let gaps: Vec<_> = starts.zip(places.iter().map(|(at, _)| *at).chain([at])).collect();
        let mut image = vec![0; at as usize];
        gaps.iter().for_each(|(start, end)| image[*start as usize..*end as usize].fill(CANARY));
        let ranges = REGIONS.iter().map(|(start, length)| {
            let span = memory.span(&mut Cursor::default(), *start, *length as u32).unwrap();
            assert_eq!(u64::from(span.len()), *length);
            (span.start().addr().get(), *length as usize)
        });
        let ranges = ranges.collect();
        let record = |packed| {
            let (region, file) = InflightRegion::create(1, 16, packed).unwrap();
            (region, File::from(file))
        };
        Guest {
            memory,
            file,
            seen: image.clone(),
            image,
            gaps,
            ranges,
            parser: Parser::new("fuzz"),
            records: [record(false), record(true)],
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.memory.write(&mut Cursor::default(), address, bytes);
    }

    fn get16(&self, address: u64) -> u16 {
        u16::from_le_bytes(self.memory.load(&mut Cursor::default(), address).unwrap())
    }

    fn reset(&self) {
        self.file.write_all_at(&self.image, 0).unwrap();
        for (region, file) in &self.records {
            file.write_all_at(&[0; 1024][..region.bytes() as usize], 0).unwrap();
        }
    }

    fn assert_intact(&mut self) {
        self.file.read_exact_at(&mut self.seen, 0).unwrap();
        for (start, end) in &self.gaps {
            let gap = *start as usize..*end as usize;
            assert!(self.seen[gap.clone()] == self.image[gap], "beside the memory");
        }
    }

    /// Checks that the data of a request is in the guest's memory and has the right length.
    fn check(&mut self, request: BlockRequest) {
        match request.action {
            Action::Transfer { bytes, gathered, .. } => {
                assert!(bytes.is_multiple_of(512));
                let mut found = 0;
                if let Data::Segments(owner) = &gathered.data {
                    for segment in owner.segments() {
                        let (start, length) = (segment.ptr.addr(), segment.len as usize);
                        assert!(length > 0);
                        let inside =
                            |(from, bytes): &(usize, usize)| start >= *from && start + length <= from + bytes;
                        assert!(self.ranges.iter().any(inside), "a segment beside the memory");
                        found += length as u64;
                    }
                }
                assert_eq!(found, bytes);
                self.parser.recycle(gathered.data);
            }
            Action::Ranges { .. } => assert!((1..=RANGES_MAX).contains(&self.parser.ranges.len())),
            Action::Flush | Action::Reply(_) => {}
        }
        assert!(BlockRequest::written(request.writable, S_OK) <= 1 << 31);
        assert!(self.parser.write_status(&self.memory, request.status, 0));
    }
}

thread_local! {
    static GUEST: RefCell<Guest> = RefCell::new(Guest::new());
}

struct Device {
    ring: Option<Ring>,
    chain: Chain,
    /// A chain that was popped and is not parsed yet.
    fresh: bool,
    in_flight: Vec<Head>,
}

/// The address that a byte selects: mostly in or near a region.
fn address(which: u8, low: u16) -> u64 {
    let base = [DATA, DATA, TABLE, RINGS, DATA + 0x1400 - 256, DATA + 0x2000 - 256, 0, u64::MAX - 0xffff];
    base[usize::from(which) % 8].wrapping_add(u64::from(low))
}

fn step(guest: &mut Guest, device: &mut Device, spec: &mut RingSpec, record: Option<usize>, step: &[u8; 8]) {
    let [what, a, b, c, d, e, f, g] = *step;
    let low = u16::from_le_bytes([c, d]);
    let word = u16::from_le_bytes([e, f]);
    let index = u16::from(a) % (spec.size + 1);
    match what % 20 {
        // Steps of the guest.
        0 => guest.write(address(b, low), &step[4..]),
        1 | 2 => {
            // Writes a descriptor, in the ring or in a table.
            let place = if b & 1 == 0 { DESCRIPTORS } else { TABLE } + 16 * u64::from(index);
            let length = [16, 1, u32::from(word), 512, u32::from(word) << (g % 20), 0x1000, 17, 48]
                [usize::from(b >> 1) % 8];
            let mut bytes = address(b >> 4, low).to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            if spec.packed {
                let turn = [0x80, 0x8000, 0, 0x8080][usize::from(g >> 6)];
                bytes.extend((u16::from(f) % (spec.size + 1)).to_le_bytes());
                bytes.extend((u16::from(g & 7) | turn).to_le_bytes());
            } else {
                bytes.extend(u16::from(g & 7).to_le_bytes());
                bytes.extend((u16::from(f) % (spec.size + 1)).to_le_bytes());
            }
            guest.write(place, &bytes);
        }
        3 => {
            // Makes a descriptor of a split ring available; the index may claim a few more.
            let next = guest.get16(DRIVER + 2);
            guest.write(DRIVER + 4 + 2 * u64::from(next % spec.size), &index.to_le_bytes());
            guest.write(DRIVER + 2, &next.wrapping_add(1 + u16::from(b / 100)).to_le_bytes());
        }
        4 => {
            // Writes a request: its header, or a range.
            let kind = u32::from([0, 1, 4, 8, 11, 13, b, 255][usize::from(b) % 8]);
            let mut bytes = kind.to_le_bytes().to_vec();
            bytes.extend([0; 4]);
            bytes.extend(u64::from(word).to_le_bytes());
            guest.write(address(a, low), &bytes);
        }
        5 => guest.write(DRIVER, &step[1..5]),
        6 => guest.write(DEVICE + 2, &step[1..3]),
        7 => {
            if let Some(which) = record {
                let (region, file) = &guest.records[which];
                let at = u64::from(low) % region.bytes();
                let length = (region.bytes() - at).min(1 + u64::from(g % 2));
                file.write_all_at(&step[4..4 + length as usize], at).unwrap();
            }
        }
        // Steps of the device.
        8..=11 => {
            let Some(ring) = &mut device.ring else { return };
            match ring.pop(&mut device.chain) {
                Ok(Some(head)) => {
                    assert!(
                        head.index < spec.size
                            && !device.in_flight.iter().any(|other| other.index == head.index)
                    );
                    assert!(device.chain.readable().len() + device.chain.writable().len() <= 1024);
                    device.in_flight.push(head);
                    assert!(device.in_flight.len() <= usize::from(spec.size));
                    assert_eq!(ring.in_flight(), device.in_flight.len());
                    device.fresh = true;
                }
                Ok(None) => {}
                Err(error) => {
                    assert!(!error.to_string().is_empty());
                    device.ring = None;
                }
            }
        }
        12 | 13 => {
            if std::mem::take(&mut device.fresh) {
                match guest.parser.parse(&device.chain, &guest.memory.clone()) {
                    Ok(request) => guest.check(request),
                    Err(error) => {
                        assert!(!error.to_string().is_empty());
                        device.ring = None;
                    }
                }
            }
        }
        14 | 15 => {
            if let (Some(ring), false) = (&mut device.ring, device.in_flight.is_empty()) {
                let which = usize::from(a) % device.in_flight.len();
                ring.push_used(device.in_flight.swap_remove(which), low.into());
            }
        }
        16 => {
            if let Some(ring) = &mut device.ring {
                ring.publish();
            }
        }
        17 => {
            // Even numbers do nothing.
            if let (Some(ring), 1) = (&mut device.ring, a & 1) {
                let _ = ring.enable_kicks();
            }
        }
        _ => {
            // Stops if nothing is in flight, or is killed; then starts again.
            if let (Some(ring), true, 18) = (&mut device.ring, device.in_flight.is_empty(), what % 20) {
                ring.publish();
                spec.base = ring.base();
            } else if a & 1 == 0 {
                spec.base = if spec.packed {
                    u32::from(low) | u32::from(word) << 16
                } else {
                    guest.get16(DEVICE + 2).into()
                };
            }
            open(guest, device, spec, record);
        }
    }
}

fn open(guest: &Guest, device: &mut Device, spec: &RingSpec, record: Option<usize>) {
    device.in_flight.clear();
    device.fresh = false;
    let queue = record.and_then(|which| guest.records[which].0.queue(0, spec.size, spec.packed));
    device.ring = Ring::new(guest.memory.clone(), spec, queue).ok();
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some(([kind, size, base, place, offset, first], program)) =
        data.split_first_chunk::<6>().map(|(a, b)| (*a, b))
    else {
        return;
    };
    GUEST.with_borrow_mut(|guest| {
        guest.reset();
        let packed = kind & 1 != 0;
        let size = if packed { 1 + u16::from(size) % 16 } else { 1 << (size % 5) };
        let skew = |bit: u8| if place & bit != 0 { u64::from(offset) << (place >> 4) } else { 0 };
        let mut spec = RingSpec {
            size,
            packed,
            event_idx: kind & 2 != 0,
            indirect: kind & 4 == 0,
            descriptors: USER + DESCRIPTORS + skew(1),
            driver_area: USER + DRIVER + skew(2),
            device_area: USER + DEVICE + skew(4),
            base: if packed { 0x8000_8000 } else { 0 },
        };
        if base > 200 {
            spec.base = u32::from(base - 200) << (first % 32);
        }
        let record = (kind & 8 != 0).then_some(usize::from(packed));
        let mut device = Device { ring: None, chain: Chain::new(), fresh: false, in_flight: Vec::new() };
        open(guest, &mut device, &spec, record);
        for bytes in program.as_chunks::<8>().0 {
            step(guest, &mut device, &mut spec, record, bytes);
        }
        guest.assert_intact();
    });
}
