//! The right to exchange the daemon of a device.

use std::fs::{File, OpenOptions};
use std::io;

use super::StateDir;
use crate::failure::{Failure, Outcome};
use crate::record_lock::{is_byte_locked, lock_byte};

/// The byte of `NAME.lock` that is locked while the device is handed over.
const UPGRADE_BYTE: usize = 0;
/// The byte that is locked meanwhile if only the next daemon may take the name.
const RESERVED_BYTE: usize = 1;

impl StateDir {
    /// Takes the right to have another daemon serve `name`, until what it returns is dropped, or this process exits:
    /// a lock on the first byte of `NAME.lock`, which the daemons lock otherwise. If the name `is_reserved`, no new device gets
    /// it meanwhile, and nobody removes what the last daemon has left. `None` if there is no such device.
    ///
    /// # Errors
    /// If another process has it, or the file cannot be opened.
    pub fn lock_upgrade(&self, name: &str, is_reserved: bool) -> Outcome<Option<File>> {
        let path = self.file(name, ".lock");
        let failure = |e: io::Error| Failure::new(format!("lock {}: {e}", path.display()));
        let file = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failure(e)),
        };
        let reserve = || if is_reserved { lock_byte(&file, RESERVED_BYTE) } else { Ok(()) };
        match lock_byte(&file, UPGRADE_BYTE).and_then(|()| reserve()) {
            Ok(()) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(Failure::new("another blkq upgrade of it is at work; try again when that has returned"))
            }
            Err(e) => Err(failure(e)),
        }
    }

    /// Whether only the next daemon of the device may take the name whose lock file `lock` is.
    pub(super) fn is_reserved(lock: &File) -> bool {
        is_byte_locked(lock, RESERVED_BYTE)
    }

    /// Whether the device `name` is being handed over to another daemon.
    pub fn is_handed_over(&self, name: &str) -> bool {
        let lock = File::open(self.file(name, ".lock"));
        lock.is_ok_and(|lock| is_byte_locked(&lock, UPGRADE_BYTE))
    }
}
