//! The event that wakes the control thread of a device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use blkq::Error;
use rustix::event::{EventfdFlags, eventfd};

use crate::reports::signal;

pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// Creates the event, which is not set, or returns the error of eventfd(2).
    pub fn new() -> Result<Wakeup, Error> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Wakeup)
            .map_err(|errno| Error::system("vhost-user: cannot create an eventfd", errno))
    }

    /// Wakes the control thread, now or when it next waits. The reason must have been stored before.
    pub fn wake(&self) {
        signal(&self.0);
    }

    /// Clears the event, before the reasons are read. Returns whether it was set.
    pub fn clear(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
