//! Tests of requests that are split into buffers in different ways.

use blkq::SegmentOwner;
use proptest::prelude::*;

use super::*;
use crate::vhost_user::chain::DESCRIPTOR_WRITE;
use crate::vhost_user::harness::Guest;
use crate::vhost_user::memory::Span;

const HEADER: u64 = 0x1000;
const DATA: u64 = 0x10_0000;
/// This region is adjacent to that of `DATA` in guest memory.
const MORE: u64 = DATA + 0x8000;
const STATUS: u64 = 0x2000;

fn guest() -> Guest {
    Guest::new(&[(HEADER, 0x2000), (DATA, 0x8000), (MORE, 0x8000)])
}

fn chain(readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Chain {
    let mut chain = Chain::new();
    for (list, flags) in [(readable, 0), (writable, DESCRIPTOR_WRITE)] {
        list.iter().for_each(|&(address, length)| chain.push(0, Buffer { address, length }, flags).unwrap());
    }
    chain
}

fn put_header(guest: &Guest, kind: u32, sector: u64) {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend(7u32.to_le_bytes());
    header.extend(sector.to_le_bytes());
    guest.write(HEADER, &header);
}

fn parse(guest: &Guest, chain: &Chain) -> Result<BlockRequest, RingError> {
    Parser::new("serial").parse(chain, &guest.memory)
}

fn place(guest: &Guest, address: u64) -> *mut u8 {
    let span: Span<'_> = guest.memory.span(&mut Cursor::default(), address, 1).unwrap();
    span.start().as_ptr()
}

fn segments(data: &Data) -> Vec<(*mut u8, u32)> {
    match data {
        Data::Segments(owner) => owner.segments().iter().map(|segment| (segment.ptr, segment.len)).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn data_of_reads_and_writes_is_in_the_guests_buffers() {
    let guest = guest();
    for (kind, operation) in [(T_IN, Operation::Read), (T_OUT, Operation::Write)] {
        put_header(&guest, kind, 0x1_2345_6789);
        let data = [(DATA, 4096), (DATA + 0x3000, 512)];
        let chain = match operation {
            Operation::Read => chain(&[(HEADER, 16)], &[data[0], data[1], (STATUS, 1)]),
            _ => chain(&[(HEADER, 16), data[0], data[1]], &[(STATUS, 1)]),
        };
        let request = parse(&guest, &chain).unwrap();
        assert_eq!(request.status, STATUS);
        let Action::Transfer { operation: found, sector, bytes, gathered } = request.action else { panic!() };
        assert_eq!((found, sector, bytes), (operation, Sector(0x1_2345_6789), 4608));
        let segments = segments(&gathered.data);
        assert_eq!(segments, [(place(&guest, DATA), 4096), (place(&guest, DATA + 0x3000), 512)]);
        assert_eq!(gathered.unaligned & 63, 0);
        let written = if operation == Operation::Read { 4609 } else { 1 };
        assert_eq!(BlockRequest::written(request.writable, S_OK), written);
        assert_eq!(BlockRequest::written(request.writable, S_IOERR), u32::from(written == 1));
    }
}

#[test]
fn a_buffer_across_adjacent_regions_is_two_segments() {
    let guest = guest();
    put_header(&guest, T_IN, 0);
    let request = parse(&guest, &chain(&[(HEADER, 16)], &[(MORE - 512, 1024), (STATUS, 1)])).unwrap();
    let Action::Transfer { gathered, .. } = request.action else { panic!() };
    assert_eq!(segments(&gathered.data), [(place(&guest, MORE - 512), 512), (place(&guest, MORE), 512)]);
    for data in [
        (MORE + 0x8000 - 512, 1024),
        (DATA - 512, 1024),
        (0, 512),
        (u64::MAX - 511, 512),
        (DATA, u32::MAX - 511),
    ] {
        let unmapped = RingError::BufferUnmapped { address: data.0, length: data.1 };
        let refused = parse(&guest, &chain(&[(HEADER, 16)], &[data, (STATUS, 1)]));
        if data.1 == u32::MAX - 511 {
            // This request is longer than the limit.
            assert!(matches!(refused.unwrap().action, Action::Reply(S_IOERR)));
        } else {
            assert_eq!(refused.err(), Some(unmapped));
        }
    }
}

#[test]
fn adjacent_buffers_become_one_segment() {
    let guest = guest();
    put_header(&guest, T_OUT, 0);
    let data = [(HEADER, 16), (DATA, 4096), (DATA + 4096, 4096), (DATA + 8192, 512), (DATA + 0x5000, 512)];
    let request = parse(&guest, &chain(&data, &[(STATUS, 1)])).unwrap();
    let Action::Transfer { gathered, .. } = request.action else { panic!() };
    assert_eq!(segments(&gathered.data), [(place(&guest, DATA), 8704), (place(&guest, DATA + 0x5000), 512)]);
}

#[test]
fn partial_sectors_and_too_long_requests_fail() {
    let guest = guest();
    put_header(&guest, T_IN, 0);
    for bytes in [1, 511, 513, 4095] {
        let request = parse(&guest, &chain(&[(HEADER, 16)], &[(DATA, bytes), (STATUS, 1)])).unwrap();
        assert!(matches!(request.action, Action::Reply(S_IOERR)), "{bytes}");
        assert_eq!(BlockRequest::written(request.writable, S_IOERR), 0);
    }
    let empty = parse(&guest, &chain(&[(HEADER, 16)], &[(STATUS, 1)])).unwrap();
    assert!(matches!(empty.action, Action::Transfer { bytes: 0, .. }));
    let mut long = vec![(DATA, 0x8000); 1000];
    long.iter_mut().for_each(|buffer| buffer.1 = 1 << 21);
    long.push((STATUS, 1));
    let request = parse(&guest, &chain(&[(HEADER, 16)], &long)).unwrap();
    assert!(matches!(request.action, Action::Reply(S_IOERR)));
}

#[test]
fn a_request_without_header_or_status_stops_the_ring() {
    let guest = guest();
    put_header(&guest, T_FLUSH, 0);
    let bad = [
        (chain(&[], &[(STATUS, 1)]), RingError::HeaderShort { bytes: 0 }),
        (chain(&[(HEADER, 15)], &[(STATUS, 1)]), RingError::HeaderShort { bytes: 15 }),
        (chain(&[(HEADER, 8), (HEADER + 8, 7)], &[(STATUS, 1)]), RingError::HeaderShort { bytes: 15 }),
        (chain(&[(HEADER, 16)], &[]), RingError::NoStatus),
        (chain(&[(0, 16)], &[(STATUS, 1)]), RingError::BufferUnmapped { address: 0, length: 16 }),
        (chain(&[(HEADER, 16)], &[(0, 1)]), RingError::BufferUnmapped { address: 0, length: 1 }),
        (
            chain(&[(HEADER, 16)], &[(u64::MAX, 2)]),
            RingError::BufferUnmapped { address: u64::MAX, length: 2 },
        ),
        (
            chain(&[(HEADER + 0x1ff8, 16)], &[(STATUS, 1)]),
            RingError::BufferUnmapped { address: 0x2ff8, length: 16 },
        ),
    ];
    for (chain, error) in bad {
        assert_eq!(parse(&guest, &chain).err(), Some(error));
    }
}

#[test]
fn each_type_has_its_action() {
    let guest = guest();
    let flush = |kind| {
        put_header(&guest, kind, 5);
        parse(&guest, &chain(&[(HEADER, 16)], &[(STATUS, 1)])).unwrap().action
    };
    assert!(matches!(flush(T_FLUSH), Action::Flush));
    // The old barrier bit; SCSI commands, lifetime, secure erase and zones, which are not supported; and
    // unknown types.
    for kind in [2, 3, 5, 10, 14, 15, 16, 24, 0x8000_0000, u32::MAX] {
        assert!(matches!(flush(kind), Action::Reply(S_UNSUPP)), "{kind}");
    }
}

#[test]
fn the_serial_number_is_cut_to_the_room_for_it() {
    let guest = guest();
    put_header(&guest, T_GET_ID, 0);
    let mut parser = Parser::new("a-serial-number-that-is-too-long");
    for (room, expected) in
        [(20, "a-serial-number-that"), (5, "a-ser"), (0, ""), (64, "a-serial-number-that")]
    {
        guest.write(DATA, &[0xee; 80]);
        let mut writable = vec![(DATA, 1), (DATA + 1, 64)];
        writable.truncate(usize::from(room > 0) + usize::from(room > 1));
        if let Some(last) = writable.get_mut(1) {
            last.1 = room - 1;
        }
        writable.push((STATUS, 1));
        let request = parser.parse(&chain(&[(HEADER, 16)], &writable), &guest.memory).unwrap();
        assert!(matches!(request.action, Action::Reply(S_OK)));
        let written: [u8; 80] = guest.read(DATA);
        let (id, rest) = written.split_at(expected.len());
        assert_eq!(id, expected.as_bytes());
        assert!(rest.iter().all(|byte| *byte == 0xee));
        // The status directly follows the number only if the number fills its buffer.
        let follows = room <= 20;
        assert_eq!(request.writable, expected.len() as u32 + u32::from(follows));
    }
    let mut parser = Parser::new("x");
    parser.parse(&chain(&[(HEADER, 16)], &[(DATA, 20), (STATUS, 1)]), &guest.memory).unwrap();
    assert_eq!(guest.read::<20>(DATA), *b"x\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
}

fn put_range(guest: &Guest, index: u64, sector: u64, sectors: u32, flags: u32) {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    guest.write(DATA + index * 16, &bytes);
}

#[test]
fn discards_and_write_zeroes_have_their_ranges() {
    let guest = guest();
    let mut parser = Parser::new("");
    let mut parse = |kind, bytes| {
        put_header(&guest, kind, 99);
        let chain = chain(&[(HEADER, 16), (DATA, bytes)], &[(STATUS, 1)]);
        let action = parser.parse(&chain, &guest.memory).unwrap().action;
        (action, parser.ranges.clone())
    };
    put_range(&guest, 0, 8, 16, 0);
    put_range(&guest, 1, 1 << 40, u32::MAX, 0);
    let range = |sector, sectors, unmap| Range { sector: Sector(sector), sectors, unmap };
    for (kind, operation) in [(T_DISCARD, Operation::Discard), (T_WRITE_ZEROES, Operation::WriteZeroes)] {
        let (action, ranges) = parse(kind, 32);
        assert!(matches!(action, Action::Ranges(found) if found == operation));
        assert_eq!(ranges, [range(8, 16, false), range(1 << 40, u32::MAX.into(), false)]);
        for bytes in [0, 1, 15, 17, 16 * (RANGES_MAX as u32 + 1)] {
            let expected = if bytes == 0 { 16 } else { bytes };
            if bytes > 0 {
                assert!(matches!(parse(kind, expected).0, Action::Reply(S_IOERR)), "{bytes}");
            }
        }
        assert!(matches!(parse(kind, 16 * RANGES_MAX as u32).0, Action::Ranges { .. }));
    }
    put_range(&guest, 1, 24, 1, RANGE_UNMAP);
    assert_eq!(parse(T_WRITE_ZEROES, 32).1[1], range(24, 1, true));
    assert!(matches!(parse(T_DISCARD, 32).0, Action::Reply(S_UNSUPP)));
    put_range(&guest, 1, 24, 1, 2);
    assert!(matches!(parse(T_WRITE_ZEROES, 32).0, Action::Reply(S_UNSUPP)));
    assert!(matches!(parse(T_DISCARD, 32).0, Action::Reply(S_UNSUPP)));
}

#[test]
fn segments_of_a_completed_request_are_reused() {
    let guest = guest();
    put_header(&guest, T_IN, 0);
    let chain = chain(&[(HEADER, 16)], &[(DATA, 4096), (STATUS, 1)]);
    let mut parser = Parser::new("");
    let data_of = |parser: &mut Parser| match parser.parse(&chain, &guest.memory).unwrap().action {
        Action::Transfer { gathered: Gathered { data: Data::Segments(owner), .. }, .. } => owner,
        _ => panic!(),
    };
    let address = |owner: &dyn SegmentOwner| (&raw const *owner).cast::<u8>();
    let (first, second) = (data_of(&mut parser), data_of(&mut parser));
    let known = [address(&**first), address(&**second)];
    assert_ne!(known[0], known[1]);
    parser.recycle(Data::Segments(first));
    parser.recycle(Data::Segments(second));
    let again = [data_of(&mut parser), data_of(&mut parser)];
    again.iter().for_each(|owner| assert!(known.contains(&address(&***owner))));
    // Data of other kinds is dropped.
    parser.recycle(Data::Buffer(blkq::IoBuffer::zeroed(512)));
    // A bio keeps the guest memory mapped, and an idle owner does not.
    let [bio, idle] = again;
    parser.recycle(Data::Segments(idle));
    drop(parser);
    let weak = Arc::downgrade(&guest.memory);
    drop(guest);
    assert!(weak.upgrade().is_some());
    drop(bio);
    assert!(weak.upgrade().is_none());
}

proptest! {
    #[test]
    fn the_driver_may_split_a_request_anywhere(
        cuts in prop::collection::vec(8u32..200, 0..12), sectors in 1u32..8, writes: bool, gap in 0u64..3,
    ) {
        let guest = guest();
        let bytes = sectors * 512;
        // The readable part is at DATA: the header, and the data of a write. The writable part is at MORE.
        let mut header = (if writes { T_OUT } else { T_IN }).to_le_bytes().to_vec();
        header.extend(0u32.to_le_bytes());
        header.extend(77u64.to_le_bytes());
        let cut = |start: u64, total: u32| {
            let (mut at, mut left, mut list, mut cuts) = (start, total, Vec::new(), cuts.iter().cycle());
            while left > 0 {
                let length = cuts.next().map_or(left, |cut| (*cut).min(left));
                list.push((at, length));
                at += u64::from(length) + gap;
                left -= length;
            }
            list
        };
        let readable = cut(DATA, if writes { 16 + bytes } else { 16 });
        let mut rest = header.as_slice();
        for (address, length) in &readable {
            let (now, later) = rest.split_at(rest.len().min(*length as usize));
            guest.write(*address, now);
            rest = later;
        }
        let writable = cut(MORE, if writes { 1 } else { bytes + 1 });
        let request = parse(&guest, &chain(&readable, &writable)).unwrap();
        let Action::Transfer { operation, sector, bytes: found, gathered } = request.action else { panic!() };
        prop_assert_eq!(operation, if writes { Operation::Write } else { Operation::Read });
        prop_assert_eq!((sector, found), (Sector(77), u64::from(bytes)));
        let (address, length) = writable[writable.len() - 1];
        prop_assert_eq!(request.status, address + u64::from(length) - 1);
        // Byte for byte, the segments are the buffers without the header or the status.
        let list = if writes { &readable } else { &writable };
        let all: Vec<u64> = list.iter().flat_map(|(at, length)| *at..at + u64::from(*length)).collect();
        let expected = if writes { &all[16..] } else { &all[..all.len() - 1] };
        let found: Vec<*mut u8> = segments(&gathered.data)
            .into_iter()
            .flat_map(|(start, length)| (0..length as usize).map(move |at| start.wrapping_add(at)))
            .collect();
        let places: Vec<*mut u8> = expected.iter().map(|at| place(&guest, *at)).collect();
        prop_assert_eq!(found, places);
    }
}
