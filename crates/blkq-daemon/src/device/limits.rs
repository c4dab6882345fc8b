//! The limits of a daemon: the memory that it may register with its engines' io_uring instances, and the clients that it
//! accepts. Clients must not use up all file descriptors, because the device could then no longer be detached.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use blkq_export::vhost_user::RegistrationLimits;
use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// A memory controller, of version 1 or 2 (cgroups(7)).
struct Controller {
    name: &'static str,
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// The line of `memory.stat` with the bytes of the page cache and of memory files.
    files: &'static str,
}

/// Version 2, alone or beside version 1, and version 1.
const CONTROLLERS: [Controller; 3] =
    [version_2("/sys/fs/cgroup"), version_2("/sys/fs/cgroup/unified"), VERSION_1];

const fn version_2(mount: &'static str) -> Controller {
    Controller { name: "", mount, limit: "memory.max", usage: "memory.current", files: "file" }
}

const VERSION_1: Controller = Controller {
    name: "memory",
    mount: "/sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    files: "total_cache",
};

/// The value that version 1 reports if there is no limit: `PAGE_COUNTER_MAX` in bytes.
const NO_LIMIT: u64 = i64::MAX as u64 >> 12 << 12;

impl Controller {
    /// The bytes left until the limit of the group in `directory`. The page cache does not count as used: the
    /// kernel reclaims it. Memory files are in the same counter, so the memory of a guest that is already
    /// charged does not count either.
    fn left(&self, directory: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
        let number = |file: &str| read(&directory.join(file))?.trim().parse::<u64>().ok();
        // "max" in version 2 means that there is no limit.
        let limit = number(self.limit).filter(|bytes| *bytes < NO_LIMIT)?;
        let stat = read(&directory.join("memory.stat")).unwrap_or_default();
        let files = stat.lines().find_map(|line| line.strip_prefix(self.files)?.trim().parse().ok());
        let used = number(self.usage).unwrap_or(0).saturating_sub(files.unwrap_or(0));
        Some(limit.saturating_sub(used))
    }
}

/// Engines have the capabilities of this process unless `sandbox` is set. Must be called before the process
/// is confined, while it can still read these files.
pub(super) fn memory_limits(sandbox: bool) -> RegistrationLimits {
    let is_privileged =
        !sandbox && capabilities(None).is_ok_and(|has| has.effective.contains(CapabilitySet::IPC_LOCK));
    let locked_max = getrlimit(Resource::Memlock).current.filter(|_| !is_privileged);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    RegistrationLimits { locked_max, memory_left: cgroup_left(&groups, read) }
}

/// `groups` is the text of /proc/self/cgroup. Considers the ancestors of the groups, too.
fn cgroup_left(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(names), Some(group)) = (fields.next(), fields.next()) else { continue };
        for controller in CONTROLLERS.iter().filter(|it| names.split(',').any(|name| name == it.name)) {
            let mut directory = PathBuf::from(controller.mount);
            directory.push(group.trim_start_matches('/'));
            let within = directory.ancestors().take_while(|group| group.starts_with(controller.mount));
            least = within.filter_map(|group| controller.left(group, &read)).chain(least).min();
        }
    }
    least
}

/// Number of descriptors that clients do not get. They are for clients of the control socket, log and state
/// files, and sockets that are accepted only to be rejected.
const KEPT: usize = 32;

/// Occupies the reserved descriptors until the result is dropped, so that code which takes all free
/// descriptors leaves them.
pub(super) fn reserve() -> Vec<OwnedFd> {
    std::iter::repeat_with(|| eventfd(0, EventfdFlags::CLOEXEC)).take(KEPT).map_while(Result::ok).collect()
}

/// The number of clients that each of `servers` may accept: at most `asked`, at least one.
pub(super) fn clients_max(asked: usize, servers: usize) -> usize {
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

    #[test]
    fn the_smallest_rest_of_a_group_and_its_ancestors_counts() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/a/b/memory.max" => "max\n",
                "/sys/fs/cgroup/a/memory.max" => "8192\n",
                "/sys/fs/cgroup/memory/c/memory.limit_in_bytes" => "9223372036854771712\n",
                "/sys/fs/cgroup/memory/c/memory.usage_in_bytes" => "4096\n",
                "/sys/fs/cgroup/memory/d/memory.limit_in_bytes" => "4096\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(cgroup_left("0::/a/b\n", read), Some(8192));
        assert_eq!(cgroup_left("4:memory:/c\n1:cpu:/d\n0::/\n", read), None);
        assert_eq!(cgroup_left("4:cpu,memory:/d\n0::/a\n", read), Some(4096));
        assert_eq!(cgroup_left("nonsense\n", read), None);
    }

    #[test]
    fn used_memory_is_subtracted_but_not_the_page_cache() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                // The parent group has less left, because other groups use it.
                "/sys/fs/cgroup/a/b/memory.max" => "10000\n",
                "/sys/fs/cgroup/a/b/memory.current" => "1000\n",
                "/sys/fs/cgroup/a/memory.max" => "20000\n",
                "/sys/fs/cgroup/a/memory.current" => "19000\n",
                "/sys/fs/cgroup/a/memory.stat" => "anon 12000\nfile 7000\nfile_mapped 5\n",
                "/sys/fs/cgroup/full/memory.max" => "10000\n",
                "/sys/fs/cgroup/full/memory.current" => "10500\n",
                "/sys/fs/cgroup/memory/d/memory.limit_in_bytes" => "4096\n",
                "/sys/fs/cgroup/memory/d/memory.usage_in_bytes" => "4000\n",
                "/sys/fs/cgroup/memory/d/memory.stat" => "cache 0\ntotal_cache 1000\ntotal_rss 3000\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(cgroup_left("0::/a/b\n", read), Some(8000));
        assert_eq!(cgroup_left("0::/full\n", read), Some(0));
        assert_eq!(cgroup_left("4:memory:/d\n", read), Some(1096));
    }
}
