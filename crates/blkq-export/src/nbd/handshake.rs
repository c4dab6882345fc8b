//! The fixed newstyle handshake as a state machine over bytes.
//!
//! The caller buffers at least [`INPUT_BYTES`] for [`Handshake::receive`], and sends the output.

use std::borrow::Cow;
use std::sync::Arc;

use blkq::TURN_BUDGET;
use zerocopy::FromBytes;
use zerocopy::byteorder::big_endian::{U16, U32};

use super::contexts::{Contexts, OfferedBitmap, context_name};
use super::proto::*;
use super::reply::ReplyStyle;

/// Maximum number of options in one handshake. A client needs about ten.
pub const OPTIONS_MAX: u32 = 128;
/// Maximum bytes of an option: enough for the longest name and a dozen metadata context queries.
pub const OPTION_MAX_BYTES: usize = 64 << 10;
/// Maximum bytes of an option that is skipped with an error reply. A longer option closes the connection.
pub const OPTION_SKIP_MAX_BYTES: usize = 1 << 20;
/// Maximum number of queries in one option. A client needs at most 66, one for each metadata context.
pub const QUERIES_MAX: u32 = 256;
/// Minimum size in bytes of the caller's input buffer.
pub const INPUT_BYTES: usize = size_of::<OptionHeader>() + OPTION_MAX_BYTES;

/// Minimum block size that clients assume; exports above it require [`info::BLOCK_SIZE`].
const BLOCK_MIN_USUAL_BYTES: u32 = 512;

/// An export that clients can choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The export name, at most [`STRING_MAX_BYTES`] bytes long.
    pub name: String,
    /// A description for users, at most [`STRING_MAX_BYTES`] bytes long. May be empty.
    pub description: String,
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// Capabilities. [`TransmissionFlags::SEND_DF`] is added for structured and extended replies.
    pub flags: TransmissionFlags,
    /// Size of the smallest request, and the alignment of all requests, in bytes: a power of two from 1 to
    /// 65536. This is the disk's logical block size, or 1 if the server serves unaligned requests.
    pub minimum_block_bytes: u32,
    /// Size of the smallest request that is efficient, in bytes: a power of two from 512 or the minimum,
    /// whichever is larger, to [`PAYLOAD_MAX_BYTES`].
    pub preferred_block_bytes: u32,
    /// The dirty bitmaps of the export, at most [`BITMAPS_MAX`](blkq::bitmap::BITMAPS_MAX).
    pub bitmaps: Arc<[OfferedBitmap]>,
}

/// The outcome of a successful handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Session {
    /// Index of the chosen export.
    pub export: usize,
    /// Size of the export in bytes.
    pub size_bytes: u64,
    /// Capabilities of the export, as announced to this client.
    pub flags: TransmissionFlags,
    /// Size of the smallest request, and the alignment of all requests, in bytes.
    pub minimum_block_bytes: u32,
    /// The negotiated format of requests and replies.
    pub replies: ReplyStyle,
    /// The metadata contexts that the client chose for this export.
    pub contexts: Contexts,
}

/// Whether clients can or must start TLS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum TlsPolicy {
    /// The server does not offer TLS.
    #[default]
    Off,
    /// Clients can start TLS or do without it.
    Optional,
    /// Clients must start TLS before they can use any option but ABORT.
    Required,
}

/// The next step of the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// Receive more bytes from the client.
    Receive,
    /// The turn's budget is spent: call [`Handshake::receive`] in the next turn, with the bytes not consumed.
    Later,
    /// Send the output in plaintext, then continue under TLS in both directions. If there are received bytes
    /// that were not consumed, close the connection: they were sent before TLS and cannot be trusted.
    StartTls,
    /// Enter the transmission phase of this session.
    Transmission(Session),
    /// Send the output, then close the connection: the client ended the handshake.
    Abort,
    /// Send the output, then close the connection: the client broke the protocol, or asked for what cannot be refused
    /// in a reply.
    Close,
}

/// The server's side of one handshake.
#[derive(Default)]
pub struct Handshake {
    over: bool,
    /// Bytes of a rejected option that must still be discarded.
    skip: usize,
    tls: TlsPolicy,
    encrypted: bool,
    /// `None` until they are received.
    client_flags: Option<HandshakeFlags>,
    options: u32,
    replies: ReplyStyle,
    /// Index of the export for which the client chose metadata contexts, and these contexts.
    contexts: Option<(usize, Contexts)>,
    /// Index of the export whose block sizes the client has received.
    block_sizes: Option<usize>,
    lacks_tls: bool,
    shutting_down: bool,
    /// Options, queries and replies processed since [`Handshake::take_work`].
    work: usize,
}

impl Handshake {
    /// Begins a handshake, and appends the server's greeting to `output`.
    pub fn new(tls: TlsPolicy, output: &mut Vec<u8>) -> Handshake {
        let flags = HandshakeFlags::all().bits() as u16;
        append(output, &[&INIT_MAGIC.to_be_bytes(), &OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()]);
        Handshake { tls, ..Handshake::default() }
    }

    /// From now on, answers each option except ABORT with `NBD_REP_ERR_SHUTDOWN`.
    pub fn shut_down(&mut self) {
        self.shutting_down = true;
    }

    /// Whether the client used an option before TLS although TLS is required, and has not started TLS since.
    pub fn lacks_tls(&self) -> bool {
        self.lacks_tls && !self.encrypted
    }

    /// The options, queries and replies since the last call, which cost items of the turn's budget.
    pub fn take_work(&mut self) -> usize {
        std::mem::take(&mut self.work)
    }

    /// Processes `input`, the bytes not consumed yet, within the budget of a turn. Returns how many it
    /// consumed. `exports` must be the same for each call; the first is the default export (the empty name).
    pub fn receive(&mut self, input: &[u8], exports: &[Export], output: &mut Vec<u8>) -> (usize, Next) {
        let mut rest = input;
        let work_before = self.work;
        let next = loop {
            let skipped = self.skip.min(rest.len());
            (self.skip, rest) = (self.skip - skipped, &rest[skipped..]);
            if self.skip > 0 {
                break Next::Receive;
            }
            if self.over {
                break Next::Close;
            }
            let Some(client_flags) = self.client_flags else {
                let Ok((bits, after)) = U32::read_from_prefix(rest) else { break Next::Receive };
                rest = after;
                // The specification demands to close the connection after an unknown flag.
                let Some(flags) = HandshakeFlags::from_bits(bits.get()) else { break Next::Close };
                self.client_flags = Some(flags);
                continue;
            };
            if self.work - work_before >= TURN_BUDGET.items {
                break Next::Later;
            }
            let Ok((header, after)) = OptionHeader::read_from_prefix(rest) else { break Next::Receive };
            let (option, length) = (header.option.get(), header.length.get() as usize);
            if header.magic.get() != OPTION_MAGIC
                || self.options == OPTIONS_MAX
                || length > OPTION_SKIP_MAX_BYTES
                // A client without fixed newstyle may use EXPORT_NAME only.
                || (option != option::EXPORT_NAME && !client_flags.contains(HandshakeFlags::FIXED_NEWSTYLE))
                || (option == option::EXPORT_NAME && length > STRING_MAX_BYTES)
            {
                break Next::Close;
            }
            if length > OPTION_MAX_BYTES {
                self.options += 1;
                (rest, self.skip) = (after, length);
                Reply { option, output }.send(option_reply::ERR_TOO_BIG, &[b"option too long"]);
                continue;
            }
            let Some((data, after)) = after.split_at_checked(length) else { break Next::Receive };
            self.options += 1;
            rest = after;
            self.work += 1;
            let mut reply = Reply { option, output };
            match self.negotiate(data, exports, &mut reply) {
                Ok(Next::Receive) => {}
                Ok(next) => break next,
                // The reply to EXPORT_NAME cannot be an error.
                Err(_) if option == option::EXPORT_NAME => break Next::Close,
                Err((kind, text)) => reply.send(kind, &[text.as_bytes()]),
            }
        };
        if !matches!(next, Next::Receive | Next::Later | Next::StartTls) {
            self.over = true;
        }
        (input.len() - rest.len(), next)
    }

    /// Carries out the option of `reply`. An error is the reply to the option, and the handshake continues.
    fn negotiate(&mut self, data: &[u8], exports: &[Export], reply: &mut Reply<'_>) -> Result<Next, Refusal> {
        let option = reply.option;
        if self.shutting_down && option != option::ABORT {
            return Err((option_reply::ERR_SHUTDOWN, "the server is shutting down".into()));
        }
        if self.tls == TlsPolicy::Required
            && !self.encrypted
            && !matches!(option, option::STARTTLS | option::ABORT)
        {
            self.lacks_tls = true;
            return Err((option_reply::ERR_TLS_REQD, "this server requires TLS; use an nbds:// URI".into()));
        }
        let mut next = Next::Receive;
        match option {
            option::EXPORT_NAME => return self.export_name(data, exports, reply.output),
            option::ABORT => next = Next::Abort,
            option::INFO => _ = self.info(data, exports, reply)?,
            option::GO => {
                let session = self.info(data, exports, reply)?;
                let minimum = session.minimum_block_bytes;
                if minimum > BLOCK_MIN_USUAL_BYTES && self.block_sizes != Some(session.export) {
                    let text = format!(
                        "the minimum block size is {minimum} bytes; request NBD_INFO_BLOCK_SIZE first"
                    );
                    return Err((option_reply::ERR_BLOCK_SIZE_REQD, text.into()));
                }
                next = Next::Transmission(session);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(data, exports, reply)?
            }
            option::LIST | option::STARTTLS | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS
                if !data.is_empty() =>
            {
                return Err((option_reply::ERR_INVALID, "this option takes no data".into()));
            }
            option::LIST => {
                self.work += exports.len();
                for export in exports {
                    let name = export.name.as_bytes();
                    let length = (name.len() as u32).to_be_bytes();
                    reply.send(option_reply::SERVER, &[&length, name, export.description.as_bytes()]);
                }
            }
            option::STARTTLS if self.tls == TlsPolicy::Off => {
                return Err((option_reply::ERR_POLICY, "this server does not offer TLS".into()));
            }
            option::STARTTLS if self.encrypted => {
                return Err((option_reply::ERR_INVALID, "TLS is already in use".into()));
            }
            option::STARTTLS => {
                // Discards all earlier negotiation, because it was not protected: a man in the middle may
                // have sent it (CVE-2021-3716).
                self.replies = ReplyStyle::Simple;
                self.contexts = None;
                self.block_sizes = None;
                self.encrypted = true;
                next = Next::StartTls;
            }
            option::STRUCTURED_REPLY if self.replies == ReplyStyle::Extended => {
                let text = "extended headers are already negotiated";
                return Err((option_reply::ERR_EXT_HEADER_REQD, text.into()));
            }
            option::STRUCTURED_REPLY => self.replies = ReplyStyle::Structured,
            option::EXTENDED_HEADERS => self.replies = ReplyStyle::Extended,
            _ => return Err((option_reply::ERR_UNSUP, "unknown option".into())),
        }
        reply.send(option_reply::ACK, &[]);
        Ok(next)
    }

    fn export_name(&self, name: &[u8], exports: &[Export], output: &mut Vec<u8>) -> Result<Next, Refusal> {
        // With extended headers a client must use GO.
        let export = find(exports, name).filter(|_| self.replies != ReplyStyle::Extended).ok_or(UNKNOWN)?;
        let session = self.session(export, exports);
        append(output, &[&session.size_bytes.to_be_bytes(), &session.flags.bits().to_be_bytes()]);
        if self.client_flags.is_none_or(|flags| !flags.contains(HandshakeFlags::NO_ZEROES)) {
            output.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
        }
        Ok(Next::Transmission(session))
    }

    fn info(&mut self, data: &[u8], exports: &[Export], reply: &mut Reply<'_>) -> Result<Session, Refusal> {
        let mut data = Fields(data);
        let name = data.string()?;
        let count = usize::from(data.take::<U16>()?.get());
        let requests = data.0;
        if requests.len() != count * size_of::<U16>() {
            return Err(INVALID);
        }
        let asked = |info: u16| requests.chunks_exact(2).any(|request| request == info.to_be_bytes());
        let index = find(exports, name).ok_or(UNKNOWN)?;
        let (export, session) = (&exports[index], self.session(index, exports));
        let (size, flags) = (session.size_bytes.to_be_bytes(), session.flags.bits().to_be_bytes());
        reply.info(info::EXPORT, &[&size, &flags]);
        if asked(info::NAME) {
            reply.info(info::NAME, &[export.name.as_bytes()]);
        }
        if asked(info::DESCRIPTION) && !export.description.is_empty() {
            reply.info(info::DESCRIPTION, &[export.description.as_bytes()]);
        }
        if asked(info::BLOCK_SIZE) {
            self.block_sizes = Some(index);
        }
        if asked(info::BLOCK_SIZE) || export.minimum_block_bytes > BLOCK_MIN_USUAL_BYTES {
            let Export { minimum_block_bytes, preferred_block_bytes, .. } = export;
            let bytes =
                [*minimum_block_bytes, *preferred_block_bytes, PAYLOAD_MAX_BYTES].map(u32::to_be_bytes);
            reply.info(info::BLOCK_SIZE, &[bytes.as_flattened()]);
        }
        Ok(session)
    }

    fn meta_context(
        &mut self,
        data: &[u8],
        exports: &[Export],
        reply: &mut Reply<'_>,
    ) -> Result<(), Refusal> {
        let set = reply.option == option::SET_META_CONTEXT;
        if set {
            // A new SET_META_CONTEXT replaces the earlier choice, even if it fails.
            self.contexts = None;
        }
        if self.replies == ReplyStyle::Simple {
            return Err((option_reply::ERR_INVALID, "metadata contexts need structured replies".into()));
        }
        let mut data = Fields(data);
        let name = data.string()?;
        let queries = data.take::<U32>()?.get();
        if queries > QUERIES_MAX {
            return Err((option_reply::ERR_TOO_BIG, "too many queries".into()));
        }
        let export = find(exports, name);
        let bitmaps = export.map_or(&[][..], |export| &exports[export].bitmaps);
        let mut found = if queries == 0 && !set { Contexts::all(bitmaps) } else { Contexts::default() };
        self.work += queries as usize;
        for _ in 0..queries {
            found = found.with(Contexts::matching(data.string()?, bitmaps, !set));
        }
        if !data.0.is_empty() {
            return Err(INVALID);
        }
        let export = export.ok_or(UNKNOWN)?;
        self.work += found.ids().count();
        for id in found.ids() {
            let number = if set { id } else { 0 };
            let (namespace, leaf) = context_name(id, bitmaps);
            reply.send(option_reply::META_CONTEXT, &[&number.to_be_bytes(), namespace, leaf]);
        }
        if set {
            self.contexts = Some((export, found));
        }
        Ok(())
    }

    fn session(&self, index: usize, exports: &[Export]) -> Session {
        let export = &exports[index];
        let mut flags = export.flags | TransmissionFlags::HAS_FLAGS;
        flags.set(TransmissionFlags::SEND_DF, self.replies != ReplyStyle::Simple);
        let contexts = self.contexts.filter(|(of, _)| *of == index).map(|(_, chosen)| chosen);
        Session {
            export: index,
            size_bytes: export.size_bytes,
            flags,
            minimum_block_bytes: export.minimum_block_bytes,
            replies: self.replies,
            contexts: contexts.unwrap_or_default(),
        }
    }
}

fn find(exports: &[Export], name: &[u8]) -> Option<usize> {
    let named = exports.iter().position(|export| export.name.as_bytes() == name);
    // The empty name selects the default export.
    named.or((name.is_empty() && !exports.is_empty()).then_some(0))
}

/// The type and the text of an error reply.
type Refusal = (u32, Cow<'static, str>);
const INVALID: Refusal = (option_reply::ERR_INVALID, Cow::Borrowed("malformed option"));
const UNKNOWN: Refusal = (option_reply::ERR_UNKNOWN, Cow::Borrowed("no such export"));

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<T: FromBytes>(&mut self) -> Result<T, Refusal> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| INVALID)?;
        self.0 = rest;
        Ok(value)
    }

    /// Reads a string: a 32-bit length and that number of bytes.
    fn string(&mut self) -> Result<&'a [u8], Refusal> {
        let length = self.take::<U32>()?.get() as usize;
        let (string, rest) = self.0.split_at_checked(length).ok_or(INVALID)?;
        if length > STRING_MAX_BYTES {
            return Err((option_reply::ERR_TOO_BIG, "string too long".into()));
        }
        self.0 = rest;
        Ok(string)
    }
}

/// Appends replies to one option.
struct Reply<'a> {
    option: u32,
    output: &'a mut Vec<u8>,
}

impl Reply<'_> {
    fn send(&mut self, reply: u32, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let words = [self.option, reply, length as u32].map(u32::to_be_bytes);
        append(self.output, &[&OPTION_REPLY_MAGIC.to_be_bytes(), words.as_flattened()]);
        append(self.output, parts);
    }

    fn info(&mut self, kind: u16, parts: &[&[u8]]) {
        self.send(option_reply::INFO, &[&kind.to_be_bytes(), &parts.concat()]);
    }
}
