//! Which descriptors a daemon begins with, and how many clients there may be, so that some are left
//! for commands: a daemon whose clients have used up all could not be detached.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};

/// Kept back: for the control socket's clients, log and state files, and the sockets that are
/// taken only to be turned away.
const KEPT: usize = 32;

/// Has the program of `command` inherit standard input, output and error only: another descriptor
/// would keep a caller's lock locked and its pipe open for as long as the program runs.
pub fn inherit_standard_only(command: &mut Command) -> &mut Command {
    const ON_EXEC: libc::c_uint = libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: one system call between fork and exec, which allocates nothing.
    unsafe { command.pre_exec(|| close_range(libc::STDERR_FILENO as libc::c_uint + 1, ON_EXEC)) }
}

/// Closes all descriptors from `first` on.
///
/// # Errors
/// The error of the kernel.
///
/// # Safety
/// Nothing in this process owns one of them.
pub unsafe fn close_from(first: u32) -> io::Result<()> {
    close_range(first, 0)
}

fn close_range(first: libc::c_uint, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: no memory is involved; whose descriptors these are is the callers' concern.
    match unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes those that are kept back, until they are dropped: what then takes all that there are leaves them.
pub fn reserve() -> Vec<OwnedFd> {
    std::iter::repeat_with(|| eventfd(0, EventfdFlags::CLOEXEC)).take(KEPT).map_while(Result::ok).collect()
}

/// Clients that each of `servers` may have, of the `asked` ones; at least one.
pub fn clients_max(asked: usize, servers: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    // Descriptors that cannot be counted are not there.
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
