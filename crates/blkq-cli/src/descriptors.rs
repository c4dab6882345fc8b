//! File descriptors of a daemon: which ones it starts with, and how many clients it accepts. Clients must not
//! use up all descriptors, because the device could then no longer be detached.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};

/// Number of descriptors that clients do not get. They are for clients of the control socket, log and state
/// files, and sockets that are accepted only to be rejected.
const KEPT: usize = 32;

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

/// Occupies the reserved descriptors until the result is dropped, so that code which takes all free
/// descriptors leaves them.
pub fn reserve() -> Vec<OwnedFd> {
    std::iter::repeat_with(|| eventfd(0, EventfdFlags::CLOEXEC)).take(KEPT).map_while(Result::ok).collect()
}

/// The number of clients that each of `servers` may accept: at most `asked`, at least one.
pub fn clients_max(asked: usize, servers: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    // If the open descriptors cannot be counted, none is assumed.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    share(asked, servers, limit.saturating_sub(open))
}

fn share(asked: usize, servers: usize, free: usize) -> usize {
    asked.min(free.saturating_sub(KEPT) / servers.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_descriptors_for_commands() {
        assert_eq!(share(64, 1, usize::MAX), 64);
        assert_eq!(share(64, 1, 1000), 64);
        assert_eq!(share(64, 1, KEPT + 10), 10);
        assert_eq!(share(64, 3, KEPT + 10), 3);
        assert_eq!((share(64, 1, KEPT), share(64, 0, 3)), (1, 1));
        assert!(clients_max(64, 1) >= 1);
    }
}
