//! A vhost-user-blk front end that sends what the input says: messages in any order, with any numbers and descriptors, or
//! arbitrary bytes. Its guest writes arbitrary data to its memory, kicks at any time, and truncates the memory.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use arbitrary::{Arbitrary, Unstructured};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const STEPS_MAX: usize = 48;
/// Size of the memory, and its addresses in the guest and in the front end.
const MEMORY_BYTES: u64 = 128 << 10;
const GUEST: u64 = 1 << 32;
const USER: u64 = 0x7000_0000_0000;
/// Entries of the rings of a front end that negotiates, and the addresses of the parts of the first ring; those of
/// the second ring follow.
const RING: u64 = 16;
const DESCRIPTORS: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const SECOND: u64 = 0x8000;
/// Runs between two counts of the open descriptors, and the number of additional descriptors that may be open: those of
/// threads that are exiting, and the small rings that a device creates for its 64 call eventfds and its error
/// eventfds when they are first set, and keeps.
const RUNS_BETWEEN: usize = 256;
const MORE_OPEN: usize = 16 + 64 + 1;

/// How far a front end has negotiated before the steps.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Connected,
    Negotiated,
    /// Whether the rings are packed, and whether there is a record of requests in flight.
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
    /// A memfd that is shorter than the message says.
    Little,
    Socket,
    Null,
    Several(u8),
}

/// A number that often has a meaning in the protocol.
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
    /// A message whose payload has the format of its request.
    Message {
        code: u8,
        numbers: [Number; 5],
        attached: Attached,
        reply: bool,
    },
    /// A message with an arbitrary payload.
    Payload {
        code: u8,
        bytes: Vec<u8>,
        attached: Attached,
    },
    /// Bytes that are not a message.
    Bytes(Vec<u8>),
    Write {
        at: u16,
        bytes: Vec<u8>,
    },
    /// Makes a chain of three descriptors available in a ring.
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

#[derive(Arbitrary, Debug)]
pub struct Input {
    start: Start,
    steps: Vec<Step>,
}

impl Input {
    pub fn parse(data: &[u8]) -> Option<Input> {
        Input::arbitrary_take_rest(Unstructured::new(data)).ok()
    }
}

/// Number and size of the numbers in the payload of a request.
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

fn payload(numbers: impl Iterator<Item = (u64, usize)>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(64);
    numbers.for_each(|(value, size)| bytes.extend_from_slice(&value.to_le_bytes()[..size]));
    bytes
}

/// The connection between a front end and the device.
pub trait Link {
    /// Sends bytes with descriptors, unless the device has closed the connection or does not read.
    fn send(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]);

    /// Waits for the reply to the last message, and returns header and payload.
    fn reply(&mut self) -> Vec<u8>;

    /// Reads the replies that have arrived.
    fn skip_replies(&mut self);

    /// Lets the device run, if it has no thread of its own.
    fn turn(&mut self) {}

    /// A connected socket to pass to the device.
    fn socket(&mut self) -> OwnedFd;
}

/// The descriptors that all front ends use, one after another.
struct Files {
    memory: File,
    kicks: [OwnedFd; 2],
    call: OwnedFd,
    little: OwnedFd,
    null: File,
}

static FILES: LazyLock<Files> = LazyLock::new(|| {
    let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("eventfd");
    let memory = |name| memfd_create(name, MemfdFlags::CLOEXEC).expect("memory");
    Files {
        memory: memory("guest").into(),
        kicks: [event(), event()],
        call: event(),
        little: memory("little"),
        null: File::open("/dev/null").expect("it exists"),
    }
});

struct FrontEnd<'a, L> {
    link: &'a mut L,
    files: &'static Files,
    available: [u16; 2],
}

impl<L: Link> FrontEnd<'_, L> {
    fn new(link: &mut L) -> FrontEnd<'_, L> {
        let files = &*FILES;
        // Clears the memory.
        ftruncate(&files.memory, 0).expect("memory");
        ftruncate(&files.memory, MEMORY_BYTES).expect("memory");
        for event in files.kicks.iter().chain([&files.call]) {
            let _ = rustix::io::read(event, &mut [0; 8]);
        }
        FrontEnd { link, files, available: [0, 0] }
    }

    fn send(&mut self, code: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let header = [code, flags, payload.len() as u32];
        let mut bytes = Vec::with_capacity(12 + payload.len());
        header.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        bytes.extend_from_slice(payload);
        self.link.send(&bytes, files);
    }

    fn numbers(&mut self, code: u32, numbers: &[(u64, usize)], files: &[BorrowedFd<'_>]) {
        self.send(code, 1, &payload(numbers.iter().copied()), files);
    }

    /// Reads a reply of the device, which must be valid at this point.
    fn reply(&mut self, code: u32) -> Vec<u8> {
        let mut reply = self.link.reply();
        let word = |at: usize| u32::from_le_bytes(reply[at..at + 4].try_into().expect("four"));
        assert_eq!((word(0), word(4), word(8) as usize), (code, 5, reply.len() - 12));
        reply.split_off(12)
    }

    fn start(&mut self, start: Start) {
        // The device must serve this front end, whatever the previous one did.
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
        self.numbers(5, &region, &[self.files.memory.as_fd()]);
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
            self.numbers(13, &[(index, 8)], &[self.files.call.as_fd()]);
            self.numbers(12, &[(index, 8)], &[self.files.kicks[index as usize].as_fd()]);
            self.numbers(18, &[(index, 4), (1, 4)], &[]);
        }
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let end = MEMORY_BYTES.saturating_sub(at) as usize;
        // A truncated memory grows again, but the device must still treat it as broken.
        let _ = self.files.memory.write_all_at(&bytes[..bytes.len().min(end)], at);
    }

    /// A request in a split ring: header, data, status. `spoiled` changes a byte of the descriptors.
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

    /// A message with the descriptors that `attached` selects.
    fn send_with(&mut self, code: u8, flags: u32, payload: &[u8], attached: Attached) {
        let it = self.files;
        let socket = matches!(attached, Attached::Socket).then(|| self.link.socket());
        let files = match attached {
            Attached::Nothing => vec![],
            Attached::Event => vec![it.kicks[0].as_fd()],
            Attached::Memory => vec![it.memory.as_fd()],
            Attached::Little => vec![it.little.as_fd()],
            Attached::Socket => socket.iter().map(AsFd::as_fd).collect(),
            Attached::Null => vec![it.null.as_fd()],
            Attached::Several(count) => vec![it.call.as_fd(); usize::from(count) % 40],
        };
        self.send(u32::from(code % 42), flags, payload, &files);
    }

    fn step(&mut self, step: &Step) {
        if !matches!(step, Step::Message { .. } | Step::Payload { .. } | Step::Bytes(_)) {
            self.link.turn();
        }
        match step {
            Step::Message { code, numbers, attached, reply } => {
                let values = numbers.iter().cycle().map(|number| number.value());
                let bytes = payload(values.zip(form(code % 42).iter().copied()));
                self.send_with(*code, if *reply { 9 } else { 1 }, &bytes, *attached);
            }
            Step::Payload { code, bytes, attached } => self.send_with(*code, 1, bytes, *attached),
            Step::Bytes(bytes) if bytes.is_empty() => {}
            Step::Bytes(bytes) => self.link.send(bytes, &[]),
            Step::Write { at, bytes } => self.write((*at).into(), bytes),
            Step::Request { ring, kind, sector, bytes, spoiled } => {
                self.request(*ring, *kind, *sector, bytes.value(), *spoiled);
            }
            Step::Kick(ring) => {
                let _ = rustix::io::write(&self.files.kicks[usize::from(*ring)], &1_u64.to_ne_bytes());
            }
            Step::Truncate(pages) => drop(ftruncate(&self.files.memory, u64::from(*pages % 33) * 4096)),
            Step::Replies => self.link.skip_replies(),
        }
    }
}

pub fn run(input: &Input, link: &mut impl Link) {
    let mut front_end = FrontEnd::new(link);
    front_end.start(input.start);
    input.steps.iter().take(STEPS_MAX).for_each(|step| front_end.step(step));
    front_end.link.turn();
}

/// Checks at intervals that no descriptors were leaked.
pub fn check_descriptors() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    static FIRST: AtomicUsize = AtomicUsize::new(0);
    if RUNS.fetch_add(1, Ordering::Relaxed) % RUNS_BETWEEN != RUNS_BETWEEN - 1 {
        return;
    }
    let open = std::fs::read_dir("/proc/self/fd").expect("it exists").count();
    let first =
        FIRST.compare_exchange(0, open, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|first| first);
    assert!(first == 0 || open <= first + MORE_OPEN, "{open} descriptors are open, {first} at first");
}
