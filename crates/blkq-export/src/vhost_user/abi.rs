//! Constants of virtio 1.2: section 5.2 (block device) and chapter 6 (reserved feature bits).

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

// Types of requests (VIRTIO_BLK_T_*).
pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

// Status of a completed request (VIRTIO_BLK_S_*).
pub const S_OK: u8 = 0;
pub const S_IOERR: u8 = 1;
pub const S_UNSUPP: u8 = 2;

pub const HEADER_BYTES: usize = 16;
/// Size of a range of a discard or write zeroes in a request.
pub const RANGE_BYTES: usize = 16;
/// A flag of a range: write zeroes may deallocate the range.
pub const RANGE_UNMAP: u32 = 1;
/// Size of a serial number, which has no terminator if it is that long.
pub const ID_BYTES: usize = 20;
