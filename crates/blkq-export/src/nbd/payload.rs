//! The payload of a write, on its way into a buffer.

use std::ops::Range;

use blkq::IoBuffer;

use super::transmission::Request;

/// A write whose payload is on its way.
pub(super) struct Payload {
    request: Request,
    buffer: IoBuffer,
    /// Its part of the buffer that has not arrived.
    missing: Range<usize>,
}

impl Payload {
    /// Of `request`, into `buffer` from its byte `from` on.
    pub fn new(request: Request, buffer: IoBuffer, from: usize) -> Payload {
        Payload { missing: from..from + request.length as usize, request, buffer }
    }

    /// The place for the rest.
    pub fn missing(&mut self) -> &mut [u8] {
        &mut self.buffer[self.missing.clone()]
    }

    /// `bytes` more have arrived where they belong.
    pub fn took(&mut self, bytes: usize) {
        self.missing.start += bytes;
    }

    /// Length of all of it in bytes.
    pub fn length(&self) -> u64 {
        self.request.length
    }

    /// The write and its buffer.
    pub fn into_parts(self) -> (Request, IoBuffer) {
        (self.request, self.buffer)
    }
}
