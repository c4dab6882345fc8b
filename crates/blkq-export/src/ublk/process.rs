//! Prepares a process to serve a block device that other processes and the kernel itself use. Such a process
//! must not wait for memory that only a write to its own device would free, must not be killed for lack of
//! memory before the users of the device, and must not keep mounts of its own device alive.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use blkq::text::unescape_octal;
use blkq::{Error, ErrorKind};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};
use rustix::process::{configure_io_flusher_behavior, is_io_flusher};
use rustix::thread::{UnshareFlags, unshare_unsafe};

const OOM_SCORE_ADJ: &str = "-1000";
/// The process needs these mounts, and the mounts below them, later.
const SYSTEM: [&str; 2] = ["/dev", "/proc"];
/// The process needs this mount, but not the mounts below it, for the settings of the block device.
const SETTINGS: &str = "/sys";

/// Prepares this process, before it starts threads; later threads inherit the preparation. Keeps only the
/// mounts that the paths `kept` are on. Does nothing for users other than root.
///
/// # Errors
/// The error of the step that failed.
pub fn prepare(kept: &[PathBuf]) -> Result<(), Error> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    configure_io_flusher_behavior(true).map_err(failed("PR_SET_IO_FLUSHER"))?;
    if !is_io_flusher().map_err(failed("PR_GET_IO_FLUSHER"))? {
        let message = "cannot serve a block device: PR_SET_IO_FLUSHER has no effect";
        return Err(Error::new(ErrorKind::System, message));
    }
    fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ).map_err(failed("/proc/self/oom_score_adj"))?;
    leave_mounts(kept)
}

fn failed<E: Into<io::Error>>(step: &'static str) -> impl FnOnce(E) -> Error {
    move |e| Error::system(format!("cannot serve a block device: {step}"), e)
}

/// Enters a mount namespace with only the needed mounts. In a shared one, the exit of this process could
/// unmount a file system on its own device, and wait for itself for ever. A mount kept without need would
/// stay mounted when another process unmounts it.
fn leave_mounts(kept: &[PathBuf]) -> Result<(), Error> {
    // SAFETY: there are no other threads that could rely on the shared namespace, and open files stay open.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(failed("cannot create a mount namespace"))?;
    let propagation = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", propagation).map_err(failed("cannot create a mount namespace"))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(failed("/proc/self/mountinfo"))?;
    // mountinfo shows paths without symbolic links.
    let real = |path: &PathBuf| match (fs::canonicalize(path), path.parent().map(fs::canonicalize)) {
        (Ok(real), _) | (Err(_), Some(Ok(real))) => real,
        _ => path.clone(),
    };
    let kept: Vec<PathBuf> = kept.iter().map(real).collect();
    for point in unneeded(&mounts, &kept) {
        // If this fails, the mount is hidden under another mount, and keeps no path busy.
        let _ = unmount(&point, UnmountFlags::DETACH);
    }
    Ok(())
}

/// The mount points of `mountinfo` (proc_pid_mountinfo(5)) that neither the system nor a path of `kept` is
/// on, in reverse order, because mounts on top of others come later.
fn unneeded(mountinfo: &str, kept: &[PathBuf]) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| Some(unescape_octal(line.split(' ').nth(4)?)));
    let needed = |point: &Path| {
        let system = SYSTEM.iter().any(|path| point.starts_with(path)) || point == Path::new(SETTINGS);
        system || kept.iter().any(|path| path.starts_with(point))
    };
    let mut points: Vec<PathBuf> =
        points.filter(|point| !needed(point) && *point != Path::new("/")).collect();
    points.reverse();
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_mounts_that_are_needed_are_kept() {
        let mountinfo = "\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:5 / /proc rw - proc proc rw
23 21 0:6 / /dev rw - devtmpfs dev rw
24 23 0:7 / /dev/pts rw - devpts devpts rw
25 21 0:8 / /run rw - tmpfs tmpfs rw
29 21 0:10 / /sys rw - sysfs sysfs rw
30 29 0:11 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
26 25 0:9 / /run/user/1000 rw - tmpfs tmpfs rw
27 21 8:2 / /mnt/my\\040disk rw - ext4 /dev/sdb1 rw
28 27 8:3 / /mnt/my\\040disk/inner rw - ext4 /dev/sdc1 rw
";
        let unneeded = unneeded(mountinfo, &["/run/blkq".into(), "/mnt/other/socket".into()]);
        let expected =
            ["/mnt/my disk/inner", "/mnt/my disk", "/run/user/1000", "/sys/fs/cgroup"].map(PathBuf::from);
        assert_eq!(unneeded, expected);
    }
}
