//! A vhost-user-blk front end: it behaves to a server like the disk of a virtual machine. Its memory is one memfd, and
//! its rings are split. A thread owns each queue; it sleeps on the call eventfd and does not poll.
//!
//! The front end is written from the protocol (docs/interop/vhost-user.rst of QEMU) and virtio 1.2. It shares no code with
//! the server, so that both cannot have the same defect.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use crate::{Result, ensure};

mod connection;
mod memory;
mod queue;
#[cfg(test)]
mod tests;

use connection::Connection;
use memory::SharedMemory;
use queue::GUEST_START;
pub use queue::{Options, Queue};

/// VIRTIO_F_INDIRECT_DESC (the driver may use indirect descriptor tables), VIRTIO_F_EVENT_IDX (each side publishes the
/// ring index at which it needs a notification), VHOST_USER_F_PROTOCOL_FEATURES (protocol features can be negotiated)
/// and VIRTIO_F_VERSION_1 (the device is not a legacy device). All servers that are measured offer them.
const REQUIRED: u64 = 1 << 28 | 1 << 29 | 1 << 30 | 1 << 32;
/// Features that the front end accepts in addition, as a guest's driver does (virtio 1.2, 5.2.3):
/// VIRTIO_BLK_F_RO, _BLK_SIZE, _FLUSH, _MQ, _DISCARD and _WRITE_ZEROES.
const ACCEPTED: u64 = 1 << 5 | 1 << 6 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 14;

/// Protocol features: the server acknowledges messages that request it (REPLY_ACK), and the front end can read the
/// configuration (CONFIG).
const PROTOCOL_REQUIRED: u64 = 1 << 3 | 1 << 9;
/// The protocol feature for several queues (MQ).
const PROTOCOL_ACCEPTED: u64 = 1 << 0;

/// Size of the configuration that this front end reads, and of its header: offset, size and flags.
const CONFIG_BYTES: usize = 60;
const CONFIG_HEADER_BYTES: usize = 12;

/// Parses struct virtio_blk_config (virtio 1.2, 5.2.4). Returns the size of the device in sectors of 512 bytes, and
/// `num_queues`, which is valid only if the server offers VIRTIO_BLK_F_MQ.
fn parse_config(bytes: &[u8; CONFIG_BYTES]) -> (u64, u16) {
    let [b0, b1, b2, b3, b4, b5, b6, b7, ..] = *bytes;
    let sectors = u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]);
    (sectors, u16::from_le_bytes([bytes[34], bytes[35]]))
}

/// Reads the configuration of the device.
fn config(connection: &mut Connection) -> Result<(u64, u16)> {
    // The request has the header and the size of a reply; its offset and flags are 0.
    let mut words = [0; (CONFIG_HEADER_BYTES + CONFIG_BYTES) / 8];
    words[0] = (CONFIG_BYTES as u64) << 32;
    let reply = connection.ask(connection::GET_CONFIG, &words)?;
    match reply.get(CONFIG_HEADER_BYTES..).and_then(|bytes| bytes.first_chunk()) {
        Some(bytes) => Ok(parse_config(bytes)),
        None => Err(format!("the server sent a configuration of {} bytes", reply.len()).into()),
    }
}

/// Returns the features of `offered` that the front end uses. Fails unless all of `required` are offered.
fn accepted(what: &str, offered: u64, required: u64, optional: u64) -> Result<u64> {
    ensure(offered & required == required, || {
        format!("the server offers the {what} {offered:#x}; {required:#x} are required")
    })?;
    Ok(offered & (required | optional))
}

/// A connected front end. Dropping it closes the connection, which stops its queues.
pub struct FrontEnd {
    pub queues: Vec<Queue>,
    /// Size of the device, in bytes.
    pub bytes: u64,
    _connection: Connection,
    /// The memory that the server maps.
    pub memory: Arc<SharedMemory>,
}

impl FrontEnd {
    /// Connects to the server at `path`, negotiates features, shares the memory, and starts all queues. Fails
    /// if no server listens, the server lacks a required feature, rejects a message, or offers fewer queues.
    pub fn connect(path: &Path, options: &Options) -> Result<FrontEnd> {
        let mut connection = Connection::connect(path)?;
        connection.send(connection::SET_OWNER, &[])?;
        let offered = connection.ask_u64(connection::GET_FEATURES)?;
        let features = accepted("features", offered, REQUIRED, ACCEPTED)?;
        let offered = connection.ask_u64(connection::GET_PROTOCOL_FEATURES)?;
        let protocol_features = accepted("protocol features", offered, PROTOCOL_REQUIRED, PROTOCOL_ACCEPTED)?;
        connection.send(connection::SET_PROTOCOL_FEATURES, &[protocol_features])?;
        connection.set(connection::SET_FEATURES, &[features], None)?;
        let (sectors, count) = config(&mut connection)?;
        // A server without VIRTIO_BLK_F_MQ has one queue.
        let count = usize::from(count.max(1));
        ensure(count >= options.queues, || {
            format!("the server offers {count} queues; {} are required", options.queues)
        })?;
        let bytes =
            sectors.checked_mul(512).ok_or_else(|| format!("the server reports {sectors} sectors"))?;
        let queue_bytes = queue::memory_bytes(options);
        let memory = Arc::new(SharedMemory::new(queue_bytes * options.queues)?);
        // One region, which begins at its own offset 0 in the file.
        let table = [1, GUEST_START, memory.len() as u64, memory.address(), 0];
        connection.set(connection::SET_MEM_TABLE, &table, Some(memory.as_fd()))?;
        let mut queues = Vec::with_capacity(options.queues);
        for index in 0..options.queues {
            let queue = Queue::new(&memory, index * queue_bytes, options)?;
            queue.hand_over(index as u32, &mut connection)?;
            queues.push(queue);
        }
        for index in 0..options.queues as u32 {
            connection.set(connection::SET_VRING_ENABLE, &connection::vring_state(index, 1), None)?;
        }
        Ok(FrontEnd { queues, bytes, _connection: connection, memory })
    }
}
