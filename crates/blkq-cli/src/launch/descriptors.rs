//! The file descriptors that a program inherits.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes `command` inherit only standard input, output and error. Any other descriptor would keep a lock or a
/// pipe of the caller open while the program runs.
pub fn inherit_standard_only(command: &mut Command) -> &mut Command {
    const ON_EXEC: libc::c_uint = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: between fork and exec, this makes one system call and allocates nothing.
    unsafe { command.pre_exec(|| close_range(libc::STDERR_FILENO as libc::c_uint + 1, ON_EXEC)) }
}

/// Closes all descriptors from `first` on.
///
/// # Safety
/// Nothing in this process may own one of these descriptors.
pub unsafe fn close_from(first: u32) -> io::Result<()> {
    close_range(first, 0)
}

fn close_range(first: libc::c_uint, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: the call accesses no memory; the callers are responsible for the descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
