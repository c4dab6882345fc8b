//! An NBD server, compared with a model of its disk. A client that knows the protocol sends valid and invalid commands,
//! several together, in pieces of any size. Every request must be answered once, as the model says, and reads must
//! return the bytes of the model.
//!
//! Input: the style of replies, then commands in the format of `arbitrary`.
// Contract: bounded-input

#[path = "../../crates/blkq-export/tests/nbd/mod.rs"]
pub(crate) mod nbd;

use std::collections::BTreeMap;
use std::io::Write;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

use arbitrary::{Arbitrary, Result, Unstructured};
use blkq::drivers::ram::Ram;
use blkq_export::nbd::NbdOptions;
use blkq_export::nbd::reply::ReplyStyle;
use nbd::{Client, Served};

const SIZE: u64 = 256 << 10;
const BLOCK: u64 = 512;
const COMMANDS_MAX: usize = 64;
const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

static SERVED: LazyLock<Served> = LazyLock::new(|| {
    let ram = Ram::new(SIZE, BLOCK as u32, false).expect("memory");
    let options = NbdOptions { requests_max: 16, ..nbd::options() };
    nbd::serve(Box::new(ram), 1, options)
});

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    Flush,
    Trim,
    Cache,
    WriteZeroes,
    BlockStatus,
    /// Not a command of the protocol.
    Unknown,
}

impl Kind {
    fn number(self) -> u16 {
        match self {
            Kind::Read => 0,
            Kind::Write => 1,
            Kind::Flush => 3,
            Kind::Trim => 4,
            Kind::Cache => 5,
            Kind::WriteZeroes => 6,
            Kind::BlockStatus => 7,
            Kind::Unknown => 9,
        }
    }

    fn changes(self) -> bool {
        matches!(self, Kind::Write | Kind::Trim | Kind::WriteZeroes)
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Command {
    kind: Kind,
    block: u16,
    blocks: u8,
    fill: u8,
    flags: u8,
    /// The reason why the command is invalid, if it is.
    skew: u8,
}

struct Sent {
    kind: Kind,
    range: Range<u64>,
    /// The expected error; 0 if the request must succeed.
    error: u32,
    content: Vec<u8>,
}

struct Session {
    client: Client<UnixStream>,
    model: Vec<u8>,
    sent: BTreeMap<u64, Sent>,
    next: u64,
    queued: Vec<u8>,
}

impl Session {
    fn begin(style: ReplyStyle) -> Session {
        let mut client = SERVED.client(style);
        // Zeroes the disk, on which the previous session has left data.
        assert_eq!(client.call(6, 0, 0, SIZE, &[]).0, 0);
        Session { client, model: vec![0; SIZE as usize], sent: BTreeMap::new(), next: 1, queued: Vec::new() }
    }

    fn send_queued(&mut self, piece: usize) {
        let queued = std::mem::take(&mut self.queued);
        queued
            .chunks(piece.max(1))
            .for_each(|piece| self.client.stream.write_all(piece).expect("the server reads"));
    }

    /// Receives replies until at most `left` requests are unanswered.
    fn take(&mut self, left: usize) {
        while self.sent.len() > left {
            let sent = &self.sent;
            let reply = self.client.reply(|cookie| match sent.get(&cookie) {
                Some(Sent { kind: Kind::Read, error: 0, range, .. }) => (range.end - range.start) as usize,
                _ => 0,
            });
            let sent = self.sent.remove(&reply.cookie).expect("a reply to nothing, or a second one");
            assert_eq!(reply.error, sent.error, "{:?} {:?}", sent.kind, sent.range);
            match sent.kind {
                Kind::Read if sent.error == 0 => assert!(reply.payload == sent.content, "{:?}", sent.range),
                Kind::BlockStatus if sent.error == 0 => {
                    assert!(!reply.payload.is_empty(), "extents of {:?}", sent.range);
                }
                _ => {}
            }
        }
    }

    fn command(&mut self, command: Command) {
        let Command { kind, block, blocks, fill, flags, skew } = command;
        let style = self.client.style;
        let mut offset = u64::from(block) % (SIZE / BLOCK) * BLOCK;
        let mut length = (u64::from(blocks) % 64 + 1) * BLOCK;
        let mut error = 0;
        match (skew, kind) {
            // Most commands are valid.
            (0..200, _) => length = length.min(SIZE - offset),
            (_, Kind::Flush | Kind::Unknown) => {}
            (200..215, _) => (offset, error) = (offset | 1, EINVAL),
            // The client sends the payload in any case.
            (215..230, _) => (length, error) = (length | 3, EINVAL),
            (230..245, _) => {
                offset = SIZE - BLOCK + BLOCK * u64::from(fill % 2);
                length = 2 * BLOCK;
                error = if matches!(kind, Kind::Write | Kind::WriteZeroes) { ENOSPC } else { EINVAL };
            }
            _ => (length, error) = (0, EINVAL),
        }
        if kind == Kind::Flush {
            (offset, length) = if skew < 200 { (0, 0) } else { (BLOCK, 0) };
            error = if skew < 200 { 0 } else { EINVAL };
        }
        if kind == Kind::Unknown || kind == Kind::BlockStatus && style == ReplyStyle::Simple {
            error = EINVAL;
        }
        let mut wire_flags = 0;
        if kind.changes() && flags & 1 != 0 {
            wire_flags |= FUA;
        }
        if kind == Kind::WriteZeroes && flags & 2 != 0 {
            wire_flags |= NO_HOLE;
        }
        // A flag that this command does not support.
        if flags & 0xf0 == 0xf0 && kind != Kind::WriteZeroes {
            (wire_flags, error) = (wire_flags | NO_HOLE, EINVAL);
        }
        let range = offset..offset + length;
        // The server may execute overlapping unanswered requests in any order.
        let meets = |sent: &Sent| {
            sent.error == 0
                && (sent.kind.changes() || kind.changes())
                && sent.range.start < range.end
                && range.start < sent.range.end
        };
        if error == 0 && self.sent.values().any(meets) {
            self.send_queued(usize::from(fill) + 1);
            self.take(0);
        }
        let data = if kind == Kind::Write { vec![fill; length as usize] } else { Vec::new() };
        let cookie = self.next;
        self.next += 1;
        let mut content = Vec::new();
        if error == 0 {
            let place = range.start as usize..range.end as usize;
            match kind {
                Kind::Read => content = self.model[place].to_vec(),
                Kind::Write => self.model[place].fill(fill),
                // The device advertises that discarded ranges read as zeroes.
                Kind::Trim | Kind::WriteZeroes => self.model[place].fill(0),
                _ => {}
            }
        }
        self.queued.extend(self.client.bytes(kind.number(), wire_flags, cookie, offset, length, &data));
        self.sent.insert(cookie, Sent { kind, range, error, content });
        if flags & 4 != 0 {
            self.send_queued(1 + usize::from(fill) * 8);
        }
        if flags & 8 != 0 || self.sent.len() > 24 {
            self.send_queued(usize::MAX);
            self.take(usize::from(flags >> 6) * 4);
        }
    }

    fn finish(mut self) {
        self.send_queued(usize::MAX);
        self.take(0);
        let whole = self.client.read(0, SIZE as usize);
        assert!(whole == self.model, "the disk is not what was written");
        self.client.send(2, 0, 0, 0, 0, &[]);
        self.client.expect_close();
    }
}

fn run(data: &[u8]) -> Result<()> {
    let mut u = Unstructured::new(data);
    let style = *u.choose(&[ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended])?;
    let commands: Vec<Command> = u.arbitrary_iter()?.take(COMMANDS_MAX).collect::<Result<_>>()?;
    let mut session = Session::begin(style);
    commands.into_iter().for_each(|command| session.command(command));
    session.finish();
    Ok(())
}

/// Checks one input.
pub fn check(data: &[u8]) {
    let _ = run(data);
}
