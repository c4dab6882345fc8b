//! The messages of vhost-user (QEMU's docs/interop/vhost-user.rst), as bytes and descriptors, without a
//! socket and without state. Numbers have the byte order of the machine, because both ends run on it.

use std::os::fd::OwnedFd;

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

macro_rules! codes {
    ($($name:ident = $code:literal,)*) => {
        /// The codes of requests, named as in the specification (`VHOST_USER_*`).
        pub mod code {
            #![allow(missing_docs, reason = "the names are those of the specification")]
            $(pub const $name: u32 = $code;)*
        }

        /// The name of the request `code`, for messages to users.
        pub fn name(code: u32) -> String {
            match code {
                $(code::$name => stringify!($name).to_owned(),)*
                _ => format!("request {code}"),
            }
        }
    };
}

codes! {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    RESET_OWNER = 4,
    SET_MEM_TABLE = 5,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SET_BACKEND_REQ_FD = 21,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
    SET_STATUS = 39,
    GET_STATUS = 40,
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
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Header, Refusal> {
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

/// Why a message is refused, as a text for users.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(pub String);

pub fn refuse(reason: impl Into<String>) -> Refusal {
    Refusal(reason.into())
}

impl From<blkq::Error> for Refusal {
    fn from(error: blkq::Error) -> Refusal {
        Refusal(error.to_string())
    }
}

/// The number of a ring, and a value for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VringState {
    pub index: u32,
    /// The size, the base or the state of the ring, depending on the message.
    pub number: u32,
}

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

#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Region {
    /// Guest address of the first byte.
    pub guest: u64,
    pub size: u64,
    /// Address of the first byte in the front end.
    pub user: u64,
    pub offset: u64,
}

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

/// A range of the configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ConfigRange {
    pub offset: u32,
    /// Length in bytes, at least 1.
    pub size: u32,
    /// Whether the range is written for a migration.
    pub flags: u32,
}

/// The number of a ring, and its eventfd, if the front end has one.
pub type RingFile = (u32, Option<UntrustedFd>);

/// A request of a front end, with its descriptors.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the specification")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(Region, UntrustedFd)>),
    SetVringNum(VringState),
    SetVringAddr(VringAddresses),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(RingFile),
    SetVringCall(RingFile),
    SetVringErr(RingFile),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd(UntrustedFd),
    GetConfig(ConfigRange),
    SetConfig(ConfigRange, Vec<u8>),
    GetInflightFd(InflightArea),
    SetInflightFd(InflightArea, UntrustedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region, UntrustedFd),
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
}

impl Request {
    /// Refuses an unknown request, a payload of a wrong size, and a wrong number of descriptors, and then
    /// closes the descriptors.
    pub fn parse(header: &Header, payload: &[u8], files: Vec<UntrustedFd>) -> Result<Request, Refusal> {
        let mut files = files.into_iter();
        let request = match header.code {
            code::GET_FEATURES => empty(payload, Request::GetFeatures)?,
            code::SET_FEATURES => Request::SetFeatures(whole(payload)?),
            code::SET_OWNER => empty(payload, Request::SetOwner)?,
            code::RESET_OWNER => empty(payload, Request::ResetOwner)?,
            code::SET_MEM_TABLE => Request::SetMemTable(mem_table(payload, files.by_ref().collect())?),
            code::SET_VRING_NUM => Request::SetVringNum(whole(payload)?),
            code::SET_VRING_ADDR => Request::SetVringAddr(whole(payload)?),
            code::SET_VRING_BASE => Request::SetVringBase(whole(payload)?),
            code::GET_VRING_BASE => Request::GetVringBase(whole(payload)?),
            code::SET_VRING_KICK => Request::SetVringKick(ring_file(payload, files.next())?),
            code::SET_VRING_CALL => Request::SetVringCall(ring_file(payload, files.next())?),
            code::SET_VRING_ERR => Request::SetVringErr(ring_file(payload, files.next())?),
            code::GET_PROTOCOL_FEATURES => empty(payload, Request::GetProtocolFeatures)?,
            code::SET_PROTOCOL_FEATURES => Request::SetProtocolFeatures(whole(payload)?),
            code::GET_QUEUE_NUM => empty(payload, Request::GetQueueNum)?,
            code::SET_VRING_ENABLE => Request::SetVringEnable(whole(payload)?),
            code::SET_BACKEND_REQ_FD => empty(payload, Request::SetBackendReqFd(needed(files.next())?))?,
            code::GET_CONFIG => Request::GetConfig(config(payload)?.0),
            code::SET_CONFIG => {
                config(payload).map(|(range, bytes)| Request::SetConfig(range, bytes.to_vec()))?
            }
            code::GET_INFLIGHT_FD => Request::GetInflightFd(inflight(payload)?),
            code::SET_INFLIGHT_FD => Request::SetInflightFd(inflight(payload)?, needed(files.next())?),
            code::RESET_DEVICE => empty(payload, Request::ResetDevice)?,
            code::GET_MAX_MEM_SLOTS => empty(payload, Request::GetMaxMemSlots)?,
            code::ADD_MEM_REG => Request::AddMemReg(single_region(payload)?, needed(files.next())?),
            code::REM_MEM_REG => {
                // Some front ends pass the descriptor, too; it is not needed.
                drop(files.next());
                Request::RemMemReg(single_region(payload)?)
            }
            code::SET_STATUS => Request::SetStatus(whole(payload)?),
            code::GET_STATUS => empty(payload, Request::GetStatus)?,
            _ => return Err(refuse("unknown request")),
        };
        match files.count() {
            0 => Ok(request),
            more => Err(refuse(format!("the message has {more} file descriptors too many"))),
        }
    }
}

fn wrong_size(payload: &[u8]) -> Refusal {
    refuse(format!("a payload of {} bytes has the wrong size", payload.len()))
}

fn needed(file: Option<UntrustedFd>) -> Result<UntrustedFd, Refusal> {
    file.ok_or_else(|| refuse("the message has no file descriptor"))
}

fn empty(payload: &[u8], request: Request) -> Result<Request, Refusal> {
    if payload.is_empty() { Ok(request) } else { Err(wrong_size(payload)) }
}

fn whole<T: FromBytes>(payload: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(payload).map_err(|_| wrong_size(payload))
}

fn mem_table(payload: &[u8], files: Vec<UntrustedFd>) -> Result<Vec<(Region, UntrustedFd)>, Refusal> {
    let (counts, mut rest) = <[u32; 2]>::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    let count = counts[0] as usize;
    if count > FILES_MAX || rest.len() != count * size_of::<Region>() {
        return Err(refuse(format!("a payload of {} bytes does not fit {count} regions", payload.len())));
    }
    if files.len() != count {
        return Err(refuse(format!("the message has {} file descriptors for {count} regions", files.len())));
    }
    let mut regions = Vec::with_capacity(count);
    for file in files {
        let (region, after) = Region::read_from_prefix(rest).map_err(|_| wrong_size(payload))?;
        regions.push((region, file));
        rest = after;
    }
    Ok(regions)
}

fn single_region(payload: &[u8]) -> Result<Region, Refusal> {
    let (_padding, rest) = u64::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    Region::read_from_bytes(rest).map_err(|_| wrong_size(payload))
}

/// Parses the number of a ring. The eventfd may be missing if the payload says so.
fn ring_file(payload: &[u8], file: Option<UntrustedFd>) -> Result<RingFile, Refusal> {
    let value: u64 = whole(payload)?;
    if value & !(NO_FILE | 0xff) != 0 {
        return Err(refuse(format!("invalid ring {value:#x}")));
    }
    let file = match (value & NO_FILE != 0, file) {
        (true, None) => None,
        (true, Some(_)) => {
            return Err(refuse("the message has a descriptor although its payload denies that"));
        }
        (false, file) => Some(needed(file)?),
    };
    Ok((value as u32 & 0xff, file))
}

fn config(payload: &[u8]) -> Result<(ConfigRange, &[u8]), Refusal> {
    let (range, bytes) = ConfigRange::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    let end = range.offset.checked_add(range.size);
    if range.size == 0 || end.is_none_or(|end| end > CONFIG_MAX_BYTES) || bytes.len() != range.size as usize {
        let ConfigRange { offset, size, .. } = range;
        return Err(refuse(format!(
            "invalid configuration range: {size} bytes at offset {offset}, with {} bytes of data",
            bytes.len()
        )));
    }
    Ok((range, bytes))
}

fn inflight(payload: &[u8]) -> Result<InflightArea, Refusal> {
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
