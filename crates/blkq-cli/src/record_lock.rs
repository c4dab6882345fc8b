//! Locks on bytes of a file that belong to the open file (`F_OFD_SETLK` of fcntl(2)): the kernel releases them when
//! that is closed, however its process exits. Closing another descriptor of the same file releases nothing, as it
//! would with locks of the process. They have nothing to do with those of flock(2).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks a byte, which need not be there, for this open file alone. It must be open for writing.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another open file has it.
pub fn lock_byte(file: &File, byte: usize) -> io::Result<()> {
    // SAFETY: the descriptor is open, the structure lives through the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &of_byte(byte)) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether another open file has locked the byte.
pub fn is_byte_locked(file: &File, byte: usize) -> bool {
    let mut lock = of_byte(byte);
    // SAFETY: the descriptor is open, the structure lives through the call.
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
