//! The limits of a device. No request that a driver gets exceeds them: `queue` splits, emulates or rejects
//! the bio instead. Defaults as in block/blk-settings.c.

use crate::bio::{BioFlags, Operation};
use crate::error::{Error, ErrorKind, Status};
use crate::sector::{SECTOR_SHIFT, Sector};

/// Largest number of hardware queues of a disk.
pub const QUEUES_MAX: usize = 64;

/// Limits and capabilities of a device (`struct queue_limits`). Sizes are in bytes.
///
/// A driver sets the fields that it needs and takes the others from [`QueueLimits::default`], which describes
/// a device without special capabilities: `QueueLimits { capacity_bytes, ..Default::default() }`. Then a new
/// field breaks no driver. The struct is not `#[non_exhaustive]`, because that would forbid the literal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Size of the device, padding included. A multiple of the logical block, less than 8 EiB.
    pub capacity_bytes: u64,
    /// Bytes at the end of the last logical block that the backing store does not have. They read as zeroes,
    /// and writes to them are dropped. Less than a logical block.
    pub padding_bytes: u32,
    /// Smallest addressable unit: a power of two from 512 to 65536.
    pub logical_block_bytes: u32,
    /// Unit that the medium writes without reading it first: a power of two, at least the logical block.
    pub physical_block_bytes: u32,
    /// Preferred request size; 0 if the device has none.
    pub io_opt_bytes: u32,
    /// Largest read or write request.
    pub max_request_bytes: u32,
    /// Largest number of memory segments of a request.
    pub max_segments: u16,
    /// Largest memory segment of a request.
    pub max_segment_bytes: u32,
    /// A request must not cross a multiple of this size. 0: no such boundary. The kernel's `chunk_sectors`.
    pub chunk_bytes: u32,
    /// Required alignment of memory addresses and lengths: a power of two, 1 if any alignment will do.
    pub memory_align: u32,
    /// Data may be memory that only operations of the ring can access ([`KernelPages`](crate::KernelPages)).
    pub kernel_pages: bool,
    /// Largest discard. 0: the device does not support discard.
    pub max_discard_bytes: u64,
    /// Discards that are smaller than this, or not aligned to it, may have no effect.
    pub discard_granularity: u32,
    /// Discarded ranges read as zeroes.
    pub discard_zeroes: bool,
    /// Largest write-zeroes that may deallocate. 0: unsupported, and the queue writes zeroes instead.
    pub max_write_zeroes_bytes: u64,
    /// Largest write-zeroes that must keep the blocks allocated (NO_UNMAP). 0: unsupported, and the queue
    /// writes zeroes instead.
    pub max_write_zeroes_no_unmap_bytes: u64,
    /// Completed writes may be lost in a power failure until a flush completes. A driver that turns its write
    /// cache off while it is in use, or that replaces a driver with a write cache, must first make durable
    /// what has completed before.
    pub write_cache: bool,
    /// The driver makes writes with FUA durable itself. Otherwise the queue sends a flush after them.
    pub fua: bool,
    /// All writes, discards and write-zeroes are rejected.
    pub read_only: bool,
    /// Seeks take time, so the order of the scheduler matters.
    pub rotational: bool,
    /// Reads go through a page cache, so read-ahead makes later reads faster.
    pub page_cache: bool,
}

impl Default for QueueLimits {
    fn default() -> QueueLimits {
        QueueLimits {
            capacity_bytes: 0,
            padding_bytes: 0,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            io_opt_bytes: 0,
            max_request_bytes: 2560 << 9,
            max_segments: 128,
            max_segment_bytes: 1 << 31,
            chunk_bytes: 0,
            memory_align: 1,
            kernel_pages: false,
            max_discard_bytes: 0,
            discard_granularity: 0,
            discard_zeroes: false,
            max_write_zeroes_bytes: 0,
            max_write_zeroes_no_unmap_bytes: 0,
            write_cache: false,
            fua: false,
            read_only: false,
            rotational: false,
            page_cache: false,
        }
    }
}

impl QueueLimits {
    /// Checks the limits for contradictions. Fails with [`ErrorKind::Invalid`] and the violated rule.
    pub fn validate(&self) -> Result<(), Error> {
        let block = self.logical_block_bytes;
        let rule = if !block.is_power_of_two() || !(512..=65536).contains(&block) {
            "the logical block must be a power of two from 512 to 65536"
        } else if !self.physical_block_bytes.is_power_of_two() || self.physical_block_bytes < block {
            "the physical block must be a power of two, at least the logical block"
        } else if !self.capacity_bytes.is_multiple_of(u64::from(block))
            || self.capacity_bytes > i64::MAX as u64
        {
            "the capacity must be a multiple of the logical block, below 8 EiB"
        } else if self.padding_bytes >= block || u64::from(self.padding_bytes) > self.capacity_bytes {
            "the padding must be smaller than a logical block, and not larger than the device"
        } else if self.max_request_bytes < block || self.max_segment_bytes < block || self.max_segments == 0 {
            "a request must have room for one logical block"
        } else if !self.chunk_bytes.is_multiple_of(block) {
            "the chunk must be a multiple of the logical block"
        } else if !self.memory_align.is_power_of_two() || self.memory_align > 4096 {
            "the memory alignment must be a power of two, at most 4096"
        } else if self.memory_align > block {
            "the memory alignment must not exceed the logical block"
        } else if self.max_discard_bytes != 0 && self.discard_granularity == 0 {
            "a device that supports discard must have a discard granularity"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Invalid, format!("invalid queue limits: {rule}")))
    }

    /// Size of the device without the padding: the bytes that the backing store has.
    pub fn size_bytes(&self) -> u64 {
        self.capacity_bytes - u64::from(self.padding_bytes)
    }

    /// Size of the logical blocks that the backing store has completely.
    pub fn whole_bytes(&self) -> u64 {
        self.size_bytes() & !(u64::from(self.logical_block_bytes) - 1)
    }

    /// Largest request of `operation` in bytes that may start at byte `offset`, before segments are counted.
    /// 0 if the driver does not support the operation.
    pub fn max_bytes_at(&self, operation: Operation, no_unmap: bool, offset: u64) -> u64 {
        let block = u64::from(self.logical_block_bytes);
        let limit = match operation {
            Operation::Read | Operation::Write => u64::from(self.max_request_bytes),
            Operation::Discard => self.max_discard_bytes,
            Operation::WriteZeroes => self.write_zeroes_bytes(no_unmap),
            Operation::Flush => return 0,
        };
        let limit = limit & !(block - 1);
        if self.chunk_bytes == 0 {
            return limit;
        }
        let chunk = u64::from(self.chunk_bytes);
        limit.min(chunk - offset % chunk)
    }

    /// Largest write-zeroes. 0 if the driver does not support the operation.
    pub(crate) fn write_zeroes_bytes(&self, no_unmap: bool) -> u64 {
        if no_unmap { self.max_write_zeroes_no_unmap_bytes } else { self.max_write_zeroes_bytes }
    }

    pub(crate) fn allow(&self, operation: Operation, start: Sector, sectors: u64, segments: u32) -> bool {
        segments <= u32::from(self.max_segments)
            && sectors << SECTOR_SHIFT <= self.max_bytes_at(operation, false, start.bytes())
    }

    /// Whether the driver has declared support for all `flags` of a request of `operation`.
    pub(crate) fn declares(&self, operation: Operation, flags: BioFlags) -> bool {
        let fua = self.write_cache && self.fua && operation == Operation::Write;
        let no_unmap = operation == Operation::WriteZeroes;
        (fua || !flags.contains(BioFlags::FUA))
            && (no_unmap || !flags.contains(BioFlags::NO_UNMAP))
            && !flags.contains(BioFlags::PREFLUSH)
    }

    /// Checks that `offset` and `length` (bytes) are whole blocks of the device, else [`Status::Invalid`].
    pub fn check_range(&self, offset: u64, length: u64) -> Result<(), Status> {
        let is_whole = (offset | length) & (u64::from(self.logical_block_bytes) - 1) == 0;
        let is_within = offset.checked_add(length).is_some_and(|end| end <= self.capacity_bytes);
        if is_whole && is_within { Ok(()) } else { Err(Status::Invalid) }
    }
}

/// Flags that forbid a bio or request to be merged.
pub(crate) const ALONE: BioFlags =
    BioFlags::FUA.union(BioFlags::PREFLUSH).union(BioFlags::NO_MERGE).union(BioFlags::NO_UNMAP);

pub(crate) fn is_mergeable(operation: Operation, flags: BioFlags) -> bool {
    operation.has_data() && !flags.intersects(ALONE)
}

/// The side of a request on which a bio continues it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MergeSide {
    /// The bio starts at the end of the request.
    Back,
    /// The request starts where the bio stops.
    Front,
}

impl MergeSide {
    /// The side of `start..end` that the range `sector..sector + sectors` touches, if it touches one.
    pub(crate) fn of(start: Sector, end: Sector, sector: Sector, sectors: u64) -> Option<MergeSide> {
        if sector == end {
            Some(MergeSide::Back)
        } else if sector.0.checked_add(sectors) == Some(start.0) {
            Some(MergeSide::Front)
        } else {
            None
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Valid limits that are narrow enough to matter to small requests.
    pub(crate) fn limits() -> impl Strategy<Value = QueueLimits> {
        let sizes = (0u32..4, 0u32..4, 1u32..40, 1u16..20, 1u32..20, 0u32..30);
        let others = (0u64..300, 1u32..20, 0u64..300, 0u64..300);
        (sizes, others).prop_map(|((block, physical, request, segments, segment, chunk), others)| {
            let block = 512u32 << block;
            let (discard, granularity, zeroes, no_unmap) = others;
            QueueLimits {
                capacity_bytes: u64::from(block) << 13,
                logical_block_bytes: block,
                physical_block_bytes: block << physical,
                // Not a multiple of the block: the rest must not be used.
                max_request_bytes: request * block + 100,
                max_segments: segments,
                max_segment_bytes: segment * block + 3,
                chunk_bytes: chunk * block,
                max_discard_bytes: discard * u64::from(block),
                discard_granularity: granularity * block,
                max_write_zeroes_bytes: zeroes * u64::from(block),
                max_write_zeroes_no_unmap_bytes: no_unmap * 1000,
                ..QueueLimits::default()
            }
        })
    }

    proptest! {
        // Contract: declared
        #[test]
        fn a_request_of_maximum_size_is_whole_blocks_within_a_chunk(
            limits in limits(), at in 0u64..8192, operation in 0..Operation::COUNT, no_unmap: bool,
        ) {
            prop_assert!(limits.validate().is_ok());
            let block = u64::from(limits.logical_block_bytes);
            let (offset, operation) = (at * block, Operation::ALL[operation]);
            let declared = match (operation, no_unmap) {
                (Operation::Read | Operation::Write, _) => u64::from(limits.max_request_bytes),
                (Operation::Discard, _) => limits.max_discard_bytes,
                (Operation::WriteZeroes, false) => limits.max_write_zeroes_bytes,
                (Operation::WriteZeroes, true) => limits.max_write_zeroes_no_unmap_bytes,
                (Operation::Flush, _) => 0,
            };
            let max = limits.max_bytes_at(operation, no_unmap, offset);
            prop_assert!(max <= declared && max % block == 0);
            let chunk = u64::from(limits.chunk_bytes);
            let at_boundary = chunk > 0 && (offset + max) % chunk == 0;
            prop_assert!(at_boundary || max + block > declared, "{max} could be more");
            prop_assert!(max == 0 || chunk == 0 || offset / chunk == (offset + max - 1) / chunk);
        }

        #[test]
        fn a_range_is_valid_if_it_is_whole_blocks_of_the_device(
            limits in limits(), offset in 0u64..40_000_000, length in 0u64..40_000_000, whole: bool,
        ) {
            let block = u64::from(limits.logical_block_bytes);
            let down = |bytes: u64| if whole { bytes / block * block } else { bytes };
            let (offset, length) = (down(offset), down(length));
            let good = offset % block == 0 && length % block == 0 && offset + length <= limits.capacity_bytes;
            prop_assert_eq!(limits.check_range(offset, length).is_ok(), good);
            prop_assert_eq!(limits.check_range(u64::MAX / block * block, 2 * block), Err(Status::Invalid));
        }
    }

    #[test]
    fn contradictory_limits_are_rejected() {
        let good = QueueLimits { capacity_bytes: 1 << 20, ..QueueLimits::default() };
        assert!(good.validate().is_ok());
        let breaks: [fn(&mut QueueLimits); 13] = [
            |l| l.logical_block_bytes = 0,
            |l| l.logical_block_bytes = 256,
            |l| l.logical_block_bytes = 131_072,
            |l| l.logical_block_bytes = 1000,
            |l| l.physical_block_bytes = 256,
            |l| l.capacity_bytes += 100,
            |l| l.capacity_bytes = 1 << 63,
            |l| l.padding_bytes = 512,
            |l| l.max_request_bytes = 511,
            |l| l.max_segments = 0,
            |l| l.chunk_bytes = 1000,
            |l| l.memory_align = 3,
            |l| l.max_discard_bytes = 4096,
        ];
        for (i, break_rule) in breaks.iter().enumerate() {
            let mut limits = good.clone();
            break_rule(&mut limits);
            assert_eq!(limits.validate().map_err(|e| e.kind()), Err(ErrorKind::Invalid), "rule {i}");
        }
    }
}
