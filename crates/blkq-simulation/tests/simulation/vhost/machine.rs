//! The machine: the guest's memory, the driver side of its rings, and its requests. It checks that each request
//! completes once, with possible data, and that no other memory changes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;

use blkq::engine::SimulatedEngine;
use blkq::random::Random;
use blkq_export::vhost_user::simulated::{Driver, Guest, Offer, SERIAL, USER_OFFSET};
use blkq_simulation as simulation;
use blkq_simulation::{SECTOR_BYTES, take_injections};
use rustix::event::{EventfdFlags, eventfd};

use super::super::client::{Common, History};
use super::super::model::{Content, payload};
use super::wiring::{Tamper, Wiring};

/// Addresses of the rings and of the data. The data is in two adjacent regions.
const RINGS: u64 = 0x1_0000;
const DATA: u64 = 0x100_0000;
const REGION_BYTES: u64 = 0x1_8000;
/// Size of the data of a request slot. One slot spans both regions.
const SLOT_BYTES: u64 = 0x4800;
const SLOTS: u64 = 2 * REGION_BYTES / SLOT_BYTES;
/// Memory after the slots, which no request of [`Machine::step`] uses.
pub const FREE: u64 = DATA + SLOTS * SLOT_BYTES;
/// Maximum size of the data of a request.
const DATA_MAX_BYTES: u64 = 12 << 10;
const BUFFERS_MAX: usize = 8;
/// Initial content of the buffer of a read.
const UNREAD: u8 = 0xee;

const S_OK: u8 = 0;
const S_IOERR: u8 = 1;
const S_UNSUPP: u8 = 2;
const PENDING: u8 = 0xff;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Write,
    Flush,
    Id,
    Discard,
    WriteZeroes,
    Unknown,
}

impl Kind {
    fn code(self) -> u32 {
        match self {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::Flush => 4,
            Kind::Id => 8,
            Kind::Discard => 11,
            Kind::WriteZeroes => 13,
            Kind::Unknown => 77,
        }
    }
}

/// A request that is or will be available to the device.
#[derive(Debug)]
struct Asked {
    kind: Kind,
    ranges: Vec<Range<u64>>,
    /// Number of the request, which is also the time at which it was made available.
    submitted: u64,
    /// The request is beyond the end of any device, so it must fail.
    wrong: bool,
    slot: u64,
    /// Address and length of each data buffer.
    data: Vec<(u64, u64)>,
    status: u64,
    /// The request was in flight when a daemon was killed.
    recovered: bool,
}

impl Asked {
    fn content(&self) -> Option<Content> {
        match self.kind {
            _ if self.wrong => None,
            Kind::Write => Some(Content::Write(self.submitted)),
            Kind::Discard | Kind::WriteZeroes => Some(Content::Zero),
            _ => None,
        }
    }

    /// The memory that the device may write for this request.
    fn written(&self) -> Vec<(u64, u64)> {
        let data = if matches!(self.kind, Kind::Read | Kind::Id) { &self.data[..] } else { &[] };
        data.iter().copied().chain([(self.status, 1)]).collect()
    }

    fn begin(&self, common: &mut Common) {
        let Some(content) = self.content() else { return };
        for range in &self.ranges {
            common.model.begin(self.submitted, range.clone(), &content, self.submitted);
        }
    }
}

pub struct Ring {
    pub driver: Driver,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    /// Whether a device may write to the ring and its buffers.
    pub served: bool,
    /// The position at which a stopped ring continues.
    pub base: Option<u32>,
    asked: BTreeMap<u16, Asked>,
    /// Descriptors that were added since the last check whether to kick.
    unkicked: usize,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

impl Ring {
    fn new(guest: &Guest, index: usize, wiring: &Wiring, chance: &mut Random) -> Ring {
        let at = RINGS + index as u64 * Driver::BYTES;
        let mut driver = Driver::new(guest, at, wiring.size, wiring.packed, wiring.event_idx);
        driver.spec.indirect = wiring.indirect;
        if !wiring.packed && chance.one_in(3) {
            // Starts near the end of the index range, so that the indexes soon wrap around.
            driver.start_at(guest, 0u16.wrapping_sub(chance.below(20) as u16));
        }
        let (kick, call) = (event(), event());
        Ring { driver, kick, call, served: false, base: None, asked: BTreeMap::new(), unkicked: 0 }
    }

    /// The parts of the ring that the device writes.
    fn places(&self) -> Vec<(u64, u64)> {
        let spec = &self.driver.spec;
        let size = u64::from(spec.size);
        let device_area = spec.device_area - USER_OFFSET;
        if spec.packed {
            vec![(spec.descriptors - USER_OFFSET, 16 * size), (device_area, 4)]
        } else {
            vec![(device_area, 6 + 8 * size)]
        }
    }

    fn kick(&mut self, guest: &Guest) {
        if self.unkicked > 0 && self.driver.wants_kick(guest) {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
        self.unkicked = 0;
    }

    fn is_called(&self) -> bool {
        rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }
}

pub struct Machine {
    pub wiring: Wiring,
    pub guest: Guest,
    pub rings: Vec<Ring>,
    slots: Vec<u64>,
    pub sectors: u64,
    pub discards: bool,
    /// Whether the write cache is enabled.
    pub cache: History<bool>,
    pub daemon_began: u64,
    pub tamper: Option<Tamper>,
    pub requests: u64,
    pub errors: u64,
    /// The number of requests that were in flight when a daemon was killed and completed later, and how many of these
    /// began with descriptor 0.
    pub recovered: [u64; 2],
}

fn slots() -> Vec<u64> {
    (0..SLOTS).map(|slot| DATA + slot * SLOT_BYTES).collect()
}

impl Machine {
    pub fn new(wiring: Wiring, chance: &mut Random, now: u64) -> Machine {
        let rings_bytes = wiring.rings as u64 * Driver::BYTES;
        let guest =
            Guest::new(&[(RINGS, rings_bytes), (DATA, REGION_BYTES), (DATA + REGION_BYTES, REGION_BYTES)]);
        let rings = (0..wiring.rings).map(|index| Ring::new(&guest, index, &wiring, chance)).collect();
        Machine {
            cache: History::new(now, wiring.flushes),
            wiring,
            guest,
            rings,
            slots: slots(),
            sectors: 0,
            discards: false,
            daemon_began: now,
            tamper: None,
            requests: 0,
            errors: 0,
            recovered: [0, 0],
        }
    }

    /// Replaces this machine by a new one with new memory.
    pub fn replace(&mut self, chance: &mut Random, now: u64) {
        let Machine { tamper, requests, errors, recovered, .. } = *self;
        *self = Machine::new(self.wiring.clone(), chance, now);
        (self.tamper, self.requests, self.errors, self.recovered) = (tamper, requests, errors, recovered);
    }

    /// The driver starts again after a reset of the device.
    pub fn reset(&mut self, chance: &mut Random, common: &mut Common) {
        self.check();
        for index in 0..self.rings.len() {
            let ring = Ring::new(&self.guest, index, &self.wiring, chance);
            self.rings[index] = ring;
        }
        self.slots = slots();
        // Each request in flight before the reset took effect, or never will.
        common.now += 1;
        common.model.settle(common.now);
    }

    pub fn is_idle(&self) -> bool {
        self.rings.iter().all(|ring| ring.asked.is_empty())
    }

    /// Lets the machine act, and then the engine.
    pub fn step(&mut self, chance: &mut Random, common: &mut Common, engine: &mut SimulatedEngine) {
        for _ in 0..chance.below(4) {
            let ring = chance.below(self.rings.len() as u64) as usize;
            self.ask(ring, chance, common);
        }
        for index in 0..self.rings.len() {
            if !chance.one_in(3) {
                self.rings[index].kick(&self.guest);
            }
            if chance.one_in(4) || self.rings[index].is_called() {
                self.collect(index, common, !chance.one_in(4));
            }
        }
        for _ in 0..chance.below(4) {
            engine.turn();
            self.do_tamper(chance);
        }
        // Rules of the fault driver must not change data silently here: see `loud` in `change.rs`.
        drop(take_injections());
        if chance.one_in(50) {
            self.check();
        }
        if chance.one_in(200) {
            simulation::pass(chance.below(9_000_000_000));
        }
    }

    /// Runs until all requests complete, which must not take more than `turns_max` turns of the engine. Processes used
    /// buffers only when the device calls. No faults may be injected.
    pub fn drain(&mut self, common: &mut Common, engine: &mut SimulatedEngine, turns_max: u64) {
        for index in 0..self.rings.len() {
            self.collect(index, common, true);
        }
        for _ in 0..turns_max {
            if self.is_idle() {
                return;
            }
            for index in 0..self.rings.len() {
                self.rings[index].kick(&self.guest);
                if self.rings[index].is_called() {
                    self.collect(index, common, true);
                }
            }
            engine.turn();
            drop(take_injections());
        }
        panic!(
            "requests are not answered: {:?}",
            self.rings.iter().map(|ring| &ring.asked).collect::<Vec<_>>()
        );
    }

    /// Processes used buffers, then requests calls, or disables them, as `calls` says.
    pub fn collect(&mut self, index: usize, common: &mut Common, calls: bool) {
        loop {
            let mut any = false;
            while let Some((head, written)) = self.rings[index].driver.take_used(&self.guest) {
                any = true;
                let asked = self.rings[index].asked.remove(&head).expect("a used chain was available");
                self.recovered[0] += u64::from(asked.recovered);
                self.recovered[1] += u64::from(asked.recovered && head == 0);
                self.finished(asked, written, common);
            }
            // Checks again, because the device sends no call for requests that it used before calls were requested.
            let Machine { rings, guest, .. } = self;
            rings[index].driver.want_calls(guest, calls);
            if !any {
                return;
            }
        }
    }

    /// Checks that nothing has changed but the memory that the device may write.
    pub fn check(&self) {
        let served = self.rings.iter().filter(|ring| ring.served);
        let parts = served.flat_map(|ring| {
            let buffers = ring.asked.values().flat_map(Asked::written);
            ring.places().into_iter().chain(buffers)
        });
        let changed = self.guest.changed_beside(&parts.collect::<Vec<_>>());
        assert_eq!(changed, None, "memory that is not the device's has changed");
    }

    /// Ring `index` was stopped and can continue at `base`: all requests that the device took from it have completed.
    pub fn stopped(&mut self, index: usize, base: u32, common: &mut Common, chance: &mut Random) {
        self.collect(index, common, true);
        self.check();
        let ring = &mut self.rings[index];
        assert_eq!(base, ring.driver.used_position(), "requests are in flight in a stopped ring");
        (ring.served, ring.base) = (false, Some(base));
        if self.tamper == Some(Tamper::WritesAfterStop)
            && let Some(asked) = ring.asked.values().next()
        {
            self.guest.write_unexpected(asked.status, &[chance.below(2) as u8]);
        }
    }

    /// The daemon was killed: processes the buffers that it used. `in_flight` returns whether the record of
    /// requests in flight contains a head of a ring.
    pub fn killed(&mut self, common: &mut Common, in_flight: impl Fn(usize, u16) -> bool) {
        for index in 0..self.rings.len() {
            self.collect(index, common, true);
            let ring = &mut self.rings[index];
            ring.base = None;
            for (head, asked) in &mut ring.asked {
                asked.recovered |= in_flight(index, *head);
            }
        }
        self.check();
        self.rings.iter_mut().for_each(|ring| ring.served = false);
    }

    pub fn heads(&self, index: usize) -> impl Iterator<Item = u16> {
        self.rings[index].asked.keys().copied()
    }

    /// Adds the requests in flight to the model again, after the model was reset to the content of the file.
    pub fn begin_again(&self, common: &mut Common) {
        self.rings.iter().flat_map(|ring| ring.asked.values()).for_each(|asked| asked.begin(common));
    }

    fn do_tamper(&mut self, chance: &mut Random) {
        match self.tamper {
            Some(Tamper::CompletesTwice) if chance.one_in(16) => {
                let ring = &self.rings[0];
                let spec = &ring.driver.spec;
                if spec.packed || !ring.served {
                    return;
                }
                let used = spec.device_area - USER_OFFSET;
                let (index, size) = (self.guest.get16(used + 2), spec.size);
                let entry = |index: u16| used + 4 + 8 * u64::from(index % size);
                let last: [u8; 8] = self.guest.read(entry(index.wrapping_sub(1)));
                self.guest.write_unexpected(entry(index), &last);
                self.guest.write_unexpected(used + 2, &index.wrapping_add(1).to_le_bytes());
            }
            Some(Tamper::StrayByte) if chance.one_in(64) => {
                let at = DATA + chance.below(2 * REGION_BYTES);
                let [byte] = self.guest.read(at);
                self.guest.write_unexpected(at, &[!byte]);
            }
            _ => {}
        }
    }

    fn ask(&mut self, ring: usize, chance: &mut Random, common: &mut Common) {
        let Some(slot) = self.slots.pop() else { return };
        let weights = [
            (30, Kind::Read),
            (32, Kind::Write),
            (if self.wiring.flushes { 8 } else { 0 }, Kind::Flush),
            (if self.discards { 6 } else { 0 }, Kind::Discard),
            (9, Kind::WriteZeroes),
            (2, Kind::Id),
            (1, Kind::Unknown),
        ];
        let mut pick = chance.below(weights.iter().map(|(weight, _)| weight).sum());
        let here = |(weight, _): &&(u64, Kind)| {
            let here = pick < *weight;
            pick = pick.wrapping_sub(*weight);
            here
        };
        let kind = weights.iter().find(here).unwrap().1;
        let submitted = common.tick();
        let count = match kind {
            Kind::Read | Kind::Write => 1,
            Kind::Discard | Kind::WriteZeroes => 1 + chance.below(3),
            _ => 0,
        };
        let blocks = self.sectors / common.block_sectors;
        let longest = (DATA_MAX_BYTES >> 9) / common.block_sectors;
        let ranges: Vec<Range<u64>> = (0..count)
            .map(|_| {
                let most = if chance.one_in(4) { longest } else { longest.min(4) };
                let length = 1 + chance.below(most.min(blocks));
                let first = chance.below(blocks - length + 1);
                first * common.block_sectors..(first + length) * common.block_sectors
            })
            .collect();
        let mut asked = Asked {
            kind,
            wrong: count > 0 && chance.one_in(40),
            ranges,
            submitted,
            slot,
            data: Vec::new(),
            status: slot + 0x50 + chance.below(8),
            recovered: false,
        };
        let indirect = self.wiring.indirect && chance.one_in(2);
        let most = if indirect { BUFFERS_MAX } else { BUFFERS_MAX.min(self.wiring.size.into()) };
        let offers = self.write_request(&mut asked, most, chance);
        let Machine { rings, guest, slots, .. } = self;
        let ring = &mut rings[ring];
        let descriptors = if indirect { 1 } else { offers.len() };
        if !ring.driver.has_room(descriptors) {
            return slots.push(slot);
        }
        if ring.unkicked + descriptors > self.wiring.size.into() {
            // Between two checks whether to kick, at most as many descriptors as the ring has may be added.
            ring.kick(guest);
        }
        ring.unkicked += descriptors;
        asked.begin(common);
        let head = ring.driver.add(guest, &offers, indirect);
        assert!(ring.asked.insert(head, asked).is_none());
    }

    /// Writes the request into its slot, in at most `most` buffers.
    fn write_request(&self, asked: &mut Asked, most: usize, chance: &mut Random) -> Vec<Offer> {
        let header = asked.slot + 16 * chance.below(4);
        let beyond = if asked.wrong { 1 << 40 } else { 0 };
        let first = asked.ranges.first().map_or(0, |range| range.start + beyond);
        let of_ranges = matches!(asked.kind, Kind::Discard | Kind::WriteZeroes);
        let mut bytes = asked.kind.code().to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(if of_ranges { 0 } else { first }.to_le_bytes());
        self.guest.write(header, &bytes);
        self.guest.write(asked.status, &[PENDING]);
        let data = match asked.kind {
            Kind::Read => vec![UNREAD; bytes_of(&asked.ranges[0])],
            Kind::Write => payload(asked.submitted, asked.ranges[0].clone()),
            Kind::Id => vec![UNREAD; 20],
            Kind::Discard | Kind::WriteZeroes => {
                let mut data = Vec::new();
                for range in &asked.ranges {
                    data.extend((range.start + beyond).to_le_bytes());
                    data.extend(((range.end - range.start) as u32).to_le_bytes());
                    let unmap = asked.kind == Kind::WriteZeroes && chance.one_in(2);
                    data.extend(u32::from(unmap).to_le_bytes());
                }
                data
            }
            Kind::Flush | Kind::Unknown => Vec::new(),
        };
        let mut offers = vec![(header, 16, false)];
        if most > 4 && chance.one_in(6) {
            offers = vec![(header, 5, false), (header + 5, 11, false)];
        }
        let writes = matches!(asked.kind, Kind::Read | Kind::Id);
        // The mapping in this process is shifted by 64 bytes against the guest's pages. So an address 448 bytes after a
        // boundary of 512 bytes in the guest is aligned in this process.
        let aligned = chance.one_in(2) && data.len().is_multiple_of(SECTOR_BYTES);
        let unit = if aligned { SECTOR_BYTES } else { 1 };
        let begin = asked.slot + 0x80;
        let mut at = if aligned { begin.next_multiple_of(512) + 448 } else { begin + chance.below(600) };
        let mut left = &data[..];
        while !left.is_empty() {
            let last = offers.len() + 2 >= most || chance.one_in(2);
            let length = 1 + chance.below((left.len() / unit) as u64) as usize;
            let (now, rest) = left.split_at(if last { left.len() } else { length * unit });
            self.guest.write(at, now);
            offers.push((at, now.len() as u32, writes));
            asked.data.push((at, now.len() as u64));
            at += now.len() as u64 + chance.below(3) * unit as u64;
            left = rest;
        }
        match offers.last_mut() {
            Some((at, length, true)) if chance.one_in(6) => {
                asked.status = *at + u64::from(*length);
                *length += 1;
                self.guest.write(asked.status, &[PENDING]);
            }
            _ => offers.push((asked.status, 1, true)),
        }
        let end = offers.iter().map(|(at, length, _)| at + u64::from(*length)).max();
        assert!(end <= Some(asked.slot + SLOT_BYTES), "the request does not fit into its slot: {asked:?}");
        offers
    }

    fn finished(&mut self, asked: Asked, written: u32, common: &mut Common) {
        self.slots.push(asked.slot);
        self.guest.expect(&asked.written());
        self.requests += 1;
        let now = common.tick();
        let [status] = self.guest.read(asked.status);
        let ok = status == S_OK;
        self.errors += u64::from(!ok);
        assert!([S_OK, S_IOERR, S_UNSUPP].contains(&status), "used with status {status}: {asked:?}");
        let data: u64 = asked.data.iter().map(|(_, length)| length).sum();
        let expected = if matches!(asked.kind, Kind::Read | Kind::Id) { data + 1 } else { 1 };
        assert!(!ok || u64::from(written) == expected, "{written} bytes written: {asked:?}");
        if asked.kind == Kind::Unknown {
            return assert_eq!(status, S_UNSUPP, "{asked:?}");
        }
        if asked.wrong {
            return assert!(!ok, "an invalid request succeeded: {asked:?}");
        }
        let since = asked.submitted;
        let writes = matches!(asked.kind, Kind::Write | Kind::Discard | Kind::WriteZeroes);
        let may_deny = writes && common.read_only.may(since, |read_only| read_only);
        let must_deny = writes && !common.read_only.may(since, |read_only| !read_only);
        let end = asked.ranges.iter().map(|range| range.end).max().unwrap_or(0);
        let may_be_beyond = common.sectors.may(since, |sectors| sectors < end);
        let must_be_beyond = !common.sectors.may(since, |sectors| sectors >= end);
        let may_fail = common.errors_allowed || common.slow || may_deny || may_be_beyond;
        assert!(ok || may_fail, "status {status} though nothing went wrong: {asked:?}");
        if must_deny || must_be_beyond {
            assert!(!ok, "a request succeeded that must be rejected: {asked:?}");
            // An earlier daemon may have executed a part of the request.
            if since > self.daemon_began && writes {
                return asked.ranges.iter().for_each(|range| common.model.reject(since, range.clone()));
            }
        }
        match asked.kind {
            Kind::Read if ok => {
                let mut bytes = self.read_data(&asked);
                if self.tamper == Some(Tamper::UsedBeforeData) && since.is_multiple_of(4) {
                    bytes.fill(UNREAD);
                }
                for (sector, bytes) in asked.ranges[0].clone().zip(bytes.chunks(SECTOR_BYTES)) {
                    if let Err(wrong) = common.model.check_read(sector, since, bytes) {
                        panic!("a read returned impossible data: {wrong}");
                    }
                }
            }
            Kind::Id if ok => {
                let id = self.read_data(&asked);
                assert_eq!(&id[..SERIAL.len()], SERIAL.as_bytes());
                assert!(id[SERIAL.len()..].iter().all(|byte| *byte == 0));
            }
            Kind::Write | Kind::Discard | Kind::WriteZeroes => {
                let done = ok && asked.kind != Kind::Discard;
                let promised = done && !self.cache.may(since, |cached| cached);
                for range in &asked.ranges {
                    common.model.complete(since, range.clone(), done, promised, now);
                }
            }
            Kind::Flush if ok => common.model.flushed(since),
            _ => {}
        }
    }

    fn read_data(&self, asked: &Asked) -> Vec<u8> {
        let piece = |(at, length): &(u64, u64)| self.guest.read_bytes(*at, *length as usize);
        asked.data.iter().flat_map(piece).collect()
    }
}

fn bytes_of(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize * SECTOR_BYTES
}
