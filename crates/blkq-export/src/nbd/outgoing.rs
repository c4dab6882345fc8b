//! The replies of one vectored send: headers in one buffer, and the data of reads in I/O buffers, not copied.

use std::ops::Range;

use blkq::IoBuffer;

use crate::buffers::BufferPool;

/// Capacity in bytes that the header buffer keeps after a send.
const HEADERS_KEPT_BYTES: usize = 64 << 10;
/// Maximum number of iovecs in one write (`UIO_MAXIOV` of the kernel).
const IOVECS_MAX: usize = 1024;

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

    /// Lets `write` append bytes that are not a reply to a request.
    pub fn append<R>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        write(&mut self.headers)
    }

    /// Lets `write` append a reply that has no data.
    #[inline]
    pub fn reply(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.headers);
        self.replies += 1;
    }

    /// Lets `write` append the header of data, which is `part` of `buffer`, in bytes. `last`: the data ends the reply.
    #[inline]
    pub fn append_data(
        &mut self,
        buffer: IoBuffer,
        part: Range<usize>,
        last: bool,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        write(&mut self.headers);
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
