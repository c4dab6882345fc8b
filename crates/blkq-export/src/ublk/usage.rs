//! Detects users of a block device: claims (mounts, swap, device mapper), and open files in /proc.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use blkq::{Error, ErrorKind};

use super::child;

pub(super) fn busy(path: &str, why: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("{path} is in use: {why}; unmount or close the device first"))
}

pub(super) enum Use {
    Claimed,
    Open,
    Unused,
    Removed,
    /// The use cannot be determined now.
    Unknown,
}

/// Process names of udev: systemd's daemon and its workers, and eudev's daemon.
const UDEV: [&str; 3] = ["systemd-udevd", "(udev-worker)", "udevd"];

fn is_udev(command: &str) -> bool {
    UDEV.contains(&command)
}

fn open_exclusively(path: &str) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL | libc::O_NONBLOCK).open(path)
}

/// Whether a process other than this one and `server` has `path` open, except udev, which probes new devices.
pub(super) fn is_open(path: &str, server: u32) -> bool {
    opener(path, server, |command| !is_udev(command)).is_some()
}

/// [`Use::Claimed`] or [`Use::Unused`]. An attempt of another process to claim the device now fails.
pub(super) fn probe(path: &str) -> Use {
    match open_exclusively(path) {
        Ok(_) => Use::Unused,
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Use::Claimed,
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::ENODEV)) => Use::Removed,
        Err(_) => Use::Unknown,
    }
}

/// Claims `path`, so that no other process can mount it. Fails with [`ErrorKind::Busy`] if it is in use, as
/// far as this process can see.
pub(super) fn claim(path: &str) -> Result<File, Error> {
    let claimed = open_exclusively(path).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => busy(path, "the device or one of its partitions is mounted or claimed"),
        _ => Error::system(format!("cannot open {path}"), e),
    })?;
    check_unopened(path, std::process::id()).map(|()| claimed)
}

/// Fails with [`ErrorKind::Busy`] if a process other than this one and `server` has `path` open, as far as
/// this user may see. A confined daemon sees no other processes, so the command that stops the daemon calls
/// this before, and passes the daemon, which may have the device open, as `server`.
pub fn check_unopened(path: &str, server: u32) -> Result<(), Error> {
    match opener(path, server, |_| true) {
        Some(process) => Err(busy(path, &format!("process {process} has it open"))),
        None => Ok(()),
    }
}

/// Finds a process with the device or a partition open whose name `counts` accepts, and returns its ID and
/// name. Skips this process, `server` and its [`child::IDLE_NAME`].
fn opener(path: &str, server: u32, counts: fn(&str) -> bool) -> Option<String> {
    let known = [std::process::id().to_string(), server.to_string()];
    let processes = fs::read_dir("/proc").ok()?.flatten();
    for process in processes {
        let name = process.file_name();
        let pid = name
            .to_str()
            .filter(|name| name.bytes().all(|b| b.is_ascii_digit()) && !known.iter().any(|pid| pid == name));
        // Skips processes of other users, and processes that have just exited.
        let (Some(pid), Ok(fds)) = (pid, fs::read_dir(process.path().join("fd"))) else { continue };
        if !fds.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|target| is_part_of(&target, path))) {
            continue;
        }
        let command = name_of(pid);
        // Also skips the watch of a killed server, whose parent is no blkq process: it may still write back,
        // for the next server.
        let is_of = |parent| parent == server || name_of(parent) != "blkq";
        let is_watch =
            command.as_bytes() == child::IDLE_NAME.to_bytes() && parent(&process.path()).is_some_and(is_of);
        if counts(&command) && !is_watch {
            return Some(format!("{pid} ({command})"));
        }
    }
    None
}

/// The name of a process; empty if the process has exited.
fn name_of(process: impl Display) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    name.trim_end_matches('\n').to_owned()
}

fn parent(path: &Path) -> Option<u32> {
    let status = fs::read_to_string(path.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

/// Whether `target` is the device `path` (`/dev/ublkb1`) or one of its partitions (`/dev/ublkb1p2`).
pub(super) fn is_part_of(target: &Path, path: &str) -> bool {
    let Some(rest) = target.to_str().and_then(|target| target.strip_prefix(path)) else { return false };
    rest.is_empty() || rest.strip_prefix('p').is_some_and(|part| part.bytes().all(|b| b.is_ascii_digit()))
}

/// Makes the kernel write back cached data of the block device `path`, and returns when that is done. If the
/// device is claimed, a file system may be on it, and this writes back all file systems.
pub(super) fn write_back(path: &str) {
    // The claim is released immediately, so that a command that stops the device can claim it while this
    // hangs. The last close of a device writes back, too, and would hang before the claim is released: so
    // `device` stays open meanwhile.
    let open = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    match (open, open_exclusively(path)) {
        (Ok(device), Ok(claimed)) => {
            drop(claimed);
            let _ = device.sync_all();
        }
        _ => rustix::fs::sync(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_part_of_their_device_and_of_no_other() {
        let part = |target: &str| is_part_of(Path::new(target), "/dev/ublkb1");
        assert!(part("/dev/ublkb1") && part("/dev/ublkb1p1") && part("/dev/ublkb1p12"));
        assert!(!part("/dev/ublkb10") && !part("/dev/ublkb1.img") && !part("/dev/ublkb") && !part("/x"));
    }

    #[test]
    fn only_udev_is_taken_for_udev() {
        for name in ["systemd-udevd", "(udev-worker)", "udevd"] {
            assert!(is_udev(name), "{name}");
        }
        for name in ["", "udev", "udevadm", "my-udev-backup", "udev-worker", "systemd-udevd2", "(udev-worker"]
        {
            assert!(!is_udev(name), "{name}");
        }
    }

    #[test]
    fn a_process_that_has_a_file_open_is_found() {
        let path = std::env::temp_dir().join(format!("blkq-usage-{}", std::process::id()));
        fs::write(&path, "").unwrap();
        let path_text = path.to_str().unwrap();
        let this = std::process::id();
        assert_eq!(opener(path_text, this, |_| true), None);
        let mut child =
            std::process::Command::new("sleep").arg("60").stdin(File::open(&path).unwrap()).spawn().unwrap();
        let found = opener(path_text, this, |_| true);
        let server = opener(path_text, child.id(), |_| true);
        let other = opener(path_text, this, |command| command != "sleep");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, Some(format!("{} (sleep)", child.id())));
        assert_eq!((server, other), (None, None));
        fs::remove_file(&path).unwrap();
    }
}
