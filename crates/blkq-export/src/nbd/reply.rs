//! Replies: everything but the content of a read, which is sent from where it lies.

use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::U32;

use super::contexts::ContextStatus;
use super::proto::*;

/// Most extents of one context in a reply; the specification's bound is 2^20.
pub const EXTENTS_MAX: usize = 4096;

/// The format of replies, as negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplyStyle {
    /// One header; the content of a read follows.
    Simple,
    /// Typed chunks.
    Structured,
    /// The same with 64-bit headers.
    Extended,
}

/// The fields of a request that its reply repeats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReplyTo {
    /// The client's cookie.
    pub cookie: u64,
    /// The offset in bytes.
    pub offset: u64,
}

impl ReplyStyle {
    /// Appends the reply to a request that was done and has no content.
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

    /// Appends what comes before the content of a read of `length` bytes, at most
    /// [`PAYLOAD_MAX_BYTES`]. The content must follow.
    pub fn data(self, to: ReplyTo, length: u32, output: &mut Vec<u8>) {
        if self == ReplyStyle::Simple {
            return simple(to, 0, output);
        }
        // The content is there already: nothing can fail any more, so this chunk is the last.
        self.part(to, to.offset, length, true, output);
    }

    /// Appends what comes before the content of a part of a read: `length` bytes from byte `offset` of
    /// the device on. The content must follow. `last`: no other chunk does.
    ///
    /// # Panics
    /// If the style is simple, which knows no parts.
    pub fn part(self, to: ReplyTo, offset: u64, length: u32, last: bool, output: &mut Vec<u8>) {
        assert!(self != ReplyStyle::Simple, "parts need structured replies");
        self.chunk(to, reply_type::OFFSET_DATA, size_of::<u64>() + length as usize, last, output);
        output.extend_from_slice(&offset.to_be_bytes());
    }

    /// Appends the reply to a block status request: a chunk for each context that was chosen, at least one.
    /// Extents beyond [`EXTENTS_MAX`] are left out, as is what comes after an extent too long for a 32-bit reply.
    ///
    /// # Panics
    /// If the style is simple, in which block status cannot have been negotiated.
    pub fn block_status(self, to: ReplyTo, contexts: &[ContextStatus], output: &mut Vec<u8>) {
        for (number, context) in contexts.iter().enumerate() {
            self.context_status(to, context, number + 1 == contexts.len(), output);
        }
    }

    fn context_status(self, to: ReplyTo, context: &ContextStatus, last: bool, output: &mut Vec<u8>) {
        /// Longest extent of a 32-bit reply: a multiple of every block size.
        const LENGTH_MAX: u64 = (1 << 32) - (1 << 16);
        let mut extents = &context.extents[..context.extents.len().min(EXTENTS_MAX)];
        let id = U32::new(context.id);
        match self {
            ReplyStyle::Simple => panic!("block status needs structured replies"),
            ReplyStyle::Structured => {
                if let Some(long) = extents.iter().position(|extent| extent.length > LENGTH_MAX) {
                    extents = &extents[..=long];
                }
                let length = 4 + extents.len() * size_of::<BlockStatusExtent>();
                self.chunk(to, reply_type::BLOCK_STATUS, length, last, output);
                output.extend_from_slice(id.as_bytes());
                for extent in extents {
                    let length = extent.length.min(LENGTH_MAX) as u32;
                    let descriptor = BlockStatusExtent { length: length.into(), flags: extent.flags.into() };
                    output.extend_from_slice(descriptor.as_bytes());
                }
            }
            ReplyStyle::Extended => {
                let count = U32::new(extents.len() as u32);
                let length = 8 + extents.len() * size_of::<BlockStatusExtentExt>();
                self.chunk(to, reply_type::BLOCK_STATUS_EXT, length, last, output);
                output.extend_from_slice(id.as_bytes());
                output.extend_from_slice(count.as_bytes());
                for extent in extents {
                    let flags = u64::from(extent.flags).into();
                    let descriptor = BlockStatusExtentExt { length: extent.length.into(), flags };
                    output.extend_from_slice(descriptor.as_bytes());
                }
            }
        }
    }

    /// Appends the head of a chunk of a reply, the `last` one or not.
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
