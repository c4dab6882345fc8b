//! The locks on bytes of `NAME.lock`. A process can find out whether they are held without acquiring them, unlike the
//! flock(2) lock on the file, which makes the claim exclusive also for older versions.

use std::fs::{File, OpenOptions};
use std::io;

use super::StateDir;
use crate::failure::{Failure, Outcome};
use crate::system::if_exists;
use crate::system::record_lock::{is_byte_locked, lock_byte};

/// The byte of `NAME.lock` that is locked while the device is being handed over.
const UPGRADE_BYTE: usize = 0;
/// The byte that is locked as well if only the next daemon may claim the name.
const RESERVED_BYTE: usize = 1;
/// The byte that is locked as long as the name is claimed. Older versions do not lock it.
pub(super) const OWNER_BYTE: usize = 2;

impl StateDir {
    /// Locks the device for a handover to another daemon, until the returned file is closed or this process
    /// exits. The lock is a record lock on a byte of `NAME.lock`; the daemons lock the whole file with
    /// flock(2), which is independent of it. If `is_reserved`, no new device can claim the name meanwhile,
    /// and no command removes the files of the last daemon. Returns `None` if there is no such device. Fails
    /// if another process holds the lock.
    pub fn lock_upgrade(&self, name: &str, is_reserved: bool) -> Outcome<Option<File>> {
        let path = self.file(name, ".lock");
        let failure = |e: io::Error| Failure::new(format!("cannot lock {}: {e}", path.display()));
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let Some(file) = if_exists(opened).map_err(failure)? else { return Ok(None) };
        let reserve = || if is_reserved { lock_byte(&file, RESERVED_BYTE) } else { Ok(()) };
        match lock_byte(&file, UPGRADE_BYTE).and_then(|()| reserve()) {
            Ok(()) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(Failure::new(
                "another `blkq upgrade` or `blkq recover` of this device is running; try again when it has returned",
            )),
            Err(e) => Err(failure(e)),
        }
    }

    pub(super) fn is_reserved(lock: &File) -> bool {
        is_byte_locked(lock, RESERVED_BYTE)
    }

    /// Whether another daemon is taking over the device `name`.
    pub fn is_handed_over(&self, name: &str) -> bool {
        let lock = File::open(self.file(name, ".lock"));
        lock.is_ok_and(|lock| is_byte_locked(&lock, UPGRADE_BYTE))
    }
}
