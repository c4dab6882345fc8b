//! Locks on the served bytes of an image, of the open file description: they are released
//! with it, so a killed process leaves none behind.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{Error, ErrorKind};

/// All bytes that a file may ever have.
pub(crate) const WHOLE_FILE: Range<u64> = 0..1 << 62;

/// The access that others keep to the bytes meanwhile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockKind {
    /// Nothing: a writer's.
    Exclusive,
    /// Lock them in the same way: a reader's, or a writer's that shares.
    Shared,
}

impl LockKind {
    pub fn of(read_only: bool, shared: bool) -> LockKind {
        if read_only || shared { LockKind::Shared } else { LockKind::Exclusive }
    }
}

/// Locks `range` of `file`, or turns the lock it has there into one of `kind`. Returns a
/// warning if the file system has no locks and `shared` allows to do without.
///
/// # Errors
/// [`ErrorKind::Busy`] if another process' lock forbids it, [`ErrorKind::Unsupported`] if the
/// file system has no locks.
pub(crate) fn acquire(
    file: &File,
    path: &Path,
    range: &Range<u64>,
    kind: LockKind,
    shared: bool,
) -> Result<Option<String>, Error> {
    let Err(error) = lock(file, range, kind, shared) else { return Ok(None) };
    let path = path.display();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => {
            let part = match range {
                range if *range == WHOLE_FILE => "it is".to_owned(),
                Range { start, end } => format!("bytes {start} to {end} are"),
            };
            Err(Error::new(ErrorKind::Busy, format!("{path} is in use: {part} attached elsewhere")))
        }
        _ if shared => Ok(Some(format!("{path} cannot be locked ({error}): nothing keeps others from it"))),
        _ => {
            let message = format!(
                "{path} cannot be locked ({error}), so others could use it; if none does, open it shared"
            );
            Err(Error::new(ErrorKind::Unsupported, message))
        }
    }
}

/// QEMU's own locks on an image (its file-posix.c): byte 100 + n: a process uses
/// permission n, byte 200 + n: a process does not share it; 0 is consistent read, 1 write.
const QEMU_BYTES: Range<u64> = 100..300;
const QEMU_READS: u64 = 100;
const QEMU_WRITES: u64 = 101;
const QEMU_KEEPS_WRITERS_OUT: u64 = 201;

/// A writer locks all of the range. A reader leaves QEMU's bytes alone, but for those that mean
/// in QEMU's terms that it reads, and that nobody is to write: so QEMU may read too.
fn lock(file: &File, range: &Range<u64>, kind: LockKind, shared: bool) -> io::Result<()> {
    if kind == LockKind::Exclusive {
        return set(file, range, libc::F_WRLCK);
    }
    set(file, range, libc::F_RDLCK)?;
    set(file, &(range.start.max(QEMU_BYTES.start)..range.end.min(QEMU_BYTES.end)), libc::F_UNLCK)?;
    if shared || range.start > QEMU_WRITES || range.end <= QEMU_KEEPS_WRITERS_OUT {
        return Ok(());
    }
    if is_locked(file, QEMU_WRITES)? {
        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
    }
    for byte in [QEMU_READS, QEMU_KEEPS_WRITERS_OUT] {
        set(file, &(byte..byte + 1), libc::F_RDLCK)?;
    }
    Ok(())
}

/// Whether another open file has any lock on the byte.
fn is_locked(file: &File, byte: u64) -> io::Result<bool> {
    let mut lock = flock(&(byte..byte + 1), libc::F_WRLCK)?;
    // SAFETY: the descriptor is open, the structure lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        0 => Ok(i32::from(lock.l_type) != libc::F_UNLCK),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives up the lock on `range`.
pub(crate) fn release(file: &File, range: &Range<u64>) {
    // A locked range can be unlocked; if not, closing the file does it.
    let _ = set(file, range, libc::F_UNLCK);
}

fn set(file: &File, range: &Range<u64>, l_type: libc::c_int) -> io::Result<()> {
    if range.is_empty() {
        // A length of 0 would mean: to the end of all files.
        return Ok(());
    }
    let lock = flock(range, l_type)?;
    // SAFETY: the descriptor is open, the structure lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn flock(range: &Range<u64>, l_type: libc::c_int) -> io::Result<libc::flock> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
    Ok(libc::flock {
        l_type: l_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: range.start.try_into().map_err(too_large)?,
        l_len: (range.end - range.start).try_into().map_err(too_large)?,
        l_pid: 0,
    })
}
