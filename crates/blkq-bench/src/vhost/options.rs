//! The options of a front end: queues, and the bits of features.

/// Where the memory begins in the guest's address space: not where it is in this process, so that a
/// server that takes one for the other is noticed.
pub const GUEST_START: u64 = 1 << 32;

/// Bits of the device's features (virtio 1.2, 5.2.3 and 6; the vhost-user protocol).
pub mod feature {
    /// Reads only.
    pub const RO: u64 = 1 << 5;
    /// The block size is in the configuration.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// Flushes.
    pub const FLUSH: u64 = 1 << 9;
    /// Several queues.
    pub const MQ: u64 = 1 << 12;
    /// Discards.
    pub const DISCARD: u64 = 1 << 13;
    /// Writing zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Descriptors in tables of their own.
    pub const INDIRECT: u64 = 1 << 28;
    /// Notifications by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The protocol has features of its own.
    pub const PROTOCOL: u64 = 1 << 30;
    /// Not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
}

/// Bits of the protocol's features.
pub mod protocol {
    /// Several queues.
    pub const MQ: u64 = 1 << 0;
    /// Messages are acknowledged if they ask for it.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The configuration can be read.
    pub const CONFIG: u64 = 1 << 9;
}

/// The queues and features of a front end.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Queues.
    pub queues: usize,
    /// Entries of each ring, a power of two.
    pub ring_size: u16,
    /// Requests in flight on each queue at most.
    pub slots: usize,
    /// Bytes of data of each.
    pub data_bytes: usize,
    /// Bits of [`feature`] that are accepted if they are offered, besides those that it cannot do without.
    pub features: u64,
}

impl Default for Options {
    fn default() -> Options {
        let features = feature::RO
            | feature::BLK_SIZE
            | feature::FLUSH
            | feature::MQ
            | feature::DISCARD
            | feature::WRITE_ZEROES
            | feature::INDIRECT
            | feature::EVENT_IDX;
        Options { queues: 1, ring_size: 128, slots: 32, data_bytes: 4096, features }
    }
}
