//! Parses requests from a stream of bytes, and checks them against what was negotiated.

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use super::handshake::Session;
use super::proto::*;
use super::reply::ReplyStyle;

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
pub struct Transmission {
    session: Session,
    /// Bytes of the last request's payload that are left in the stream.
    payload: u32,
    drop_payload: bool,
    over: bool,
}

impl Transmission {
    /// Begins to parse the stream that follows the handshake of `session`.
    pub fn new(session: Session) -> Transmission {
        Transmission { session, payload: 0, drop_payload: false, over: false }
    }

    /// The number of payload bytes of the last write that are left in the stream. The caller must take them
    /// from the stream, and call [`Transmission::took_payload`], before it parses the next request.
    pub fn payload_bytes(&self) -> u32 {
        if self.drop_payload { 0 } else { self.payload }
    }

    /// Lets [`Transmission::next`] skip the rest of the payload.
    pub fn drop_payload(&mut self) {
        self.drop_payload = self.payload > 0;
    }

    /// Notes that `bytes` of the payload were taken from the stream. Panics if fewer bytes are left.
    pub fn took_payload(&mut self, bytes: u32) {
        assert!(bytes <= self.payload_bytes(), "no more than the payload is taken");
        self.payload -= bytes;
    }

    /// Parses the next request in `input`, and advances `input` to the byte after it. Panics if the payload
    /// of the last write was neither taken nor dropped.
    pub fn next(&mut self, input: &mut &[u8]) -> Step {
        if self.over {
            return Step::Violation;
        }
        if self.drop_payload {
            let dropped = input.len().min(self.payload as usize);
            *input = &input[dropped..];
            self.payload -= dropped as u32;
            if self.payload > 0 {
                return Step::Receive;
            }
            self.drop_payload = false;
        }
        assert!(self.payload == 0, "the payload of a write is taken first");
        let header = match self.header(input) {
            Ok(Some(header)) => header,
            Ok(None) => return Step::Receive,
            Err(step) => return self.close(step),
        };
        // `None`: the command is not supported.
        let command = Command::try_read_from_bytes(header.command.get().as_bytes()).ok();
        if command == Some(Command::Disconnect) {
            return self.close(Step::Disconnect);
        }
        // With extended headers, a write must set `NBD_CMD_FLAG_PAYLOAD_LEN`. QEMU 10 does not set it, but
        // sends the payload, so each write has one.
        let has_payload = command == Some(Command::Write)
            || self.session.replies == ReplyStyle::Extended
                && header.flags.get() & CommandFlags::PAYLOAD_LEN.bits() != 0;
        let length = header.length.get();
        if has_payload && length > u64::from(PAYLOAD_MAX_BYTES) {
            return self.close(Step::Violation);
        }
        self.payload = if has_payload { length as u32 } else { 0 };
        match self.check(command, &header) {
            Ok(request) => Step::Request(request),
            Err(error) => {
                self.drop_payload = self.payload > 0;
                Step::Rejected { cookie: header.cookie.get(), offset: header.offset.get(), error }
            }
        }
    }

    fn close(&mut self, step: Step) -> Step {
        self.over = true;
        step
    }

    /// `None` if incomplete. A wrong magic number is an error as soon as its four bytes have arrived.
    fn header(&self, input: &mut &[u8]) -> Result<Option<ExtendedRequest>, Step> {
        let extended = self.session.replies == ReplyStyle::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        match input.first_chunk::<4>() {
            None => return Ok(None),
            Some(first) if u32::from_be_bytes(*first) != magic => return Err(Step::Violation),
            Some(_) => {}
        }
        Ok(if extended { read_header::<U64>(input) } else { read_header::<U32>(input) })
    }

    fn check(&self, command: Option<Command>, header: &ExtendedRequest) -> Result<Request, NbdError> {
        let session = &self.session;
        let flags = CommandFlags::from_bits(header.flags.get());
        let (Some(command), Some(flags)) = (command, flags) else { return Err(NbdError::Invalid) };
        let (cookie, offset, length) = (header.cookie.get(), header.offset.get(), header.length.get());
        let advertised = |any: TransmissionFlags| session.flags.intersects(any);
        let mut allowed = CommandFlags::empty();
        // The specification allows FUA with every command, once it was announced.
        allowed.set(CommandFlags::FUA, advertised(TransmissionFlags::SEND_FUA));
        let known = match command {
            Command::Read => {
                allowed.set(CommandFlags::DF, advertised(TransmissionFlags::SEND_DF));
                true
            }
            Command::Write => {
                allowed.set(CommandFlags::PAYLOAD_LEN, session.replies == ReplyStyle::Extended);
                true
            }
            Command::Flush => advertised(TransmissionFlags::SEND_FLUSH),
            // A read-only export announces neither TRIM nor WRITE_ZEROES. They fail with EPERM there, not as
            // unknown commands.
            Command::Trim => advertised(TransmissionFlags::SEND_TRIM | TransmissionFlags::READ_ONLY),
            Command::WriteZeroes => {
                allowed |= CommandFlags::NO_HOLE;
                allowed.set(CommandFlags::FAST_ZERO, advertised(TransmissionFlags::SEND_FAST_ZERO));
                advertised(TransmissionFlags::SEND_WRITE_ZEROES | TransmissionFlags::READ_ONLY)
            }
            Command::Cache => advertised(TransmissionFlags::SEND_CACHE),
            Command::BlockStatus => {
                allowed |= CommandFlags::REQ_ONE;
                !session.contexts.is_empty()
            }
            Command::Disconnect => false,
        };
        if !known || !allowed.contains(flags) {
            return Err(NbdError::Invalid);
        }
        let request = Request { command, flags, cookie, offset, length };
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
            let space = matches!(command, Command::Write | Command::WriteZeroes);
            return Err(if space { NbdError::NoSpace } else { NbdError::Invalid });
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

/// Reads a header with a length of the type `L`; `None` if it is incomplete.
fn read_header<L>(input: &mut &[u8]) -> Option<ExtendedRequest>
where
    L: FromBytes + Immutable + KnownLayout + Unaligned + Copy + Into<U64> + 'static,
{
    let (request, rest) = RequestHeader::<L>::ref_from_prefix(input).ok()?;
    *input = rest;
    let RequestHeader { magic, flags, command, cookie, offset, length } = *request;
    Some(RequestHeader { magic, flags, command, cookie, offset, length: length.into() })
}
