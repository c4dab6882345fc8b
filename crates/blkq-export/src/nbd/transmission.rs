//! The transmission phase, incoming: finds the requests in a stream of bytes and checks
//! them against what was negotiated.

use zerocopy::FromBytes;

use super::handshake::Session;
use super::proto::*;
use super::reply::ReplyStyle;

/// A request that may be carried out: aligned, inside the export, allowed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The command; never [`Command::Disconnect`].
    pub command: Command,
    /// How; only flags that the command has.
    pub flags: CommandFlags,
    /// The client's cookie.
    pub cookie: u64,
    /// Where, in bytes. 0 for a flush.
    pub offset: u64,
    /// How much, in bytes. 0 for a flush, and only for it. At most [`PAYLOAD_MAX_BYTES`]
    /// for read and write.
    pub length: u64,
}

impl Request {
    /// Its bytes of the export.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + self.length
    }
}

/// The outcome of parsing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// No whole request: more bytes are needed.
    Receive,
    /// A request. The payload of a write comes next: see [`Transmission::payload_bytes`].
    Request(Request),
    /// A request to be answered with an error at once. Its payload is dropped by itself.
    Rejected {
        /// The client's cookie.
        cookie: u64,
        /// Of the request, as an extended reply repeats it.
        offset: u64,
        /// The answer.
        error: NbdError,
    },
    /// The client wants to go: answer what is in flight, then close.
    Disconnect,
    /// The client broke the protocol so that nothing after this makes sense: close.
    Violation,
}

/// Finds requests in a stream.
pub struct Transmission {
    session: Session,
    /// Bytes of payload that come before the next request.
    payload: u32,
    /// Whether they belong to nobody.
    drop_payload: bool,
    over: bool,
}

/// Either header, in the larger form.
struct Header {
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u64,
}

impl Transmission {
    /// The stream after a handshake that led to `session`.
    pub fn new(session: Session) -> Transmission {
        Transmission { session, payload: 0, drop_payload: false, over: false }
    }

    /// The outcome of the handshake.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Bytes of the write just found that were not yet taken. The caller takes them from the
    /// stream and calls [`Transmission::took_payload`] before it parses the next request.
    pub fn payload_bytes(&self) -> u32 {
        if self.drop_payload { 0 } else { self.payload }
    }

    /// The payload that comes next is not wanted: it is dropped by itself.
    pub fn drop_payload(&mut self) {
        self.drop_payload = self.payload > 0;
    }

    /// `bytes` of the payload were taken from the stream.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn took_payload(&mut self, bytes: u32) {
        assert!(bytes <= self.payload_bytes(), "no more than the payload is taken");
        self.payload -= bytes;
    }

    /// Parses the next request at the beginning of `input`, and advances `input` past it.
    ///
    /// # Panics
    /// If the payload of the write before was not taken.
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
        let command = Command::from_number(header.command);
        if command == Some(Command::Disconnect) {
            return self.close(Step::Disconnect);
        }
        let flags = CommandFlags::from_bits(header.flags);
        // With extended headers a write has to flag that its length is that of a payload. QEMU 10
        // does not, and means it all the same.
        let has_payload = command == Some(Command::Write)
            || self.session.replies == ReplyStyle::Extended
                && header.flags & CommandFlags::PAYLOAD_LEN.bits() != 0;
        if has_payload && header.length > u64::from(PAYLOAD_MAX_BYTES) {
            return self.close(Step::Violation);
        }
        self.payload = if has_payload { header.length as u32 } else { 0 };
        match self.check(command, flags, &header) {
            Ok(request) => Step::Request(request),
            Err(error) => {
                self.drop_payload = self.payload > 0;
                Step::Rejected { cookie: header.cookie, offset: header.offset, error }
            }
        }
    }

    fn close(&mut self, step: Step) -> Step {
        self.over = true;
        step
    }

    /// The next header, if all of it is there. `Err` when the magic number is wrong, which
    /// shows as soon as the number itself is there.
    fn header(&self, input: &mut &[u8]) -> Result<Option<Header>, Step> {
        let extended = self.session.replies == ReplyStyle::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        match input.first_chunk::<4>() {
            None => return Ok(None),
            Some(first) if u32::from_be_bytes(*first) != magic => return Err(Step::Violation),
            Some(_) => {}
        }
        if extended {
            let Ok((request, rest)) = ExtendedRequest::ref_from_prefix(input) else { return Ok(None) };
            *input = rest;
            return Ok(Some(Header {
                flags: request.flags.get(),
                command: request.command.get(),
                cookie: request.cookie.get(),
                offset: request.offset.get(),
                length: request.length.get(),
            }));
        }
        let Ok((request, rest)) = CompactRequest::ref_from_prefix(input) else { return Ok(None) };
        *input = rest;
        Ok(Some(Header {
            flags: request.flags.get(),
            command: request.command.get(),
            cookie: request.cookie.get(),
            offset: request.offset.get(),
            length: request.length.get().into(),
        }))
    }

    fn check(
        &self,
        command: Option<Command>,
        flags: Option<CommandFlags>,
        header: &Header,
    ) -> Result<Request, NbdError> {
        let session = &self.session;
        let (Some(command), Some(flags)) = (command, flags) else { return Err(NbdError::Invalid) };
        let advertised = |flag| session.flags.contains(flag);
        let (known, mut allowed) = match command {
            Command::Read if advertised(TransmissionFlags::SEND_DF) => (true, CommandFlags::DF),
            Command::Read => (true, CommandFlags::empty()),
            Command::Write if session.replies == ReplyStyle::Extended => (true, CommandFlags::PAYLOAD_LEN),
            Command::Write => (true, CommandFlags::empty()),
            Command::Flush => (advertised(TransmissionFlags::SEND_FLUSH), CommandFlags::empty()),
            // A read-only export advertises neither of the two; its error is read-only, not unknown.
            Command::Trim => (
                advertised(TransmissionFlags::SEND_TRIM) || advertised(TransmissionFlags::READ_ONLY),
                CommandFlags::empty(),
            ),
            Command::WriteZeroes => {
                let mut allowed = CommandFlags::NO_HOLE;
                allowed.set(CommandFlags::FAST_ZERO, advertised(TransmissionFlags::SEND_FAST_ZERO));
                (
                    advertised(TransmissionFlags::SEND_WRITE_ZEROES)
                        || advertised(TransmissionFlags::READ_ONLY),
                    allowed,
                )
            }
            Command::Cache => (advertised(TransmissionFlags::SEND_CACHE), CommandFlags::empty()),
            Command::BlockStatus => (!session.contexts.is_empty(), CommandFlags::REQ_ONE),
            Command::Disconnect => (false, CommandFlags::empty()),
        };
        // The specification: FUA is valid on every command once it is advertised.
        allowed.set(CommandFlags::FUA, advertised(TransmissionFlags::SEND_FUA));
        if !known || !allowed.contains(flags) {
            return Err(NbdError::Invalid);
        }
        let Header { cookie, offset, length, .. } = *header;
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
            // A structured reply could be split: the error is that the server does not.
            let structured = session.replies != ReplyStyle::Simple;
            return Err(if structured { NbdError::Overflow } else { NbdError::Invalid });
        }
        Ok(request)
    }
}
