//! Represents the clients of a trace as processes, the only kind of client that the blktrace format has.

use blkq::trace::TraceClient;
use blkq_export::client_kind::{NBD, UBLK, VRING};

/// Size of a process name (`TASK_COMM_LEN`), including the final NUL.
pub const COMM_BYTES: usize = 16;
/// Number of process IDs per kind of client. Process IDs of Linux are below 2^22.
const KIND_NUMBERS: u32 = 10_000_000;

/// The process ID that represents a client. For NBD clients this is the number in the log and in `blkq show`.
/// For rings and queues it is their number plus 20,000,000 or 30,000,000. For threads of the daemon it is 0.
pub fn pid(client: TraceClient) -> u32 {
    match client.kind() {
        0 => 0,
        NBD => client.number(),
        kind => (u32::from(kind) * KIND_NUMBERS).wrapping_add(client.number()),
    }
}

pub fn name(client: TraceClient) -> String {
    let number = client.number();
    match client.kind() {
        0 => "blkq".to_owned(),
        NBD => format!("nbd {number}"),
        VRING => format!("vring {number}"),
        UBLK => format!("ublk {number}"),
        kind => format!("client {kind}.{number}"),
    }
}
