//! Where an image is attached that is in use: the device, or the process that has the lock.

use std::fs;
use std::path::Path;

use crate::backing::{FileId, Window};
use crate::info::StateFile;
use crate::options::Format;
use crate::state::StateDir;

/// Those that have locked bytes of an image.
pub struct Holders {
    /// Devices of the same state directory by their names, or else processes.
    pub text: String,
    /// Whether all of them could be attached with --shared, as far as is known: the files of a qcow2 image cannot.
    pub can_share: bool,
}

/// Those that have locked bytes of the image at `path`, as far as this user may see.
pub fn holders_of(dir: &StateDir, path: &Path, offset: u64, size_limit: Option<u64>) -> Option<Holders> {
    let file = FileId::of(path)?;
    let holders = holders(path, file, Window { offset, size_limit });
    // Not asked: a daemon that is just starting may be the one that asks here.
    let names = dir.names().unwrap_or_default();
    let states: Vec<StateFile> = names.iter().filter_map(|name| dir.read_state(name)).collect();
    let serves = |state: &&StateFile| match holders.is_empty() {
        // Locks of other processes are hidden from this one.
        true => {
            FileId::of(&state.image) == Some(file) && Path::new("/proc").join(state.pid.to_string()).exists()
        }
        false => holders.contains(&state.pid),
    };
    let devices: Vec<&StateFile> = states.iter().filter(serves).collect();
    if !devices.is_empty() {
        let is_raw = |state: &&StateFile| {
            let options = state.attach_options.as_ref().and_then(|record| record.read().ok());
            options.is_none_or(|options| options.format != Some(Format::Qcow2))
        };
        let names: Vec<&str> = devices.iter().map(|state| state.name.as_str()).collect();
        let can_share = devices.iter().all(|state| is_raw(state));
        return Some(Holders { text: format!("as {}", names.join(", ")), can_share });
    }
    let process = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("process {pid} ({})", name.trim())
    };
    let processes: Vec<String> = holders.iter().map(process).collect();
    let text = format!("by {}", processes.join(", "));
    (!processes.is_empty()).then_some(Holders { text, can_share: true })
}

/// Whether a process has locked these bytes of the image at `path`, as far as this user may see.
pub fn has_holder(path: &Path, offset: u64, size_limit: Option<u64>) -> bool {
    FileId::of(path).is_some_and(|file| !holders(path, file, Window { offset, size_limit }).is_empty())
}

/// The processes that have locked bytes of `window` of the file. The lock of an open file has no owner
/// in the kernel's list; but each open file shows its own.
fn holders(path: &Path, file: FileId, window: Window) -> Vec<u32> {
    let path = path.canonicalize().unwrap_or_default();
    let own = std::process::id();
    let numbers = |directory: &str| -> Vec<u32> {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let has_lock = |pid: u32| {
        numbers(&format!("/proc/{pid}/fdinfo")).into_iter().any(|fd| {
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
            let mut locks = info.lines().filter_map(Lock::parse);
            // Some file systems show another device than that of the lock: there the path decides.
            let is_path = || fs::read_link(format!("/proc/{pid}/fd/{fd}")).is_ok_and(|link| link == path);
            locks.any(|lock| {
                lock.inode == file.inode
                    && lock.is_use_of(window)
                    && (lock.device == file.device || is_path())
            })
        })
    };
    numbers("/proc").into_iter().filter(|pid| *pid != own && has_lock(*pid)).collect()
}

/// A lock as proc_pid_fdinfo(5) shows it.
#[derive(PartialEq, Debug)]
struct Lock {
    device: (u32, u32),
    inode: u64,
    window: Window,
}

impl Lock {
    /// Whether the owner uses bytes of `window`. QEMU locks bytes 100 to 199 of an image that it uses, wherever; a lock
    /// on bytes 200 to 299 alone only keeps others out, as devices of other windows do.
    fn is_use_of(&self, window: Window) -> bool {
        match self.window {
            Window { offset: 100..200, size_limit: Some(1..=100) } => true,
            Window { offset: 200..300, size_limit: Some(1..=100) } => false,
            locked => locked.overlaps(window),
        }
    }

    /// `lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:01:1234 0 EOF`
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
        let behind = Window { offset: 1 << 20, size_limit: None };
        for (line, of_window, of_other) in [
            ("lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 0 199", true, false),
            ("lock:\t1: OFDLCK  ADVISORY  READ -1 08:1a:1234 200 201", false, false),
            ("lock:\t1: OFDLCK  ADVISORY  READ -1 08:1a:1234 100 101", true, true),
            ("lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 1048576 2097151", false, true),
        ] {
            let lock = Lock::parse(line).unwrap();
            assert_eq!((lock.is_use_of(of_device), lock.is_use_of(behind)), (of_window, of_other), "{line}");
        }
        for bad in
            ["", "pos:\t0", "lock:", "lock:\t1: OFDLCK  ADVISORY  WRITE -1 08:1a:1234 9 3", "lock:\t1: -> x"]
        {
            assert_eq!(Lock::parse(bad), None, "{bad}");
        }
    }
}
