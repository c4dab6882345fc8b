//! Finds who uses an image that is in use: devices of the same state directory, or the processes that hold
//! locks on it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use blkq_protocol::info::{FileId, StateFile, Window};
use blkq_protocol::state::{Claim, Found, ProcessState, StateDir};

pub struct Holders {
    /// Names the devices of the same state directory or, if there are none, the processes: "by the device a".
    pub text: String,
    /// Whether all holders could share the image (`--shared`), as far as is known. The files of a qcow2 image
    /// cannot be shared.
    pub can_share: bool,
}

/// Finds the processes that hold locks on these bytes of the image at `path`, as far as this user can see.
pub fn holders_of(claim: &Claim, path: &Path, window: Window) -> Option<Holders> {
    let file = FileId::of(path);
    let holders = holders(numbers("/proc"), path, window);
    let dir = claim.dir();
    let states = states(dir).into_iter().filter(|state| match holders.is_empty() {
        // The kernel hides the locks of other users' processes. Then a recorded device that has a daemon is assumed to
        // be the holder.
        true => {
            file.is_some()
                && state.name != claim.name()
                && FileId::of(state.image_path()) == file
                && matches!(dir.inspect(&state.name), Ok(Found::Busy(_)))
        }
        false => holders.contains(&state.pid),
    });
    let (mut names, mut can_share) = (Vec::new(), true);
    for state in states {
        let options = state.attach_options.and_then(|record| record.read().ok());
        can_share &= options.is_none_or(|options| !options.is_qcow2());
        names.push(state.name);
    }
    let process = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("process {pid} ({})", name.trim())
    };
    let text = match (&names[..], &holders[..]) {
        ([], []) => return None,
        ([], holders) => holders.iter().map(process).collect::<Vec<_>>().join(", "),
        ([name], _) => format!("the device {name}"),
        (names, _) => format!("the devices {}", names.join(", ")),
    };
    Some(Holders { text: format!("by {text}"), can_share })
}

/// The daemons are not asked: one that is starting may be the process that calls this.
fn states(dir: &StateDir) -> Vec<StateFile> {
    dir.names().unwrap_or_default().iter().filter_map(|name| dir.read_state(name)).collect()
}

/// Whether a process holds locks on these bytes of the image at `path`, as far as this user can see.
pub fn has_holder(path: &Path, window: Window) -> bool {
    !holders(numbers("/proc"), path, window).is_empty()
}

pub fn daemons(dir: &StateDir) -> Vec<u32> {
    states(dir).iter().map(|state| state.pid).collect()
}

/// Whether one of `processes` is running and has locked these bytes of the image at `path`, as far as this user can
/// see. A killed process is not a running one: the kernel releases its locks soon.
pub fn has_running_holder(processes: Vec<u32>, path: &Path, window: Window) -> bool {
    holders(processes, path, window).iter().any(|pid| ProcessState::of(*pid) != ProcessState::Dying)
}

/// Whether the block device at `path` is mounted, or part of another block device.
pub fn is_mounted(path: &Path) -> bool {
    let Ok(metadata) = fs::metadata(path) else { return false };
    if !metadata.file_type().is_block_device() {
        return false;
    }
    let (major, minor) = (rustix::fs::major(metadata.rdev()), rustix::fs::minor(metadata.rdev()));
    let number = format!("{major}:{minor}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let holders = fs::read_dir(format!("/sys/dev/block/{number}/holders"));
    mounts.lines().any(|mount| mount.split(' ').nth(2) == Some(&number))
        || holders.is_ok_and(|mut holders| holders.next().is_some())
}

/// Returns each of `processes`, except this one, that holds a lock on bytes of `window` of the file. Sorted. The fdinfo
/// of each open file is read, because nothing else names the owner: the locks belong to open file descriptions, for
/// which neither `F_OFD_GETLK` nor /proc/locks reports a process.
fn holders(mut processes: Vec<u32>, path: &Path, window: Window) -> Vec<u32> {
    let Some(file) = FileId::of(path) else { return Vec::new() };
    let (path, own) = (path.canonicalize().unwrap_or_default(), std::process::id());
    let has_lock = |pid: u32| {
        numbers(&format!("/proc/{pid}/fdinfo")).into_iter().any(|fd| {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
            let locks = info.lines().filter_map(Lock::parse);
            let mut locks = locks.filter(|lock| lock.inode == file.inode && lock.is_use_of(window));
            // On some file systems, for example btrfs and overlayfs, stat(2) reports another device number
            // than the lock does. There the path decides.
            let is_path = || fs::read_link(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|link| link == path);
            locks.any(|lock| lock.device == file.device || is_path())
        })
    };
    processes.retain(|pid| *pid != own && has_lock(*pid));
    processes.sort_unstable();
    processes
}

fn numbers(directory: &str) -> Vec<u32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// A lock as proc_pid_fdinfo(5) prints it.
#[derive(PartialEq, Debug)]
struct Lock {
    device: (u32, u32),
    inode: u64,
    window: Window,
}

impl Lock {
    /// Whether the owner of the lock uses bytes of `window`. QEMU locks some of the bytes 100 to 199 of an
    /// image that it uses, wherever its data is. A lock on only bytes 200 to 299 denies access to others,
    /// which devices with another window do as well.
    fn is_use_of(&self, window: Window) -> bool {
        match self.window {
            Window { offset: 100..200, size_limit: Some(1..=100) } => true,
            Window { offset: 200..300, size_limit: Some(1..=100) } => false,
            locked => locked.overlaps(window),
        }
    }

    /// Parses a line such as `lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:01:1234 0 EOF`.
    fn parse(line: &str) -> Option<Lock> {
        let mut fields = line.strip_prefix("lock:")?.split_whitespace().skip(5);
        let mut file = fields.next()?.split(':');
        let mut hex = || u32::from_str_radix(file.next()?, 16).ok();
        let device = (hex()?, hex()?);
        let inode = file.next()?.parse().ok()?;
        let offset: u64 = fields.next()?.parse().ok()?;
        let size_limit = match fields.next()? {
            "EOF" => None,
            last => Some(last.parse::<u64>().ok()?.checked_sub(offset)?.checked_add(1)?),
        };
        Some(Lock { device, inode, window: Window { offset, size_limit } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_read_as_the_kernel_shows_them() {
        let lock = |window| Some(Lock { device: (8, 26), inode: 1234, window });
        assert_eq!(
            Lock::parse("lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 512 1023"),
            lock(Window { offset: 512, size_limit: Some(512) })
        );
        assert_eq!(
            Lock::parse("lock:\t2: POSIX  ADVISORY  READ 77 08:1a:1234 0 EOF"),
            lock(Window { offset: 0, size_limit: None })
        );
        let of_device = Window { offset: 0, size_limit: Some(1 << 20) };
        let after = Window { offset: 1 << 20, size_limit: None };
        for (line, of_window, of_other) in [
            ("lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 0 199", true, false),
            ("lock:\t1: OFDLCK  ADVISORY  READ -1 08:1a:1234 200 201", false, false),
            ("lock:\t1: OFDLCK  ADVISORY  READ -1 08:1a:1234 100 101", true, true),
            ("lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 1048576 2097151", false, true),
        ] {
            let lock = Lock::parse(line).unwrap();
            assert_eq!((lock.is_use_of(of_device), lock.is_use_of(after)), (of_window, of_other), "{line}");
        }
        for bad in
            ["", "pos:\t0", "lock:", "lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 9 3", "lock:\t1: -> x"]
        {
            assert_eq!(Lock::parse(bad), None, "{bad}");
        }
    }
}
