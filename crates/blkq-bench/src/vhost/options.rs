//! Options of a front end: queues and features.

/// Address of the memory in the guest. It differs from the address in this process, so that a server that confuses
/// both is detected.
pub const GUEST_START: u64 = 1 << 32;
/// Entries of a ring: QEMU's default for virtio-blk.
pub const RING_SIZE: u16 = 128;

/// VIRTIO_F_INDIRECT_DESC (the driver may use indirect descriptor tables), VIRTIO_F_EVENT_IDX (each side publishes the
/// ring index at which it needs a notification), VHOST_USER_F_PROTOCOL_FEATURES (protocol features can be negotiated)
/// and VIRTIO_F_VERSION_1 (the device is not a legacy device). All servers that are measured offer them.
pub const REQUIRED: u64 = 1 << 28 | 1 << 29 | 1 << 30 | 1 << 32;
/// Features that the front end accepts in addition, as a guest's driver does (virtio 1.2, 5.2.3):
/// VIRTIO_BLK_F_RO, _BLK_SIZE, _FLUSH, _MQ, _DISCARD and _WRITE_ZEROES.
pub const ACCEPTED: u64 = 1 << 5 | 1 << 6 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 14;

/// Protocol features: the server acknowledges messages that request it (REPLY_ACK), and the front end can read the
/// configuration (CONFIG).
pub const PROTOCOL_REQUIRED: u64 = 1 << 3 | 1 << 9;
/// The protocol feature for several queues (MQ).
pub const PROTOCOL_ACCEPTED: u64 = 1 << 0;

/// Queues and memory of a front end.
pub struct Options {
    pub queues: usize,
    /// Maximum requests in flight on each queue, at most [`RING_SIZE`].
    pub slots: usize,
    /// Size of the data buffer of each request.
    pub data_bytes: usize,
}
