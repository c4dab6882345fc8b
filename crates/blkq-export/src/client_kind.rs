//! The kinds of clients in a trace: see [`TraceClient::kind`](blkq::trace::TraceClient::kind).

/// An NBD connection. The client number is the connection number of the server.
pub const NBD: u8 = 1;
/// A virtqueue of a virtual machine (vhost-user-blk). The client number is the index of the virtqueue.
pub const VRING: u8 = 2;
/// The kernel's block device (ublk). The client number is the index of the hardware queue.
pub const UBLK: u8 = 3;
