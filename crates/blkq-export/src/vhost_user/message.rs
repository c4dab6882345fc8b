//! The messages of vhost-user (QEMU's docs/interop/vhost-user.rst), as bytes and descriptors, without a
//! socket and without state. Numbers have the byte order of the machine, because both ends run on it.

use std::os::fd::OwnedFd;

use blkq::{Error, ErrorKind};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::untrusted_fd::UntrustedFd;

pub const HEADER_BYTES: usize = size_of::<Header>();
/// Longest accepted payload in bytes. All known requests are shorter.
pub const PAYLOAD_MAX_BYTES: usize = 4096;
/// Most descriptors that a message may have.
pub const FILES_MAX: usize = 32;
/// Size of the part of the configuration space that messages can name, in bytes.
pub const CONFIG_MAX_BYTES: u32 = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// A flag in the payload of messages with the eventfd of a ring: the message has no descriptor.
const NO_FILE: u64 = 1 << 8;

/// `VHOST_USER_F_PROTOCOL_FEATURES`: a feature bit, unused by virtio, that announces protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// The protocol features that this back end offers (`VHOST_USER_PROTOCOL_F_*`).
pub mod protocol {
    /// The front end may ask for the number of queues with GET_QUEUE_NUM.
    pub const MQ: u64 = 1 << 0;
    /// Any request can ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back end may send requests, over another socket.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The back end has the configuration space of the device.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are recorded in memory that outlives the back end.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// The front end may reset the device with RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Memory regions can be added and removed one at a time.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The front end passes the status of the virtio device.
    pub const STATUS: u64 = 1 << 16;
    pub const OFFERED: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS | STATUS;
}

/// The rules that a request must follow whatever its payload contains.
#[derive(Clone, Copy)]
pub struct RequestKind {
    pub name: &'static str,
    /// The most descriptors that the request may have.
    pub files_max: usize,
    /// The protocol feature without which the request is refused, and its name.
    pub feature: Option<(u64, &'static str)>,
}

macro_rules! requests {
    ($($name:ident = $code:literal, files $files_max:expr $(, feature $feature:ident)?;)*) => {
        /// The codes of requests, named as in the specification (`VHOST_USER_*`).
        pub mod code {
            #![allow(missing_docs, reason = "the names are those of the specification")]
            $(pub const $name: u32 = $code;)*
        }

        impl RequestKind {
            /// The kind of the request `code`; `None` if it is unknown.
            pub fn of(code: u32) -> Option<RequestKind> {
                match code {
                    $(code::$name => Some(RequestKind {
                        name: stringify!($name),
                        files_max: $files_max,
                        feature: None$(.or(Some((protocol::$feature, stringify!($feature)))))?,
                    }),)*
                    _ => None,
                }
            }
        }
    };
}

// Those that have a reply of their own are named GET_*, which `Session` relies on. It refuses a request of this table
// for which it has no arm.
requests! {
    GET_FEATURES = 1, files 0;
    SET_FEATURES = 2, files 0;
    SET_OWNER = 3, files 0;
    RESET_OWNER = 4, files 0;
    SET_MEM_TABLE = 5, files FILES_MAX;
    SET_VRING_NUM = 8, files 0;
    SET_VRING_ADDR = 9, files 0;
    SET_VRING_BASE = 10, files 0;
    GET_VRING_BASE = 11, files 0;
    SET_VRING_KICK = 12, files 1;
    SET_VRING_CALL = 13, files 1;
    SET_VRING_ERR = 14, files 1;
    GET_PROTOCOL_FEATURES = 15, files 0;
    SET_PROTOCOL_FEATURES = 16, files 0;
    GET_QUEUE_NUM = 17, files 0, feature MQ;
    SET_VRING_ENABLE = 18, files 0;
    SET_BACKEND_REQ_FD = 21, files 1, feature BACKEND_REQ;
    GET_CONFIG = 24, files 0;
    SET_CONFIG = 25, files 0, feature CONFIG;
    GET_INFLIGHT_FD = 31, files 0, feature INFLIGHT_SHMFD;
    SET_INFLIGHT_FD = 32, files 1, feature INFLIGHT_SHMFD;
    RESET_DEVICE = 34, files 0, feature RESET_DEVICE;
    GET_MAX_MEM_SLOTS = 36, files 0, feature CONFIGURE_MEM_SLOTS;
    ADD_MEM_REG = 37, files 1, feature CONFIGURE_MEM_SLOTS;
    // Some front ends pass the descriptor of the region, too; it is not needed.
    REM_MEM_REG = 38, files 1, feature CONFIGURE_MEM_SLOTS;
    SET_STATUS = 39, files 0, feature STATUS;
    GET_STATUS = 40, files 0, feature STATUS;
}

/// A request of the back end: the configuration space has changed.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

/// The header of a message, without its payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    pub code: u32,
    flags: u32,
    /// Length in bytes of the payload that follows.
    pub size: u32,
}

impl Header {
    /// Refuses a version other than 1, a reply, and a payload of more than [`PAYLOAD_MAX_BYTES`].
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Header, Error> {
        let header: Header = zerocopy::transmute!(bytes);
        let version = header.flags & VERSION_MASK;
        if version != VERSION {
            return Err(refuse(format!("the header has version {version}, not {VERSION}")));
        }
        if header.flags & !(VERSION_MASK | NEED_REPLY) != 0 {
            return Err(refuse(format!("the header has invalid flags: {:#x}", header.flags)));
        }
        if header.size as usize > PAYLOAD_MAX_BYTES {
            let size = header.size;
            return Err(refuse(format!("a payload of {size} bytes is longer than {PAYLOAD_MAX_BYTES}")));
        }
        Ok(header)
    }

    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

/// Why a message is refused.
pub fn refuse(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, reason)
}

/// The number of a ring, and its size, base or state, depending on the message.
pub type VringState = [u32; 2];

/// Addresses of the parts of a ring in the address space of the front end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VringAddresses {
    pub index: u32,
    /// Whether to log changes of the used ring. Logging is not offered here.
    pub flags: u32,
    pub descriptors: u64,
    /// Address of the used ring, or of the device's event suppression in a packed ring.
    pub used: u64,
    /// Address of the available ring, or of the driver's event suppression in a packed ring.
    pub available: u64,
    pub log: u64,
}

/// A region of guest memory: the guest address of its first byte, its size, the address of the first byte in the
/// front end, and the offset in the file.
pub type Region = [u64; 4];

#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct InflightArea {
    pub size: u64,
    pub offset: u64,
    pub queues: u16,
    pub queue_size: u16,
    /// The padding at the end of the C structure.
    pub padding: u32,
}

/// Some front ends send the structure without its padding.
const INFLIGHT_BYTES: usize = 20;

/// A range of the configuration space: its offset, its length in bytes (at least 1), and whether it is written for
/// a migration.
pub type ConfigRange = [u32; 3];

pub fn wrong_size(payload: &[u8]) -> Error {
    refuse(format!("a payload of {} bytes has the wrong size", payload.len()))
}

pub fn needed(file: Option<UntrustedFd>) -> Result<UntrustedFd, Error> {
    file.ok_or_else(|| refuse("the message has no file descriptor"))
}

/// Parses a payload that is a `T` and nothing else.
pub fn whole<T: FromBytes>(payload: &[u8]) -> Result<T, Error> {
    T::read_from_bytes(payload).map_err(|_| wrong_size(payload))
}

/// Parses the regions of SET_MEM_TABLE, each with one of `files`.
pub fn mem_table(payload: &[u8], files: Vec<UntrustedFd>) -> Result<Vec<(Region, UntrustedFd)>, Error> {
    let (counts, rest) = <[u32; 2]>::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    let count = counts[0] as usize;
    if count > FILES_MAX || rest.len() != count * size_of::<Region>() {
        return Err(refuse(format!("a payload of {} bytes does not fit {count} regions", payload.len())));
    }
    if files.len() != count {
        return Err(refuse(format!("the message has {} file descriptors for {count} regions", files.len())));
    }
    let regions = rest.chunks_exact(size_of::<Region>()).map(whole);
    regions.zip(files).map(|(region, file)| Ok((region?, file))).collect()
}

pub fn single_region(payload: &[u8]) -> Result<Region, Error> {
    let [_padding, region @ ..]: [u64; 5] = whole(payload)?;
    Ok(region)
}

/// Parses the number of a ring, and returns it with its eventfd, which may be missing if the payload says so.
pub fn ring_file(payload: &[u8], file: Option<UntrustedFd>) -> Result<(u32, Option<UntrustedFd>), Error> {
    let value: u64 = whole(payload)?;
    if value & !(NO_FILE | 0xff) != 0 {
        return Err(refuse(format!("invalid ring {value:#x}")));
    }
    let index = value as u32 & 0xff;
    match file {
        file if value & NO_FILE == 0 => Ok((index, Some(needed(file)?))),
        None => Ok((index, None)),
        Some(_) => Err(refuse("the message has a descriptor although its payload denies that")),
    }
}

/// Parses a range of the configuration space, with its bytes.
pub fn config_range(payload: &[u8]) -> Result<(ConfigRange, &[u8]), Error> {
    let (range, bytes) = ConfigRange::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    let [offset, size, _] = range;
    let end = offset.checked_add(size);
    if size == 0 || end.is_none_or(|end| end > CONFIG_MAX_BYTES) || bytes.len() != size as usize {
        return Err(refuse(format!(
            "invalid configuration range: {size} bytes at offset {offset}, with {} bytes of data",
            bytes.len()
        )));
    }
    Ok((range, bytes))
}

pub fn inflight(payload: &[u8]) -> Result<InflightArea, Error> {
    let mut padded = [0; size_of::<InflightArea>()];
    if payload.len() != INFLIGHT_BYTES && payload.len() != padded.len() {
        return Err(wrong_size(payload));
    }
    padded[..payload.len()].copy_from_slice(payload);
    Ok(zerocopy::transmute!(padded))
}

#[derive(Debug)]
pub struct Reply {
    pub bytes: Vec<u8>,
    pub file: Option<OwnedFd>,
}

impl Reply {
    pub fn new(code: u32, payload: &[u8]) -> Reply {
        Reply { bytes: message(code, VERSION | REPLY, payload), file: None }
    }

    pub fn number(code: u32, value: u64) -> Reply {
        Reply::new(code, value.as_bytes())
    }
}

/// The request of the back end to read the configuration space again. It asks for no acknowledgement.
pub fn config_change() -> Vec<u8> {
    message(BACKEND_CONFIG_CHANGE, VERSION, &[])
}

fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { code, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}
