//! What a device can do and how large a request may be: declared once by its driver,
//! and impossible to exceed (`bio` splits, emulates or refuses).
//! Defaults as in the kernel's block/blk-settings.c.

use crate::Status;
use crate::bio::Operation;
use crate::error::{Error, ErrorKind};

/// Limits and capabilities of a device. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Size of the device.
    pub capacity_bytes: u64,
    /// Smallest addressable unit: a power of two, 512 to 65536.
    pub logical_block_bytes: u32,
    /// Unit that the medium writes without reading: a power of two, at least the logical block.
    pub physical_block_bytes: u32,
    /// Preferred request size, 0 if there is none.
    pub io_opt_bytes: u32,
    /// Largest read or write request.
    pub max_request_bytes: u32,
    /// Most segments of a request.
    pub max_segments: u16,
    /// Largest segment.
    pub max_segment_bytes: u32,
    /// Requests do not cross multiples of this; 0: no such boundary.
    pub chunk_bytes: u32,
    /// Alignment of memory addresses and lengths: a power of two, 1 if any will do.
    pub memory_align: u32,
    /// Largest discard; 0: the device does not discard.
    pub max_discard_bytes: u64,
    /// Discards smaller than this, or not aligned to it, may have no effect.
    pub discard_granularity: u32,
    /// Discarded ranges read back as zeroes.
    pub discard_zeroes: bool,
    /// Largest write-zeroes that may deallocate; 0: the layer writes zeroes instead.
    pub max_write_zeroes_bytes: u64,
    /// Largest write-zeroes that must keep the blocks allocated (no-unmap); 0: the layer writes zeroes instead.
    pub max_write_zeroes_no_unmap_bytes: u64,
    /// Completed writes may be lost with the power until a flush completes.
    pub write_cache: bool,
    /// Writes with FUA are done by the driver; otherwise the layer flushes after them.
    pub fua: bool,
    /// Writes of any kind are refused.
    pub read_only: bool,
    /// Seeks cost time: the scheduler's order matters.
    pub rotational: bool,
}

impl Default for QueueLimits {
    fn default() -> QueueLimits {
        QueueLimits {
            capacity_bytes: 0,
            logical_block_bytes: 512,
            physical_block_bytes: 512,
            io_opt_bytes: 0,
            max_request_bytes: 2560 << 9,
            max_segments: 128,
            max_segment_bytes: 1 << 31,
            chunk_bytes: 0,
            memory_align: 1,
            max_discard_bytes: 0,
            discard_granularity: 0,
            discard_zeroes: false,
            max_write_zeroes_bytes: 0,
            max_write_zeroes_no_unmap_bytes: 0,
            write_cache: false,
            fua: false,
            read_only: false,
            rotational: false,
        }
    }
}

impl QueueLimits {
    /// Checks that the limits make sense together.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] with the rule that is broken.
    pub fn validate(&self) -> Result<(), Error> {
        let invalid = |what: &str| Err(Error::new(ErrorKind::Invalid, format!("queue limits: {what}")));
        let block = self.logical_block_bytes;
        if !block.is_power_of_two() || !(512..=65536).contains(&block) {
            return invalid("the logical block is not a power of two from 512 to 65536");
        }
        if !self.physical_block_bytes.is_power_of_two() || self.physical_block_bytes < block {
            return invalid("the physical block is not a power of two of at least the logical block");
        }
        if self.capacity_bytes % u64::from(block) != 0 || self.capacity_bytes > i64::MAX as u64 {
            return invalid("the capacity is not a multiple of the logical block below 8 EiB");
        }
        if self.max_request_bytes < block || self.max_segment_bytes < block || self.max_segments == 0 {
            return invalid("not even one logical block fits into a request");
        }
        if self.chunk_bytes % block != 0 {
            return invalid("the chunk is not a multiple of the logical block");
        }
        if !self.memory_align.is_power_of_two() || self.memory_align > 4096 {
            return invalid("the memory alignment is not a power of two of at most 4096");
        }
        if self.max_discard_bytes != 0 && self.discard_granularity == 0 {
            return invalid("a device that discards has a discard granularity");
        }
        Ok(())
    }

    /// Largest request of `operation` that may begin at byte `offset`, before segments
    /// are counted. 0 if the driver does not do the operation.
    pub fn max_bytes_at(&self, operation: Operation, no_unmap: bool, offset: u64) -> u64 {
        let block = u64::from(self.logical_block_bytes);
        let limit = match operation {
            Operation::Read | Operation::Write => u64::from(self.max_request_bytes),
            Operation::Discard => self.max_discard_bytes,
            Operation::WriteZeroes if no_unmap => self.max_write_zeroes_no_unmap_bytes,
            Operation::WriteZeroes => self.max_write_zeroes_bytes,
            Operation::Flush => return 0,
        };
        let limit = limit - limit % block;
        if self.chunk_bytes == 0 {
            return limit;
        }
        let chunk = u64::from(self.chunk_bytes);
        limit.min(chunk - offset % chunk)
    }

    /// Whether `offset` and `length` (bytes) are whole blocks inside the device.
    pub fn check_range(&self, offset: u64, length: u64) -> Result<(), Status> {
        let mask = u64::from(self.logical_block_bytes) - 1;
        if (offset | length) & mask != 0 {
            return Err(Status::Invalid);
        }
        match offset.checked_add(length) {
            Some(end) if end <= self.capacity_bytes => Ok(()),
            _ => Err(Status::Invalid),
        }
    }
}
