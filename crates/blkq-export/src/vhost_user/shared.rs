//! The state that the control thread of a device, its sessions, its rings and its owner share.

use std::sync::Arc;

use blkq::{Disk, EngineHandle, Error};
use rustix::net::SocketAddrAny;

use super::notifier::Notifier;
use super::registration::RegistrationLimits;
use super::status::Registry;
use super::wakeup::Wakeup;
use crate::sync::atomic::AtomicBool;
use crate::sync::atomic::Ordering::SeqCst;

/// Most rings: ring `i` is served by engine `i` modulo the number of engines.
pub const VRINGS_MAX: usize = 64;

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
    pub register_memory: Option<RegistrationLimits>,
    /// There is something for the control thread.
    pub wake: Arc<Wakeup>,
    pub stopping: AtomicBool,
    pub config_changed: AtomicBool,
    /// They call the guest, by the number of the ring. Of one that is served only its engine notifies.
    pub calls: [Arc<Notifier>; VRINGS_MAX],
    /// It notifies the front end of a ring that was rejected.
    pub errors: Notifier,
}

impl Shared {
    /// Of a device that listens nowhere, reports to nobody and registers no memory.
    ///
    /// # Errors
    /// That there can be no more descriptors.
    pub fn new(disk: &Arc<Disk>, engines: Vec<EngineHandle>, serial: &str) -> Result<Shared, Error> {
        Ok(Shared {
            disk: disk.clone(),
            engines,
            serial: serial.into(),
            address: None,
            registry: Registry::new(None, None),
            register_memory: None,
            wake: Arc::new(Wakeup::new()?),
            stopping: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            calls: std::array::from_fn(|_| Arc::default()),
            errors: Notifier::default(),
        })
    }

    /// Queues that drivers are shown: one for each engine.
    pub fn queues(&self) -> u16 {
        self.engines.len() as u16
    }

    /// The number of the engine of ring `index`.
    pub fn engine_of(&self, index: u32) -> usize {
        index as usize % self.engines.len()
    }

    /// The disk has another size, or other limits.
    pub fn change_config(&self) {
        // No plain store: loom would let the swap that takes it read what was there before.
        self.config_changed.swap(true, SeqCst);
        self.wake.wake();
    }

    /// Has the control thread exit.
    pub fn stop(&self) {
        self.stopping.store(true, SeqCst);
        self.wake.wake();
    }
}
