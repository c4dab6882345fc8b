//! A connection to a vhost-user server, and the messages of a front end.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::{Result, ensure};

// Requests of the front end.
pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_CONFIG: u32 = 24;

/// Version 1 of the protocol, in the lowest bits of the flags.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Size of the header: request, flags, size of the payload.
const HEADER_BYTES: usize = 12;
/// Maximum payload of a reply.
const REPLY_BYTES_MAX: usize = 4096;
const ANSWER_WAIT: Duration = Duration::from_secs(30);

/// The payload of a request about the ring `index`: struct vhost_vring_state, two numbers of 32 bits.
pub fn vring_state(index: u32, value: u32) -> [u64; 1] {
    [u64::from(index) | u64::from(value) << 32]
}

pub struct Connection(UnixStream);

impl Connection {
    /// Fails with a [`std::io::Error`] if no server listens at `path`.
    pub fn connect(path: &Path) -> Result<Connection> {
        Ok(Connection(UnixStream::connect(path)?))
    }

    /// Sends a request with the payload `words`, without waiting for a reply.
    pub fn send(&mut self, request: u32, words: &[u64]) -> Result {
        self.send_with(request, VERSION, words, None)
    }

    fn send_with(&mut self, request: u32, flags: u32, words: &[u64], fd: Option<BorrowedFd<'_>>) -> Result {
        let mut bytes: Vec<u8> =
            [request, flags, size_of_val(words) as u32].iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if let Some(fd) = &fd {
            ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        }
        let sent = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        ensure(sent == bytes.len(), || "the message was sent in part only".into())
    }

    /// Sends a request that changes the state of the server, and waits for its acknowledgement (REPLY_ACK). Fails if
    /// the server rejects the request.
    pub fn set(&mut self, request: u32, words: &[u64], fd: Option<BorrowedFd<'_>>) -> Result {
        self.send_with(request, VERSION | NEED_REPLY, words, fd)?;
        match self.reply_u64(request)? {
            0 => Ok(()),
            code => Err(format!("the server rejects request {request} ({code})").into()),
        }
    }

    /// Sends a request. Returns the payload of the reply. Fails if the reply is missing or belongs to another
    /// request.
    pub fn ask(&mut self, request: u32, words: &[u64]) -> Result<Vec<u8>> {
        self.send(request, words)?;
        self.reply(request)
    }

    /// Sends a request whose reply is a number.
    pub fn ask_u64(&mut self, request: u32) -> Result<u64> {
        self.send(request, &[])?;
        self.reply_u64(request)
    }

    fn reply_u64(&mut self, request: u32) -> Result<u64> {
        let payload = self.reply(request)?;
        let bytes = payload.as_slice().try_into();
        Ok(u64::from_le_bytes(bytes.map_err(|_| {
            format!("the server sent a reply of {} bytes to request {request}", payload.len())
        })?))
    }

    fn reply(&mut self, request: u32) -> Result<Vec<u8>> {
        self.0.set_read_timeout(Some(ANSWER_WAIT))?;
        let none = |e| format!("no reply to request {request}: {e}");
        let mut header = [[0; 4]; HEADER_BYTES / 4];
        self.0.read_exact(header.as_flattened_mut()).map_err(none)?;
        let [to, flags, size] = header.map(u32::from_le_bytes);
        let is_reply = to == request && flags & (VERSION_MASK | REPLY) == VERSION | REPLY;
        ensure(is_reply && size as usize <= REPLY_BYTES_MAX, || {
            format!(
                "the reply to request {request} is for request {to}, with flags {flags:#x} and {size} bytes"
            )
        })?;
        let mut payload = vec![0; size as usize];
        self.0.read_exact(&mut payload).map_err(none)?;
        Ok(payload)
    }
}
