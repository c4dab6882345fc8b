//! Locks on bytes of a file that belong to the open file description (`F_OFD_SETLK` of fcntl(2)). The kernel
//! releases them when the last descriptor is closed, however the process exits. Unlike with POSIX locks,
//! closing another descriptor of the same file releases nothing. They are independent of flock(2) locks.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks a byte, which may be beyond the end of the file. The file must be open for writing. Fails with
/// [`io::ErrorKind::WouldBlock`] if the byte is locked through another open file description.
pub fn lock_byte(file: &File, byte: usize) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the structure outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &of_byte(byte)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the byte is locked through another open file description.
pub fn is_byte_locked(file: &File, byte: usize) -> bool {
    let mut lock = of_byte(byte);
    // SAFETY: the descriptor is open, and the structure outlives the call.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

fn of_byte(byte: usize) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}
