//! The kinds of clients in a trace: see [`TraceClient::kind`](blkq::trace::TraceClient::kind).

/// A connection of NBD; its number is the server's.
pub const NBD: u8 = 1;
/// A ring of a virtual machine; its number is the ring's.
pub const VRING: u8 = 2;
/// The kernel's block device; its number is that of the queue.
pub const UBLK: u8 = 3;
