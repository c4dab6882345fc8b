//! Decides how a request is carried out, on a block layer that accepts whole logical blocks only.

use std::ops::Range;

use blkq::{Bio, BioFlags, Data, Operation, QueueLimits, Sector};

use crate::buffers::BufferPool;

use super::proto::{Command, CommandFlags, NbdError};
use super::transmission::Request;

/// Maximum number of bytes that one cache request reads.
const CACHE_MAX_BYTES: u64 = 4 << 20;

/// The smallest range of whole blocks that contains `range`. `block` is the block size in bytes, a power of two.
pub(super) fn blocks_around(range: &Range<u64>, block: u64) -> Range<u64> {
    range.start & !(block - 1)..range.end.next_multiple_of(block)
}

/// The largest range of whole blocks inside `range`. It may be empty.
pub(super) fn blocks_within(range: &Range<u64>, block: u64) -> Range<u64> {
    let start = range.start.next_multiple_of(block);
    start..start.max(range.end & !(block - 1))
}

/// The offsets of the first and the last block of `range`, if it does not cover them completely. If both are the same
/// block, it is returned once.
pub(super) fn edges(range: &Range<u64>, block: u64) -> [Option<u64>; 2] {
    let around = blocks_around(range, block);
    let (head, tail) = (around.start, around.end - block);
    let in_tail = range.end < around.end && (tail > head || range.start == head);
    [(range.start > head).then_some(head), in_tail.then_some(tail)]
}

pub(super) enum Plan {
    /// Reply immediately with this result.
    Answer(Result<(), NbdError>),
    /// Read these blocks, or receive the payload of a write into a buffer for these blocks.
    Transfer(Range<u64>),
    /// Submit this operation, which has no data, on this range. Only write zeroes may begin or end within a block.
    Submit(Operation, Range<u64>),
    /// Query the extents of the range.
    Extents,
}

/// Decides how to carry out `request` on a device with these limits.
pub(super) fn plan(request: &Request, limits: &QueueLimits) -> Plan {
    let (range, block) = (request.range(), u64::from(limits.logical_block_bytes));
    let is_whole = (range.start | range.end) & (block - 1) == 0;
    // The device shrank since the client connected. The block layer cannot detect this if the new end is in
    // the same block.
    if !is_whole && range.end > limits.size_bytes() {
        let writes = matches!(request.command, Command::Write | Command::WriteZeroes);
        return Plan::Answer(Err(if writes { NbdError::NoSpace } else { NbdError::Invalid }));
    }
    match request.command {
        Command::Cache if !limits.page_cache => Plan::Answer(Ok(())),
        Command::Read | Command::Write | Command::Cache if is_whole => Plan::Transfer(transferred(request)),
        Command::Read | Command::Write | Command::Cache => {
            Plan::Transfer(blocks_around(&transferred(request), block))
        }
        Command::Flush => Plan::Submit(Operation::Flush, 0..0),
        // The blocks at the ends would have to be read and written, which is not fast.
        Command::WriteZeroes if !is_whole && request.flags.contains(CommandFlags::FAST_ZERO) => {
            Plan::Answer(Err(NbdError::NotSupported))
        }
        Command::WriteZeroes => Plan::Submit(Operation::WriteZeroes, range),
        Command::Trim => match blocks_within(&range, block) {
            blocks if blocks.is_empty() => Plan::Answer(Ok(())),
            blocks => Plan::Submit(Operation::Discard, blocks),
        },
        Command::BlockStatus => Plan::Extents,
        // The parser reports `NBD_CMD_DISC` as a step of its own.
        Command::Disconnect => Plan::Answer(Err(NbdError::Invalid)),
    }
}

/// The part of the range that is transferred: a cache request reads only the beginning.
fn transferred(request: &Request) -> Range<u64> {
    let cached = request.command == Command::Cache;
    let length = if cached { request.length.min(CACHE_MAX_BYTES) } else { request.length };
    request.offset..request.offset + length
}

/// The bio for whole `blocks`.
pub(super) fn bio(operation: Operation, flags: BioFlags, blocks: &Range<u64>, data: Data) -> Bio {
    // A logical block is a multiple of 512 bytes.
    let (sector, sectors) = (Sector(blocks.start >> 9), (blocks.end - blocks.start) >> 9);
    Bio { operation, flags, sector, sectors, data, user_data: 0 }
}

pub(super) fn bio_flags(request: &Request, operation: Operation) -> BioFlags {
    let mut flags = BioFlags::empty();
    // Clients may set FUA on each command, but it only affects commands that write.
    flags.set(BioFlags::FUA, request.flags.contains(CommandFlags::FUA) && operation.is_write());
    flags.set(BioFlags::NO_UNMAP, request.flags.contains(CommandFlags::NO_HOLE));
    flags.set(BioFlags::NO_FALLBACK, request.flags.contains(CommandFlags::FAST_ZERO));
    flags
}

/// Size in bytes of the data buffers that a request needs, on a device with blocks of `block` bytes.
pub(super) fn buffer_bytes(request: &Request, block: u64) -> usize {
    let part = transferred(request);
    let blocks = blocks_around(&part, block);
    let length = (blocks.end - blocks.start) as u32;
    let edges = || edges(&part, block).iter().flatten().count() * BufferPool::size(block as u32);
    match request.command {
        Command::Read | Command::Cache => BufferPool::size(length),
        Command::Write => BufferPool::size(length) + edges(),
        Command::WriteZeroes => edges(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_around_and_within_a_range() {
        let edges = |range: Range<u64>| edges(&range, 512);
        assert_eq!(blocks_around(&(511..513), 512), 0..1024);
        assert_eq!(blocks_within(&(1..1535), 512), 512..1024);
        assert!(blocks_within(&(1..511), 512).is_empty());
        assert_eq!(edges(512..1024), [None, None]);
        assert_eq!(edges(513..1024), [Some(512), None]);
        assert_eq!(edges(512..1023), [None, Some(512)]);
        assert_eq!(edges(513..1023), [Some(512), None], "one block is read once");
        assert_eq!(edges(513..1025), [Some(512), Some(1024)]);
        assert_eq!(edges(0..1), [None, Some(0)]);
    }
}
