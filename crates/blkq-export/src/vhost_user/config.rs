//! The device as a driver sees it: the offered features and `virtio_blk_config` (virtio 1.2, 5.2.4), derived
//! from the limits of a disk.

use blkq::{Operation, QueueLimits};

use feature::*;

/// Feature bits that the device offers: of a block device, and of its rings.
pub mod feature {
    #![allow(missing_docs, reason = "the names are those of the specification")]
    /// The configuration has the largest size of a buffer of a request.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// The configuration has the largest number of buffers of a request.
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    /// The device has a volatile write cache and supports flushes.
    pub const FLUSH: u64 = 1 << 9;
    /// The configuration has the physical block size and preferred sizes.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the write cache on and off.
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Requests may use indirect tables of descriptors.
    pub const RING_INDIRECT_DESC: u64 = 1 << 28;
    /// Each side names the index at which it expects the next notification.
    pub const RING_EVENT_IDX: u64 = 1 << 29;
    /// The device follows virtio 1 and not an earlier draft.
    pub const VERSION_1: u64 = 1 << 32;
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Most ranges of a discard or write zeroes request.
pub const RANGES_MAX: usize = 32;
/// Most data buffers of a request, which with header and status fits a ring of 128, the usual default.
pub const SEGMENTS_MAX: u32 = 126;
/// Size of the configuration: up to and including the fields of write zeroes.
pub const CONFIG_BYTES: usize = 60;
/// Offset of `writeback`, the only field that a driver may write.
pub const WRITEBACK_AT: usize = 32;
/// Largest discard and write zeroes in bytes. A limit, because one request delays others.
const RANGE_MAX_BYTES: u64 = 1 << 30;

/// Largest segment of a request in bytes. The sum of [`SEGMENTS_MAX`] such segments is less than the 1 GiB of
/// a request, and fits into the 31 bits in which libblkio computes it.
const SEGMENT_MAX_BYTES: u32 = 1 << 23;

/// Features that depend on the disk's limits, which may change live or with the next daemon. The driver keeps
/// the features that it was offered, and its requests are checked against the limits.
pub const FEATURES_OF_LIMITS: u64 = RO | DISCARD | WRITE_ZEROES;

/// MQ is always offered, because a device may get several engines.
pub fn features(limits: &QueueLimits) -> u64 {
    let of_rings = RING_INDIRECT_DESC | RING_EVENT_IDX | VERSION_1 | RING_PACKED;
    let mut features = of_rings | SEG_MAX | SIZE_MAX | BLK_SIZE | TOPOLOGY | FLUSH | CONFIG_WCE | MQ;
    let mut offer = |has: bool, bit: u64| features |= if has { bit } else { 0 };
    offer(limits.read_only, RO);
    offer(discards(limits), DISCARD);
    offer(!limits.read_only, WRITE_ZEROES);
    features
}

fn discards(limits: &QueueLimits) -> bool {
    limits.max_discard_bytes > 0 && !limits.read_only
}

/// Largest range of an `operation` in sectors; 0 if the device does not support it.
///
/// The layer splits ranges by the limits of the image's driver. Those are not passed on, because QEMU's front
/// end over libblkio (QEMU 10.0) does not split ranges by the device's limits, and its requests would fail.
pub fn range_sectors_max(limits: &QueueLimits, operation: Operation) -> u64 {
    let is_supported = match operation {
        Operation::Discard => discards(limits),
        // For a driver without the operation, the layer writes zeroes.
        Operation::WriteZeroes => !limits.read_only,
        _ => false,
    };
    if is_supported { RANGE_MAX_BYTES >> 9 } else { 0 }
}

/// `write_cache`: whether the driver sees a write cache.
pub fn config(limits: &QueueLimits, queues: u16, write_cache: bool) -> [u8; CONFIG_BYTES] {
    let block = limits.logical_block_bytes;
    let blocks = |bytes: u32| bytes / block;
    let discard = range_sectors_max(limits, Operation::Discard) as u32;
    let zeroes = range_sectors_max(limits, Operation::WriteZeroes) as u32;
    let mut bytes = [0; CONFIG_BYTES];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(0, &(limits.whole_bytes() >> 9).to_le_bytes());
    put(8, &limits.max_segment_bytes.min(SEGMENT_MAX_BYTES).to_le_bytes());
    put(12, &SEGMENTS_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(24, &[blocks(limits.physical_block_bytes).ilog2() as u8, 0]);
    put(26, &(u16::try_from(blocks(limits.physical_block_bytes)).unwrap_or(u16::MAX)).to_le_bytes());
    put(28, &blocks(limits.io_opt_bytes).to_le_bytes());
    put(WRITEBACK_AT, &[write_cache.into()]);
    put(34, &queues.to_le_bytes());
    put(36, &discard.to_le_bytes());
    put(40, &(if discard > 0 { RANGES_MAX as u32 } else { 0 }).to_le_bytes());
    put(44, &(limits.discard_granularity.max(block) >> 9).to_le_bytes());
    put(48, &zeroes.to_le_bytes());
    put(52, &(if zeroes > 0 { RANGES_MAX as u32 } else { 0 }).to_le_bytes());
    put(56, &[u8::from(limits.max_write_zeroes_bytes > 0)]);
    bytes
}

#[cfg(test)]
mod tests;
