//! The messages of vhost-user (QEMU's docs/interop/vhost-user.rst), as bytes and descriptors: no
//! socket, no state. Numbers are in the byte order of the machine, which both ends run on.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::foreign::Foreign;

/// Bytes of a header.
pub const HEADER_BYTES: usize = size_of::<Header>();
/// Longest payload that any known request has, rounded up: a longer one is a violation.
pub const PAYLOAD_MAX_BYTES: usize = 4096;
/// Most descriptors of a message.
pub const FILES_MAX: usize = 32;
/// Bytes of the configuration space that a message may name.
pub const CONFIG_MAX_BYTES: u32 = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In the payload of a message about a ring's eventfd: there is none.
const NO_FILE: u64 = 1 << 8;

/// Virtio's feature bit 30, which virtio does not use: there are protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// The protocol features that are offered.
pub mod protocol {
    /// GET_QUEUE_NUM.
    pub const MQ: u64 = 1 << 0;
    /// Requests that ask for it are acknowledged.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// Requests of the back end, on a socket of their own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The configuration space is the back end's.
    pub const CONFIG: u64 = 1 << 9;
    /// Requests in flight are noted in memory that survives the back end.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// RESET_DEVICE.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// Regions of memory are added and removed one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    /// The status of the virtio device.
    pub const STATUS: u64 = 1 << 16;
    /// All of them.
    pub const OFFERED: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS | STATUS;
}

/// Numbers of requests.
pub mod code {
    #![allow(missing_docs, reason = "named as in the specification")]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const SET_STATUS: u32 = 39;
    pub const GET_STATUS: u32 = 40;
    /// Of the back end: the configuration space has changed.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// The name of request `code`, for people.
pub fn name(code: u32) -> String {
    let known = match code {
        code::GET_FEATURES => "GET_FEATURES",
        code::SET_FEATURES => "SET_FEATURES",
        code::SET_OWNER => "SET_OWNER",
        code::RESET_OWNER => "RESET_OWNER",
        code::SET_MEM_TABLE => "SET_MEM_TABLE",
        code::SET_VRING_NUM => "SET_VRING_NUM",
        code::SET_VRING_ADDR => "SET_VRING_ADDR",
        code::SET_VRING_BASE => "SET_VRING_BASE",
        code::GET_VRING_BASE => "GET_VRING_BASE",
        code::SET_VRING_KICK => "SET_VRING_KICK",
        code::SET_VRING_CALL => "SET_VRING_CALL",
        code::SET_VRING_ERR => "SET_VRING_ERR",
        code::GET_PROTOCOL_FEATURES => "GET_PROTOCOL_FEATURES",
        code::SET_PROTOCOL_FEATURES => "SET_PROTOCOL_FEATURES",
        code::GET_QUEUE_NUM => "GET_QUEUE_NUM",
        code::SET_VRING_ENABLE => "SET_VRING_ENABLE",
        code::SET_BACKEND_REQ_FD => "SET_BACKEND_REQ_FD",
        code::GET_CONFIG => "GET_CONFIG",
        code::SET_CONFIG => "SET_CONFIG",
        code::GET_INFLIGHT_FD => "GET_INFLIGHT_FD",
        code::SET_INFLIGHT_FD => "SET_INFLIGHT_FD",
        code::RESET_DEVICE => "RESET_DEVICE",
        code::GET_MAX_MEM_SLOTS => "GET_MAX_MEM_SLOTS",
        code::ADD_MEM_REG => "ADD_MEM_REG",
        code::REM_MEM_REG => "REM_MEM_REG",
        code::SET_STATUS => "SET_STATUS",
        code::GET_STATUS => "GET_STATUS",
        _ => return format!("request {code}"),
    };
    known.to_owned()
}

/// The header of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    /// Number of the request.
    pub code: u32,
    flags: u32,
    /// Bytes of the payload that follows.
    pub size: u32,
}

impl Header {
    /// Parses a header that a front end sent.
    ///
    /// # Errors
    /// A version that is not 1, a reply, or a payload longer than any.
    pub fn parse(bytes: [u8; HEADER_BYTES]) -> Result<Header, Refusal> {
        let header: Header = zerocopy::transmute!(bytes);
        if header.flags & VERSION_MASK != VERSION {
            return Err(refuse(format!("version {} in a header", header.flags & VERSION_MASK)));
        }
        if header.flags & !(VERSION_MASK | NEED_REPLY) != 0 {
            return Err(refuse(format!("flags {:#x} in a header", header.flags)));
        }
        if header.size as usize > PAYLOAD_MAX_BYTES {
            return Err(refuse(format!("a payload of {} bytes", header.size)));
        }
        Ok(header)
    }

    /// Whether an acknowledgement is asked for.
    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

/// Why a message is refused, in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal(pub String);

/// A refusal with this reason.
pub fn refuse(reason: impl Into<String>) -> Refusal {
    Refusal(reason.into())
}

impl From<blkq::Error> for Refusal {
    fn from(error: blkq::Error) -> Refusal {
        Refusal(error.to_string())
    }
}

/// A ring and a number of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VringState {
    /// Number of the ring.
    pub index: u32,
    /// Its size, base or state.
    pub number: u32,
}

/// The addresses of a ring's parts in the front end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct VringAddresses {
    /// Number of the ring.
    pub index: u32,
    /// Whether changes of the used ring are logged, which they never are here.
    pub flags: u32,
    /// Descriptors, or the packed ring.
    pub descriptors: u64,
    /// The used ring; the device's event suppression of a packed ring.
    pub used: u64,
    /// The available ring; the driver's event suppression of a packed ring.
    pub available: u64,
    /// Where changes are logged.
    pub log: u64,
}

/// A region of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Region {
    /// Its first address for the guest.
    pub guest: u64,
    /// Its length in bytes.
    pub size: u64,
    /// Its first address in the front end.
    pub user: u64,
    /// Where it begins in its file.
    pub offset: u64,
}

/// The memory that notes requests in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct InflightArea {
    /// Its bytes.
    pub size: u64,
    /// Where they begin in the file.
    pub offset: u64,
    /// Rings that it has room for.
    pub queues: u16,
    /// Descriptors of each of them.
    pub queue_size: u16,
    /// Bytes up to the alignment of the C structure.
    pub padding: u32,
}

/// The C structure has no padding on the wire: 20 bytes.
const INFLIGHT_BYTES: usize = 20;

/// A part of the configuration space.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ConfigRange {
    /// Its first byte.
    pub offset: u32,
    /// Its bytes, at least one.
    pub size: u32,
    /// Whether it is written for a migration.
    pub flags: u32,
}

/// A request of a front end, with the descriptors that came with it.
#[derive(Debug)]
#[allow(missing_docs, reason = "named as in the specification")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(Region, Foreign)>),
    SetVringNum(VringState),
    SetVringAddr(VringAddresses),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(u32, Option<Foreign>),
    SetVringCall(u32, Option<Foreign>),
    SetVringErr(u32, Option<Foreign>),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd(Foreign),
    GetConfig(ConfigRange),
    SetConfig(ConfigRange, Vec<u8>),
    GetInflightFd(InflightArea),
    SetInflightFd(InflightArea, Foreign),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region, Foreign),
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
}

impl Request {
    /// Parses the request with `header`, whose payload and descriptors have arrived. Descriptors of a
    /// request that is refused are closed.
    ///
    /// # Errors
    /// An unknown request, a payload of a wrong size, descriptors missing or superfluous.
    pub fn parse(header: &Header, payload: &[u8], files: Vec<Foreign>) -> Result<Request, Refusal> {
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
            code::SET_VRING_KICK => {
                let (ring, file) = ring_file(payload, files.next())?;
                Request::SetVringKick(ring, file)
            }
            code::SET_VRING_CALL => {
                let (ring, file) = ring_file(payload, files.next())?;
                Request::SetVringCall(ring, file)
            }
            code::SET_VRING_ERR => {
                let (ring, file) = ring_file(payload, files.next())?;
                Request::SetVringErr(ring, file)
            }
            code::GET_PROTOCOL_FEATURES => empty(payload, Request::GetProtocolFeatures)?,
            code::SET_PROTOCOL_FEATURES => Request::SetProtocolFeatures(whole(payload)?),
            code::GET_QUEUE_NUM => empty(payload, Request::GetQueueNum)?,
            code::SET_VRING_ENABLE => Request::SetVringEnable(whole(payload)?),
            code::SET_BACKEND_REQ_FD => {
                let file = needed(files.next())?;
                empty(payload, Request::SetBackendReqFd(file))?
            }
            code::GET_CONFIG => Request::GetConfig(config(payload)?.0),
            code::SET_CONFIG => {
                let (range, bytes) = config(payload)?;
                Request::SetConfig(range, bytes.to_vec())
            }
            code::GET_INFLIGHT_FD => Request::GetInflightFd(inflight(payload)?),
            code::SET_INFLIGHT_FD => Request::SetInflightFd(inflight(payload)?, needed(files.next())?),
            code::RESET_DEVICE => empty(payload, Request::ResetDevice)?,
            code::GET_MAX_MEM_SLOTS => empty(payload, Request::GetMaxMemSlots)?,
            code::ADD_MEM_REG => Request::AddMemReg(single_region(payload)?, needed(files.next())?),
            code::REM_MEM_REG => {
                // Some front ends pass the descriptor again, to be closed.
                drop(files.next());
                Request::RemMemReg(single_region(payload)?)
            }
            code::SET_STATUS => Request::SetStatus(whole(payload)?),
            code::GET_STATUS => empty(payload, Request::GetStatus)?,
            _ => return Err(refuse("it is not known here")),
        };
        match files.count() {
            0 => Ok(request),
            more => Err(refuse(format!("{more} descriptors more than it has"))),
        }
    }
}

fn wrong_size(payload: &[u8]) -> Refusal {
    refuse(format!("its payload has {} bytes", payload.len()))
}

fn needed(file: Option<Foreign>) -> Result<Foreign, Refusal> {
    file.ok_or_else(|| refuse("its descriptor is missing"))
}

fn empty(payload: &[u8], request: Request) -> Result<Request, Refusal> {
    if payload.is_empty() { Ok(request) } else { Err(wrong_size(payload)) }
}

/// The whole payload as one value.
fn whole<T: FromBytes>(payload: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(payload).map_err(|_| wrong_size(payload))
}

fn mem_table(payload: &[u8], files: Vec<Foreign>) -> Result<Vec<(Region, Foreign)>, Refusal> {
    let (counts, mut rest) = <[u32; 2]>::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    let count = counts[0] as usize;
    if count > FILES_MAX || rest.len() != count * size_of::<Region>() {
        return Err(refuse(format!("{count} regions in a payload of {} bytes", payload.len())));
    }
    if files.len() != count {
        return Err(refuse(format!("{} descriptors for {count} regions", files.len())));
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

/// The number of a ring, and its eventfd.
fn ring_file(payload: &[u8], file: Option<Foreign>) -> Result<(u32, Option<Foreign>), Refusal> {
    let value: u64 = whole(payload)?;
    if value & !(NO_FILE | 0xff) != 0 {
        return Err(refuse(format!("ring {value:#x}")));
    }
    let ring = value as u32 & 0xff;
    match (value & NO_FILE != 0, file) {
        (true, None) => Ok((ring, None)),
        (true, Some(_)) => Err(refuse("it came with a descriptor that its flags deny")),
        (false, file) => Ok((ring, Some(needed(file)?))),
    }
}

fn config(payload: &[u8]) -> Result<(ConfigRange, &[u8]), Refusal> {
    let (range, bytes) = ConfigRange::read_from_prefix(payload).map_err(|_| wrong_size(payload))?;
    let end = range.offset.checked_add(range.size);
    if range.size == 0 || end.is_none_or(|end| end > CONFIG_MAX_BYTES) || bytes.len() != range.size as usize {
        let ConfigRange { offset, size, .. } = range;
        return Err(refuse(format!(
            "{size} bytes of configuration at {offset}, with {} of them",
            bytes.len()
        )));
    }
    Ok((range, bytes))
}

/// Front ends whose structure is padded send 24 bytes, others 20.
fn inflight(payload: &[u8]) -> Result<InflightArea, Refusal> {
    let mut padded = [0; size_of::<InflightArea>()];
    if payload.len() != INFLIGHT_BYTES && payload.len() != padded.len() {
        return Err(wrong_size(payload));
    }
    padded[..payload.len()].copy_from_slice(payload);
    Ok(zerocopy::transmute!(padded))
}

/// A message to a front end.
#[derive(Debug)]
pub struct Reply {
    /// Header and payload.
    pub bytes: Vec<u8>,
    /// A descriptor that goes with it.
    pub file: Option<OwnedFd>,
}

impl Reply {
    /// The reply to request `code` with these bytes.
    pub fn new(code: u32, payload: &[u8]) -> Reply {
        Reply { bytes: message(code, VERSION | REPLY, payload), file: None }
    }

    /// The reply with one number.
    pub fn number(code: u32, value: u64) -> Reply {
        Reply::new(code, value.as_bytes())
    }
}

/// The request of a back end that the configuration space is read again. No reply is asked for.
pub fn config_change() -> Vec<u8> {
    message(code::BACKEND_CONFIG_CHANGE, VERSION, &[])
}

fn message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { code, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}
