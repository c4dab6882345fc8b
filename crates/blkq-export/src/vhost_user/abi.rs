//! Numbers of virtio 1.2, 5.2 (block device) and 6 (reserved feature bits).

/// Feature bits of a block device, and those of rings that a device offers.
pub mod feature {
    /// Largest buffer of a request.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// Most buffers of a request.
    pub const SEG_MAX: u64 = 1 << 2;
    /// Writes are refused.
    pub const RO: u64 = 1 << 5;
    /// Size of logical blocks.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a write cache that flushes empty.
    pub const FLUSH: u64 = 1 << 9;
    /// Physical blocks and preferred sizes.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the write cache.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// Several queues.
    pub const MQ: u64 = 1 << 12;
    /// Discards.
    pub const DISCARD: u64 = 1 << 13;
    /// Write zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Tables of descriptors.
    pub const RING_INDIRECT_DESC: u64 = 1 << 28;
    /// Kicks and calls at an index only.
    pub const RING_EVENT_IDX: u64 = 1 << 29;
    /// Not a device of before virtio 1.
    pub const VERSION_1: u64 = 1 << 32;
    /// Packed rings.
    pub const RING_PACKED: u64 = 1 << 34;
}

/// Reads.
pub const T_IN: u32 = 0;
/// Writes.
pub const T_OUT: u32 = 1;
/// Flushes.
pub const T_FLUSH: u32 = 4;
/// Asks for the serial number.
pub const T_GET_ID: u32 = 8;
/// Discards ranges.
pub const T_DISCARD: u32 = 11;
/// Writes zeroes to ranges.
pub const T_WRITE_ZEROES: u32 = 13;

/// Done.
pub const S_OK: u8 = 0;
/// Failed.
pub const S_IOERR: u8 = 1;
/// The device does not do that.
pub const S_UNSUPP: u8 = 2;

/// Bytes of a request's header.
pub const HEADER_BYTES: usize = 16;
/// Bytes of a range of discard and write zeroes.
pub const RANGE_BYTES: usize = 16;
/// In the flags of a range: write zeroes may deallocate.
pub const RANGE_UNMAP: u32 = 1;
/// Bytes of a serial number, without a terminator if it is as long.
pub const ID_BYTES: usize = 20;
