//! The state that a device's control thread shares with its sessions, its rings and the code that started it.

use std::sync::Arc;

use blkq::{Disk, EngineHandle, Error};
use rustix::net::SocketAddrAny;

use super::notifier::Notifier;
use super::registration::RegistrationLimits;
use super::status::Registry;
use super::wakeup::Wakeup;
use crate::sync::atomic::AtomicBool;
use crate::sync::atomic::Ordering::SeqCst;

/// Most rings of a device. Engine `i` modulo the number of engines serves ring `i`.
pub const VRINGS_MAX: usize = 64;

pub struct Shared {
    pub disk: Arc<Disk>,
    /// The engines that serve rings, at least one.
    pub engines: Vec<EngineHandle>,
    pub serial: Arc<str>,
    pub address: Option<SocketAddrAny>,
    pub registry: Registry,
    pub register_memory: Option<RegistrationLimits>,
    /// Wakes the control thread when a ring was rejected, or when one of the flags below was set.
    pub wake: Wakeup,
    pub stopping: AtomicBool,
    pub config_changed: AtomicBool,
    /// Notifiers that signal the drivers of the rings. While a ring is served, only its engine notifies.
    pub calls: [Notifier; VRINGS_MAX],
    /// Signals the front end that a ring was rejected.
    pub errors: Notifier,
}

impl Shared {
    /// The state of a device without a listening socket, report events and registered memory. Fails as
    /// eventfd(2) does.
    pub fn new(disk: &Arc<Disk>, engines: Vec<EngineHandle>, serial: &str) -> Result<Shared, Error> {
        Ok(Shared {
            disk: disk.clone(),
            engines,
            serial: serial.into(),
            address: None,
            registry: Registry::new(None, None),
            register_memory: None,
            wake: Wakeup::new()?,
            stopping: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
            calls: std::array::from_fn(|_| Notifier::default()),
            errors: Notifier::default(),
        })
    }

    pub fn queues(&self) -> u16 {
        self.engines.len() as u16
    }

    pub fn engine_of(&self, index: u32) -> usize {
        index as usize % self.engines.len()
    }

    pub fn change_config(&self) {
        // A swap instead of a store, because loom would let the swap that reads the flag return the older
        // value.
        self.config_changed.swap(true, SeqCst);
        self.wake.wake();
    }

    pub fn stop(&self) {
        self.stopping.store(true, SeqCst);
        self.wake.wake();
    }
}
