//! Inspects a device whose daemon does not answer. Nothing is changed, and no lock is taken: a command that
//! only reads must not block others that claim the name.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{OLD_LOG, OWNER_BYTE, ProcessState, StateDir};
use crate::failure::{Failure, Outcome};
use crate::info::FileId;
use crate::system::{if_exists, is_byte_locked, read_bounded};

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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// Only files are left, which the next attach of this name removes or replaces.
    #[default]
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
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
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
        let owner = match self.owner(name)? {
            None => return Ok(Found::Nothing),
            Some(Owner::Running(pid)) => {
                let process = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
                let hint = pid.filter(|_| !self.control_socket(name).exists()).map(|pid| {
                    format!("; if the control socket was removed, run `kill {pid}` to detach the device")
                });
                let hint = hint.unwrap_or_default();
                return Ok(Found::Busy(format!("starting or stopping{process}{hint}")));
            }
            Some(Owner::Exited(pid)) => pid,
        };
        let log = self.last_log(name);
        let log_lines = last_lines(&log).unwrap_or_default();
        let mut remains = Remains { name: name.to_owned(), pid: owner, log, log_lines, ..Remains::default() };
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

    /// `None` if no process has claimed the name.
    fn owner(&self, name: &str) -> Outcome<Option<Owner>> {
        let path = self.file(name, ".lock");
        let failed = |e: io::Error| Failure::new(format!("cannot read {}: {e}", path.display()));
        while let Some(lock) = if_exists(File::open(&path)).map_err(failed)? {
            if let Some(owner) = Owner::of(&lock, &path).map_err(failed)? {
                return Ok(Some(owner));
            }
        }
        Ok(None)
    }
}

/// The process that has claimed a name, as far as it is known.
#[derive(Debug)]
enum Owner {
    Running(Option<u32>),
    Exited(Option<u32>),
}

impl Owner {
    /// Returns `None` if the lock file has been removed since it was opened: a daemon that is detached removes the file
    /// before it exits.
    fn of(lock: &File, path: &Path) -> io::Result<Option<Owner>> {
        let mut text = [0; 16];
        let length = lock.read_at(&mut text, 0)?;
        let pid = String::from_utf8_lossy(&text[..length]).trim().parse().ok();
        // The owner locks the byte before it writes its number, so the number must be read first.
        let is_locked = is_byte_locked(lock, OWNER_BYTE);
        let state = pid.map(ProcessState::of);
        // A killed process holds the lock until its I/O in flight has completed. An owner of an older version does not
        // lock the byte, but keeps the file open, as this process does here.
        let is_running = match state {
            Some(ProcessState::Dying) => false,
            Some(ProcessState::Running | ProcessState::Stopped) => {
                is_locked || pid.is_some_and(|pid| pid != std::process::id() && has_open(pid, path))
            }
            Some(ProcessState::Exited) | None => is_locked,
        };
        // The owner of an empty file has not locked the byte yet.
        if length == 0 || is_running {
            return Ok(Some(Owner::Running(pid)));
        }
        Ok((lock.metadata()?.nlink() > 0).then_some(Owner::Exited(pid)))
    }
}

/// Whether the process has `path` open. True if this process is not permitted to find out.
fn has_open(process: u32, path: &Path) -> bool {
    // The kernel reports paths without symbolic links, and the state directory may be reached through one.
    let path = path.canonicalize().unwrap_or_default();
    match fs::read_dir(format!("/proc/{process}/fd")) {
        Ok(files) => files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|open| open == path)),
        Err(e) => e.kind() == io::ErrorKind::PermissionDenied,
    }
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
    use std::fs;

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
        let claim = dir.claim("a").unwrap();
        let path = dir.file("a", ".lock");
        let lock = File::open(&path).unwrap();
        let own = std::process::id();
        assert!(matches!(Owner::of(&lock, &path), Ok(Some(Owner::Running(Some(pid)))) if pid == own));
        drop(claim);
        assert!(matches!(Owner::of(&lock, &path), Ok(None)));
        assert!(matches!(dir.owner("a"), Ok(None)));

        fs::write(dir.file("a", ".lock"), "8\n").unwrap();
        assert!(matches!(dir.owner("a"), Ok(Some(Owner::Exited(Some(8))))));
        fs::write(dir.file("a", ".lock"), "").unwrap();
        assert!(matches!(dir.owner("a"), Ok(Some(Owner::Running(None)))));
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
