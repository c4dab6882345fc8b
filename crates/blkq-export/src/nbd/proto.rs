//! Numbers and layouts of the NBD protocol, from doc/proto.md of the reference implementation and, for 64-bit
//! headers, from its branch `extension-ext-header`. All integers are big endian.

use bitflags::bitflags;
use blkq::Status;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// `NBDMAGIC`, the first word that a server sends.
pub const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// `IHAVEOPT`, the second word of a newstyle server and the first word of each option.
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// The first word of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The first word of a compact (32-bit) request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first word of an extended (64-bit) request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The first word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The first word of a structured reply chunk.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The first word of an extended reply chunk.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Maximum length of a string in the protocol, in bytes.
pub const STRING_MAX_BYTES: usize = 4096;
/// Maximum payload in bytes. The specification lets both sides rely on no more than 32 MiB.
pub const PAYLOAD_MAX_BYTES: u32 = 32 << 20;
/// Zero bytes after the reply to `NBD_OPT_EXPORT_NAME`, unless [`HandshakeFlags::NO_ZEROES`] is negotiated.
pub const EXPORT_NAME_ZEROES: usize = 124;

bitflags! {
    /// Capabilities that the server announces in the handshake, in 16 bits, and those that the client accepts, in 32.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub struct HandshakeFlags: u32 {
        /// The server replies to each option, and can reject one without closing the connection.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The server can omit the zeroes after the reply to `NBD_OPT_EXPORT_NAME`.
        const NO_ZEROES = 1 << 1;
    }

    /// Capabilities of an export, for the transmission phase.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct TransmissionFlags: u16 {
        /// Always set, as the specification demands.
        const HAS_FLAGS = 1 << 0;
        /// The server rejects all commands that write.
        const READ_ONLY = 1 << 1;
        /// The server supports `NBD_CMD_FLUSH`: see [`Command::Flush`].
        const SEND_FLUSH = 1 << 2;
        /// The server supports `NBD_CMD_FLAG_FUA` for all commands that write.
        const SEND_FUA = 1 << 3;
        /// The export has the characteristics of a rotational disk.
        const ROTATIONAL = 1 << 4;
        /// The server supports `NBD_CMD_TRIM`: see [`Command::Trim`].
        const SEND_TRIM = 1 << 5;
        /// The server supports `NBD_CMD_WRITE_ZEROES` and `NBD_CMD_FLAG_NO_HOLE`.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// The server supports `NBD_CMD_FLAG_DF`, which only structured and extended replies need.
        const SEND_DF = 1 << 7;
        /// A flush or FUA on one connection covers completed writes of all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// The server supports `NBD_CMD_CACHE`: see [`Command::Cache`].
        const SEND_CACHE = 1 << 10;
        /// The server supports `NBD_CMD_FLAG_FAST_ZERO` for write zeroes.
        const SEND_FAST_ZERO = 1 << 11;
    }

    /// Flags of a request (`NBD_CMD_FLAG_*`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct CommandFlags: u16 {
        /// Force unit access: the data must be on stable storage before the reply.
        const FUA = 1 << 0;
        /// Write zeroes must not deallocate the range.
        const NO_HOLE = 1 << 1;
        /// Do not fragment: the reply to a read must not be split into several chunks.
        const DF = 1 << 2;
        /// The client requests only one extent in the reply to a block status request.
        const REQ_ONE = 1 << 3;
        /// Write zeroes must fail immediately if it is not faster than a write.
        const FAST_ZERO = 1 << 4;
        /// The length of an extended request is the length of a payload that follows.
        const PAYLOAD_LEN = 1 << 5;
    }
}

/// Options of the handshake (`NBD_OPT_*`).
pub mod option {
    /// `NBD_OPT_EXPORT_NAME`: enters the transmission phase, or disconnects; there is no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// `NBD_OPT_ABORT`: ends the session before the transmission phase.
    pub const ABORT: u32 = 2;
    /// `NBD_OPT_LIST`: requests the names of all exports.
    pub const LIST: u32 = 3;
    /// `NBD_OPT_STARTTLS`: continues the handshake under TLS.
    pub const STARTTLS: u32 = 5;
    /// `NBD_OPT_INFO`: requests information about an export.
    pub const INFO: u32 = 6;
    /// `NBD_OPT_GO`: requests information about an export and enters the transmission phase.
    pub const GO: u32 = 7;
    /// `NBD_OPT_STRUCTURED_REPLY`: negotiates structured replies to requests.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// `NBD_OPT_LIST_META_CONTEXT`: requests the names of metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// `NBD_OPT_SET_META_CONTEXT`: chooses metadata contexts for block status requests.
    pub const SET_META_CONTEXT: u32 = 10;
    /// `NBD_OPT_EXTENDED_HEADERS`: negotiates 64-bit requests and replies.
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options (`NBD_REP_*`).
pub mod option_reply {
    /// `NBD_REP_ACK`: the server has carried out the option.
    pub const ACK: u32 = 1;
    /// `NBD_REP_SERVER`: describes one export of the list.
    pub const SERVER: u32 = 2;
    /// `NBD_REP_INFO`: one piece of information about an export.
    pub const INFO: u32 = 3;
    /// `NBD_REP_META_CONTEXT`: describes one metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// `NBD_REP_ERR_UNSUP`: the server does not know the option.
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    /// `NBD_REP_ERR_POLICY`: the server knows the option but is configured not to allow it.
    pub const ERR_POLICY: u32 = 0x8000_0002;
    /// `NBD_REP_ERR_INVALID`: the option is malformed or not allowed in this state.
    pub const ERR_INVALID: u32 = 0x8000_0003;
    /// `NBD_REP_ERR_TLS_REQD`: the client must start TLS first.
    pub const ERR_TLS_REQD: u32 = 0x8000_0005;
    /// `NBD_REP_ERR_UNKNOWN`: no export has the requested name.
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
    /// `NBD_REP_ERR_SHUTDOWN`: the server is shutting down.
    pub const ERR_SHUTDOWN: u32 = 0x8000_0007;
    /// `NBD_REP_ERR_BLOCK_SIZE_REQD`: the client must request `info::BLOCK_SIZE` first.
    pub const ERR_BLOCK_SIZE_REQD: u32 = 0x8000_0008;
    /// `NBD_REP_ERR_TOO_BIG`: the option exceeds a limit of the server.
    pub const ERR_TOO_BIG: u32 = 0x8000_0009;
    /// `NBD_REP_ERR_EXT_HEADER_REQD`: the option conflicts with extended headers, which were negotiated.
    pub const ERR_EXT_HEADER_REQD: u32 = 0x8000_000a;
}

/// Types of information about an export (`NBD_INFO_*`).
pub mod info {
    /// `NBD_INFO_EXPORT`: the size and the transmission flags.
    pub const EXPORT: u16 = 0;
    /// `NBD_INFO_NAME`: the canonical name of the export.
    pub const NAME: u16 = 1;
    /// `NBD_INFO_DESCRIPTION`: a description of the export for users.
    pub const DESCRIPTION: u16 = 2;
    /// `NBD_INFO_BLOCK_SIZE`: minimum and preferred block size, and maximum payload.
    pub const BLOCK_SIZE: u16 = 3;
}

/// `NBD_REPLY_FLAG_DONE`: this chunk is the last one of its reply.
pub const REPLY_FLAG_DONE: u16 = 1 << 0;

/// `NBD_STATE_HOLE` of `base:allocation`: the extent is not allocated, and writing it may fail for lack of space.
pub const STATE_HOLE: u32 = 1 << 0;
/// `NBD_STATE_ZERO` of `base:allocation`: the extent reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// Types of reply chunks (`NBD_REPLY_TYPE_*`).
pub mod reply_type {
    /// `NBD_REPLY_TYPE_NONE`: the chunk has no payload.
    pub const NONE: u16 = 0;
    /// `NBD_REPLY_TYPE_OFFSET_DATA`: an offset and data that was read.
    pub const OFFSET_DATA: u16 = 1;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS`: extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`: extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// `NBD_REPLY_TYPE_ERROR`: the request failed with an [`NbdError`](super::NbdError).
    pub const ERROR: u16 = 0x8001;
}

/// Commands of the transmission phase (`NBD_CMD_*`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, TryFromBytes)]
#[repr(u16)]
pub enum Command {
    /// Reads data from the export.
    Read = 0,
    /// Writes the payload to the export.
    Write = 1,
    /// Ends the session. The server completes the requests in flight, then closes the connection.
    Disconnect = 2,
    /// Makes all completed writes durable.
    Flush = 3,
    /// Discards a range whose data the client no longer needs.
    Trim = 4,
    /// Reads a range into the cache of the server.
    Cache = 5,
    /// Writes zeroes without a payload.
    WriteZeroes = 6,
    /// Requests the extents of a range in the negotiated metadata contexts.
    BlockStatus = 7,
}

/// Errors of requests. The specification allows only these numbers (they are Linux errno values).
#[derive(Clone, Copy, PartialEq, Eq, Debug, TryFromBytes)]
#[repr(u32)]
pub enum NbdError {
    /// EPERM: the export is read-only.
    Permission = 1,
    /// EIO: an input/output error occurred.
    Io = 5,
    /// ENOMEM: the server is out of memory.
    NoMemory = 12,
    /// EINVAL: the request is malformed, or not allowed for this export.
    Invalid = 22,
    /// ENOSPC: there is no space, or a write extends beyond the end of the export.
    NoSpace = 28,
    /// EOVERFLOW: the request is too large for this reply format.
    Overflow = 75,
    /// ENOTSUP: the server does not support the request.
    NotSupported = 95,
    /// ESHUTDOWN: the server is shutting down.
    Shutdown = 108,
}

impl From<Status> for NbdError {
    fn from(status: Status) -> NbdError {
        NbdError::try_read_from_bytes(status.nbd().as_bytes()).unwrap_or(NbdError::Io)
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
    /// Header of an option, followed by `length` bytes of data.
    OptionHeader = 16 {
        /// [`OPTION_MAGIC`]; other values violate the protocol.
        magic: U64,
        /// Number of the option in [`option`].
        option: U32,
        /// Length of the data that follows, in bytes.
        length: U32,
    }

    /// A request, followed by its length in bytes: 64 bits if extended headers were negotiated, else 32 bits. It is the
    /// length of the payload with [`CommandFlags::PAYLOAD_LEN`], else of the range.
    RequestHeader = 24 {
        /// [`REQUEST_MAGIC`] or [`EXTENDED_REQUEST_MAGIC`]; other values violate the protocol.
        magic: U32,
        /// Flags of the request, as [`CommandFlags`].
        flags: U16,
        /// Number of the [`Command`] to carry out.
        command: U16,
        /// Opaque value that identifies the request in its reply.
        cookie: U64,
        /// Offset in the export, in bytes.
        offset: U64,
    }

    /// A simple reply. The data of a successful read follows.
    SimpleReply = 16 {
        /// [`SIMPLE_REPLY_MAGIC`], by which clients recognize the reply format.
        magic: U32,
        /// 0 for success, or the number of an [`NbdError`].
        error: U32,
        /// Cookie of the request that this is the reply to.
        cookie: U64,
    }

    /// Header of a structured reply chunk, followed by `length` bytes of payload.
    StructuredReply = 20 {
        /// [`STRUCTURED_REPLY_MAGIC`], by which clients recognize the reply format.
        magic: U32,
        /// Flags of the chunk, such as [`REPLY_FLAG_DONE`].
        flags: U16,
        /// Type of the chunk in [`reply_type`].
        kind: U16,
        /// Cookie of the request that this is the reply to.
        cookie: U64,
        /// Length of the payload that follows, in bytes.
        length: U32,
    }

    /// Header of an extended reply chunk, followed by `length` bytes of payload.
    ExtendedReply = 32 {
        /// [`EXTENDED_REPLY_MAGIC`], by which clients recognize the reply format.
        magic: U32,
        /// Flags of the chunk, such as [`REPLY_FLAG_DONE`].
        flags: U16,
        /// Type of the chunk in [`reply_type`].
        kind: U16,
        /// Cookie of the request that this is the reply to.
        cookie: U64,
        /// Offset of the request that this is the reply to.
        offset: U64,
        /// Length of the payload that follows, in bytes.
        length: U64,
    }
}

/// Appends the fields of a message, between which there is no padding.
pub fn append(output: &mut Vec<u8>, fields: &[&[u8]]) {
    fields.iter().for_each(|field| output.extend_from_slice(field));
}
