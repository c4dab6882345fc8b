use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkq::Driver;
use blkq_protocol::failure::{Failure, Outcome};

use crate::device::autoclear::new_event;

/// Nonblocking eventfds for which the daemon of a device polls.
pub(super) struct Events {
    /// The kernel rejected a command of the block device's queues.
    pub(super) failure: Arc<OwnedFd>,
    /// The size of the image may have changed.
    pub(super) size: Arc<OwnedFd>,
    /// A client was rejected or disconnected.
    pub(super) rejection: Arc<OwnedFd>,
}

impl Events {
    /// Fails if no file descriptor is left.
    pub(super) fn new(driver: &dyn Driver) -> Outcome<Events> {
        let size = match driver.size_event() {
            Some(event) => {
                let cloned = event.try_clone_to_owned();
                Arc::new(cloned.map_err(|e| Failure::new(format!("cannot duplicate an eventfd: {e}")))?)
            }
            None => new_event()?,
        };
        Ok(Events { failure: new_event()?, size, rejection: new_event()? })
    }
}

/// A failed read is ignored: another thread may have reset the event.
pub(super) fn take(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}
