//! Parses requests from a stream of bytes, and checks them against what was negotiated.

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes, TryFromBytes};

use super::handshake::Session;
use super::proto::*;
use super::reply::{ReplyStyle, ReplyTo};

/// A valid request: the command and flags are allowed, the range is aligned and inside the export.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The command, which is never [`Command::Disconnect`].
    pub command: Command,
    /// The flags, which are all valid for the command.
    pub flags: CommandFlags,
    /// Opaque value of the client that identifies the request in its reply.
    pub cookie: u64,
    /// Offset in the export in bytes, 0 for a flush.
    pub offset: u64,
    /// Length in bytes: 0 only for a flush, and at most [`PAYLOAD_MAX_BYTES`] for reads and writes.
    pub length: u64,
}

impl Request {
    /// The range of the request in the export, in bytes.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + self.length
    }

    /// The fields of the request that its reply repeats.
    pub fn reply_to(&self) -> ReplyTo {
        ReplyTo { cookie: self.cookie, offset: self.offset }
    }
}

/// The outcome of one call of [`Transmission::next`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// The next request is incomplete: receive more bytes.
    Receive,
    /// The next request. The payload of a write follows: see [`Transmission::payload_bytes`].
    Request(Request),
    /// A request that must be answered with an error. [`Transmission::next`] skips its payload.
    Rejected {
        /// Cookie of the request, for the reply.
        cookie: u64,
        /// Offset of the request, which an extended reply repeats.
        offset: u64,
        /// The error to reply with.
        error: NbdError,
    },
    /// The client ends the session: answer the requests in flight, then close the connection.
    Disconnect,
    /// The client broke the protocol, and the rest of the stream is meaningless: answer as for `Disconnect`.
    Violation,
}

/// Parses the requests of one session.
#[derive(Default)]
pub struct Transmission {
    session: Session,
    /// Bytes of the last request's payload that are left in the stream.
    payload: u32,
    /// Bytes of a rejected payload that must still be discarded.
    skip: u32,
    over: bool,
}

impl Transmission {
    /// Begins to parse the stream that follows the handshake of `session`.
    pub fn new(session: Session) -> Transmission {
        Transmission { session, ..Transmission::default() }
    }

    /// The number of payload bytes of the last write that are left in the stream. The caller must take them
    /// from the stream, and call [`Transmission::took_payload`], before it parses the next request.
    pub fn payload_bytes(&self) -> u32 {
        self.payload
    }

    /// Lets [`Transmission::next`] skip the rest of the payload.
    pub fn drop_payload(&mut self) {
        self.skip += std::mem::take(&mut self.payload);
    }

    /// Notes that `bytes` of the payload were taken from the stream. Panics if fewer bytes are left.
    pub fn took_payload(&mut self, bytes: u32) {
        assert!(bytes <= self.payload, "no more than the payload is taken");
        self.payload -= bytes;
    }

    /// Parses the next request in `input`, and advances `input` to the byte after it. Panics if the payload
    /// of the last write was neither taken nor dropped.
    pub fn next(&mut self, input: &mut &[u8]) -> Step {
        if self.over {
            return Step::Violation;
        }
        let skipped = input.len().min(self.skip as usize);
        *input = &input[skipped..];
        self.skip -= skipped as u32;
        if self.skip > 0 {
            return Step::Receive;
        }
        assert!(self.payload == 0, "the payload of a write is taken first");
        let extended = self.session.replies == ReplyStyle::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        // A wrong magic number is a violation as soon as its four bytes have arrived.
        if input.first_chunk().is_some_and(|first| u32::from_be_bytes(*first) != magic) {
            return self.close(Step::Violation);
        }
        let Some((header, length, rest)) = read_header(input, extended) else { return Step::Receive };
        *input = rest;
        // `None`: the command is not supported.
        let command = Command::try_read_from_bytes(header.command.get().as_bytes()).ok();
        if command == Some(Command::Disconnect) {
            return self.close(Step::Disconnect);
        }
        let (flags, cookie, offset) = (header.flags.get(), header.cookie.get(), header.offset.get());
        // With extended headers, a write must set `NBD_CMD_FLAG_PAYLOAD_LEN`. QEMU 10 does not set it, but
        // sends the payload, so each write has one.
        let has_payload =
            command == Some(Command::Write) || extended && flags & CommandFlags::PAYLOAD_LEN.bits() != 0;
        if has_payload && length > u64::from(PAYLOAD_MAX_BYTES) {
            return self.close(Step::Violation);
        }
        self.payload = if has_payload { length as u32 } else { 0 };
        let request = match (command, CommandFlags::from_bits(flags)) {
            (Some(command), Some(flags)) => self.check(Request { command, flags, cookie, offset, length }),
            _ => Err(NbdError::Invalid),
        };
        match request {
            Ok(request) => Step::Request(request),
            Err(error) => {
                self.drop_payload();
                Step::Rejected { cookie, offset, error }
            }
        }
    }

    fn close(&mut self, step: Step) -> Step {
        self.over = true;
        step
    }

    fn check(&self, request: Request) -> Result<Request, NbdError> {
        let session = &self.session;
        let Request { command, flags, offset, length, .. } = request;
        let advertised = |any: TransmissionFlags| session.flags.intersects(any);
        let flag_if = |is_allowed, flag| if is_allowed { flag } else { CommandFlags::empty() };
        let none = CommandFlags::empty();
        // Whether the command is known, and the flags that are allowed with it.
        let (known, allowed) = match command {
            Command::Read => (true, flag_if(advertised(TransmissionFlags::SEND_DF), CommandFlags::DF)),
            Command::Write => {
                (true, flag_if(session.replies == ReplyStyle::Extended, CommandFlags::PAYLOAD_LEN))
            }
            Command::Flush => (advertised(TransmissionFlags::SEND_FLUSH), none),
            // A read-only export announces neither TRIM nor WRITE_ZEROES. They fail with EPERM there, not as
            // unknown commands.
            Command::Trim => (advertised(TransmissionFlags::SEND_TRIM | TransmissionFlags::READ_ONLY), none),
            Command::WriteZeroes => (
                advertised(TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::READ_ONLY),
                CommandFlags::NO_HOLE
                    | flag_if(advertised(TransmissionFlags::SEND_FAST_ZERO), CommandFlags::FAST_ZERO),
            ),
            Command::Cache => (advertised(TransmissionFlags::SEND_CACHE), none),
            Command::BlockStatus => (!session.contexts.is_empty(), CommandFlags::REQ_ONE),
            Command::Disconnect => (false, none),
        };
        // The specification allows FUA with every command, once it was announced.
        let allowed = allowed | flag_if(advertised(TransmissionFlags::SEND_FUA), CommandFlags::FUA);
        if !known || !allowed.contains(flags) {
            return Err(NbdError::Invalid);
        }
        let writes = matches!(command, Command::Write | Command::Trim | Command::WriteZeroes);
        if writes && advertised(TransmissionFlags::READ_ONLY) {
            return Err(NbdError::Permission);
        }
        if command == Command::Flush {
            return if offset == 0 && length == 0 { Ok(request) } else { Err(NbdError::Invalid) };
        }
        if length == 0 || (offset | length) & (u64::from(session.minimum_block_bytes) - 1) != 0 {
            return Err(NbdError::Invalid);
        }
        if offset.checked_add(length).is_none_or(|end| end > session.size_bytes) {
            return Err(beyond_end(command));
        }
        if command == Command::Read && length > u64::from(PAYLOAD_MAX_BYTES) {
            // The specification: EOVERFLOW if the server could have split the reply into structured chunks
            // but does not, else EINVAL.
            let structured = session.replies != ReplyStyle::Simple;
            return Err(if structured { NbdError::Overflow } else { NbdError::Invalid });
        }
        Ok(request)
    }
}

/// The error of a command whose range is not inside of the export.
pub(super) fn beyond_end(command: Command) -> NbdError {
    if matches!(command, Command::Write | Command::WriteZeroes) {
        NbdError::NoSpace
    } else {
        NbdError::Invalid
    }
}

/// Returns the header and the length of a request, and the bytes after them; `None` if they are incomplete.
fn read_header(input: &[u8], extended: bool) -> Option<(&RequestHeader, u64, &[u8])> {
    let (header, rest) = RequestHeader::ref_from_prefix(input).ok()?;
    if extended {
        let (length, rest) = U64::read_from_prefix(rest).ok()?;
        return Some((header, length.get(), rest));
    }
    let (length, rest) = U32::read_from_prefix(rest).ok()?;
    Some((header, length.get().into(), rest))
}
