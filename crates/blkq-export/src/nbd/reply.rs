//! Writes replies, except the data of reads, which is sent directly from the I/O buffers.

use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::U32;

use super::contexts::{ContextStatus, StatusExtent};
use super::proto::*;

/// Maximum number of extents in a reply for one metadata context. The specification allows up to 2^20.
pub const EXTENTS_MAX: usize = 4096;

/// The format of replies, as negotiated in the handshake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyStyle {
    /// A single header; the data of a read follows it.
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
        let payload = ErrorPayload { error: (error as u32).into(), message_length: 0.into() };
        self.chunk(to, reply_type::ERROR, size_of_val(&payload), true, output);
        output.extend_from_slice(payload.as_bytes());
    }

    /// Appends the header of a read of at most [`PAYLOAD_MAX_BYTES`]. The data must follow directly.
    pub fn data(self, to: ReplyTo, length: u32, output: &mut Vec<u8>) {
        if self == ReplyStyle::Simple {
            return simple(to, 0, output);
        }
        // The data has been read, so no error can follow and this chunk is the last one.
        self.part(to, to.offset, length, true, output);
    }

    /// Appends the header of a part of a read: `length` bytes at `offset` of the device, directly followed by
    /// the data. `last`: this is the last chunk. Panics if the style is simple, which has one part.
    pub fn part(self, to: ReplyTo, offset: u64, length: u32, last: bool, output: &mut Vec<u8>) {
        assert!(self != ReplyStyle::Simple, "parts need structured replies");
        self.chunk(to, reply_type::OFFSET_DATA, size_of::<u64>() + length as usize, last, output);
        output.extend_from_slice(&offset.to_be_bytes());
    }

    /// Appends the reply to a block status request: a chunk with at most [`EXTENTS_MAX`] extents for each of
    /// `contexts`, which must not be empty. An extent too long for a structured reply is shortened and is the
    /// last one; the client then asks for the rest. Panics if the style is simple.
    pub fn block_status(self, to: ReplyTo, contexts: &[ContextStatus], output: &mut Vec<u8>) {
        for (number, context) in contexts.iter().enumerate() {
            self.context_status(to, context, number + 1 == contexts.len(), output);
        }
    }

    fn context_status(self, to: ReplyTo, context: &ContextStatus, last: bool, output: &mut Vec<u8>) {
        /// Maximum length of an extent in a structured reply, in bytes: a multiple of all block sizes.
        const LENGTH_MAX: u64 = (1 << 32) - (1 << 16);
        assert!(self != ReplyStyle::Simple, "block status needs structured replies");
        let extended = self == ReplyStyle::Extended;
        let mut extents = &context.extents[..context.extents.len().min(EXTENTS_MAX)];
        let long = extents.iter().position(|extent| extent.length > LENGTH_MAX);
        if let Some(long) = long.filter(|_| !extended) {
            extents = &extents[..=long];
        }
        let (kind, length) = match extended {
            true => (reply_type::BLOCK_STATUS_EXT, 8 + size_of::<BlockStatusExtentExt>() * extents.len()),
            false => (reply_type::BLOCK_STATUS, 4 + size_of::<BlockStatusExtent>() * extents.len()),
        };
        self.chunk(to, kind, length, last, output);
        output.extend_from_slice(U32::new(context.id).as_bytes());
        if extended {
            output.extend_from_slice(U32::new(extents.len() as u32).as_bytes());
        }
        for StatusExtent { length, flags } in extents {
            if extended {
                let flags = u64::from(*flags).into();
                output.extend_from_slice(BlockStatusExtentExt { length: (*length).into(), flags }.as_bytes());
            } else {
                let length = (*length.min(&LENGTH_MAX) as u32).into();
                output.extend_from_slice(BlockStatusExtent { length, flags: (*flags).into() }.as_bytes());
            }
        }
    }

    fn chunk(self, to: ReplyTo, kind: u16, length: usize, last: bool, output: &mut Vec<u8>) {
        let flags = if last { ReplyFlags::DONE } else { ReplyFlags::empty() };
        let flags = flags.bits().into();
        if self == ReplyStyle::Extended {
            let head = ExtendedReply {
                magic: EXTENDED_REPLY_MAGIC.into(),
                flags,
                kind: kind.into(),
                cookie: to.cookie.into(),
                offset: to.offset.into(),
                length: (length as u64).into(),
            };
            return output.extend_from_slice(head.as_bytes());
        }
        let head = StructuredReply {
            magic: STRUCTURED_REPLY_MAGIC.into(),
            flags,
            kind: kind.into(),
            cookie: to.cookie.into(),
            length: (length as u32).into(),
        };
        output.extend_from_slice(head.as_bytes());
    }
}

fn simple(to: ReplyTo, error: u32, output: &mut Vec<u8>) {
    let reply =
        SimpleReply { magic: SIMPLE_REPLY_MAGIC.into(), error: error.into(), cookie: to.cookie.into() };
    output.extend_from_slice(reply.as_bytes());
}
