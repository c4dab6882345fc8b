//! The replies that one vectored send takes: headers, and between them content that
//! is sent from where it lies.

use std::ops::Range;

use blkq::IoBuffer;

use crate::buffers::BufferPool;

/// Room for headers that is kept for the next time, in bytes.
const HEADERS_KEPT_BYTES: usize = 64 << 10;
/// Iovecs that the kernel takes at once (`UIO_MAXIOV`).
const IOVECS_MAX: usize = 1024;

struct Content {
    /// Headers up to here go before it.
    headers_end: usize,
    buffer: IoBuffer,
    part: Range<usize>,
}

/// Replies gathered, then sent.
pub struct Outgoing {
    /// Everything but content, in order.
    headers: Vec<u8>,
    contents: Vec<Content>,
    /// Replies in here.
    replies: usize,
    /// Bytes that its connection has for the extents in `headers`.
    extents_bytes: usize,
    iovecs: Vec<libc::iovec>,
    /// Of the iovecs, those that have left.
    sent: usize,
}

impl Outgoing {
    /// Nothing.
    pub fn new() -> Outgoing {
        Outgoing {
            headers: Vec::new(),
            contents: Vec::new(),
            replies: 0,
            extents_bytes: 0,
            iovecs: Vec::new(),
            sent: 0,
        }
    }

    /// Whether nothing was gathered.
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// Replies gathered since it was last recycled.
    pub fn replies(&self) -> usize {
        self.replies
    }

    /// Has `write` append bytes that are no reply to a request.
    pub fn append<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        write(&mut self.headers)
    }

    /// Has `write` append the reply to a request.
    #[inline]
    pub fn reply(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.headers);
        self.replies += 1;
    }

    /// Has `write` append the head of a reply, of which `part` of `buffer`, in its bytes, is the
    /// content.
    #[inline]
    pub fn reply_with(&mut self, buffer: IoBuffer, part: Range<usize>, write: impl FnOnce(&mut Vec<u8>)) {
        self.part_with(buffer, part, write);
        self.replies += 1;
    }

    /// As [`Outgoing::reply_with`], of a reply that this does not complete.
    #[inline]
    pub fn part_with(&mut self, buffer: IoBuffer, part: Range<usize>, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.headers);
        self.contents.push(Content { headers_end: self.headers.len(), buffer, part });
    }

    /// The connection has `bytes` for extents that are in a reply, until this is recycled.
    pub fn hold_extents(&mut self, bytes: usize) {
        self.extents_bytes += bytes;
    }

    /// Lays out everything for sending; nothing may be appended until it has been recycled.
    /// Returns the number of bytes.
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

    /// The bytes that are sent next: as many of those that are left as the kernel takes at once.
    pub fn unsent(&self) -> &[libc::iovec] {
        let rest = &self.iovecs[self.sent..];
        &rest[..rest.len().min(IOVECS_MAX)]
    }

    /// Notes that `bytes` more have left. True if that was all.
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

    /// Hands out the next bytes that are to leave, at most `bytes_max`; empty if all have.
    pub fn next(&self, bytes_max: usize) -> &[u8] {
        let Some(iovec) = self.iovecs.get(self.sent) else { return &[] };
        // SAFETY: since `prepare` made it, the iovec lies in headers or content, which nothing
        // changes before `recycle`, which forgets it.
        unsafe { std::slice::from_raw_parts(iovec.iov_base.cast(), iovec.iov_len.min(bytes_max)) }
    }

    /// Empties it; the buffers go back to `pool`. Returns how many bytes are free with that.
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
