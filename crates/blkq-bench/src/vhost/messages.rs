//! Messages of the vhost-user protocol, sent by a front end.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::memory::SharedMemory;
use super::options::GUEST_START;
use crate::Result;

// Requests of the front end.
pub(super) const GET_FEATURES: u32 = 1;
pub(super) const SET_FEATURES: u32 = 2;
pub(super) const SET_OWNER: u32 = 3;
pub(super) const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_VRING_NUM: u32 = 8;
pub(super) const SET_VRING_ADDR: u32 = 9;
pub(super) const SET_VRING_BASE: u32 = 10;
pub(super) const GET_VRING_BASE: u32 = 11;
pub(super) const SET_VRING_KICK: u32 = 12;
pub(super) const SET_VRING_CALL: u32 = 13;
pub(super) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(super) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(super) const SET_VRING_ENABLE: u32 = 18;
pub(super) const GET_CONFIG: u32 = 24;

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

pub struct Message<'a> {
    request: u32,
    payload: Vec<u8>,
    descriptors: Vec<BorrowedFd<'a>>,
}

impl<'a> Message<'a> {
    pub fn new(request: u32) -> Message<'a> {
        Message { request, payload: Vec::new(), descriptors: Vec::new() }
    }

    pub fn u64(request: u32, value: u64) -> Message<'a> {
        let mut message = Message::new(request);
        message.push_u64(value);
        message
    }

    pub fn vring_state(request: u32, index: u32, value: u32) -> Message<'a> {
        let mut message = Message::new(request);
        message.push_u32(index);
        message.push_u32(value);
        message
    }

    pub fn vring_descriptor(request: u32, index: u32, descriptor: BorrowedFd<'a>) -> Message<'a> {
        Message::u64(request, u64::from(index)).with_descriptor(descriptor)
    }

    /// The memory table with one region at [`GUEST_START`].
    pub fn memory_table(memory: &'a SharedMemory) -> Message<'a> {
        let mut message = Message::new(SET_MEM_TABLE);
        message.push_u32(1);
        message.push_u32(0);
        for word in [GUEST_START, memory.len() as u64, memory.address(), 0] {
            message.push_u64(word);
        }
        message.with_descriptor(memory.as_fd())
    }

    pub fn push_u32(&mut self, value: u32) {
        self.push_bytes(&value.to_le_bytes());
    }

    pub fn push_u64(&mut self, value: u64) {
        self.push_bytes(&value.to_le_bytes());
    }

    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.payload.extend_from_slice(bytes);
    }

    #[must_use]
    pub fn with_descriptor(mut self, descriptor: BorrowedFd<'a>) -> Message<'a> {
        self.descriptors.push(descriptor);
        self
    }
}

pub struct Connection {
    stream: UnixStream,
    /// Whether the server acknowledges messages that ask for it (REPLY_ACK).
    pub(super) acknowledged: bool,
}

impl Connection {
    /// Uses a stream on which nothing was sent yet.
    pub fn new(stream: UnixStream) -> Connection {
        Connection { stream, acknowledged: false }
    }

    /// Sends a message without waiting for a reply.
    pub fn send(&mut self, message: &Message<'_>) -> Result {
        self.send_with(message, VERSION)
    }

    fn send_with(&mut self, message: &Message<'_>, flags: u32) -> Result {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + message.payload.len());
        for word in [message.request, flags, message.payload.len() as u32] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&message.payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !message.descriptors.is_empty()
            && !ancillary.push(SendAncillaryMessage::ScmRights(&message.descriptors))
        {
            return Err("a message can carry at most 8 descriptors".into());
        }
        let sent = sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        if sent != bytes.len() {
            return Err("the message was sent in part only".into());
        }
        Ok(())
    }

    /// Sends a message that changes the state of the server. If REPLY_ACK was negotiated, waits for its
    /// acknowledgement. Fails if the server rejects the message.
    pub fn set(&mut self, message: Message<'_>) -> Result {
        if !self.acknowledged {
            return self.send(&message);
        }
        self.send_with(&message, VERSION | NEED_REPLY)?;
        match self.reply_u64(message.request)? {
            0 => Ok(()),
            code => Err(format!("the server rejects request {} ({code})", message.request).into()),
        }
    }

    /// Sends a request. Returns the payload of the reply. Fails if the reply is missing or belongs to another
    /// request.
    pub fn ask(&mut self, message: &Message<'_>) -> Result<Vec<u8>> {
        self.send(message)?;
        self.reply(message.request)
    }

    /// Sends a request whose reply is a number.
    pub fn ask_u64(&mut self, request: u32) -> Result<u64> {
        self.send(&Message::new(request))?;
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
        self.stream.set_read_timeout(Some(ANSWER_WAIT))?;
        let none = |e| format!("no reply to request {request}: {e}");
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).map_err(none)?;
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (to, flags, size) = (word(0), word(4), word(8) as usize);
        if to != request || flags & (VERSION_MASK | REPLY) != VERSION | REPLY || size > REPLY_BYTES_MAX {
            return Err(format!(
                "the reply to request {request} is for request {to}, with flags {flags:#x} and {size} bytes"
            )
            .into());
        }
        let mut payload = vec![0; size];
        self.stream.read_exact(&mut payload).map_err(none)?;
        Ok(payload)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
