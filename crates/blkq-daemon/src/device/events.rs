use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkq::Driver;
use blkq_protocol::failure::{Failure, Outcome};
use rustix::event::{EventfdFlags, eventfd};

/// Nonblocking eventfds for which the daemon of a device polls.
pub struct Events {
    /// The last client has disconnected, whether or not the device detaches with it.
    pub idle: Arc<OwnedFd>,
    /// The kernel rejected a command of the block device's queues.
    pub failure: Arc<OwnedFd>,
    /// The size of the image may have changed.
    pub size: Arc<OwnedFd>,
    /// A client was rejected or disconnected.
    pub rejection: Arc<OwnedFd>,
}

impl Events {
    /// `idle` comes from [`new_event`]. Fails if no file descriptor is left.
    pub(super) fn new(idle: Arc<OwnedFd>, driver: &dyn Driver) -> Outcome<Events> {
        let size = match driver.size_event() {
            Some(event) => {
                let cloned = event.try_clone_to_owned();
                Arc::new(cloned.map_err(|e| Failure::new(format!("cannot duplicate an eventfd: {e}")))?)
            }
            None => new_event()?,
        };
        Ok(Events { idle, failure: new_event()?, size, rejection: new_event()? })
    }
}

pub(super) fn new_event() -> Outcome<Arc<OwnedFd>> {
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
    event.map(Arc::new).map_err(|e| Failure::new(format!("cannot create an eventfd: {e}")))
}

/// A failed read is ignored: another thread may have reset the event.
pub fn take(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}
