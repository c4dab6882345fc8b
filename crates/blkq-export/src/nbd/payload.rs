//! A write request whose payload is being received.

use std::ops::Range;

use blkq::IoBuffer;

use super::transmission::Request;

pub(super) struct Payload {
    pub request: Request,
    pub buffer: IoBuffer,
    /// The part of the buffer into which the rest of the payload must be received.
    missing: Range<usize>,
}

impl Payload {
    /// Expects the payload of `request`, which goes into `buffer` at byte `from`.
    pub fn new(request: Request, buffer: IoBuffer, from: usize) -> Payload {
        Payload { missing: from..from + request.length as usize, request, buffer }
    }

    pub fn missing(&mut self) -> &mut [u8] {
        &mut self.buffer[self.missing.clone()]
    }

    pub fn took(&mut self, bytes: usize) {
        self.missing.start += bytes;
    }
}
