//! The NBD transmission phase with arbitrary clients. Accepted requests must be allowed, aligned and inside the export.
//! Every request must be found once, in order, with exactly its payload, independently of how the stream is divided.
//! Every reply must match its request.
//!
//! Input: four bytes that choose the session, a byte for the division, then the stream, or requests of eight bytes each
//! from which the stream is built.
// Contract: bounded-input

use blkq_export::nbd::contexts::{ContextStatus, Contexts, StatusExtent};
use blkq_export::nbd::handshake::Session;
use blkq_export::nbd::proto::*;
use blkq_export::nbd::reply::{ReplyStyle, ReplyTo};
use blkq_export::nbd::transmission::{Request, Step, Transmission};

fn session(choice: &[u8; 4]) -> Session {
    let replies =
        [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended][usize::from(choice[0]) % 3];
    let flags = u16::from_be_bytes([choice[1], choice[2]]) | 1;
    Session {
        export: 0,
        size_bytes: [0, 512, 1 << 20, 1 << 26, 1 << 40, u64::MAX - 511][usize::from(choice[0] / 3) % 6],
        flags: TransmissionFlags::from_bits_truncate(flags),
        minimum_block_bytes: [1, 512, 4096, 65536][usize::from(choice[3] >> 2) % 4],
        replies,
        contexts: if choice[3] & 2 != 0 && replies != ReplyStyle::Simple {
            Contexts::BASE_ALLOCATION
        } else {
            Contexts::default()
        },
    }
}

/// Builds the stream of a list of short requests.
fn expand(program: &[u8], session: &Session) -> Vec<u8> {
    let extended = session.replies == ReplyStyle::Extended;
    let mut stream = Vec::new();
    for step in program.chunks_exact(8) {
        let [command, flags, block, end, length, shift, skew, cookie] = *step else { return stream };
        let unit = u64::from(session.minimum_block_bytes);
        let mut offset = u64::from(block) * unit + u64::from(skew & 1);
        if end & 1 != 0 {
            offset = session.size_bytes.wrapping_sub(offset);
        }
        let mut length =
            (u64::from(length) * unit).wrapping_shl(u32::from(shift) % 40) + u64::from(skew >> 7);
        if end & 2 != 0 {
            length = session.size_bytes.wrapping_sub(offset);
        }
        if command % 16 == 1 {
            length %= 9000;
        }
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        stream.extend(if skew == 0x55 { 0 } else { magic }.to_be_bytes());
        stream.extend([flags >> 7, flags & 0x7f, 0, command % 16]);
        stream.extend(u64::from(cookie).to_be_bytes());
        stream.extend(offset.to_be_bytes());
        if extended {
            stream.extend(length.to_be_bytes());
        } else {
            stream.extend((length as u32).to_be_bytes());
        }
        let payload = command % 16 == 1 || extended && flags & 0x20 != 0;
        if payload && length < 9000 {
            stream.resize(stream.len() + length as usize, cookie);
        }
    }
    stream
}

#[derive(PartialEq, Eq, Debug)]
struct Found {
    step: Step,
    payload: Vec<u8>,
}

fn run(session: Session, stream: &[u8], cut: usize) -> Vec<Found> {
    let mut transmission = Transmission::new(session);
    let mut found: Vec<Found> = Vec::new();
    let (mut start, mut end) = (0, 0);
    loop {
        let mut input = &stream[start..end];
        let wanted = (transmission.payload_bytes() as usize).min(input.len());
        if wanted > 0 {
            let (payload, rest) = input.split_at(wanted);
            found.last_mut().unwrap().payload.extend(payload);
            transmission.took_payload(wanted as u32);
            input = rest;
        }
        let step =
            if transmission.payload_bytes() > 0 { Step::Receive } else { transmission.next(&mut input) };
        let before = start;
        start = end - input.len();
        match step {
            Step::Receive if end == stream.len() => return found,
            Step::Receive => {
                // At most a header waits for more bytes: the caller's buffer can be small.
                assert!(input.len() < 32);
                end = (end + cut).min(stream.len());
            }
            Step::Request(_) | Step::Rejected { .. } => {
                assert!(start >= before + 28);
                found.push(Found { step, payload: Vec::new() });
            }
            Step::Disconnect | Step::Violation => {
                assert_eq!(transmission.next(&mut input), Step::Violation);
                found.push(Found { step, payload: Vec::new() });
                return found;
            }
        }
    }
}

/// Walks the stream as the specification says, without checks. Returns cookie, offset and payload of every request, up to
/// the first that closes the session.
fn walk<'a>(session: &Session, stream: &'a [u8]) -> Vec<(u64, u64, &'a [u8])> {
    let extended = session.replies == ReplyStyle::Extended;
    let header = if extended { 32 } else { 28 };
    let mut requests = Vec::new();
    let mut rest = stream;
    let word = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
    while rest.len() >= header {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let command = u16::from_be_bytes([rest[6], rest[7]]);
        let flags = u16::from_be_bytes([rest[4], rest[5]]);
        let length = if extended {
            word(&rest[24..32])
        } else {
            u32::from_be_bytes(rest[24..28].try_into().unwrap()).into()
        };
        let payload = command == 1 || extended && flags & 0x20 != 0;
        let payload = if payload { length } else { 0 };
        if rest[..4] != magic.to_be_bytes() || command == 2 || payload > u64::from(PAYLOAD_MAX_BYTES) {
            break;
        }
        let end = header + (payload as usize).min(rest.len() - header);
        requests.push((word(&rest[8..16]), word(&rest[16..24]), &rest[header..end]));
        rest = &rest[end..];
    }
    requests
}

fn check_allowed(session: &Session, request: &Request) {
    let Request { command, flags, offset, length, .. } = *request;
    assert!(command != Command::Disconnect);
    if command == Command::Flush {
        assert_eq!((offset, length), (0, 0));
        assert!(session.flags.contains(TransmissionFlags::SEND_FLUSH));
        return;
    }
    assert!(length > 0 && offset.checked_add(length).unwrap() <= session.size_bytes);
    let block = u64::from(session.minimum_block_bytes);
    assert!(offset.is_multiple_of(block) && length.is_multiple_of(block));
    if matches!(command, Command::Write | Command::Trim | Command::WriteZeroes) {
        assert!(!session.flags.contains(TransmissionFlags::READ_ONLY));
    }
    if matches!(command, Command::Read | Command::Write) {
        assert!(length <= u64::from(PAYLOAD_MAX_BYTES));
    }
    let needs = [
        (flags.contains(CommandFlags::FUA), TransmissionFlags::SEND_FUA),
        (flags.contains(CommandFlags::DF), TransmissionFlags::SEND_DF),
        (flags.contains(CommandFlags::FAST_ZERO), TransmissionFlags::SEND_FAST_ZERO),
        (command == Command::Trim, TransmissionFlags::SEND_TRIM),
        (command == Command::WriteZeroes, TransmissionFlags::SEND_WRITE_ZEROES),
        (command == Command::Cache, TransmissionFlags::SEND_CACHE),
    ];
    for (used, flag) in needs {
        assert!(!used || session.flags.contains(flag), "{request:?} without {flag:?}");
    }
    assert!(command != Command::BlockStatus || !session.contexts.is_empty());
    assert!(!flags.contains(CommandFlags::NO_HOLE) || command == Command::WriteZeroes);
    assert!(!flags.contains(CommandFlags::REQ_ONE) || command == Command::BlockStatus);
}

/// Checks that the reply contains the cookie, and its length in the header.
fn check_reply(style: ReplyStyle, to: ReplyTo, content: usize, reply: &[u8]) {
    assert_eq!(reply[8..16], to.cookie.to_be_bytes());
    match style {
        ReplyStyle::Simple => assert_eq!(reply.len(), 16),
        ReplyStyle::Structured => {
            let length = u32::from_be_bytes(reply[16..20].try_into().unwrap()) as usize;
            assert_eq!(reply.len() + content, 20 + length);
        }
        ReplyStyle::Extended => {
            let length = u64::from_be_bytes(reply[24..32].try_into().unwrap()) as usize;
            assert_eq!(reply.len() + content, 32 + length);
            assert_eq!(reply[16..24], to.offset.to_be_bytes());
        }
    }
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let Some((choice, [cut, rest @ ..])) = data.split_first_chunk::<4>() else { return };
    let session = session(choice);
    let stream = if choice[3] & 1 == 0 { rest.to_vec() } else { expand(rest, &session) };
    let found = run(session, &stream, stream.len().max(1));
    let cut = (1 + usize::from(*cut)) * (stream.len() / 256).max(1);
    assert_eq!(run(session, &stream, cut), found);

    let walked = walk(&session, &stream);
    let answered =
        found.iter().filter(|f| matches!(f.step, Step::Request(_) | Step::Rejected { .. })).count();
    assert_eq!(answered, walked.len());
    for (found, (cookie, offset, payload)) in found.iter().zip(walked) {
        let to = ReplyTo { cookie, offset };
        let mut reply = Vec::new();
        match &found.step {
            Step::Request(request) => {
                assert_eq!((request.cookie, request.offset), (cookie, offset));
                check_allowed(&session, request);
                if request.command == Command::Write {
                    assert_eq!(found.payload, payload);
                }
                let mut content = 0;
                match request.command {
                    Command::Read => {
                        content = request.length as usize;
                        session.replies.data(to, to.offset, request.length as u32, true, &mut reply);
                    }
                    Command::BlockStatus => {
                        let length = request.length;
                        let extents = vec![StatusExtent { length, flags: 0 }; 3];
                        let contexts = [ContextStatus { id: 1, extents }];
                        session.replies.block_status(to, &contexts, &mut reply);
                    }
                    _ => session.replies.done(to, &mut reply),
                }
                check_reply(session.replies, to, content, &reply);
            }
            Step::Rejected { cookie: c, offset: o, error } => {
                assert_eq!((*c, *o), (cookie, offset));
                assert!(found.payload.is_empty());
                session.replies.error(to, *error, &mut reply);
                check_reply(session.replies, to, 0, &reply);
            }
            _ => {}
        }
    }
}
