//! Replies: writes their headers, and gathers the replies of one vectored send. The data of reads is sent directly
//! from the I/O buffers.

use std::ops::Range;

use blkq::IoBuffer;
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::U16;

use crate::buffers::BufferPool;

use super::contexts::{ContextStatus, StatusExtent};
use super::proto::*;

/// Capacity in bytes that the header buffer keeps after a send.
const HEADERS_KEPT_BYTES: usize = 64 << 10;
/// Maximum number of iovecs in one write (`UIO_MAXIOV` of the kernel).
const IOVECS_MAX: usize = 1024;
/// Maximum number of extents in a reply for one metadata context. The specification allows up to 2^20.
pub const EXTENTS_MAX: usize = 4096;

/// The format of replies, as negotiated in the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplyStyle {
    /// A single header; the data of a read follows it.
    #[default]
    Simple,
    /// One or more chunks, each with a type.
    Structured,
    /// Chunks with 64-bit headers; requests have 64-bit headers as well.
    Extended,
}

/// The fields of a request that its reply repeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplyTo {
    /// Opaque value of the client that identifies the request.
    pub cookie: u64,
    /// Offset of the request in bytes, which only extended replies repeat.
    pub offset: u64,
}

impl ReplyStyle {
    /// Appends the reply to a successful request that returns no data.
    pub fn done(self, to: ReplyTo, output: &mut Vec<u8>) {
        match self {
            ReplyStyle::Simple => simple(to, 0, output),
            _ => self.chunk(to, reply_type::NONE, 0, true, output),
        }
    }

    /// Appends the reply to a request that failed.
    pub fn error(self, to: ReplyTo, error: NbdError, output: &mut Vec<u8>) {
        if self == ReplyStyle::Simple {
            return simple(to, error as u32, output);
        }
        // The number of the error, and a message of length 0.
        self.chunk(to, reply_type::ERROR, size_of::<u32>() + size_of::<u16>(), true, output);
        append(output, &[&(error as u32).to_be_bytes(), &[0; 2]]);
    }

    /// Appends the header of `length` bytes of data at `offset` of the device, which must follow directly: a read of
    /// at most [`PAYLOAD_MAX_BYTES`], or a part of one. `last`: this ends the reply. Panics if the style is simple and
    /// this is not the whole read.
    pub fn data(self, to: ReplyTo, offset: u64, length: u32, last: bool, output: &mut Vec<u8>) {
        if self == ReplyStyle::Simple {
            assert!(last && offset == to.offset, "parts need structured replies");
            return simple(to, 0, output);
        }
        self.chunk(to, reply_type::OFFSET_DATA, size_of::<u64>() + length as usize, last, output);
        output.extend_from_slice(&offset.to_be_bytes());
    }

    /// Appends the reply to a block status request: a chunk with at most [`EXTENTS_MAX`] extents for each of
    /// `contexts`, which must not be empty. An extent too long for a structured reply is shortened and is the
    /// last one; the client then asks for the rest. Panics if the style is simple.
    pub fn block_status(self, to: ReplyTo, contexts: &[ContextStatus], output: &mut Vec<u8>) {
        /// Maximum length of an extent in a structured reply, in bytes: a multiple of all block sizes.
        const LENGTH_MAX: u64 = (1 << 32) - (1 << 16);
        assert!(self != ReplyStyle::Simple, "block status needs structured replies");
        let extended = self == ReplyStyle::Extended;
        for (number, context) in (1..).zip(contexts) {
            let mut extents = &context.extents[..context.extents.len().min(EXTENTS_MAX)];
            let long = extents.iter().position(|extent| extent.length > LENGTH_MAX);
            if let Some(long) = long.filter(|_| !extended) {
                extents = &extents[..=long];
            }
            let (kind, length) = match extended {
                true => (reply_type::BLOCK_STATUS_EXT, 8 + 16 * extents.len()),
                false => (reply_type::BLOCK_STATUS, 4 + 8 * extents.len()),
            };
            self.chunk(to, kind, length, number == contexts.len(), output);
            output.extend_from_slice(&context.id.to_be_bytes());
            if extended {
                output.extend_from_slice(&(extents.len() as u32).to_be_bytes());
            }
            for &StatusExtent { length, flags } in extents {
                if extended {
                    append(output, &[&length.to_be_bytes(), &u64::from(flags).to_be_bytes()]);
                } else {
                    let length = length.min(LENGTH_MAX) as u32;
                    append(output, &[&length.to_be_bytes(), &flags.to_be_bytes()]);
                }
            }
        }
    }

    fn chunk(self, to: ReplyTo, kind: u16, length: usize, last: bool, output: &mut Vec<u8>) {
        let flags = U16::new(if last { REPLY_FLAG_DONE } else { 0 });
        let (kind, cookie) = (kind.into(), to.cookie.into());
        if self == ReplyStyle::Extended {
            let (magic, offset) = (EXTENDED_REPLY_MAGIC.into(), to.offset.into());
            let head = ExtendedReply { magic, flags, kind, cookie, offset, length: (length as u64).into() };
            return output.extend_from_slice(head.as_bytes());
        }
        let (magic, length) = (STRUCTURED_REPLY_MAGIC.into(), (length as u32).into());
        output.extend_from_slice(StructuredReply { magic, flags, kind, cookie, length }.as_bytes());
    }
}

fn simple(to: ReplyTo, error: u32, output: &mut Vec<u8>) {
    let reply =
        SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: to.cookie.into() };
    output.extend_from_slice(reply.as_bytes());
}

struct Content {
    /// End of the header bytes that are sent before this data.
    headers_end: usize,
    buffer: IoBuffer,
    part: Range<usize>,
}

/// Replies that are gathered, and then sent together.
#[derive(Default)]
pub struct Outgoing {
    /// All bytes but the data of reads, in order.
    headers: Vec<u8>,
    contents: Vec<Content>,
    /// The number of complete replies.
    replies: usize,
    /// Bytes that the connection has reserved for the extents in `headers`.
    extents_bytes: usize,
    iovecs: Vec<libc::iovec>,
    /// The number of iovecs that have been sent completely.
    sent: usize,
}

impl Outgoing {
    /// Whether nothing was gathered since the last recycling.
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// The number of replies gathered since the last recycling.
    pub fn replies(&self) -> usize {
        self.replies
    }

    /// Lets `write` append bytes that are not a complete reply to a request.
    pub fn append<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        write(&mut self.headers)
    }

    /// Lets `write` append a reply that has no data.
    pub fn reply(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.append(write);
        self.replies += 1;
    }

    /// Appends data, which is `part` of `buffer`, in bytes, to its header. `last`: the data ends the reply.
    pub fn append_data(&mut self, buffer: IoBuffer, part: Range<usize>, last: bool) {
        self.contents.push(Content { headers_end: self.headers.len(), buffer, part });
        self.replies += usize::from(last);
    }

    /// Counts `bytes`, which the connection has reserved for extents, as in use until this is recycled.
    pub fn hold_extents(&mut self, bytes: usize) {
        self.extents_bytes += bytes;
    }

    /// Returns the number of bytes to send. Nothing may be appended before this is recycled.
    pub fn prepare(&mut self) -> usize {
        debug_assert!(self.iovecs.is_empty() && !self.is_empty());
        let mut start = 0;
        for content in &self.contents {
            push_iovec(&mut self.iovecs, &self.headers[start..content.headers_end]);
            push_iovec(&mut self.iovecs, &content.buffer[content.part.clone()]);
            start = content.headers_end;
        }
        push_iovec(&mut self.iovecs, &self.headers[start..]);
        self.iovecs.iter().map(|iovec| iovec.iov_len).sum()
    }

    /// The iovecs to send next: the unsent ones, limited to the number that the kernel accepts.
    pub fn unsent(&self) -> &[libc::iovec] {
        let rest = &self.iovecs[self.sent..];
        &rest[..rest.len().min(IOVECS_MAX)]
    }

    /// Notes that `bytes` more were sent. Returns whether everything has been sent.
    pub fn advance(&mut self, mut bytes: usize) -> bool {
        while let Some(iovec) = self.iovecs.get_mut(self.sent) {
            if bytes < iovec.iov_len {
                iovec.iov_len -= bytes;
                iovec.iov_base = iovec.iov_base.wrapping_byte_add(bytes);
                return false;
            }
            bytes -= iovec.iov_len;
            self.sent += 1;
        }
        true
    }

    /// The next bytes to send, at most `bytes_max`. Empty if everything has been sent.
    pub fn next(&self, bytes_max: usize) -> &[u8] {
        let Some(iovec) = self.iovecs.get(self.sent) else { return &[] };
        // SAFETY: `prepare` made the iovec from the headers or the data. Neither changes before `recycle`,
        // which clears the iovecs.
        unsafe { std::slice::from_raw_parts(iovec.iov_base.cast(), iovec.iov_len.min(bytes_max)) }
    }

    /// Returns the buffers to `pool`, and the number of bytes that the connection no longer uses.
    pub(super) fn recycle(&mut self, pool: &mut BufferPool) -> usize {
        let mut freed = std::mem::take(&mut self.extents_bytes);
        for content in self.contents.drain(..) {
            freed += content.buffer.len();
            pool.put(content.buffer);
        }
        self.headers.clear();
        self.headers.shrink_to(HEADERS_KEPT_BYTES);
        self.iovecs.clear();
        self.sent = 0;
        self.replies = 0;
        freed
    }
}

fn push_iovec(iovecs: &mut Vec<libc::iovec>, bytes: &[u8]) {
    if !bytes.is_empty() {
        iovecs.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
    }
}
