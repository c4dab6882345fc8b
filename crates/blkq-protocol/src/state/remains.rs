//! Inspects a device whose daemon does not answer. Nothing is changed, and no lock is taken: a command that
//! only reads must not block others that claim the name.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::path::PathBuf;

use serde::Serialize;

use super::dying::ProcessState::{Running, Stopped};
use super::files::read_bounded;
use super::{OLD_LOG, ProcessState, StateDir};
use crate::failure::{Failure, Outcome};
use crate::info::FileId;
use crate::system::if_exists;

const LOG_LINES: usize = 10;
/// Number of bytes at the end of the log in which its last lines are searched.
const TAIL_BYTES: u64 = 8 << 10;

#[derive(Debug)]
pub enum Found {
    Nothing,
    /// A process that owns the name of a device does not answer. Describes the state of the device as far as it is
    /// known, with a hint.
    Busy(String),
    Remains(Box<Remains>),
}

/// The state that a killed or crashed daemon has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// Only files are left, which the next attach of this name removes or replaces.
    Dead,
    /// A block device is left in the kernel. Its I/O waits until another daemon recovers it.
    Orphan,
}

impl Fate {
    pub fn name(self) -> &'static str {
        match self {
            Fate::Dead => "dead",
            Fate::Orphan => "orphan",
        }
    }
}

/// A device whose daemon was killed or crashed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Remains {
    pub name: String,
    pub state: Fate,
    /// Whether `blkq recover` can serve the device again.
    pub recoverable: bool,
    pub pid: Option<u32>,
    /// Path of the image; empty if the daemon was killed before it recorded the path.
    pub image: String,
    /// The file that is now at the path of the image.
    #[serde(skip)]
    pub file: Option<FileId>,
    /// The URIs and block devices under which clients reached the device.
    pub exports: Vec<String>,
    pub log: PathBuf,
    pub log_lines: Vec<String>,
    /// The message for the user: all of the above in one line, with a hint.
    pub error: String,
}

impl Remains {
    pub fn failure(&self) -> Failure {
        Failure::new(&self.error)
    }
}

impl StateDir {
    pub fn inspect(&self, name: &str) -> Outcome<Found> {
        let lock = self.file(name, ".lock");
        let owns = |pid| matches!(ProcessState::of(pid), Running | Stopped) && has_open(pid, &lock);
        let owner = match self.lock_owner(name, owns)? {
            LockOwner::NoLock => return Ok(Found::Nothing),
            LockOwner::Running(pid) => {
                let process = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
                let hint = pid.filter(|_| !self.control_socket(name).exists()).map(|pid| {
                    format!("; if the control socket was removed, run `kill {pid}` to detach the device")
                });
                let hint = hint.unwrap_or_default();
                return Ok(Found::Busy(format!("starting or stopping{process}{hint}")));
            }
            LockOwner::Exited(pid) => pid,
        };
        let log = self.last_log(name);
        let log_lines = last_lines(&log).unwrap_or_default();
        let mut remains = Remains {
            name: name.to_owned(),
            state: Fate::Dead,
            recoverable: false,
            pid: owner,
            image: String::new(),
            file: None,
            exports: Vec::new(),
            log,
            log_lines,
            error: String::new(),
        };
        let mut is_guest = false;
        if let Some(state) = self.read_state(name) {
            is_guest = state.is_guest();
            remains.recoverable = matches!(state.recoverable_options(), Ok(Some(_)));
            remains.pid = Some(state.pid).filter(|pid| *pid != 0).or(owner);
            remains.file = FileId::of(state.image_path());
            (remains.image, remains.exports) = (state.image, state.exports);
            let block_device = state.ublk.map(|ublk| ublk.identity().waiting()).transpose()?.flatten();
            if let Some(block_device) = block_device {
                (remains.state, remains.recoverable) = (Fate::Orphan, true);
                // The daemon may have died before it recorded the number of the block device.
                if !remains.exports.contains(&block_device.path()) {
                    remains.exports = vec![block_device.path()];
                }
            }
        }
        remains.error = match remains.state {
            Fate::Orphan => orphaned(name, &remains.exports),
            Fate::Dead => died(&remains, is_guest),
        };
        Ok(Found::Remains(Box::new(remains)))
    }

    /// The log of the last daemon of `name` that ran. If a later daemon has failed to start, that log already has the
    /// suffix [`OLD_LOG`].
    pub(super) fn last_log(&self, name: &str) -> PathBuf {
        let [log, old] = [".log", OLD_LOG].map(|suffix| self.file(name, suffix));
        if !log.exists() && old.exists() { old } else { log }
    }

    /// Finds out who has the lock of `name`. `owns` checks whether a process runs and has the lock file open.
    ///
    /// A daemon that is detached removes its lock file before it exits, and may do so after the file was read here. Only
    /// a lock file that still exists once its process has exited belongs to a daemon that died.
    fn lock_owner(&self, name: &str, owns: impl Fn(u32) -> bool) -> Outcome<LockOwner> {
        let lock = self.file(name, ".lock");
        let failed = |e: io::Error| Failure::new(format!("cannot read {}: {e}", lock.display()));
        let read = || if_exists(fs::read(&lock)).map_err(failed);
        let mut found = read()?;
        loop {
            let Some(owner) = found else { return Ok(LockOwner::NoLock) };
            let pid = String::from_utf8_lossy(&owner).trim().parse::<u32>().ok();
            if owner.is_empty() || pid.is_some_and(&owns) {
                return Ok(LockOwner::Running(pid));
            }
            found = read()?;
            if found.as_ref() == Some(&owner) {
                return Ok(LockOwner::Exited(pid));
            }
        }
    }
}

enum LockOwner {
    NoLock,
    /// The process; `None` if it has not written its ID yet.
    Running(Option<u32>),
    Exited(Option<u32>),
}

/// The message for a command that needs the name of an orphan, or a running daemon.
pub(super) fn orphaned(name: &str, exports: &[String]) -> String {
    let exports = exports.join(" ");
    format!(
        "{name}: the daemon has exited, and I/O on {exports} waits; run `blkq recover {name}`, or `blkq detach {name}` to remove the device"
    )
}

fn died(remains: &Remains, is_guest: bool) -> String {
    let Remains { name, pid, log_lines, recoverable, .. } = remains;
    let process = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
    let why = quote_last_line(log_lines.last().map_or("", String::as_str));
    let hint = match (is_guest, recoverable) {
        (true, _) => format!("run `blkq recover {name}` to serve its virtual machine again"),
        (false, true) => format!("run `blkq recover {name}` to serve it again with its options and settings"),
        (false, false) => "attach the image again".to_owned(),
    };
    format!(
        "{name}: the daemon{process} was killed or crashed ({why}); {hint}, or run `blkq detach {name}` to remove its stale files"
    )
}

/// Quotes the last log line of a daemon that died, for a message. `line` is empty if the log is.
pub(crate) fn quote_last_line(line: &str) -> String {
    if line.is_empty() { "empty log".to_owned() } else { format!("last log line: {line}") }
}

/// Whether the process is running and has `path` open. True if this process is not permitted to find out.
fn has_open(process: u32, path: &std::path::Path) -> bool {
    // The kernel reports paths without symbolic links, and the state directory may be reached through one. If the file
    // was removed meanwhile, no process is found, as it should be.
    let path = path.canonicalize().unwrap_or_default();
    match fs::read_dir(format!("/proc/{process}/fd")) {
        Ok(files) => files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|open| open == path)),
        Err(e) => e.kind() == io::ErrorKind::PermissionDenied,
    }
}

pub(super) fn last_lines(log: &std::path::Path) -> io::Result<Vec<String>> {
    let mut file = File::open(log)?;
    let from = file.metadata()?.len().saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(from))?;
    let bytes = read_bounded(file, TAIL_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let printable = |line: &&str| line.replace(char::is_control, "?");
    Ok(lines[lines.len().saturating_sub(LOG_LINES)..].iter().map(printable).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::scratch;

    #[test]
    fn a_daemon_is_found_through_a_symbolic_link() {
        let dir = scratch("real");
        let linked = StateDir(dir.path().join("link"));
        std::os::unix::fs::symlink(dir.path(), &linked.0).unwrap();
        let claim = linked.claim("a").unwrap();
        assert!(matches!(linked.inspect("a"), Ok(Found::Busy(_))));
        drop(claim);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    // Contract: detach
    #[test]
    fn a_daemon_that_exits_cleanly_meanwhile_did_not_die() {
        let dir = scratch("exits-cleanly");
        let lock = dir.file("a", ".lock");
        fs::write(&lock, "7\n").unwrap();
        let exit_cleanly = |_| {
            fs::remove_file(&lock).unwrap();
            false
        };
        assert!(matches!(dir.lock_owner("a", exit_cleanly), Ok(LockOwner::NoLock)));

        fs::write(&lock, "7\n").unwrap();
        let attach_again = |pid| {
            fs::write(&lock, "8\n").unwrap();
            pid == 8
        };
        assert!(matches!(dir.lock_owner("a", attach_again), Ok(LockOwner::Running(Some(8)))));

        assert!(matches!(dir.lock_owner("a", |_| false), Ok(LockOwner::Exited(Some(8)))));
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
