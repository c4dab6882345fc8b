//! Detaching a device with its last client: the `autoclear` of a loop device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::failure::{Failure, Outcome};

/// Whether the device is to detach, and the event by which its daemon learns that it has no clients.
pub struct Autoclear {
    on: AtomicBool,
    idle: Arc<OwnedFd>,
}

impl Autoclear {
    /// Of a device that has no clients yet.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn new(on: bool) -> Outcome<Autoclear> {
        Ok(Autoclear { on: AtomicBool::new(on), idle: new_event()? })
    }

    /// Readable when the last client has disconnected; for the exports to write, whether it is on
    /// or not.
    pub fn idle_event(&self) -> &Arc<OwnedFd> {
        &self.idle
    }

    /// Makes the event ready for the next time.
    pub fn take_event(&self) {
        // Empty: another thread has read it.
        let _ = rustix::io::read(&self.idle, &mut [0; 8]);
    }

    /// Whether the device detaches with its last client.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    /// Changes that; clients that are connected count, those that were before do not.
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::SeqCst);
    }
}

/// An eventfd that does not block.
///
/// # Errors
/// If the process has no descriptor left.
pub fn new_event() -> Outcome<Arc<OwnedFd>> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    event.map(Arc::new).map_err(|e| Failure::new(format!("eventfd: {e}")))
}
