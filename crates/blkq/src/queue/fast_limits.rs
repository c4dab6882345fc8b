use crate::bio::{BioFlags, Operation, Outline};
use crate::buffer::{Data, Segment};
use crate::limits::QueueLimits;
use crate::sector::SECTOR_SHIFT;
use crate::split::check_memory;

use super::plug::PLUG_FLUSH_BYTES;

/// Limits in sectors, so that the fast path needs only a few comparisons.
#[derive(Clone, Copy)]
pub(super) struct FastLimits {
    capacity_sectors: u64,
    /// Bits of sector and length that must be zero.
    block_mask: u64,
    /// Largest read and largest write that certainly need no split. 0: all go through the slow path.
    whole_sectors: [u64; 2],
    /// As `whole_sectors`, but too small to flush the plug.
    small_sectors: [u64; 2],
    max_segments: u32,
    kernel_pages: bool,
}

impl FastLimits {
    pub fn new(limits: &QueueLimits) -> FastLimits {
        let whole = limits.max_request_bytes.min(limits.max_segment_bytes);
        let whole = if limits.chunk_bytes == 0 { u64::from(whole >> SECTOR_SHIFT) } else { 0 };
        let small = whole.min((PLUG_FLUSH_BYTES >> SECTOR_SHIFT) - 1);
        FastLimits {
            capacity_sectors: limits.capacity_bytes >> SECTOR_SHIFT,
            block_mask: u64::from(limits.logical_block_bytes >> SECTOR_SHIFT) - 1,
            whole_sectors: [whole, if limits.read_only { 0 } else { whole }],
            small_sectors: [small, if limits.read_only { 0 } else { small }],
            max_segments: u32::from(limits.max_segments),
            kernel_pages: limits.kernel_pages,
        }
    }

    /// Whether this is a legal read or write of one buffer that needs no split and no flush.
    #[inline]
    pub fn fits(&self, outline: &Outline, data: &Data) -> bool {
        let Data::Buffer(buffer) = data else { return false };
        self.fits_bytes(outline, buffer.len() as u64, self.whole_sectors)
    }

    /// As [`FastLimits::fits`], for a bio that is also too small to flush the plug.
    #[inline(always)]
    pub fn fits_small(&self, outline: &Outline, data: &Data) -> bool {
        let Data::Buffer(buffer) = data else { return false };
        self.fits_bytes(outline, buffer.len() as u64, self.small_sectors)
    }

    /// The check for memory of `bytes`, and lengths up to `most` for reads and writes.
    #[inline(always)]
    fn fits_bytes(&self, outline: &Outline, bytes: u64, most: [u64; 2]) -> bool {
        let &Outline { operation, flags, sector, sectors, .. } = outline;
        // Read is operation 0 and Write is 1. A length of 0 wraps around and is too long.
        let Some(&most) = most.get(operation as usize) else { return false };
        (sector.0 | sectors) & self.block_mask == 0
            && sectors.wrapping_sub(1) < most
            && sectors <= bytes >> SECTOR_SHIFT
            && sector.0.checked_add(sectors).is_some_and(|end| end <= self.capacity_sectors)
            && !flags.intersects(BioFlags::FUA | BioFlags::PREFLUSH | BioFlags::NO_UNMAP)
    }

    /// Whether one read or write certainly may have that many sectors and memory segments.
    #[inline]
    pub fn allows(&self, operation: Operation, sectors: u64, segments: u32) -> bool {
        let most = self.whole_sectors.get(operation as usize);
        most.is_some_and(|&most| sectors <= most) && segments <= self.max_segments
    }

    /// Whether this is a legal read or write of kernel pages of `bytes` that needs no split.
    pub fn fits_pages(&self, outline: &Outline, bytes: u32) -> bool {
        self.kernel_pages && self.fits_bytes(outline, u64::from(bytes), self.whole_sectors)
    }

    /// Whether this is a legal read or write of `segments` that needs no split and no flush.
    pub fn fits_segments(&self, outline: &Outline, segments: &[Segment], limits: &QueueLimits) -> bool {
        segments.len() <= usize::from(limits.max_segments)
            && self.fits_bytes(outline, u64::from(u32::MAX), self.whole_sectors)
            && check_memory(limits, segments, outline.sectors << SECTOR_SHIFT).is_ok()
    }
}
