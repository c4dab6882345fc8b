//! NBD requests and replies, compared with byte sequences from the specification.

use blkq::Status;
use blkq_export::nbd::contexts::{ContextStatus, Contexts, StatusExtent};
use blkq_export::nbd::handshake::Session;
use blkq_export::nbd::proto::{Command, CommandFlags, NbdError, PAYLOAD_MAX_BYTES, TransmissionFlags};
use blkq_export::nbd::reply::{EXTENTS_MAX, ReplyStyle, ReplyTo};
use blkq_export::nbd::transmission::{Request, Step, Transmission};
use proptest::prelude::*;

const SIZE: u64 = 64 << 20;
const COOKIE: u64 = 0x0102_0304_0506_0708;

fn session(replies: ReplyStyle) -> Session {
    let mut flags = TransmissionFlags::all() - TransmissionFlags::READ_ONLY;
    flags.set(TransmissionFlags::SEND_DF, replies != ReplyStyle::Simple);
    Session {
        export: 0,
        size_bytes: SIZE,
        flags,
        minimum_block_bytes: 512,
        replies,
        contexts: if replies == ReplyStyle::Simple { Contexts::default() } else { Contexts::BASE_ALLOCATION },
    }
}

fn encode(style: ReplyStyle, command: u16, flags: u16, offset: u64, length: u64) -> Vec<u8> {
    let extended = style == ReplyStyle::Extended;
    let mut bytes = if extended { 0x21e4_1c71u32 } else { 0x2560_9513 }.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(COOKIE.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    if extended {
        bytes.extend(length.to_be_bytes());
    } else {
        bytes.extend((length as u32).to_be_bytes());
    }
    bytes
}

fn one(session: Session, bytes: &[u8]) -> Step {
    Transmission::new(session).next(&mut &bytes[..])
}

fn refused(offset: u64, error: NbdError) -> Step {
    Step::Rejected { cookie: COOKIE, offset, error }
}

#[test]
fn a_compact_request_is_28_bytes() {
    let bytes =
        [0x25, 0x60, 0x95, 0x13, 0, 4, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0];
    let request = Request {
        command: Command::Read,
        flags: CommandFlags::DF,
        cookie: COOKIE,
        offset: 4096,
        length: 512,
    };
    assert_eq!(one(session(ReplyStyle::Structured), &bytes), Step::Request(request));
    for end in 0..bytes.len() {
        let mut input = &bytes[..end];
        assert_eq!(Transmission::new(session(ReplyStyle::Structured)).next(&mut input), Step::Receive);
        assert_eq!(input.len(), end);
    }
}

#[test]
fn an_extended_request_is_32_bytes_and_reaches_beyond_32_bits() {
    let bytes = [
        0x21, 0xe4, 0x1c, 0x71, 0, 0, 0, 4, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 5, 0,
        0, 0, 0,
    ];
    let large = Session { size_bytes: 1 << 40, ..session(ReplyStyle::Extended) };
    let request = Request {
        command: Command::Trim,
        flags: CommandFlags::empty(),
        cookie: COOKIE,
        offset: 4096,
        length: 5 << 32,
    };
    assert_eq!(one(large, &bytes), Step::Request(request));
    assert_eq!(one(large, &bytes[..31]), Step::Receive);
}

#[test]
fn every_command_takes_the_flags_of_the_specification() {
    // The bits from the right: FUA, NO_HOLE, DF, REQ_ONE, FAST_ZERO, PAYLOAD_LEN.
    let allowed: [(Command, u16); 6] = [
        (Command::Read, 0b00101),
        (Command::Write, 0b00001),
        (Command::Trim, 0b00001),
        (Command::Cache, 0b00001),
        (Command::WriteZeroes, 0b10011),
        (Command::BlockStatus, 0b01001),
    ];
    for style in [ReplyStyle::Structured, ReplyStyle::Extended] {
        for (command, flags) in allowed {
            for bit in 0..16 {
                let payload =
                    if style == ReplyStyle::Extended && command == Command::Write { 0x20 } else { 0 };
                let step = one(session(style), &encode(style, command as u16, 1 << bit | payload, 0, 512));
                if (flags | payload) & (1 << bit) != 0 {
                    assert!(matches!(step, Step::Request(r) if r.command == command), "{command:?} {bit}");
                } else {
                    assert_eq!(step, refused(0, NbdError::Invalid), "{command:?} {bit}");
                }
            }
        }
    }
    let flush = |flags, offset, length| {
        one(session(ReplyStyle::Simple), &encode(ReplyStyle::Simple, 3, flags, offset, length))
    };
    assert!(matches!(flush(1, 0, 0), Step::Request(_)));
    assert_eq!(flush(2, 0, 0), refused(0, NbdError::Invalid));
    assert_eq!(flush(0, 512, 0), refused(512, NbdError::Invalid));
    assert_eq!(flush(0, 0, 512), refused(0, NbdError::Invalid));
    let unknown = one(session(ReplyStyle::Simple), &encode(ReplyStyle::Simple, 8, 0, 0, 512));
    assert_eq!(unknown, refused(0, NbdError::Invalid));
}

#[test]
fn commands_that_were_not_announced_are_rejected() {
    let bare = |replies| Session {
        flags: TransmissionFlags::HAS_FLAGS,
        contexts: Contexts::default(),
        ..session(replies)
    };
    for (command, flags) in [(0, 1), (0, 4), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)] {
        let length = if command == 3 { 0 } else { 512 };
        let bytes = encode(ReplyStyle::Structured, command, flags, 0, length);
        assert_eq!(one(bare(ReplyStyle::Structured), &bytes), refused(0, NbdError::Invalid), "{command}");
    }
    // FAST_ZERO is only valid if the server announced it.
    let slow = Session {
        flags: TransmissionFlags::all() - TransmissionFlags::READ_ONLY - TransmissionFlags::SEND_FAST_ZERO,
        ..session(ReplyStyle::Simple)
    };
    assert_eq!(one(slow, &encode(ReplyStyle::Simple, 6, 16, 0, 512)), refused(0, NbdError::Invalid));
}

#[test]
fn ranges_are_checked_with_the_errors_of_the_specification() {
    let check = |style, command: Command, flags, offset, length| {
        one(session(style), &encode(style, command as u16, flags, offset, length))
    };
    use ReplyStyle::{Extended, Simple, Structured};
    for command in [Command::Read, Command::Trim, Command::Cache] {
        assert_eq!(check(Simple, command, 0, SIZE, 512), refused(SIZE, NbdError::Invalid));
        assert_eq!(check(Simple, command, 0, SIZE - 512, 1024), refused(SIZE - 512, NbdError::Invalid));
    }
    let huge = u64::MAX - 511;
    for command in [Command::Write, Command::WriteZeroes] {
        assert_eq!(check(Simple, command, 0, SIZE - 512, 1024), refused(SIZE - 512, NbdError::NoSpace));
        assert_eq!(check(Simple, command, 0, huge, 1024), refused(huge, NbdError::NoSpace));
        assert_eq!(check(Simple, command, 0, 100, 512), refused(100, NbdError::Invalid));
        assert_eq!(check(Simple, command, 0, 0, 100), refused(0, NbdError::Invalid));
        assert_eq!(check(Simple, command, 0, 0, 0), refused(0, NbdError::Invalid));
    }
    assert_eq!(check(Extended, Command::WriteZeroes, 0, 512, huge), refused(512, NbdError::NoSpace));
    let big = u64::from(PAYLOAD_MAX_BYTES) + 512;
    assert_eq!(check(Simple, Command::Read, 0, 0, big), refused(0, NbdError::Invalid));
    assert_eq!(check(Structured, Command::Read, 4, 0, big), refused(0, NbdError::Overflow));
    assert!(matches!(check(Structured, Command::Read, 4, 0, big - 512), Step::Request(_)));
    assert!(matches!(check(Simple, Command::WriteZeroes, 0, 0, SIZE), Step::Request(_)));
}

#[test]
fn a_read_only_export_refuses_every_write() {
    let flags = TransmissionFlags::HAS_FLAGS | TransmissionFlags::READ_ONLY | TransmissionFlags::SEND_FUA;
    let read_only = Session { flags, ..session(ReplyStyle::Simple) };
    for command in [Command::Write, Command::Trim, Command::WriteZeroes] {
        let bytes = encode(ReplyStyle::Simple, command as u16, 0, 0, 512);
        assert_eq!(one(read_only, &bytes), refused(0, NbdError::Permission));
    }
    assert!(matches!(one(read_only, &encode(ReplyStyle::Simple, 0, 0, 0, 512)), Step::Request(_)));
}

#[test]
fn the_payload_of_a_rejected_write_is_skipped() {
    let style = ReplyStyle::Simple;
    let mut bytes = encode(style, 1, 0, SIZE, 1024);
    // The payload resembles requests.
    bytes.extend(encode(style, 2, 0, 0, 0).iter().cycle().take(1024));
    bytes.extend(encode(style, 3, 0, 0, 0));
    let mut transmission = Transmission::new(session(style));
    let (head, tail) = bytes.split_at(500);
    let mut input = head;
    assert_eq!(transmission.next(&mut input), refused(SIZE, NbdError::NoSpace));
    assert_eq!(transmission.payload_bytes(), 0);
    assert_eq!(transmission.next(&mut input), Step::Receive);
    assert!(input.is_empty());
    let mut input = tail;
    assert!(matches!(transmission.next(&mut input), Step::Request(r) if r.command == Command::Flush));
}

#[test]
fn extended_payloads_are_skipped_for_every_command() {
    let style = ReplyStyle::Extended;
    let mut transmission = Transmission::new(session(style));
    let mut bytes = encode(style, 7, 0x20, 0, 12);
    bytes.extend([0xee; 12]);
    // A write has a payload even if the client omits the flag.
    for flags in [0, 0x20] {
        bytes.extend(encode(style, 1, flags, 0, 512));
        bytes.extend([0xee; 512]);
    }
    let mut input = &bytes[..];
    assert_eq!(transmission.next(&mut input), refused(0, NbdError::Invalid));
    for left in [512 + 32 + 512, 512] {
        assert!(matches!(transmission.next(&mut input), Step::Request(r) if r.command == Command::Write));
        assert_eq!((transmission.payload_bytes(), input.len()), (512, left));
        transmission.took_payload(512);
        input = &input[512..];
    }
}

#[test]
fn a_violation_closes_the_stream() {
    for style in [ReplyStyle::Simple, ReplyStyle::Extended] {
        let other = if style == ReplyStyle::Simple { ReplyStyle::Extended } else { ReplyStyle::Simple };
        assert_eq!(one(session(style), &encode(other, 0, 0, 0, 512)), Step::Violation);
        assert_eq!(one(session(style), b"GET / HTTP/1.1\r\n"), Step::Violation);
        let big = u64::from(PAYLOAD_MAX_BYTES) + 1;
        let mut transmission = Transmission::new(session(style));
        assert_eq!(transmission.next(&mut &encode(style, 1, 0x20, 0, big)[..]), Step::Violation);
        assert_eq!(transmission.next(&mut &encode(style, 0, 0, 0, 512)[..]), Step::Violation);
    }
    assert_eq!(one(session(ReplyStyle::Simple), &encode(ReplyStyle::Simple, 2, 0, 0, 0)), Step::Disconnect);
}

const TO: ReplyTo = ReplyTo { cookie: COOKIE, offset: 0x1000 };

fn written(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut output = Vec::new();
    write(&mut output);
    output
}

#[test]
fn simple_replies_match_the_specification() {
    let style = ReplyStyle::Simple;
    let head = |error| [0x67, 0x44, 0x66, 0x98, 0, 0, 0, error, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(written(|out| style.done(TO, out)), head(0));
    assert_eq!(written(|out| style.data(TO, TO.offset, 512, true, out)), head(0));
    assert_eq!(written(|out| style.error(TO, NbdError::NoSpace, out)), head(28));
}

#[test]
fn structured_replies_match_the_specification() {
    let style = ReplyStyle::Structured;
    let none = [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0];
    assert_eq!(written(|out| style.done(TO, out)), none);
    let data =
        [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0];
    assert_eq!(written(|out| style.data(TO, TO.offset, 512, true, out)), data);
    let error = [0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0];
    assert_eq!(written(|out| style.error(TO, NbdError::Io, out)), error);
    let extents = [StatusExtent { length: 0x1000, flags: 3 }, StatusExtent { length: 9 << 32, flags: 0 }];
    let status = [
        0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 5, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0x10, 0,
        0, 0, 0, 3, 0xff, 0xff, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(written(|out| style.block_status(TO, &base(&extents), out)), status);
    // An extent that was shortened must be the last one: a following extent would be at the wrong offset.
    let after = [extents[1], extents[0]];
    assert_eq!(written(|out| style.block_status(TO, &base(&after), out)).len(), 20 + 4 + 8);
}

fn base(extents: &[StatusExtent]) -> [ContextStatus; 1] {
    [ContextStatus { id: 1, extents: extents.to_vec() }]
}

#[test]
fn each_context_of_a_reply_has_a_chunk() {
    let context = |id, flags| ContextStatus { id, extents: vec![StatusExtent { length: 512, flags }] };
    let contexts = [context(1, 3), context(2, 7)];
    let chunk = |last, id, flags| {
        let head = [0x66, 0x8e, 0x33, 0xef, 0, last, 0, 5, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 12];
        [&head[..], &[0, 0, 0, id, 0, 0, 2, 0, 0, 0, 0, flags]].concat()
    };
    let reply = [chunk(0, 1, 3), chunk(1, 2, 7)].concat();
    assert_eq!(written(|out| ReplyStyle::Structured.block_status(TO, &contexts, out)), reply);
}

#[test]
fn extended_replies_match_the_specification() {
    let style = ReplyStyle::Extended;
    let head = |kind: u16, length: u8| {
        let mut bytes = vec![0x6e, 0x8a, 0x27, 0x8c, 0, 1];
        bytes.extend(kind.to_be_bytes());
        bytes.extend([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, length]);
        bytes
    };
    assert_eq!(written(|out| style.done(TO, out)), head(0, 0));
    let mut data = head(1, 108);
    data.extend([0, 0, 0, 0, 0, 0, 0x10, 0]);
    assert_eq!(written(|out| style.data(TO, TO.offset, 100, true, out)), data);
    let mut error = head(0x8001, 6);
    error.extend([0, 0, 0, 75, 0, 0]);
    assert_eq!(written(|out| style.error(TO, NbdError::Overflow, out)), error);
    let extents = [StatusExtent { length: 9 << 32, flags: 2 }, StatusExtent { length: 512, flags: 1 }];
    let mut status = head(6, 40);
    status.extend([0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    status.extend([0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    assert_eq!(written(|out| style.block_status(TO, &base(&extents), out)), status);
}

#[test]
fn the_extents_of_a_reply_are_bounded() {
    let extents = vec![StatusExtent { length: 512, flags: 0 }; EXTENTS_MAX + 1];
    let length = |style: ReplyStyle| written(|out| style.block_status(TO, &base(&extents), out)).len();
    assert_eq!(length(ReplyStyle::Structured), 20 + 4 + 8 * EXTENTS_MAX);
    assert_eq!(length(ReplyStyle::Extended), 32 + 8 + 16 * EXTENTS_MAX);
}

#[test]
fn every_status_maps_to_an_error_of_the_protocol() {
    for status in Status::ALL {
        assert_eq!(NbdError::from(status) as u32, status.nbd());
    }
}

fn style() -> impl Strategy<Value = ReplyStyle> {
    prop::sample::select(vec![ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended])
}

/// Parses `stream` in pieces of the given lengths. Returns the requests and the payloads of writes.
fn parse(session: Session, stream: &[u8], cuts: &[usize]) -> Vec<(Step, Vec<u8>)> {
    let mut transmission = Transmission::new(session);
    let mut found: Vec<(Step, Vec<u8>)> = Vec::new();
    let (mut start, mut end) = (0, 0);
    let mut cuts = cuts.iter();
    loop {
        let mut input = &stream[start..end];
        let wanted = (transmission.payload_bytes() as usize).min(input.len());
        if wanted > 0 {
            let (payload, rest) = input.split_at(wanted);
            found.last_mut().unwrap().1.extend(payload);
            transmission.took_payload(wanted as u32);
            input = rest;
        }
        let step =
            if transmission.payload_bytes() > 0 { Step::Receive } else { transmission.next(&mut input) };
        start = end - input.len();
        match step {
            Step::Receive if end == stream.len() => return found,
            Step::Receive => end = (end + cuts.next().copied().unwrap_or(usize::MAX / 2)).min(stream.len()),
            Step::Request(_) | Step::Rejected { .. } => found.push((step, Vec::new())),
            Step::Disconnect | Step::Violation => {
                found.push((step, Vec::new()));
                return found;
            }
        }
    }
}

proptest! {
    #[test]
    fn parsing_does_not_depend_on_how_the_stream_is_cut(
        style in style(),
        requests in prop::collection::vec((0u16..10, 0u16..0x40, 0u64..(SIZE >> 9) + 4, 0u64..9), 0..20),
        cuts in prop::collection::vec(1usize..3000, 0..100),
    ) {
        let mut stream = Vec::new();
        let mut sent = Vec::new();
        for &(command, flags, block, blocks) in &requests {
            let (offset, length) = (block << 9, blocks << 9);
            stream.extend(encode(style, command, flags, offset, length));
            let payload = command == 1 || style == ReplyStyle::Extended && flags & 0x20 != 0;
            let content = vec![block as u8; if payload && command != 2 { length as usize } else { 0 }];
            stream.extend(&content);
            sent.push((command, flags, offset, length, content));
            if command == 2 {
                break;
            }
        }
        let found = parse(session(style), &stream, &cuts);
        prop_assert_eq!(found.len(), sent.len());
        for ((step, payload), (command, flags, at, bytes, content)) in found.iter().zip(&sent) {
            match step {
                Step::Request(Request { command: c, flags: f, cookie, offset, length }) => {
                    prop_assert_eq!((*c as u16, f.bits(), *cookie, offset, length), (*command, *flags, COOKIE, at, bytes));
                    prop_assert_eq!(payload, content);
                }
                Step::Rejected { cookie, offset, .. } => prop_assert_eq!((*cookie, offset), (COOKIE, at)),
                Step::Disconnect => prop_assert_eq!(*command, 2),
                step => prop_assert!(false, "{:?}", step),
            }
        }
    }
}
