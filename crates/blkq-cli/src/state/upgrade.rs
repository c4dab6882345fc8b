//! The right to exchange the daemon of a device.

use std::fs::{File, OpenOptions};
use std::io;

use super::StateDir;
use crate::failure::{Failure, Outcome};
use crate::record_lock::lock_byte;

impl StateDir {
    /// Takes the right to have another daemon serve `name`, until what it returns is dropped, or this process exits:
    /// a lock on the first byte of `NAME.lock`, which the daemons lock otherwise. `None` if there is no such device.
    ///
    /// # Errors
    /// If another process has it, or the file cannot be opened.
    pub fn lock_upgrade(&self, name: &str) -> Outcome<Option<File>> {
        let path = self.file(name, ".lock");
        let failure = |e: io::Error| Failure::new(format!("lock {}: {e}", path.display()));
        let file = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failure(e)),
        };
        match lock_byte(&file, 0) {
            Ok(()) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(Failure::new("another blkq upgrade of it is at work; try again when that has returned"))
            }
            Err(e) => Err(failure(e)),
        }
    }
}
