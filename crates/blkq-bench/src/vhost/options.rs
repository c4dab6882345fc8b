//! Options of a front end: queues and features.

/// Address of the memory in the guest. It differs from the address in this process, so that a server that confuses
/// both is detected.
pub const GUEST_START: u64 = 1 << 32;

/// Feature bits of the device (virtio 1.2, 5.2.3 and 6; vhost-user protocol).
pub mod feature {
    /// VIRTIO_BLK_F_RO: the device is read-only.
    pub const RO: u64 = 1 << 5;
    /// VIRTIO_BLK_F_BLK_SIZE: the configuration contains the block size.
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// VIRTIO_F_INDIRECT_DESC: the driver may use indirect descriptor tables.
    pub const INDIRECT: u64 = 1 << 28;
    /// VIRTIO_F_EVENT_IDX: each side publishes the ring index at which it needs a notification.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// VHOST_USER_F_PROTOCOL_FEATURES: protocol features can be negotiated.
    pub const PROTOCOL: u64 = 1 << 30;
    /// VIRTIO_F_VERSION_1: the device is not a legacy device.
    pub const VERSION_1: u64 = 1 << 32;
}

pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    /// The server acknowledges messages that request it.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The front end can read the configuration.
    pub const CONFIG: u64 = 1 << 9;
}

/// Queues, memory and features of a front end.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub queues: usize,
    /// Entries of each ring, a power of two.
    pub ring_size: u16,
    /// Maximum requests in flight on each queue.
    pub slots: usize,
    /// Size of the data buffer of each request.
    pub data_bytes: usize,
    /// Bits of [`feature`] that the front end accepts, in addition to those that it requires.
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
