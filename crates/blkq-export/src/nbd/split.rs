//! Splits large reads into parts. The device reads the later parts while the server sends the first one. Each
//! part is a chunk of a structured reply, and the parts may complete in any order.

use std::collections::VecDeque;

use blkq::Status;

use crate::buffers::BufferPool;
use crate::submissions::Slots;

use super::transmission::Request;

/// Bytes of each part but the last. With 64 KiB, reads were slower than without splitting (docs/bench.md).
pub(super) const PART_BYTES: u64 = 128 << 10;
/// Maximum parts of one client in flight: 4 MiB keep any disk busy, and others need not wait for 32 MiB.
const IN_FLIGHT_MAX: usize = 32;

#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Number of the read in [`SplitReads`].
    read: u64,
    /// Offset of the part on the device, in bytes.
    pub offset: u64,
    /// Length of the part in bytes.
    pub length: u64,
}

struct SplitRead {
    request: Request,
    /// Offset of the next part to submit, in bytes of the device.
    next: u64,
    /// Parts that have not completed.
    left: u32,
    result: Result<(), Status>,
}

/// The split reads of one client.
#[derive(Default)]
pub(super) struct SplitReads {
    reads: Slots<SplitRead>,
    /// Reads with parts that were not submitted yet, in the order of their arrival.
    pub waiting: VecDeque<u64>,
    in_flight: usize,
}

pub(super) fn buffer_bytes(length: u64) -> usize {
    let starts = (0..length).step_by(PART_BYTES as usize);
    starts.map(|start| BufferPool::size((length - start).min(PART_BYTES) as u32)).sum()
}

impl SplitReads {
    /// Adds a read, whose range must not be empty. [`SplitReads::next`] returns its parts.
    pub fn begin(&mut self, request: Request) {
        let left = request.length.div_ceil(PART_BYTES) as u32;
        let read = self.reads.insert(SplitRead { request, next: request.offset, left, result: Ok(()) });
        self.waiting.push_back(read);
    }

    /// Returns the next part to submit; the caller must call [`SplitReads::complete`] for it. Returns `None`
    /// if no part is left or the limit of parts in flight is reached.
    pub fn next(&mut self) -> Option<(Request, Part)> {
        if self.in_flight >= IN_FLIGHT_MAX {
            return None;
        }
        let number = *self.waiting.front()?;
        let read = self.reads.get_mut(number)?;
        let (offset, end) = (read.next, read.request.range().end);
        let length = (end - offset).min(PART_BYTES);
        read.next += length;
        if read.next == end {
            self.waiting.pop_front();
        }
        self.in_flight += 1;
        Some((read.request, Part { read: number, offset, length }))
    }

    /// Returns the result of the read, which is the first error of a part, if this was its last part.
    pub fn complete(&mut self, part: Part, result: Result<(), Status>) -> Option<Result<(), Status>> {
        self.in_flight -= 1;
        let read = self.reads.get_mut(part.read)?;
        read.left -= 1;
        read.result = read.result.and(result);
        if read.left > 0 {
            return None;
        }
        self.reads.take(part.read).map(|read| read.result)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::nbd::proto::{Command, CommandFlags};

    fn read(range: Range<u64>) -> Request {
        let (offset, length) = (range.start, range.end - range.start);
        Request { command: Command::Read, flags: CommandFlags::empty(), cookie: offset, offset, length }
    }

    fn with_range(part: Part) -> (Part, Range<u64>) {
        (part, part.offset..part.offset + part.length)
    }

    fn begin(split: &mut SplitReads, range: Range<u64>) -> Vec<(Part, Range<u64>)> {
        split.begin(read(range));
        std::iter::from_fn(|| split.next()).map(|(_, part)| with_range(part)).collect()
    }

    #[test]
    fn a_split_read_completes_with_the_first_error_of_its_parts() {
        let mut split = SplitReads::default();
        let range = 4096..4096 + 2 * PART_BYTES + 512;
        let first = begin(&mut split, range.clone());
        let ranges: Vec<_> = first.iter().map(|(_, range)| range.end - range.start).collect();
        assert_eq!(ranges, [PART_BYTES, PART_BYTES, 512]);
        assert_eq!((first[0].1.start, first[2].1.end), (range.start, range.end));
        let second = begin(&mut split, range);
        assert_eq!(split.complete(first[2].0, Err(Status::NoSpace)), None);
        assert_eq!(split.complete(second[1].0, Ok(())), None);
        assert_eq!(split.complete(first[0].0, Err(Status::Io)), None);
        assert_eq!(split.complete(first[1].0, Ok(())), Some(Err(Status::NoSpace)));
        assert_eq!(split.complete(second[0].0, Ok(())), None);
        assert_eq!(split.complete(second[2].0, Ok(())), Some(Ok(())));
        let third = begin(&mut split, 0..PART_BYTES + 1);
        assert_eq!(split.complete(third[1].0, Ok(())), None, "no state is left of an earlier read");
        assert_eq!(split.complete(third[0].0, Ok(())), Some(Ok(())));
        assert_eq!((split.reads.len(), split.in_flight), (0, 0));
    }

    #[test]
    fn parts_beyond_the_limit_are_submitted_in_order() {
        let mut split = SplitReads::default();
        let bytes = IN_FLIGHT_MAX as u64 * PART_BYTES;
        let mut begun = VecDeque::from(begin(&mut split, 0..bytes + PART_BYTES));
        assert_eq!(begun.len(), IN_FLIGHT_MAX);
        assert!(begin(&mut split, bytes + PART_BYTES..bytes + 3 * PART_BYTES).is_empty());
        for part in 0..IN_FLIGHT_MAX as u64 + 3 {
            let (completed, range) = begun.pop_front().unwrap();
            assert_eq!(range.start, part * PART_BYTES);
            let last = part == IN_FLIGHT_MAX as u64 || part == IN_FLIGHT_MAX as u64 + 2;
            assert_eq!(split.complete(completed, Ok(())), last.then_some(Ok(())));
            begun.extend(split.next().map(|(_, part)| with_range(part)));
            assert!(split.next().is_none());
        }
        assert_eq!((begun.len(), split.reads.len(), split.in_flight), (0, 0, 0));
    }

    #[test]
    fn buffer_sizes_of_split_reads_are_those_of_their_parts() {
        assert_eq!(buffer_bytes(2 * PART_BYTES), 256 << 10);
        assert_eq!(buffer_bytes(PART_BYTES + 512), (128 << 10) + 4096);
    }
}
