//! How a request that is not whole blocks is carried out, over a block layer that knows only these.

use std::ops::Range;

use blkq::{BioFlags, Operation, QueueLimits};

use crate::buffers::BufferPool;

use super::proto::{Command, CommandFlags, NbdError};
use super::transmission::Request;

/// Most that one cache request reads ahead, in bytes.
pub(super) const CACHE_MAX_BYTES: u64 = 4 << 20;

/// Whole blocks of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Blocks {
    /// In bytes of the device.
    pub range: Range<u64>,
    block: u64,
}

impl Blocks {
    /// The blocks of `block` bytes, a power of two, that have bytes of `range`.
    pub fn around(range: &Range<u64>, block: u64) -> Blocks {
        Blocks { range: range.start & !(block - 1)..range.end.next_multiple_of(block), block }
    }

    /// The blocks that lie in `range` as a whole; maybe none.
    pub fn within(range: &Range<u64>, block: u64) -> Blocks {
        let (start, end) = (range.start.next_multiple_of(block), range.end & !(block - 1));
        Blocks { range: start..end.max(start), block }
    }

    /// In bytes.
    pub fn length(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Those at the edges that `part`, of which these are the blocks around, does not fill.
    pub fn edges(&self, part: &Range<u64>) -> [Option<u64>; 2] {
        let head = self.range.start;
        let tail = self.range.end - self.block;
        let in_tail = part.end < self.range.end && (tail > head || part.start == head);
        [(part.start > head).then_some(head), in_tail.then_some(tail)]
    }
}

/// How a request that is not whole blocks is carried out.
pub(super) enum Plan {
    /// It is answered with that at once.
    Answer(Result<(), NbdError>),
    /// These blocks are read, or its payload is received into its place in a buffer for them.
    Transfer(Range<u64>),
    /// It is ordered: zeroes to be written.
    Order,
    /// These blocks are discarded.
    Discard(Range<u64>),
    /// Its extents are found out.
    Extents,
}

/// How to carry out `request`, which is not whole blocks, on a device with these limits.
#[cold]
pub(super) fn plan(request: &Request, limits: &QueueLimits) -> Plan {
    let (range, block) = (request.range(), u64::from(limits.logical_block_bytes));
    let writes = matches!(request.command, Command::Write | Command::WriteZeroes);
    // The device shrank since its client connected, which nobody below sees within a block.
    if range.end > limits.size_bytes() {
        return Plan::Answer(Err(if writes { NbdError::NoSpace } else { NbdError::Invalid }));
    }
    match request.command {
        Command::Read | Command::Write => Plan::Transfer(Blocks::around(&range, block).range),
        Command::Cache if !limits.page_cache => Plan::Answer(Ok(())),
        Command::Cache => {
            let end = range.end.min(range.start + CACHE_MAX_BYTES);
            Plan::Transfer(Blocks::around(&(range.start..end), block).range)
        }
        // Blocks at the edges are written, which is not what a client calls fast.
        Command::WriteZeroes if request.flags.contains(CommandFlags::FAST_ZERO) => {
            Plan::Answer(Err(NbdError::NotSupported))
        }
        Command::WriteZeroes => Plan::Order,
        Command::Trim => match Blocks::within(&range, block) {
            blocks if blocks.length() == 0 => Plan::Answer(Ok(())),
            blocks => Plan::Discard(blocks.range),
        },
        Command::BlockStatus => Plan::Extents,
        // They have neither place nor length.
        Command::Flush | Command::Disconnect => Plan::Answer(Err(NbdError::Invalid)),
    }
}

/// The flags of a bio for `request`.
pub(super) fn bio_flags(request: &Request, operation: Operation) -> BioFlags {
    let mut flags = BioFlags::empty();
    // FUA is allowed with every command and means something for those that write.
    flags.set(BioFlags::FUA, request.flags.contains(CommandFlags::FUA) && operation.is_write());
    flags.set(BioFlags::NO_UNMAP, request.flags.contains(CommandFlags::NO_HOLE));
    flags.set(BioFlags::NO_FALLBACK, request.flags.contains(CommandFlags::FAST_ZERO));
    flags
}

/// Size of the buffers that a request needs for data, in bytes.
pub(super) fn buffer_bytes(request: &Request, block: u64) -> usize {
    let cached = request.command == Command::Cache;
    let length = if cached { request.length.min(CACHE_MAX_BYTES) } else { request.length };
    let part = request.offset..request.offset + length;
    let blocks = Blocks::around(&part, block);
    let edges = || blocks.edges(&part).iter().flatten().count() * BufferPool::size(block as u32);
    match request.command {
        Command::Read | Command::Cache => BufferPool::size(blocks.length() as u32),
        Command::Write => BufferPool::size(blocks.length() as u32) + edges(),
        Command::WriteZeroes => edges(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_edges() {
        let around = |range: Range<u64>| Blocks::around(&range, 512);
        let edges = |range: Range<u64>| around(range.clone()).edges(&range);
        assert_eq!(around(511..513).range, 0..1024);
        assert_eq!(Blocks::within(&(1..1535), 512).range, 512..1024);
        assert_eq!(Blocks::within(&(1..511), 512).length(), 0);
        assert_eq!(edges(512..1024), [None, None]);
        assert_eq!(edges(513..1024), [Some(512), None]);
        assert_eq!(edges(512..1023), [None, Some(512)]);
        assert_eq!(edges(513..1023), [Some(512), None], "one block is read once");
        assert_eq!(edges(513..1025), [Some(512), Some(1024)]);
        assert_eq!(edges(0..1), [None, Some(0)]);
    }
}
