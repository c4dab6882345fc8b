//! The state that the control thread of a device, its sessions, its rings and its owner share.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blkq::{Disk, EngineHandle};
use rustix::net::SocketAddrAny;

use super::event::signal;
use super::registration::RegisterMemory;
use super::status::Registry;

/// That state.
pub struct Shared {
    pub disk: Arc<Disk>,
    /// At least one.
    pub engines: Vec<EngineHandle>,
    /// The serial number that guests see: its first 20 bytes.
    pub serial: Arc<str>,
    /// Where it listens.
    pub address: Option<SocketAddrAny>,
    pub registry: Registry,
    /// Guest memory is registered with the engines' rings.
    pub register_memory: Option<RegisterMemory>,
    /// An eventfd that does not block: there is something for the control thread.
    pub wake: Arc<OwnedFd>,
    pub stopping: AtomicBool,
    pub config_changed: AtomicBool,
}

impl Shared {
    /// Queues that drivers are shown: one for each engine.
    pub fn queues(&self) -> u16 {
        self.engines.len() as u16
    }

    /// The number of the engine of ring `index`.
    pub fn engine_of(&self, index: u32) -> usize {
        index as usize % self.engines.len()
    }

    /// Wakes the control thread.
    pub fn wake(&self) {
        signal(&self.wake);
    }
}
