//! Describes the machine on which `blkq bench` runs.

use std::path::Path;

use rustix::fs::{AtFlags, StatxFlags};

use crate::process::{bytes_of, value_of};
use crate::result::Machine;

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

impl Machine {
    pub fn describe() -> Machine {
        let cpuinfo = read("/proc/cpuinfo");
        Machine {
            processor: value_of(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            processors: std::thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: bytes_of(&read("/proc/meminfo"), "MemTotal").unwrap_or(0),
            kernel: read("/proc/sys/kernel/osrelease"),
            virtual_machine: value_of(&cpuinfo, "flags")
                .is_some_and(|f| f.split(' ').any(|f| f == "hypervisor")),
            file_system: None,
            clock_source: read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
        }
    }
}

/// Type and source of the file system that `path` is on, such as `ext4 /dev/vda1`.
pub fn file_system(path: &Path) -> Option<String> {
    let flags = (AtFlags::empty(), StatxFlags::MNT_ID);
    let id = rustix::fs::statx(rustix::fs::CWD, path, flags.0, flags.1).ok()?.stx_mnt_id.to_string();
    // ID parent device root point options [optional...] - type source options (proc(5)).
    let mounts = read("/proc/self/mountinfo");
    let mount = mounts.lines().find(|line| line.split(' ').next() == Some(id.as_str()))?;
    let (_, system) = mount.split_once(" - ")?;
    let mut words = system.split(' ');
    Some(format!("{} {}", words.next()?, words.next()?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_describes_itself() {
        let machine = super::Machine::describe();
        assert!(machine.processors > 0 && machine.memory_bytes > 0 && !machine.kernel.is_empty());
    }

    #[test]
    fn the_file_system_is_read_from_the_mount_of_the_path() {
        assert_eq!(super::file_system("/proc/self/status".as_ref()).as_deref(), Some("proc proc"));
        assert!(super::file_system("/proc/none".as_ref()).is_none());
    }
}
