//! A front end of a vhost-user-blk device that sends what a fuzzer wants: messages in any order, with any
//! numbers and any descriptors, or only bytes; and its guest, which writes anything into its memory, kicks
//! at any time, and truncates it.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const STEPS_MAX: usize = 48;
/// The guest's memory, and where it has it.
const MEMORY_BYTES: u64 = 128 << 10;
const GUEST: u64 = 1 << 32;
const USER: u64 = 0x7000_0000_0000;
/// Entries of the rings of a front end that negotiates, and where the parts of the first are; the
/// second's are behind.
const RING: u64 = 16;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const SECOND: u64 = 0x8000;
/// Runs between counts of the open descriptors, and how many may be open more than at first: those of
/// threads that just exit.
const RUNS_BETWEEN: usize = 256;
const MORE_OPEN: usize = 16;

/// How far a front end has come before the steps.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Connected,
    Negotiated,
    /// With packed rings or split ones, and the table of requests in flight.
    Served {
        packed: bool,
        inflight: bool,
    },
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Attached {
    Nothing,
    Event,
    Memory,
    /// Shorter than what the message says.
    Little,
    Socket,
    Null,
    Several(u8),
}

/// A number that is often one that means something.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Number {
    Small(u8),
    User(u16),
    Guest(u16),
    Any(u64),
    Bit(u8),
}

impl Number {
    fn value(self) -> u64 {
        match self {
            Number::Small(value) => value.into(),
            Number::User(offset) => USER + u64::from(offset),
            Number::Guest(offset) => GUEST + u64::from(offset),
            Number::Any(value) => value,
            Number::Bit(bit) => 1 << (bit % 64),
        }
    }
}

#[derive(Arbitrary, Debug)]
enum Step {
    /// A message whose payload has the form that its code wants.
    Message {
        code: u8,
        numbers: [Number; 5],
        attached: Attached,
        reply: bool,
    },
    /// One with any payload.
    Payload {
        code: u8,
        bytes: Vec<u8>,
        attached: Attached,
    },
    /// No message.
    Bytes(Vec<u8>),
    Write {
        at: u16,
        bytes: Vec<u8>,
    },
    /// A chain of three descriptors, made available in a ring.
    Request {
        ring: bool,
        kind: u8,
        sector: u8,
        bytes: Number,
        spoiled: Option<(u8, u8)>,
    },
    Kick(bool),
    Truncate(u8),
    Replies,
}

/// The life of a front end.
#[derive(Arbitrary, Debug)]
pub struct Input {
    start: Start,
    steps: Vec<Step>,
}

/// The payload's numbers: how many, and the bytes of each.
fn form(code: u8) -> &'static [usize] {
    match code {
        2 | 12..=14 | 16 | 39 => &[8],
        5 => &[4, 4, 8, 8, 8, 8],
        8 | 10 | 11 | 18 => &[4, 4],
        9 => &[4, 4, 8, 8, 8, 8],
        24 | 25 => &[4, 4, 4, 1],
        31 | 32 => &[8, 8, 2, 2],
        37 | 38 => &[8, 8, 8, 8, 8],
        _ => &[],
    }
}

struct FrontEnd {
    stream: UnixStream,
    /// Has the device do what it can, if it does nothing by itself.
    turn: fn(),
    memory: File,
    kicks: [OwnedFd; 2],
    call: OwnedFd,
    available: [u16; 2],
}

impl FrontEnd {
    fn connect(path: &Path, turn: fn()) -> FrontEnd {
        let stream = UnixStream::connect(path).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(15))).expect("a time");
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory"));
        ftruncate(&memory, MEMORY_BYTES).expect("memory");
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("eventfd");
        FrontEnd { stream, turn, memory, kicks: [event(), event()], call: event(), available: [0, 0] }
    }

    /// Sends bytes, unless the other side has closed, or reads no more.
    fn send_bytes(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(files)));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, flags);
    }

    fn send(&self, code: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let header = [code, flags, payload.len() as u32];
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        self.send_bytes(&bytes, files);
    }

    fn numbers(&self, code: u32, numbers: &[(u64, usize)], files: &[BorrowedFd<'_>]) {
        let bytes = numbers.iter().flat_map(|(value, size)| value.to_le_bytes().into_iter().take(*size));
        self.send(code, 1, &bytes.collect::<Vec<_>>(), files);
    }

    /// A reply of the server, which still does as it should.
    fn reply(&mut self, code: u32) -> Vec<u8> {
        (self.turn)();
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).expect("a reply");
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four"));
        assert_eq!((word(0), word(4)), (code, 5));
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload).expect("the rest of a reply");
        payload
    }

    fn start(&mut self, start: Start) {
        // Whatever the one before did: this one is served.
        self.send(1, 1, &[], &[]);
        let offered = u64::from_le_bytes(self.reply(1).try_into().expect("a number"));
        if start == Start::Connected {
            return;
        }
        self.numbers(16, &[(0x1b229, 8)], &[]);
        let packed = matches!(start, Start::Served { packed: true, .. });
        self.numbers(2, &[(offered & !(u64::from(!packed) << 34), 8)], &[]);
        let Start::Served { inflight, .. } = start else { return };
        let region = [(1, 4), (0, 4), (GUEST, 8), (MEMORY_BYTES, 8), (USER, 8), (0, 8)];
        self.numbers(5, &region, &[self.memory.as_fd()]);
        if inflight {
            self.numbers(31, &[(0, 8), (0, 8), (2, 2), (RING, 2)], &[]);
            self.reply(31);
        }
        for index in [0, 1] {
            let at = USER + index * SECOND;
            let addresses = [at + DESCRIPTORS, at + USED, at + AVAILABLE, 0].map(|address| (address, 8));
            self.numbers(8, &[(index, 4), (RING, 4)], &[]);
            self.numbers(10, &[(index, 4), (if packed { 0x8000_8000 } else { 0 }, 4)], &[]);
            self.numbers(9, &[&[(index, 4), (0, 4)], &addresses[..]].concat(), &[]);
            self.numbers(13, &[(index, 8)], &[self.call.as_fd()]);
            self.numbers(12, &[(index, 8)], &[self.kicks[index as usize].as_fd()]);
            self.numbers(18, &[(index, 4), (1, 4)], &[]);
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let end = MEMORY_BYTES.saturating_sub(at) as usize;
        // A memory that was truncated grows again, and is broken all the same.
        let _ = self.memory.write_all_at(&bytes[..bytes.len().min(end)], at);
    }

    /// A request in a split ring: header, data, status; `spoiled` changes a byte of the descriptors.
    fn request(&mut self, ring: bool, kind: u8, sector: u8, bytes: u64, spoiled: Option<(u8, u8)>) {
        let base = u64::from(ring) * SECOND;
        let index = &mut self.available[usize::from(ring)];
        let slot = u64::from(*index % 4);
        let entry = u64::from(*index) % RING;
        *index = index.wrapping_add(1);
        let index = *index;
        let (header, data) = (base + 0x3000 + 64 * slot, base + 0x4000);
        let mut words =
            [u32::from(kind).to_le_bytes(), [0; 4], u32::from(sector).to_le_bytes(), [0; 4]].concat();
        self.write(header, &words);
        words.clear();
        let first = 3 * slot as u16;
        let writes = if kind == 1 { 0 } else { 2 };
        let chain =
            [(header, 16, 1, first + 1), (data, bytes, 1 | writes, first + 2), (header + 32, 1, 2, 0)];
        for (at, length, flags, next) in chain {
            words.extend((GUEST + at).to_le_bytes());
            words.extend((length as u32).to_le_bytes());
            words.extend((flags as u16).to_le_bytes());
            words.extend(next.to_le_bytes());
        }
        if let Some((at, value)) = spoiled {
            words[usize::from(at) % 48] ^= value;
        }
        self.write(base + DESCRIPTORS + 16 * u64::from(first), &words);
        self.write(base + AVAILABLE + 4 + 2 * entry, &first.to_le_bytes());
        self.write(base + AVAILABLE + 2, &index.to_le_bytes());
    }

    /// `action` with the descriptors that `attached` stands for.
    fn with_files(&self, attached: Attached, action: impl FnOnce(&FrontEnd, &[BorrowedFd<'_>])) {
        let little = memfd_create("little", MemfdFlags::CLOEXEC).expect("memory");
        let null = File::open("/dev/null").expect("it is there");
        let files = match attached {
            Attached::Nothing => vec![],
            Attached::Event => vec![self.kicks[0].as_fd()],
            Attached::Memory => vec![self.memory.as_fd()],
            Attached::Little => vec![little.as_fd()],
            Attached::Socket => vec![self.stream.as_fd()],
            Attached::Null => vec![null.as_fd()],
            Attached::Several(count) => vec![self.call.as_fd(); usize::from(count) % 40],
        };
        action(self, &files);
    }

    fn step(&mut self, step: &Step) {
        if !matches!(step, Step::Message { .. } | Step::Payload { .. } | Step::Bytes(_)) {
            (self.turn)();
        }
        match step {
            Step::Message { code, numbers, attached, reply } => {
                let code = code % 42;
                let values = numbers.iter().cycle().map(|number| number.value());
                let bytes = form(code)
                    .iter()
                    .zip(values)
                    .flat_map(|(size, value)| value.to_le_bytes().into_iter().take(*size));
                let bytes: Vec<u8> = bytes.collect();
                let flags = if *reply { 9 } else { 1 };
                self.with_files(*attached, |it, files| it.send(code.into(), flags, &bytes, files));
            }
            Step::Payload { code, bytes, attached } => {
                self.with_files(*attached, |it, files| it.send(u32::from(code % 42), 1, bytes, files));
            }
            Step::Bytes(bytes) if bytes.is_empty() => {}
            Step::Bytes(bytes) => self.send_bytes(bytes, &[]),
            Step::Write { at, bytes } => self.write((*at).into(), bytes),
            Step::Request { ring, kind, sector, bytes, spoiled } => {
                self.request(*ring, *kind, *sector, bytes.value(), *spoiled);
            }
            Step::Kick(ring) => {
                let _ = rustix::io::write(&self.kicks[usize::from(*ring)], &1_u64.to_ne_bytes());
            }
            Step::Truncate(pages) => drop(ftruncate(&self.memory, u64::from(*pages % 33) * 4096)),
            Step::Replies => {
                self.stream.set_nonblocking(true).expect("a flag");
                let _ = self.stream.read(&mut [0; 4096]);
                self.stream.set_nonblocking(false).expect("a flag");
            }
        }
    }
}

/// A front end connects to `path`, does what `input` says, and closes. Wherever the device would do
/// something by itself `turn` is called.
pub fn run(input: &Input, path: &Path, turn: fn()) {
    let mut front_end = FrontEnd::connect(path, turn);
    front_end.start(input.start);
    input.steps.iter().take(STEPS_MAX).for_each(|step| front_end.step(step));
    turn();
    // Closing it is not enough, as the device may have got a descriptor of this end.
    let _ = front_end.stream.shutdown(std::net::Shutdown::Both);
}

/// Checks now and then that no descriptors are left open.
pub fn check_descriptors() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    static FIRST: AtomicUsize = AtomicUsize::new(0);
    if RUNS.fetch_add(1, Ordering::Relaxed) % RUNS_BETWEEN != RUNS_BETWEEN - 1 {
        return;
    }
    let open = std::fs::read_dir("/proc/self/fd").expect("it is there").count();
    let first =
        FIRST.compare_exchange(0, open, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|first| first);
    assert!(first == 0 || open <= first + MORE_OPEN, "{open} descriptors are open, {first} at first");
}
