//! The memory that a daemon may register with its engines' rings.

use std::path::{Path, PathBuf};

use blkq_export::vhost_user::RegisterMemory;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// Where controllers of memory are mounted, and what their limit is called (cgroups(7)): of version 2,
/// alone and beside version 1, and of version 1.
const CONTROLLERS: [(&str, &str, &str); 3] = [
    ("", "/sys/fs/cgroup", "memory.max"),
    ("", "/sys/fs/cgroup/unified", "memory.max"),
    ("memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
];

/// The limits of this process, whose engines have its capabilities unless `sandbox`. Asked before it is
/// confined.
pub(super) fn memory_limits(sandbox: bool) -> RegisterMemory {
    let is_privileged =
        !sandbox && capabilities(None).is_ok_and(|has| has.effective.contains(CapabilitySet::IPC_LOCK));
    let locked_max = getrlimit(Resource::Memlock).current.filter(|_| !is_privileged);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    RegisterMemory { locked_max, memory_max: cgroup_max(&groups, read) }
}

/// The least limit of the groups of `groups`, as /proc/self/cgroup lists them, and of those that they are
/// in.
fn cgroup_max(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        for (controller, mount, file) in CONTROLLERS {
            if !controllers.split(',').any(|one| one == controller) {
                continue;
            }
            let mut directory = PathBuf::from(mount);
            directory.push(group.trim_start_matches('/'));
            let limits = directory
                .ancestors()
                .take_while(|directory| directory.starts_with(mount))
                // "max" is none.
                .filter_map(|directory| read(&directory.join(file))?.trim().parse::<u64>().ok());
            least = limits.chain(least).min();
        }
    }
    // Version 1 has a number for no limit: all pages that there can be.
    least.filter(|bytes| *bytes < i64::MAX as u64 >> 12 << 12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_limit_of_a_group_and_those_above_counts() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/a/b/memory.max" => "max\n",
                "/sys/fs/cgroup/a/memory.max" => "8192\n",
                "/sys/fs/cgroup/memory/c/memory.limit_in_bytes" => "9223372036854771712\n",
                "/sys/fs/cgroup/memory/d/memory.limit_in_bytes" => "4096\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        assert_eq!(cgroup_max("0::/a/b\n", read), Some(8192));
        assert_eq!(cgroup_max("4:memory:/c\n1:cpu:/d\n0::/\n", read), None);
        assert_eq!(cgroup_max("4:cpu,memory:/d\n0::/a\n", read), Some(4096));
        assert_eq!(cgroup_max("nonsense\n", read), None);
    }
}
