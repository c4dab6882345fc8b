//! The clients of a trace, as processes: blktrace knows nothing else.

use blkq::trace::TraceClient;
use blkq_export::client_kind::{NBD, UBLK, VRING};

/// Longest name of a process (`TASK_COMM_LEN`), with the zero behind it.
pub const COMM_BYTES: usize = 16;
/// Numbers of processes of each kind: those of Linux are below 2^22.
const KIND_NUMBERS: u32 = 10_000_000;

/// The number of the process that stands for it. NBD clients have the number that the log and
/// `blkq show` give them, rings and queues one beyond 20,000,000 and 30,000,000; 0 is a thread of the daemon.
pub fn pid(client: TraceClient) -> u32 {
    match client.kind() {
        0 => 0,
        NBD => client.number(),
        kind => (u32::from(kind) * KIND_NUMBERS).wrapping_add(client.number()),
    }
}

/// Its name.
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
