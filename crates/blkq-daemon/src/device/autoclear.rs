//! `--autoclear`: detaches a device with its last client, as `LO_FLAGS_AUTOCLEAR` does for a loop device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkq_protocol::failure::{Failure, Outcome};
use rustix::event::{EventfdFlags, eventfd};

/// Whether the device detaches with its last client, and the event that is signalled when it has no clients.
pub struct Autoclear {
    on: AtomicBool,
    idle: Arc<OwnedFd>,
}

impl Autoclear {
    pub fn new(on: bool) -> Outcome<Autoclear> {
        Ok(Autoclear { on: AtomicBool::new(on), idle: new_event()? })
    }

    /// Readable after the last client has disconnected. The exports write it, whether autoclear is on or off.
    pub fn idle_event(&self) -> &Arc<OwnedFd> {
        &self.idle
    }

    pub fn take_event(&self) {
        // A failed read is ignored: another thread may have reset the event.
        let _ = rustix::io::read(&self.idle, &mut [0; 8]);
    }

    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::SeqCst)
    }

    /// Only clients that disconnect from now on count.
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::SeqCst);
    }
}

pub fn new_event() -> Outcome<Arc<OwnedFd>> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    event.map(Arc::new).map_err(|e| Failure::new(format!("cannot create an eventfd: {e}")))
}
