//! Numbers and layouts of the NBD protocol: doc/proto.md of the reference implementation,
//! and its `extension-ext-header` branch for the 64-bit headers. Everything is big endian.

use bitflags::bitflags;
use blkq::Status;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First word of the server: `NBDMAGIC`.
pub const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// Second word of a newstyle server, and first of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// First word of every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// First word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// First word of a chunk of an extended reply.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Largest string of the protocol, in bytes.
pub const STRING_MAX_BYTES: usize = 4096;
/// Largest payload of a request or reply, in bytes: the largest that every implementation
/// can rely on, and what we announce.
pub const PAYLOAD_MAX_BYTES: u32 = 32 << 20;
/// Zeroes after the answer to `NBD_OPT_EXPORT_NAME`, unless the client declined them.
pub const EXPORT_NAME_ZEROES: usize = 124;

bitflags! {
    /// Capabilities of the server in the handshake.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct HandshakeFlags: u16 {
        /// Options may be answered, and refused one by one.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The zeroes after `NBD_OPT_EXPORT_NAME` can be left out.
        const NO_ZEROES = 1 << 1;
    }

    /// The client's answer to [`HandshakeFlags`], bit by bit the same.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct ClientFlags: u32 {
        /// The client understands answers to options.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The client does not want the zeroes.
        const NO_ZEROES = 1 << 1;
    }

    /// Capabilities of an export.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes of any kind are refused.
        const READ_ONLY = 1 << 1;
        /// `NBD_CMD_FLUSH` is understood.
        const SEND_FLUSH = 1 << 2;
        /// `NBD_CMD_FLAG_FUA` is understood.
        const SEND_FUA = 1 << 3;
        /// Seeks cost time.
        const ROTATIONAL = 1 << 4;
        /// `NBD_CMD_TRIM` is understood.
        const SEND_TRIM = 1 << 5;
        /// `NBD_CMD_WRITE_ZEROES` and `NBD_CMD_FLAG_NO_HOLE` are understood.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// `NBD_CMD_FLAG_DF` is understood.
        const SEND_DF = 1 << 7;
        /// Flush and FUA hold over all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// `NBD_CMD_CACHE` is understood.
        const SEND_CACHE = 1 << 10;
        /// `NBD_CMD_FLAG_FAST_ZERO` is understood.
        const SEND_FAST_ZERO = 1 << 11;
    }

    /// Modifiers of a command.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct CommandFlags: u16 {
        /// On stable storage before the reply.
        const FUA = 1 << 0;
        /// Zeroes must not deallocate.
        const NO_HOLE = 1 << 1;
        /// At most one content chunk in reply.
        const DF = 1 << 2;
        /// At most one extent in reply.
        const REQ_ONE = 1 << 3;
        /// Zeroes faster than a write, or not at all.
        const FAST_ZERO = 1 << 4;
        /// The length of an extended request is that of a payload.
        const PAYLOAD_LEN = 1 << 5;
    }

    /// Modifiers of a chunk of a reply.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct ReplyFlags: u16 {
        /// The last chunk of this reply.
        const DONE = 1 << 0;
    }

    /// State of an extent in the metadata context `base:allocation`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct AllocationFlags: u32 {
        /// Not allocated.
        const HOLE = 1 << 0;
        /// Reads as zeroes.
        const ZERO = 1 << 1;
    }
}

/// Options of the handshake (`NBD_OPT_*`).
pub mod option {
    /// Choose an export and begin, without a way to refuse.
    pub const EXPORT_NAME: u32 = 1;
    /// Abort the session.
    pub const ABORT: u32 = 2;
    /// Name the exports.
    pub const LIST: u32 = 3;
    /// Go on under TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export and begin.
    pub const GO: u32 = 7;
    /// Reply in structured chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use 64-bit headers both ways.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Kinds of replies to options (`NBD_REP_*`).
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// One export.
    pub const SERVER: u32 = 2;
    /// One fact about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// The option is known and not allowed.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// The option breaks a rule.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// TLS comes first.
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// The server is going down.
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    /// The client must ask for the block sizes, for they are not the usual ones.
    pub const ERR_BLOCK_SIZE_REQD: u32 = 0x8000_0008;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    /// Extended headers were chosen and exclude this.
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Facts about an export (`NBD_INFO_*`).
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// A line for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Kinds of chunks of a reply (`NBD_REPLY_TYPE_*`).
pub mod reply_type {
    /// Nothing more.
    pub const NONE: u16 = 0;
    /// Content.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The request failed.
    pub const ERROR: u16 = 0x8001;
}

/// The command of a request (`NBD_CMD_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u16)]
pub enum Command {
    /// Send content.
    Read = 0,
    /// Take content.
    Write = 1,
    /// Answer what is in flight and close.
    Disconnect = 2,
    /// Make completed writes stable.
    Flush = 3,
    /// The content is no longer needed.
    Trim = 4,
    /// The content will be read soon.
    Cache = 5,
    /// Make it read as zeroes.
    WriteZeroes = 6,
    /// Describe the extents.
    BlockStatus = 7,
}

impl Command {
    /// The command with this number.
    pub const fn from_number(number: u16) -> Option<Command> {
        Some(match number {
            0 => Command::Read,
            1 => Command::Write,
            2 => Command::Disconnect,
            3 => Command::Flush,
            4 => Command::Trim,
            5 => Command::Cache,
            6 => Command::WriteZeroes,
            7 => Command::BlockStatus,
            _ => return None,
        })
    }
}

/// Why a request failed: the closed list of the protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum NbdError {
    /// The export is read-only.
    Permission = 1,
    /// Input/output error.
    Io = 5,
    /// Out of memory.
    NoMemory = 12,
    /// The request breaks a rule.
    Invalid = 22,
    /// Out of space, or beyond the end.
    NoSpace = 28,
    /// Too large.
    Overflow = 75,
    /// Not supported.
    NotSupported = 95,
    /// The server is going down.
    Shutdown = 108,
}

impl From<Status> for NbdError {
    fn from(status: Status) -> NbdError {
        match status.nbd() {
            1 => NbdError::Permission,
            12 => NbdError::NoMemory,
            22 => NbdError::Invalid,
            28 => NbdError::NoSpace,
            75 => NbdError::Overflow,
            95 => NbdError::NotSupported,
            108 => NbdError::Shutdown,
            _ => NbdError::Io,
        }
    }
}

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident = $size:literal { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $size && align_of::<$name>() == 1);
    )*};
}

wire! {
    /// The greeting of the server.
    Greeting = 18 {
        /// [`INIT_MAGIC`].
        init: U64,
        /// [`OPTION_MAGIC`].
        magic: U64,
        /// [`HandshakeFlags`].
        flags: U16,
    }

    /// Head of an option; `length` bytes follow.
    OptionHeader = 16 {
        /// [`OPTION_MAGIC`].
        magic: U64,
        /// Which one.
        option: U32,
        /// Bytes that follow.
        length: U32,
    }

    /// Head of a reply to an option; `length` bytes follow.
    OptionReplyHeader = 20 {
        /// [`OPTION_REPLY_MAGIC`].
        magic: U64,
        /// The option that is answered.
        option: U32,
        /// Kind of the reply.
        reply: U32,
        /// Bytes that follow.
        length: U32,
    }

    /// Answer to `NBD_OPT_EXPORT_NAME`.
    ExportNameReply = 10 {
        /// Size of the export in bytes.
        size_bytes: U64,
        /// [`TransmissionFlags`].
        flags: U16,
    }

    /// Payload of [`info::EXPORT`].
    InfoExport = 12 {
        /// [`info::EXPORT`].
        info: U16,
        /// Size of the export in bytes.
        size_bytes: U64,
        /// [`TransmissionFlags`].
        flags: U16,
    }

    /// Payload of [`info::BLOCK_SIZE`].
    InfoBlockSize = 14 {
        /// [`info::BLOCK_SIZE`].
        info: U16,
        /// Smallest and alignment of all, in bytes.
        minimum_bytes: U32,
        /// Smallest that is efficient, in bytes.
        preferred_bytes: U32,
        /// Largest payload, in bytes.
        payload_max_bytes: U32,
    }

    /// A request, unless extended headers were negotiated.
    CompactRequest = 28 {
        /// [`REQUEST_MAGIC`].
        magic: U32,
        /// [`CommandFlags`].
        flags: U16,
        /// [`Command`].
        command: U16,
        /// The client's cookie, opaque.
        cookie: U64,
        /// Where, in bytes.
        offset: U64,
        /// How much, in bytes.
        length: U32,
    }

    /// A request when extended headers were negotiated.
    ExtendedRequest = 32 {
        /// [`EXTENDED_REQUEST_MAGIC`].
        magic: U32,
        /// [`CommandFlags`].
        flags: U16,
        /// [`Command`].
        command: U16,
        /// The client's cookie, opaque.
        cookie: U64,
        /// Where, in bytes.
        offset: U64,
        /// How much, in bytes: payload or effect, depending on [`CommandFlags::PAYLOAD_LEN`].
        length: U64,
    }

    /// A simple reply; the content follows a successful read.
    SimpleReply = 16 {
        /// [`SIMPLE_REPLY_MAGIC`].
        magic: U32,
        /// 0 or an [`NbdError`].
        error: U32,
        /// Of the request.
        cookie: U64,
    }

    /// Head of a chunk of a structured reply; `length` bytes follow.
    StructuredReply = 20 {
        /// [`STRUCTURED_REPLY_MAGIC`].
        magic: U32,
        /// [`ReplyFlags`].
        flags: U16,
        /// [`reply_type`].
        kind: U16,
        /// Of the request.
        cookie: U64,
        /// Bytes that follow.
        length: U32,
    }

    /// Head of a chunk of an extended reply; `length` bytes follow.
    ExtendedReply = 32 {
        /// [`EXTENDED_REPLY_MAGIC`].
        magic: U32,
        /// [`ReplyFlags`].
        flags: U16,
        /// [`reply_type`].
        kind: U16,
        /// Of the request.
        cookie: U64,
        /// Of the request.
        offset: U64,
        /// Bytes that follow.
        length: U64,
    }

    /// Payload of [`reply_type::ERROR`], without a message.
    ErrorPayload = 6 {
        /// An [`NbdError`].
        error: U32,
        /// Length of the message that follows.
        message_length: U16,
    }

    /// An extent of [`reply_type::BLOCK_STATUS`].
    BlockStatusExtent = 8 {
        /// In bytes.
        length: U32,
        /// [`AllocationFlags`].
        flags: U32,
    }

    /// An extent of [`reply_type::BLOCK_STATUS_EXT`].
    BlockStatusExtentExt = 16 {
        /// In bytes.
        length: U64,
        /// [`AllocationFlags`].
        flags: U64,
    }
}
