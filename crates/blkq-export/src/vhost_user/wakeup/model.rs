//! Replaces the event under the model checkers, which cannot see system calls.
#![allow(missing_docs, reason = "as in the real module")]

use std::os::fd::{AsFd, BorrowedFd};

use blkq::Error;

use crate::sync::{Condvar, Mutex};

#[derive(Default)]
pub struct Wakeup {
    is_set: Mutex<bool>,
    set: Condvar,
}

impl Wakeup {
    pub fn new() -> Result<Wakeup, Error> {
        Ok(Wakeup::default())
    }

    pub fn wake(&self) {
        *self.is_set.lock().expect("no panic") = true;
        self.set.notify_one();
    }

    pub fn clear(&self) -> bool {
        std::mem::take(&mut *self.is_set.lock().expect("no panic"))
    }

    /// Waits until the event is set. Replaces poll(2).
    #[cfg(test)]
    pub fn wait(&self) {
        let mut is_set = self.is_set.lock().expect("no panic");
        while !*is_set {
            is_set = self.set.wait(is_set).expect("no panic");
        }
    }
}

impl AsFd for Wakeup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        unreachable!("no model polls descriptors")
    }
}
