//! How many clients a daemon accepts: clients must not use up all file descriptors, because the device could then
//! no longer be detached.

use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};

/// Number of descriptors that clients do not get. They are for clients of the control socket, log and state
/// files, and sockets that are accepted only to be rejected.
const KEPT: usize = 32;

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
