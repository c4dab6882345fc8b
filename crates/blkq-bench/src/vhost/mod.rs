//! A vhost-user-blk front end: it behaves to a server like the disk of a virtual machine. Its memory is one memfd, and
//! its rings are split. A thread owns each queue; it sleeps on the call eventfd and does not poll.
//!
//! The front end is written from the protocol (docs/interop/vhost-user.rst of QEMU) and virtio 1.2. It shares no code with
//! the server, so that both cannot have the same defect.
//!
//! ```no_run
//! # fn main() -> blkq_bench::Result {
//! use blkq_bench::vhost::{FrontEnd, Options, Request};
//! let mut disk = FrontEnd::connect("/run/blkq/disk.img.vhost".as_ref(), &Options::default())?;
//! let queue = &mut disk.queues[0];
//! queue.submit(0, &Request::read(0, 4096));
//! queue.publish()?;
//! queue.wait(std::time::Duration::from_secs(1))?;
//! queue.reap(|slot, status, _written| println!("{slot}: {status}"))?;
//! # Ok(())
//! # }
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use crate::Result;

mod memory;
mod messages;
mod options;
mod queue;
#[cfg(test)]
mod tests;

pub use memory::SharedMemory;
pub use messages::{Connection, Message};
pub use options::{GUEST_START, Options, feature, protocol};
pub use queue::{Operation, Queue, Request};

/// The device's configuration (virtio 1.2, 5.2.4). The field of a feature that the server does not offer is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Size of the device, in sectors of 512 bytes.
    pub capacity_sectors: u64,
    pub segments_max: u32,
    /// Logical block size, in bytes.
    pub block_bytes: u32,
    /// Whether completed writes may be lost until a flush.
    pub write_back: bool,
    pub queues: u16,
    pub discard_sectors_max: u32,
    pub zeroes_sectors_max: u32,
}

/// Size of the configuration that this front end reads.
const CONFIG_BYTES: u32 = 60;

impl Config {
    fn parse(bytes: &[u8]) -> Config {
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Config {
            capacity_sectors: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            segments_max: u32_at(12),
            block_bytes: u32_at(20),
            write_back: bytes[32] != 0,
            queues: u16::from_le_bytes([bytes[34], bytes[35]]),
            discard_sectors_max: u32_at(36),
            zeroes_sectors_max: u32_at(48),
        }
    }
}

/// A connected front end. Dropping it closes the connection, which stops its queues.
pub struct FrontEnd {
    pub queues: Vec<Queue>,
    /// The connection, for additional messages.
    pub connection: Connection,
    pub features: u64,
    memory: Arc<SharedMemory>,
}

impl FrontEnd {
    /// Connects to the server at `path`, negotiates features, shares the memory, and starts all queues. Fails
    /// if no server listens, the server lacks a required feature, or it rejects a message.
    pub fn connect(path: &Path, options: &Options) -> Result<FrontEnd> {
        FrontEnd::start(Connection::new(UnixStream::connect(path)?), options)
    }

    /// Like [`connect`](FrontEnd::connect), on an existing connection.
    pub fn start(mut connection: Connection, options: &Options) -> Result<FrontEnd> {
        connection.send(&Message::new(messages::SET_OWNER))?;
        let offered = connection.ask_u64(messages::GET_FEATURES)?;
        let needed = feature::PROTOCOL | feature::VERSION_1;
        if offered & needed != needed {
            return Err(
                format!("the server offers the features {offered:#x}; {needed:#x} are required").into()
            );
        }
        let protocol_offered = connection.ask_u64(messages::GET_PROTOCOL_FEATURES)?;
        let protocol_needed = protocol::CONFIG;
        if protocol_offered & protocol_needed != protocol_needed {
            return Err(format!(
                "the server offers the protocol features {protocol_offered:#x}, without CONFIG"
            )
            .into());
        }
        let accepted = protocol_offered & (protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG);
        connection.send(&Message::u64(messages::SET_PROTOCOL_FEATURES, accepted))?;
        connection.acknowledged = accepted & protocol::REPLY_ACK != 0;
        let features = offered & (needed | options.features);
        connection.set(Message::u64(messages::SET_FEATURES, features))?;
        let (memory, layouts) = queue::lay_out(options)?;
        let memory = Arc::new(memory);
        connection.set(Message::memory_table(&memory))?;
        let mut queues = Vec::with_capacity(options.queues);
        for (index, layout) in layouts.into_iter().enumerate() {
            let queue = Queue::new(&memory, layout, options, features)?;
            queue.hand_over(index as u32, &mut connection)?;
            queues.push(queue);
        }
        for index in 0..options.queues {
            connection.set(Message::vring_state(messages::SET_VRING_ENABLE, index as u32, 1))?;
        }
        Ok(FrontEnd { queues, connection, features, memory })
    }

    pub fn config(&mut self) -> Result<Config> {
        let mut message = Message::new(messages::GET_CONFIG);
        for word in [0, CONFIG_BYTES, 0] {
            message.push_u32(word);
        }
        message.push_bytes(&[0; CONFIG_BYTES as usize]);
        let reply = self.connection.ask(&message)?;
        match reply.get(12..12 + CONFIG_BYTES as usize) {
            Some(bytes) => Ok(Config::parse(bytes)),
            None => Err(format!("the server sent a configuration of {} bytes", reply.len()).into()),
        }
    }

    /// Stops queue `index` after its requests in flight have completed. Returns the position in the ring at
    /// which a server continues.
    pub fn stop_queue(&mut self, index: u32) -> Result<u32> {
        let reply = self.connection.ask(&Message::vring_state(messages::GET_VRING_BASE, index, 0))?;
        match reply.get(4..8) {
            Some(base) => Ok(u32::from_le_bytes([base[0], base[1], base[2], base[3]])),
            None => Err(format!("the server sent a ring base of {} bytes", reply.len()).into()),
        }
    }

    /// Size of the memory that the server maps, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.memory.len()
    }

    pub fn memory_file(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}
