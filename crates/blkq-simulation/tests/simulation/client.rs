//! An NBD client with random behaviour. It sends many requests together and in pieces, some of them invalid, and checks
//! every reply against the model.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use blkq::random::Random;
use blkq::{Disk, Operation, Status};
use blkq_drivers::fault::Effect;
use blkq_export::nbd::proto::*;
use blkq_simulation as simulation;
use blkq_simulation::{SECTOR_BYTES, held_writes};

use super::hits::{KINDS, Noticed};
use super::holds::Holding;
use super::model::{Content, Model, Wrong, payload};

const OUTSTANDING_MAX: usize = 24;

#[derive(Debug)]
struct Outstanding {
    command: Command,
    sectors: Range<u64>,
    submitted: u64,
    fua: bool,
    fast_zero: bool,
    /// Parts of a structured read that have arrived, by their byte offset on the device.
    parts: BTreeMap<u64, Vec<u8>>,
    /// The request is invalid, so it must be rejected.
    wrong: bool,
    /// The request writes to an export that was advertised as read-only.
    denied: bool,
    /// For a flush: the writes that were held when it was sent.
    held_writes: Vec<u64>,
    /// Whether the block layer may implement FUA of this request with a flush.
    may_flush: bool,
    /// Hits of the fault driver that may have been on this request.
    hits: Vec<Rc<Noticed>>,
}

impl Outstanding {
    fn is_flushed(&self) -> bool {
        self.command == Command::Flush || self.fua && self.may_flush
    }

    /// Whether the fault driver suppressed a flush that this request relies on.
    fn rests_on_lost_flush(&self) -> bool {
        let lost = |noticed: &Rc<Noticed>| noticed.hit.operation == Operation::Flush;
        self.is_flushed() && self.hits.iter().any(lost)
    }

    /// Whether the fault driver may have failed this request with EAGAIN, which is never held; NBD reports the same
    /// error number for other errors.
    fn failed_with_again(&self) -> bool {
        let again = |noticed: &Rc<Noticed>| {
            matches!(noticed.hit.effect, Effect::Error(Status::Again) | Effect::Short(Status::Again))
        };
        self.hits.iter().any(again)
    }

    fn check_flush(&self) -> Result<(), String> {
        match held_writes().iter().any(|write| self.held_writes.contains(write)) {
            true => Err("a flush overtook writes that are held".to_owned()),
            false => Ok(()),
        }
    }

    fn check_read<'a>(&self, model: &'a Model, sector: u64, bytes: &[u8]) -> Result<(), Wrong<'a>> {
        let mut hits = self.hits.iter().filter(|noticed| noticed.touches(sector));
        let check = |noticed: &Rc<Noticed>| noticed.check_read(model, sector, self.submitted, bytes);
        if let Some(sure) = hits.clone().find(|noticed| noticed.is_sure(sector)) {
            return check(sure).map_err(|wrong| Wrong::Other(format!("{wrong}; hit: {sure:?}")));
        }
        let clean = model.check_read(sector, self.submitted, bytes);
        if clean.is_err() && hits.any(|noticed| check(noticed).is_ok()) { Ok(()) } else { clean }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Replies {
    Simple,
    Structured,
    Extended,
}

/// A value over time. During a change it may be the old or the new value.
pub struct History<T>(Vec<(u64, [T; 2])>);

impl<T: Copy> History<T> {
    pub fn new(now: u64, value: T) -> History<T> {
        History(vec![(now, [value; 2])])
    }

    pub fn now(&self) -> T {
        self.0[self.0.len() - 1].1[1]
    }

    /// Starts a change to `value`.
    pub fn begin(&mut self, now: u64, value: T) {
        self.0.push((now, [self.now(), value]));
    }

    /// Ends the change, with this result.
    pub fn settle(&mut self, now: u64, value: T) {
        self.0.push((now, [value; 2]));
    }

    /// Whether the value may have satisfied `is` at any time from `since` until now.
    pub fn may(&self, since: u64, is: impl Fn(T) -> bool) -> bool {
        let before = self.0.iter().rposition(|(from, _)| *from <= since).unwrap_or(0);
        self.0[before..].iter().flat_map(|(_, values)| values).any(|value| is(*value))
    }
}

/// State that all clients of a device share.
pub struct Common {
    pub model: Model,
    /// Logical time: counts the actions of clients.
    pub now: u64,
    pub block_sectors: u64,
    pub sectors: History<u64>,
    pub read_only: History<bool>,
    /// Number of writes of the file after the last change.
    pub writes_seen: u64,
    /// Whether this server runs with faults, so that errors are allowed.
    pub errors_allowed: bool,
    /// Whether an orderly stop has begun, which cancels queries of the block status.
    pub stops: bool,
    /// Whether the fault driver may delay requests for longer than a change waits.
    pub slow: bool,
    /// Whether the driver may be exchanged for one without FUA.
    pub exchanges: bool,
    /// Whether the fault driver has rules.
    pub has_rules: bool,
    /// Unanswered reads of clients that have disconnected.
    pub ghosts: Vec<Range<u64>>,
    /// Number of unanswered requests of these clients, when they disconnected.
    pub abandoned: usize,
    /// Requests that must fail, because the fault driver failed a part of them.
    pub must_fail: BTreeSet<u64>,
    /// Misdirected writes in flight, by queue and tag: number, sectors, and whether the write has FUA.
    pub astray: BTreeMap<(u16, u16), (u64, Range<u64>, bool)>,
    /// Requests hit by the fault driver, by the kind of the effect.
    pub hits: [u64; KINDS],
    pub holding: Option<Holding>,
    /// Number of rules that hit because their trigger file existed.
    pub triggered: u64,
    /// When the trigger file was removed; `None` while it exists.
    pub trigger_removed_ns: Option<u64>,
    pub replies: u64,
    pub errors: u64,
}

impl Common {
    pub fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Resumes the device or changes its error policy, at random.
    pub fn step_held(&mut self, disk: &Disk) {
        if let Some(holding) = &mut self.holding {
            self.now += 1;
            holding.step(disk, self.now);
        }
    }

    /// Records the held requests after a turn of the engine. `ghosts`: whether the server still has clients that
    /// disconnected.
    pub fn note_held(&mut self, disk: &Disk, ghosts: impl FnOnce() -> bool) {
        if let Some(holding) = &mut self.holding {
            self.now += 1;
            holding.note(disk, ghosts(), self.now);
        }
    }

    pub fn check_read_only(&self) {
        if self.read_only.now() {
            let writes = simulation::with_file(|file| file.writes());
            assert_eq!(writes, self.writes_seen, "a read-only device was written to");
        }
    }
}

pub struct Client {
    stream: UnixStream,
    output: Vec<u8>,
    input: Vec<u8>,
    replies: Replies,
    block_status: bool,
    greeted: bool,
    ready: bool,
    /// Size of the device, as the server reported it.
    sectors: u64,
    flags: TransmissionFlags,
    outstanding: BTreeMap<u64, Outstanding>,
    pub closed: bool,
    /// The client sends requests, and no longer reads.
    pub silent: bool,
}

fn option(kind: u32, data: &[u8], output: &mut Vec<u8>) {
    output.extend(OPTION_MAGIC.to_be_bytes());
    output.extend(kind.to_be_bytes());
    output.extend((data.len() as u32).to_be_bytes());
    output.extend(data);
}

fn named(export: &str) -> Vec<u8> {
    [&(export.len() as u32).to_be_bytes(), export.as_bytes()].concat()
}

impl Client {
    /// Creates a client of `export`, and the server's end of its socket.
    pub fn new(chance: &mut Random, export: &str) -> (Client, OwnedFd) {
        let (stream, server) = UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let replies = [Replies::Simple, Replies::Structured, Replies::Extended][chance.below(3) as usize];
        let block_status = replies != Replies::Simple && chance.one_in(2);
        let mut output = 3u32.to_be_bytes().to_vec();
        match replies {
            Replies::Simple => {}
            Replies::Structured => option(option::STRUCTURED_REPLY, &[], &mut output),
            Replies::Extended => option(option::EXTENDED_HEADERS, &[], &mut output),
        }
        if block_status {
            let mut data = named(export);
            data.extend(1u32.to_be_bytes());
            data.extend(15u32.to_be_bytes());
            data.extend(b"base:allocation");
            option(option::SET_META_CONTEXT, &data, &mut output);
        }
        // A device with large blocks accepts only clients that request the block size.
        let infos = [1u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes()].concat();
        option(option::GO, &[named(export), infos].concat(), &mut output);
        let client = Client {
            stream,
            output,
            input: Vec::new(),
            replies,
            block_status,
            greeted: false,
            ready: false,
            sectors: 0,
            flags: TransmissionFlags::empty(),
            outstanding: BTreeMap::new(),
            closed: false,
            silent: false,
        };
        (client, server.into())
    }

    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    pub fn is_idle(&self) -> bool {
        self.closed || self.ready && self.outstanding.is_empty() && self.output.is_empty()
    }

    pub fn reads(&self) -> impl Iterator<Item = Range<u64>> {
        let reads = |asked: &&Outstanding| matches!(asked.command, Command::Read | Command::Cache);
        self.outstanding.values().filter(reads).map(|asked| asked.sectors.clone())
    }

    /// Records a hit of the fault driver with the requests that it may have been on.
    pub fn notice(&mut self, noticed: &Rc<Noticed>) {
        for asked in self.outstanding.values_mut() {
            let concerned = match noticed.hit.operation {
                Operation::Flush => asked.is_flushed(),
                operation => {
                    let read = matches!(asked.command, Command::Read | Command::Cache);
                    read == (operation == Operation::Read)
                        && asked.command != Command::Flush
                        && asked.sectors.clone().any(|sector| noticed.touches(sector))
                }
            };
            if concerned {
                asked.hits.push(noticed.clone());
            }
        }
    }

    /// Sends random requests, and transfers data.
    pub fn act(&mut self, chance: &mut Random, common: &mut Common) {
        if self.ready && !chance.one_in(3) {
            for _ in 0..chance.below(6) {
                if self.outstanding.len() < OUTSTANDING_MAX {
                    self.ask(chance, common);
                }
            }
        }
        self.transfer(chance, common);
    }

    /// Sends and receives, without new requests.
    pub fn transfer(&mut self, chance: &mut Random, common: &mut Common) {
        let most = if chance.one_in(2) { self.output.len() } else { chance.below(600) as usize };
        let now = most.min(self.output.len());
        if now > 0 {
            match self.stream.write(&self.output[..now]) {
                Ok(sent) => drop(self.output.drain(..sent)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.closed = true,
            }
        }
        if self.silent {
            return;
        }
        let mut buffer = vec![0; if chance.one_in(2) { 1 << 17 } else { 1 + chance.below(600) as usize }];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.closed = true,
            Ok(received) => self.input.extend(&buffer[..received]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(_) => self.closed = true,
        }
        while self.parse(common) {}
    }

    /// Reads, after the server has stopped, everything that it sent.
    pub fn read_rest(&mut self, chance: &mut Random, common: &mut Common) {
        if std::mem::take(&mut self.silent) {
            // It may have noticed at a write that the server closed the connection.
            self.closed = false;
            self.output.clear();
        }
        while !self.closed {
            self.transfer(chance, common);
        }
    }

    fn ask(&mut self, chance: &mut Random, common: &mut Common) {
        let commands = [
            (30, Command::Read),
            (32, Command::Write),
            (8, Command::Flush),
            (6, Command::Trim),
            (9, Command::WriteZeroes),
            (3, Command::Cache),
            (3, Command::BlockStatus),
        ];
        let mut pick = chance.below(commands.iter().map(|(weight, _)| weight).sum());
        let (_, command) = *commands
            .iter()
            .find(|(weight, _)| {
                let here = pick < *weight;
                pick = pick.wrapping_sub(*weight);
                here
            })
            .unwrap();
        let blocks = self.sectors / common.block_sectors;
        let most = if chance.one_in(4) { 40 } else { 4 };
        let length = 1 + chance.below(most.min(blocks));
        let first = chance.below(blocks - length + 1);
        let sectors = first * common.block_sectors..(first + length) * common.block_sectors;
        let cookie = common.tick();
        let mut flags = CommandFlags::empty();
        let fua = chance.one_in(5);
        flags.set(CommandFlags::FUA, fua);
        let fast_zero = command == Command::WriteZeroes && chance.one_in(5);
        flags.set(CommandFlags::FAST_ZERO, fast_zero);
        flags.set(CommandFlags::NO_HOLE, command == Command::WriteZeroes && chance.one_in(2));
        let (mut offset, mut bytes) = (sectors.start << 9, (sectors.end - sectors.start) << 9);
        if command == Command::Flush {
            (offset, bytes) = (0, 0);
        }
        let wrong = command == Command::BlockStatus && !self.block_status
            || command != Command::Flush && chance.one_in(40);
        if wrong && (self.block_status || command != Command::BlockStatus) {
            offset = match chance.below(3) {
                0 => self.sectors << 9,
                1 => offset + 1,
                _ => u64::MAX - 511,
            };
        }
        let content = match command {
            Command::Write => Some(Content::Write(cookie)),
            Command::Trim | Command::WriteZeroes => Some(Content::Zero),
            _ => None,
        };
        let denied = content.is_some() && self.flags.contains(TransmissionFlags::READ_ONLY);
        if let (Some(content), false) = (content, wrong || denied) {
            common.model.begin(cookie, sectors.clone(), &content, cookie);
        }
        self.request(command, flags, cookie, offset, bytes);
        if command == Command::Write {
            self.output.extend(payload(cookie, sectors.clone()));
        }
        let outstanding = Outstanding {
            command,
            sectors,
            parts: BTreeMap::new(),
            submitted: cookie,
            fua,
            fast_zero,
            wrong,
            denied,
            held_writes: if command == Command::Flush { held_writes() } else { Vec::new() },
            may_flush: common.exchanges || command != Command::Write,
            hits: Vec::new(),
        };
        self.outstanding.insert(cookie, outstanding);
    }

    fn request(&mut self, command: Command, mut flags: CommandFlags, cookie: u64, offset: u64, bytes: u64) {
        let extended = self.replies == Replies::Extended;
        flags.set(CommandFlags::PAYLOAD_LEN, extended && command == Command::Write);
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        self.output.extend(magic.to_be_bytes());
        self.output.extend(flags.bits().to_be_bytes());
        self.output.extend((command as u16).to_be_bytes());
        self.output.extend(cookie.to_be_bytes());
        self.output.extend(offset.to_be_bytes());
        if extended {
            self.output.extend(bytes.to_be_bytes());
        } else {
            self.output.extend((bytes as u32).to_be_bytes());
        }
    }

    /// Parses the next message of the input; returns false if it is not complete.
    fn parse(&mut self, common: &mut Common) -> bool {
        if !self.greeted {
            return self
                .take(18, |_, bytes| assert_eq!(bytes[..8], INIT_MAGIC.to_be_bytes()))
                .map(|()| self.greeted = true)
                .is_some();
        }
        if !self.ready {
            let Some(length) = self.field::<4>(16).map(u32::from_be_bytes) else { return false };
            let Some(reply) = self.take(20 + length as usize, |_, bytes| bytes.to_vec()) else {
                return false;
            };
            assert_eq!(reply[..8], OPTION_REPLY_MAGIC.to_be_bytes());
            let (asked, kind, data) = (word32(&reply[8..]), word32(&reply[12..]), &reply[20..]);
            if kind == option_reply::ERR_SHUTDOWN {
                // Nothing follows. If the server should be running, the seed fails.
                self.closed = true;
                return false;
            }
            assert!(kind < 1 << 31, "option {asked} is refused: {kind:#x}");
            if kind == option_reply::INFO && data[..2] == info::EXPORT.to_be_bytes() {
                self.sectors = u64::from_be_bytes(data[2..10].try_into().unwrap()) >> 9;
                let flags = u16::from_be_bytes(data[10..12].try_into().unwrap());
                self.flags = TransmissionFlags::from_bits(flags).unwrap();
            }
            self.ready = asked == option::GO && kind == option_reply::ACK;
            return true;
        }
        match self.replies {
            Replies::Simple => {
                let Some(cookie) = self.field::<8>(8).map(u64::from_be_bytes) else { return false };
                let error = word32(&self.input[4..]);
                let asked = &self.outstanding[&cookie];
                let read = error == 0 && asked.command == Command::Read;
                let bytes = if read { sector_bytes(&asked.sectors) } else { 0 };
                let reply = self.take(16 + bytes, |_, bytes| {
                    assert_eq!(word32(bytes), SIMPLE_REPLY_MAGIC);
                    bytes[16..].to_vec()
                });
                reply.map(|content| self.finished(cookie, error, &content, common)).is_some()
            }
            Replies::Structured => {
                let Some(length) = self.field::<4>(16).map(u32::from_be_bytes) else { return false };
                self.chunk(20, length as usize, STRUCTURED_REPLY_MAGIC, common)
            }
            Replies::Extended => {
                let Some(length) = self.field::<8>(24).map(u64::from_be_bytes) else { return false };
                self.chunk(32, length as usize, EXTENDED_REPLY_MAGIC, common)
            }
        }
    }

    fn chunk(&mut self, head: usize, length: usize, magic: u32, common: &mut Common) -> bool {
        let Some(bytes) = self.take(head + length, |_, bytes| bytes.to_vec()) else { return false };
        assert_eq!(word32(&bytes), magic);
        let flags = u16::from_be_bytes([bytes[4], bytes[5]]);
        let kind = u16::from_be_bytes([bytes[6], bytes[7]]);
        let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
        let body = &bytes[head..];
        let asked = self.outstanding.get_mut(&cookie).expect("the request is outstanding");
        let error = match kind {
            reply_type::ERROR => word32(body),
            reply_type::OFFSET_DATA => {
                assert_eq!(asked.command, Command::Read);
                let offset = u64::from_be_bytes(body[..8].try_into().unwrap());
                assert_eq!(asked.parts.insert(offset, body[8..].to_vec()), None);
                0
            }
            reply_type::BLOCK_STATUS | reply_type::BLOCK_STATUS_EXT => {
                assert_eq!(asked.command, Command::BlockStatus);
                0
            }
            reply_type::NONE => 0,
            other => panic!("an unexpected chunk of type {other}"),
        };
        if flags == REPLY_FLAG_DONE {
            let mut content = Vec::new();
            for (offset, part) in std::mem::take(&mut asked.parts) {
                let next = (asked.sectors.start << 9) + content.len() as u64;
                assert!(offset == next || error != 0, "parts that overlap, or with a gap between them");
                content.extend(part);
            }
            self.finished(cookie, error, &content, common);
        } else {
            assert_eq!((flags, kind), (0, reply_type::OFFSET_DATA));
        }
        true
    }

    fn finished(&mut self, cookie: u64, error: u32, content: &[u8], common: &mut Common) {
        let asked = self.outstanding.remove(&cookie).expect("every request is answered once");
        let now = common.tick();
        common.replies += 1;
        let ok = error == 0;
        assert!(!(asked.wrong && ok), "an invalid request succeeded: {asked:?}");
        if asked.wrong {
            return;
        }
        common.errors += u64::from(!ok);
        if asked.denied {
            // A request that a read-only device does not offer may also be reported as invalid.
            let invalid = asked.fast_zero && error == NbdError::Invalid as u32;
            assert!(invalid || error == NbdError::Permission as u32, "error {error}: {asked:?}");
            return;
        }
        let since = asked.submitted;
        let writes = matches!(asked.command, Command::Write | Command::Trim | Command::WriteZeroes);
        let may_deny = writes && common.read_only.may(since, |read_only| read_only);
        let must_deny = writes && !common.read_only.may(since, |read_only| !read_only);
        let (end, has_range) = (asked.sectors.end, asked.command != Command::Flush);
        let may_be_beyond = has_range && common.sectors.may(since, |sectors| sectors < end);
        let must_be_beyond = (writes || asked.command == Command::Read)
            && !common.sectors.may(since, |sectors| sectors >= end);
        let unknown = asked.command == Command::Trim && !self.flags.contains(TransmissionFlags::SEND_TRIM);
        let refused = may_deny && error == NbdError::Permission as u32
            || (may_be_beyond || unknown) && error == NbdError::Invalid as u32;
        let abandoned = asked.is_flushed()
            && error == NbdError::Shutdown as u32
            && common.holding.as_ref().is_some_and(|holding| holding.stops);
        let cancelled =
            common.stops && asked.command == Command::BlockStatus && error == NbdError::Shutdown as u32;
        let may_fail = refused
            || abandoned
            || cancelled
            || common.errors_allowed
            || asked.hits.iter().any(|noticed| noticed.explains(error))
            || asked.fast_zero && error == NbdError::NotSupported as u32;
        assert!(ok || may_fail, "error {error} though nothing went wrong: {asked:?}");
        assert!(may_deny || error != NbdError::Permission as u32, "not permitted: {asked:?}");
        if let Some(holding) = &common.holding {
            let checked = match asked.command {
                Command::Flush if ok => asked.check_flush(),
                Command::Flush | Command::BlockStatus => Ok(()),
                _ if ok || refused || asked.is_flushed() || asked.failed_with_again() => Ok(()),
                _ => holding.check_error(error, since, writes),
            };
            checked.unwrap_or_else(|wrong| panic!("{wrong}: {asked:?}"));
        }
        let must_fail = common.must_fail.remove(&cookie);
        assert!(!ok || !must_fail, "succeeded in spite of an error: {asked:?}");
        if must_deny || must_be_beyond {
            assert!(refused, "error {error}, not rejected as it must be: {asked:?}");
            return common.model.reject(cookie, asked.sectors);
        }
        match asked.command {
            Command::Read if ok => {
                assert_eq!(content.len(), sector_bytes(&asked.sectors));
                for (sector, bytes) in asked.sectors.clone().zip(content.chunks(SECTOR_BYTES)) {
                    if let Err(wrong) = asked.check_read(&common.model, sector, bytes) {
                        panic!("a read returned impossible data: {wrong}");
                    }
                }
            }
            Command::Write | Command::WriteZeroes => {
                let promised = ok && asked.fua && !asked.rests_on_lost_flush();
                common.model.complete(cookie, asked.sectors, ok, promised, now);
            }
            // A trim is a hint: the old content may stay.
            Command::Trim => common.model.complete(cookie, asked.sectors, false, false, now),
            Command::Flush if ok && !asked.rests_on_lost_flush() => common.model.flushed(asked.submitted),
            _ => {}
        }
    }

    fn field<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.input.get(at..at + N).map(|bytes| bytes.try_into().unwrap())
    }

    fn take<R>(&mut self, bytes: usize, use_: impl FnOnce(&Client, &[u8]) -> R) -> Option<R> {
        if self.input.len() < bytes {
            return None;
        }
        let taken: Vec<u8> = self.input.drain(..bytes).collect();
        Some(use_(self, &taken))
    }
}

fn word32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn sector_bytes(sectors: &Range<u64>) -> usize {
    ((sectors.end - sectors.start) as usize) << 9
}
