//! How many clients there may be, so that descriptors are left for commands: a daemon that its
//! clients have used up could not be detached.

use rustix::process::{Resource, getrlimit};

/// Kept back: for the control socket's clients, log and state files, and the sockets that are
/// taken only to be turned away.
const KEPT: usize = 32;

/// Clients that each of `servers` may have, of the `asked` ones; at least one.
pub fn clients_max(asked: usize, servers: usize) -> usize {
    let limit = getrlimit(Resource::Nofile).current.map_or(usize::MAX, |limit| limit as usize);
    // What cannot be counted is not there.
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
