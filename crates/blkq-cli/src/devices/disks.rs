//! Finds the disks on which a file system is, through sysfs.

use std::fs;
use std::path::{Path, PathBuf};

pub const SYSFS: &str = "/sys";
/// Maximum nesting of devices. Real stacks are much less deep.
const DEPTH_MAX: u32 = 16;

/// The names of the disks under the block device with these major and minor numbers, starting with its own.
/// For a partition this is its disk; for a mapped device, an array or a loop device, the underlying devices
/// follow. Empty if sysfs has no such device, for example for file systems with anonymous device numbers.
pub fn disks_under(sysfs: &Path, (major, minor): (u32, u32)) -> Vec<String> {
    let mut names = Vec::new();
    if let Ok(path) = sysfs.join(format!("dev/block/{major}:{minor}")).canonicalize() {
        add(&path, &mut names, DEPTH_MAX);
    }
    names
}

fn add(device: &Path, names: &mut Vec<String>, depth: u32) {
    let disk: PathBuf = match device.parent() {
        Some(disk) if device.join("partition").exists() => disk.to_owned(),
        _ => device.to_owned(),
    };
    let name = disk.file_name().map(|name| name.to_string_lossy().into_owned());
    names.extend(name.filter(|name| !names.contains(name)));
    if depth == 0 {
        return;
    }
    for slave in fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten() {
        if let Ok(slave) = slave.path().canonicalize() {
            add(&slave, names, depth - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_mapped_device_is_on_the_disk_of_its_partition() {
        let root = std::env::temp_dir().join(format!("blkq-disks-{}", std::process::id()));
        let block = root.join("devices/block");
        fs::create_dir_all(block.join("ublkb0/ublkb0p1")).unwrap();
        fs::write(block.join("ublkb0/ublkb0p1/partition"), "1\n").unwrap();
        fs::create_dir_all(block.join("dm-0/slaves")).unwrap();
        symlink(block.join("ublkb0/ublkb0p1"), block.join("dm-0/slaves/ublkb0p1")).unwrap();
        fs::create_dir_all(root.join("dev/block")).unwrap();
        symlink(block.join("dm-0"), root.join("dev/block/253:0")).unwrap();
        assert_eq!(disks_under(&root, (253, 0)), ["dm-0", "ublkb0"]);
        assert_eq!(disks_under(&root, (0, 40)), Vec::<String>::new());
        fs::remove_dir_all(root).unwrap();
    }
}
