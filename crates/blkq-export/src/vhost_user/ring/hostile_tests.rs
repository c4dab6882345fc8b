//! Rings with content that a hostile guest or front end may write. Each mistake must be reported with its
//! reason, quickly, and nothing outside of the guest's memory may be accessed.
// Contract: bounded-input

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkq::testing::wait_until;

use super::*;
use crate::vhost_user::chain::DESCRIPTORS_MAX;
use crate::vhost_user::harness::{Driver, Guest, USER_OFFSET};
use crate::vhost_user::inflight::InflightRegion;
use crate::vhost_user::request::Parser;

const RINGS: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
const DESCRIPTORS: u64 = RINGS;
const AVAILABLE: u64 = RINGS + 0x4000;
const USED: u64 = RINGS + 0x5000;
const TABLE: u64 = RINGS + 0x8000;
const SIZE: u16 = 8;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn guest() -> Guest {
    Guest::new(&[(RINGS, Driver::BYTES), (DATA, 0x10000)])
}

fn spec(guest: &Guest, packed: bool) -> RingSpec {
    Driver::new(guest, RINGS, SIZE, packed, true).spec
}

fn open(guest: &Guest, spec: &RingSpec) -> Result<Ring, RingError> {
    Ring::new(Arc::clone(&guest.memory), spec, None)
}

/// Pops the first chain of a split ring: address, length, flags, next. Returns its number of buffers.
fn split(descriptors: &[(u64, u32, u16, u16)], table: &[(u64, u32, u16, u16)]) -> Result<usize, RingError> {
    let guest = guest();
    let spec = spec(&guest, false);
    for (place, list) in [(DESCRIPTORS, descriptors), (TABLE, table)] {
        for (index, (address, length, flags, next)) in list.iter().enumerate() {
            guest.put_split(place, index as u16, *address, *length, *flags, *next);
        }
    }
    guest.put16(AVAILABLE + 2, 1);
    let mut chain = Chain::new();
    let popped = open(&guest, &spec)?.pop(&mut chain)?;
    assert!(popped.is_some());
    guest.assert_intact();
    Ok(chain.readable().len() + chain.writable().len())
}

/// As [`split`] for a packed ring: address, length, identifier, flags without the wrap bits.
fn packed(descriptors: &[(u64, u32, u16, u16)], table: &[(u64, u32, u16, u16)]) -> Result<usize, RingError> {
    let guest = guest();
    let spec = spec(&guest, true);
    for (place, list, turn) in [(DESCRIPTORS, descriptors, 0x80), (TABLE, table, 0)] {
        for (index, (address, length, id, flags)) in list.iter().enumerate() {
            guest.put_packed(place, index as u16, *address, *length, *id, flags | turn);
        }
    }
    let mut chain = Chain::new();
    let popped = open(&guest, &spec)?.pop(&mut chain)?;
    assert!(popped.is_some());
    guest.assert_intact();
    Ok(chain.readable().len() + chain.writable().len())
}

#[test]
fn invalid_chains_of_a_split_ring_are_rejected() {
    let head = 0;
    let table = |length, flags| [(TABLE, length, flags, 0)];
    assert_eq!(split(&[(DATA, 16, NEXT, 1), (DATA, 1, WRITE, 7)], &[]), Ok(2));
    assert_eq!(split(&[(DATA, 16, NEXT, 0)], &[]), Err(RingError::ChainLoop { head }));
    assert_eq!(
        split(&[(DATA, 16, NEXT, 2), (0, 0, 0, 0), (DATA, 16, NEXT, 0)], &[]),
        Err(RingError::ChainLoop { head })
    );
    assert_eq!(split(&[(DATA, 16, NEXT, SIZE)], &[]), Err(RingError::NextRange { head, next: SIZE }));
    assert_eq!(split(&[(DATA, 0, 0, 0)], &[]), Err(RingError::EmptyBuffer { head }));
    let order = [(DATA, 1, WRITE | NEXT, 1), (DATA, 16, 0, 0)];
    assert_eq!(split(&order, &[]), Err(RingError::Order { head }));
    // Indirect tables, alone and after ordinary descriptors.
    assert_eq!(split(&table(32, INDIRECT), &[(DATA, 16, NEXT, 1), (DATA, 1, WRITE, 0)]), Ok(2));
    assert_eq!(split(&[(DATA, 16, NEXT, 1), (TABLE, 16, INDIRECT, 0)], &[(DATA, 1, WRITE, 0)]), Ok(2));
    // The write flag has no meaning for the table itself.
    assert_eq!(split(&table(16, INDIRECT | WRITE), &[(DATA, 16, 0, 0)]), Ok(1));
    assert_eq!(split(&table(32, INDIRECT | NEXT), &[]), Err(RingError::IndirectNext { head }));
    for length in [0, 15, 17, 16 * (DESCRIPTORS_MAX as u32 + 1), u32::MAX, 0xffff_fff0] {
        assert_eq!(split(&table(length, INDIRECT), &[]), Err(RingError::IndirectLength { head, length }));
    }
    let nested = [(DATA, 16, NEXT, 1), (TABLE, 16, INDIRECT, 0)];
    assert_eq!(split(&table(32, INDIRECT), &nested), Err(RingError::IndirectNested { head }));
    let beyond = [(DATA, 16, NEXT, 2)];
    assert_eq!(split(&table(32, INDIRECT), &beyond), Err(RingError::NextRange { head, next: 2 }));
    let circle = [(DATA, 16, NEXT, 1), (DATA, 16, NEXT, 0)];
    assert_eq!(split(&table(32, INDIRECT), &circle), Err(RingError::ChainLoop { head }));
    for address in [0, RINGS - 16, RINGS + Driver::BYTES - 16, DATA + 0x10000, u64::MAX - 8] {
        let unmapped = RingError::BufferUnmapped { address, length: 32 };
        let linked: Vec<_> = vec![(DATA, 16, NEXT, 1); 2];
        assert_eq!(
            split(&[(address, 32, INDIRECT, 0)], &linked).map_err(|e| match e {
                // The last entries of the region are zeroes, and so are buffers of 0 bytes.
                RingError::EmptyBuffer { .. } => unmapped,
                other => other,
            }),
            Err(unmapped)
        );
    }
}

#[test]
fn invalid_chains_of_a_packed_ring_are_rejected() {
    let head = 3;
    let table = |length, flags| [(TABLE, length, head, flags)];
    assert_eq!(packed(&[(DATA, 16, 0, NEXT), (DATA, 1, head, WRITE)], &[]), Ok(2));
    assert_eq!(packed(&[(DATA, 16, SIZE, 0)], &[]), Err(RingError::HeadRange { head: SIZE, size: SIZE }));
    assert_eq!(
        packed(&[(DATA, 16, u16::MAX, 0)], &[]),
        Err(RingError::HeadRange { head: u16::MAX, size: SIZE })
    );
    assert_eq!(packed(&[(DATA, 0, head, 0)], &[]), Err(RingError::EmptyBuffer { head }));
    // A chain that is longer than the ring.
    assert_eq!(packed(&[(DATA, 16, head, NEXT); SIZE as usize], &[]), Err(RingError::RingOverrun { head }));
    let order = [(DATA, 1, head, WRITE | NEXT), (DATA, 16, head, 0)];
    assert_eq!(packed(&order, &[]), Err(RingError::Order { head }));
    // All entries of a table belong to the chain, whatever their flags and identifiers are.
    let entries = [(DATA, 16, 77, 0), (DATA, 16, 78, NEXT), (DATA, 1, 79, WRITE)];
    assert_eq!(packed(&table(48, INDIRECT), &entries), Ok(3));
    assert_eq!(packed(&table(48, INDIRECT | NEXT), &entries), Err(RingError::IndirectNext { head }));
    for length in [0, 15, 17, 16 * (DESCRIPTORS_MAX as u32 + 1), u32::MAX] {
        assert_eq!(packed(&table(length, INDIRECT), &[]), Err(RingError::IndirectLength { head, length }));
    }
    assert_eq!(
        packed(&table(16, INDIRECT), &[(TABLE, 16, 0, INDIRECT)]),
        Err(RingError::IndirectNested { head })
    );
    for address in [0, RINGS - 16, DATA + 0x10000, u64::MAX - 8] {
        let unmapped = RingError::BufferUnmapped { address, length: 32 };
        assert_eq!(packed(&[(address, 32, head, INDIRECT)], &[]), Err(unmapped));
    }
}

#[test]
fn indirect_tables_are_rejected_unless_negotiated() {
    for packed in [false, true] {
        let guest = guest();
        let spec = RingSpec { indirect: false, ..spec(&guest, packed) };
        let mut ring = open(&guest, &spec).unwrap();
        let mut driver = Driver::new(&guest, RINGS, SIZE, packed, true);
        let head = driver.add(&guest, &[(DATA, 16, false)], true);
        assert_eq!(ring.pop(&mut Chain::new()), Err(RingError::IndirectNotNegotiated { head }));
    }
}

#[test]
fn an_available_index_that_jumps_is_an_error() {
    let guest = guest();
    for start in [0u16, 1, 7, 0xfff8, 0xffff] {
        let mut driver = Driver::new(&guest, RINGS, SIZE, false, true);
        driver.start_at(&guest, start);
        let mut chain = Chain::new();
        (0..SIZE).for_each(|index| guest.put_split(DESCRIPTORS, index, DATA, 16, 0, 0));
        // As many chains as the ring has descriptors are valid, each with its own head.
        let mut ring = open(&guest, &driver.spec).unwrap();
        guest.put16(AVAILABLE + 2, start.wrapping_add(SIZE));
        (0..SIZE).for_each(|index| guest.put16(AVAILABLE + 4 + 2 * u64::from(index), index));
        assert_eq!((0..SIZE).filter(|_| ring.pop(&mut chain).unwrap().is_some()).count(), usize::from(SIZE));
        assert_eq!(ring.pop(&mut chain), Ok(None));
        // All heads are in flight.
        guest.put16(AVAILABLE + 2, start.wrapping_add(SIZE + 1));
        assert!(matches!(ring.pop(&mut chain), Err(RingError::HeadInFlight { .. })));
        for ahead in [SIZE + 1, 0x7fff, 0x8000, 0xffff] {
            let mut ring = open(&guest, &driver.spec).unwrap();
            let index = start.wrapping_add(ahead);
            guest.put16(AVAILABLE + 2, index);
            let jumped = RingError::AvailableIndex { index, expected: start, size: SIZE };
            assert_eq!(ring.pop(&mut chain), Err(jumped));
            assert!(jumped.to_string().contains("jumped"), "{jumped}");
        }
    }
}

#[test]
fn a_head_beyond_the_ring_is_an_error() {
    let guest = guest();
    let spec = spec(&guest, false);
    guest.put16(AVAILABLE + 2, 1);
    for head in [SIZE, 0x7fff, 0xffff] {
        guest.put16(AVAILABLE + 4, head);
        let popped = open(&guest, &spec).unwrap().pop(&mut Chain::new());
        assert_eq!(popped, Err(RingError::HeadRange { head, size: SIZE }));
    }
}

#[test]
fn an_identifier_in_flight_is_not_accepted_again() {
    let guest = guest();
    let spec = spec(&guest, true);
    let mut ring = open(&guest, &spec).unwrap();
    let mut chain = Chain::new();
    (0..2).for_each(|index| guest.put_packed(DESCRIPTORS, index, DATA, 16, 5, 0x80));
    assert!(ring.pop(&mut chain).unwrap().is_some());
    assert_eq!(ring.pop(&mut chain), Err(RingError::HeadInFlight { head: 5 }));
}

#[test]
fn a_driver_that_overruns_its_ring_is_rejected() {
    let guest = guest();
    let spec = spec(&guest, true);
    let mut ring = open(&guest, &spec).unwrap();
    let mut chain = Chain::new();
    for index in 0..SIZE {
        guest.put_packed(DESCRIPTORS, index, DATA, 16, index, 0x80);
        assert!(ring.pop(&mut chain).unwrap().is_some());
    }
    // The next lap begins while all descriptors of this one are in flight.
    guest.put_packed(DESCRIPTORS, 0, DATA, 16, 0, 0x8000);
    assert_eq!(ring.pop(&mut chain), Err(RingError::RingOverrun { head: 0 }));
}

#[test]
fn rings_outside_of_guest_memory_are_rejected() {
    for packed in [false, true] {
        let guest = guest();
        let good = spec(&guest, packed);
        assert!(open(&guest, &good).is_ok());
        let end = RINGS + USER_OFFSET + Driver::BYTES;
        let bad = [0, 1, RINGS, end, end - 2, u64::MAX, u64::MAX - 1, !15, good.descriptors + 1];
        for address in bad {
            let parts = [
                ("descriptors", RingSpec { descriptors: address, ..good }),
                ("driver area", RingSpec { driver_area: address, ..good }),
                ("device area", RingSpec { device_area: address, ..good }),
            ];
            for (part, spec) in parts {
                let refused = open(&guest, &spec).err();
                assert_eq!(refused, Some(RingError::Unmapped { part, address }), "{packed}");
            }
        }
        for size in if packed { vec![0, 0x8001, 0xffff] } else { vec![0, 3, 12, 0xffff] } {
            let spec = RingSpec { size, ..good };
            assert_eq!(open(&guest, &spec).err(), Some(RingError::Size { size: size.into() }));
        }
        // A ring that does not end in its region.
        let spec = RingSpec { size: 1 << 15, ..good };
        assert!(matches!(open(&guest, &spec), Err(RingError::Unmapped { part: "descriptors", .. })));
    }
    let guest = guest();
    for base in [0x1_0000, u32::MAX] {
        let spec = RingSpec { base, ..spec(&guest, false) };
        assert_eq!(open(&guest, &spec).err(), Some(RingError::Base { base }));
    }
    for base in [u32::from(SIZE), u32::from(SIZE) << 16, 0x7fff_7fff] {
        let spec = RingSpec { base, ..spec(&guest, true) };
        assert_eq!(open(&guest, &spec).err(), Some(RingError::Base { base }));
    }
}

#[test]
fn a_packed_ring_without_a_base_starts_in_the_first_lap() {
    let guest = guest();
    let mut driver = Driver::new(&guest, RINGS, SIZE, true, true);
    driver.spec.base = 0;
    let mut chain = Chain::new();
    let head = driver.add(&guest, &[(DATA, 16, false)], false);
    let mut ring = open(&guest, &driver.spec).unwrap();
    let popped = ring.pop(&mut chain).unwrap().unwrap();
    assert_eq!(popped.index, head);
    ring.push_used(popped, 0);
    assert!(ring.publish());
    for _ in 1..SIZE {
        driver.take_used(&guest).unwrap();
        driver.add(&guest, &[(DATA, 16, false)], false);
        let popped = ring.pop(&mut chain).unwrap().unwrap();
        ring.push_used(popped, 0);
        ring.publish();
    }
    // All descriptors of the first lap are used, so the base 0 now means the second lap.
    driver.take_used(&guest).unwrap();
    assert_eq!(ring.base(), 0);
    let mut ring = open(&guest, &driver.spec).unwrap();
    assert_eq!(ring.pop(&mut chain), Ok(None));
    driver.add(&guest, &[(DATA, 16, false)], false);
    assert!(ring.pop(&mut chain).unwrap().is_some());
}

/// The driver had used the ring before there was a record, as after a migration. The device is killed before
/// it completes any chain. The chain of descriptor 0 must not be taken for a used one.
#[test]
fn a_new_record_of_a_used_ring_keeps_descriptor_0() {
    for used in [1, 3, SIZE, 200, 0xffff] {
        let guest = guest();
        let mut driver = Driver::new(&guest, RINGS, SIZE, false, false);
        driver.start_at(&guest, used);
        let (region, _file) = InflightRegion::create(1, SIZE, false).unwrap();
        let mut chain = Chain::new();
        let open = |driver: &Driver| {
            let queue = region.queue(0, SIZE, false);
            Ring::new(Arc::clone(&guest.memory), &driver.spec, queue).unwrap()
        };
        let mut ring = open(&driver);
        let heads: Vec<u16> = (0..3).map(|_| driver.add(&guest, &[(DATA, 16, false)], false)).collect();
        assert_eq!(heads[0], 0);
        (0..3).for_each(|_| assert!(ring.pop(&mut chain).unwrap().is_some()));
        drop(ring);
        let mut ring = open(&driver);
        let again: Vec<u16> = (0..3).map(|_| ring.pop(&mut chain).unwrap().unwrap().index).collect();
        assert_eq!(again, heads, "used index {used}");
        assert_eq!(ring.pop(&mut chain), Ok(None));
    }
}

#[test]
fn a_record_of_an_old_ring_is_initialized_for_a_new_one() {
    for packed in [false, true] {
        for rounds in 0..3 * SIZE {
            let guest = guest();
            let (region, _file) = InflightRegion::create(1, SIZE, packed).unwrap();
            let mut chain = Chain::new();
            for rounds in [rounds, 2 * SIZE + 3] {
                let mut driver = Driver::new(&guest, RINGS, SIZE, packed, false);
                let queue = region.queue(0, SIZE, packed);
                let mut ring = Ring::new(Arc::clone(&guest.memory), &driver.spec, queue).unwrap();
                for _ in 0..rounds {
                    let head = driver.add(&guest, &[(DATA, 16, false)], true);
                    let popped = ring.pop(&mut chain).unwrap().unwrap();
                    ring.push_used(popped, 1);
                    ring.publish();
                    assert_eq!(driver.take_used(&guest), Some((head, 1)), "{packed} {rounds}");
                }
            }
        }
    }
}

#[test]
fn a_corrupted_record_is_rejected_or_bounded() {
    use std::os::unix::fs::FileExt;
    for packed in [false, true] {
        for seed in 0u32..1500 {
            let guest = guest();
            let mut driver = Driver::new(&guest, RINGS, SIZE, packed, false);
            let (region, file) = InflightRegion::create(1, SIZE, packed).unwrap();
            let file = std::fs::File::from(file);
            let open = |driver: &Driver| {
                Ring::new(Arc::clone(&guest.memory), &driver.spec, region.queue(0, SIZE, packed))
            };
            let mut ring = open(&driver).unwrap();
            let mut chain = Chain::new();
            for _ in 0..4 {
                driver.add(&guest, &[(DATA, 16, false)], false);
                ring.pop(&mut chain).unwrap().unwrap();
            }
            drop(ring);
            // Corrupts a few bytes, mostly of the header and the first records.
            let mut random = seed.wrapping_mul(2_654_435_761) | 1;
            let mut next = |bound: u64| {
                random ^= random << 13;
                random ^= random >> 17;
                random ^= random << 5;
                u64::from(random) % bound
            };
            for _ in 0..1 + seed % 4 {
                let bytes = region.bytes();
                file.write_all_at(&[next(256) as u8], 8 + next(bytes - 8) % 120).unwrap();
            }
            if let Ok(mut ring) = open(&driver) {
                let mut popped = 0;
                while let Ok(Some(head)) = ring.pop(&mut chain) {
                    popped += 1;
                    assert!(popped <= usize::from(SIZE) && head.index < SIZE);
                }
            }
            guest.assert_intact();
        }
    }
}

#[test]
fn a_record_of_another_ring_is_rejected() {
    let (region, _file) = InflightRegion::create(2, SIZE, false).unwrap();
    assert!(region.queue(2, SIZE, false).is_none());
    assert!(region.queue(0, SIZE * 2, false).is_none());
    assert!(region.queue(0, SIZE, true).is_none());
    let guest = guest();
    let driver = Driver::new(&guest, RINGS, SIZE, false, false);
    Ring::new(Arc::clone(&guest.memory), &driver.spec, region.queue(0, SIZE, false)).unwrap();
    let small = RingSpec { size: 4, ..driver.spec };
    let refused = Ring::new(Arc::clone(&guest.memory), &small, region.queue(0, 4, false)).err();
    assert!(matches!(refused, Some(RingError::Inflight { .. })), "{refused:?}");
    assert!(InflightRegion::create(0, 8, false).is_err() && InflightRegion::create(1, 0, false).is_err());
    let (region, file) = InflightRegion::create(2, SIZE, true).unwrap();
    let bytes = region.bytes();
    let open = |offset, bytes| InflightRegion::open(file.try_clone().unwrap(), offset, bytes, 2, SIZE, true);
    assert!(open(0, bytes).is_ok());
    // A record without the trailer is that of another program.
    assert_eq!(open(0, bytes - 64).unwrap().write_cache(), None);
    assert!(open(0, bytes - 65).is_err() && open(1, bytes).is_err() && open(4096, bytes).is_err());
    assert!(open(!63, bytes).is_err());
    for on in [false, true] {
        region.set_write_cache(on);
        assert_eq!(open(0, bytes).unwrap().write_cache(), Some(on));
    }
}

#[test]
fn a_guest_that_writes_at_random_harms_only_itself() {
    for packed in [false, true] {
        let guest = Arc::new(guest());
        let spec = spec(&guest, packed);
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = {
            let (guest, stop) = (Arc::clone(&guest), Arc::clone(&stop));
            std::thread::spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15u64;
                while !stop.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let value = random >> 16;
                    // Mostly valid content: few descriptors, addresses of guest memory.
                    let index = (value >> 32) as u16 % SIZE;
                    match value % 8 {
                        0 => {
                            let index = guest.get16(USED + 2).wrapping_add((value >> 8) as u16 % 10);
                            guest.put16(AVAILABLE + 2, index);
                        }
                        1 => guest
                            .put16(AVAILABLE + 4 + 2 * u64::from(index), (value >> 8) as u16 % (SIZE + 1)),
                        2 => guest.put16(DESCRIPTORS + 16 * u64::from(index) + 14, (value >> 8) as u16),
                        3 => guest.write(TABLE + (value >> 8) % 0x1000, &value.to_le_bytes()),
                        // This may become a request of two descriptors.
                        4..=6 => {
                            let first = index & !1;
                            let length = (value >> 40) as u32 % 0x2000;
                            let turn = [0x80, 0x80, 0x80, 0x8000][(value >> 50) as usize % 4];
                            for (index, length, flags) in [(first, 16, NEXT), (first + 1, length, WRITE)] {
                                let address = DATA + (value >> 24) % 0xe000;
                                if packed {
                                    guest.put_packed(
                                        DESCRIPTORS,
                                        index,
                                        address,
                                        length,
                                        first,
                                        flags | turn,
                                    );
                                } else {
                                    guest.put_split(DESCRIPTORS, index, address, length, flags, index + 1);
                                }
                            }
                        }
                        _ => {
                            let start = [DATA, TABLE, RINGS, 0][(value >> 3) as usize % 4];
                            let (length, flags) = ((value >> 40) as u32 % 0x2000, (value >> 50) as u16 % 8);
                            let address = start + (value >> 24) % 0x10800;
                            guest.put_split(
                                DESCRIPTORS,
                                index,
                                address,
                                length,
                                flags,
                                (value >> 20) as u16 % 9,
                            );
                        }
                    }
                }
            })
        };
        let (mut chain, mut parser) = (Chain::new(), Parser::new("disk"));
        let (mut popped, mut parsed) = (0u64, 0u64);
        // Returns whether enough chains and requests were found so far.
        let mut round = || {
            // A ring that broke a rule has stopped. The guest starts it again.
            std::thread::yield_now();
            let base = if packed { spec.base } else { guest.get16(USED + 2).into() };
            let mut ring = open(&guest, &RingSpec { base, ..spec }).unwrap();
            let mut in_flight = Vec::new();
            for turn in 0..64 {
                let Ok(head) = ring.pop(&mut chain) else { break };
                if let Some(head) = head {
                    popped += 1;
                    in_flight.push(head);
                    let Ok(request) = parser.parse(&chain, &guest.memory) else { break };
                    parsed += 1;
                    parser.write_status(&guest.memory, request.status, 0);
                    if let crate::vhost_user::request::Action::Transfer { gathered, .. } = request.action {
                        parser.recycle(gathered.data);
                    }
                }
                if turn % 4 == 3 {
                    in_flight.drain(..).for_each(|head| ring.push_used(head, 1));
                    ring.publish();
                    ring.enable_kicks();
                }
            }
            popped > 100 && parsed > 10
        };
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(1) {
            round();
        }
        // On a busy machine the other thread may hardly run.
        wait_until("100 chains and 10 requests are found", round);
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        guest.assert_intact();
    }
}
