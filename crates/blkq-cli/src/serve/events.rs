//! The events of a device that its daemon polls for.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use blkq::Driver;

use crate::autoclear::new_event;
use crate::failure::{Failure, Outcome};

/// Eventfds that do not block, readable when something is to be done for the device.
pub(super) struct Events {
    /// The kernel rejected a command of the block device's queues.
    pub(super) failure: Arc<OwnedFd>,
    /// The image may have changed its size by itself.
    pub(super) size: Arc<OwnedFd>,
    /// A client was turned away.
    pub(super) rejection: Arc<OwnedFd>,
}

impl Events {
    /// Those of a device whose image `driver` serves.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub(super) fn new(driver: &dyn Driver) -> Outcome<Events> {
        let size = match driver.size_event() {
            Some(event) => {
                let cloned = event.try_clone_to_owned();
                Arc::new(cloned.map_err(|e| Failure::new(format!("an eventfd: {e}")))?)
            }
            None => new_event()?,
        };
        Ok(Events { failure: new_event()?, size, rejection: new_event()? })
    }
}

/// Makes an event ready for the next time. Empty, another thread has read it.
pub(super) fn take(event: impl AsFd) {
    let _ = rustix::io::read(event, &mut [0; 8]);
}
