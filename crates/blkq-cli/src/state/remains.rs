//! Inspects a device whose daemon does not answer. Nothing is changed, and no lock taken:
//! a command that only inspects keeps no name from others.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use serde::Serialize;

use super::StateDir;
use super::dying::has_exited;
use crate::failure::{Failure, Outcome};
use crate::file_id::FileId;

/// Lines of a log that are shown, and bytes in which they are searched.
const LINES: usize = 10;
const TAIL_BYTES: u64 = 8 << 10;

/// The result of [`StateDir::inspect`].
#[derive(Debug)]
pub enum Found {
    /// There is no device of that name.
    Nothing,
    /// A process has the name, and does not answer.
    Busy(Busy),
    /// Its daemon died.
    Remains(Box<Remains>),
}

/// A process that has a device's name, and does not answer.
#[derive(Debug)]
pub struct Busy {
    /// The process; `None` if it has just begun.
    pid: Option<u32>,
    /// Whether there is a socket for commands.
    has_socket: bool,
}

impl Busy {
    /// The state of the device, as far as it can be seen, with a hint.
    pub fn describe(&self) -> String {
        let process = self.pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
        match self {
            Busy { pid: Some(pid), has_socket: false } => format!(
                "starting or stopping{process}, or its control socket was removed: then kill {pid} detaches it"
            ),
            _ => format!("starting or stopping{process}"),
        }
    }
}

/// The remains of a device after its daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// Files only, which the next attach of the name removes.
    Dead,
    /// A block device of the kernel, whose I/O waits for a new daemon.
    Orphan,
}

impl Fate {
    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Fate::Dead => "dead",
            Fate::Orphan => "orphan",
        }
    }
}

/// A device whose daemon died.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Remains {
    /// Its name.
    pub name: String,
    /// The kind of remains.
    pub state: Fate,
    /// The process that its daemon was.
    pub pid: Option<u32>,
    /// The image behind it; empty if the daemon died before it wrote that down.
    pub image: String,
    /// The file that is at the path of the image.
    #[serde(skip)]
    pub file: Option<FileId>,
    /// Where clients found it.
    pub exports: Vec<String>,
    /// The daemon's log.
    pub log: PathBuf,
    /// Its last lines.
    pub log_lines: Vec<String>,
    /// All that in a line, with what can be done.
    pub error: String,
}

impl Remains {
    /// Why the device cannot be used, and what can be done.
    pub fn failure(&self) -> Failure {
        Failure::new(&self.error)
    }
}

impl StateDir {
    /// Inspects the device `name`, whose daemon does not answer.
    ///
    /// # Errors
    /// If the kernel does not report whether there is a block device.
    pub fn inspect(&self, name: &str) -> Outcome<Found> {
        let lock = self.file(name, ".lock");
        let owns = |pid| !has_exited(pid) && has_open(pid, &lock) && !self.holder_is_dying(name);
        let owner = match self.lock_owner(name, owns)? {
            LockOwner::NoLock => return Ok(Found::Nothing),
            LockOwner::Running(pid) => {
                let has_socket = self.control_socket(name).exists();
                return Ok(Found::Busy(Busy { pid, has_socket }));
            }
            LockOwner::Exited(pid) => pid,
        };
        let state = self.read_state(name);
        let (pid, mut image, mut exports) =
            (state.as_ref().map(|state| state.pid).filter(|pid| *pid != 0).or(owner), None, None);
        let is_guest = state.as_ref().is_some_and(|state| matches!(state.guest_options(), Ok(Some(_))));
        let mut file = None;
        let mut fate = Fate::Dead;
        if let Some(state) = state {
            file = FileId::of(state.image_path());
            (image, exports) = (Some(state.image), Some(state.exports));
            let block_device = state.ublk.map(|ublk| ublk.identity().waiting()).transpose()?.flatten();
            if let Some(block_device) = block_device {
                fate = Fate::Orphan;
                // Its daemon may have died before it got the number.
                let paths = exports.get_or_insert_default();
                if !paths.contains(&block_device.path()) {
                    *paths = vec![block_device.path()];
                }
            }
        }
        let (image, exports) = (image.unwrap_or_default(), exports.unwrap_or_default());
        let log = self.file(name, ".log");
        let log_lines = last_lines(&log).unwrap_or_default();
        let error = match fate {
            Fate::Orphan => super::orphan::refusal(name, &exports),
            Fate::Dead => died(name, pid, log_lines.last().map(String::as_str), is_guest),
        };
        let state = fate;
        Ok(Found::Remains(Box::new(Remains {
            name: name.to_owned(),
            state,
            pid,
            image,
            file,
            exports,
            log,
            log_lines,
            error,
        })))
    }

    /// Finds out who has the lock of `name`. `owns` checks whether a process runs and has the lock file open.
    ///
    /// A daemon that is detached removes its lock file before it exits, and may do so after the file was read here. Only
    /// a lock file that still exists once its process has exited belongs to a daemon that died.
    fn lock_owner(&self, name: &str, owns: impl Fn(u32) -> bool) -> Outcome<LockOwner> {
        let lock = self.file(name, ".lock");
        let read = || match fs::read(&lock) {
            Ok(owner) => Ok(Some(owner)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Failure::new(format!("lock {}: {e}", lock.display()))),
        };
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

fn died(name: &str, pid: Option<u32>, last_line: Option<&str>, is_guest: bool) -> String {
    let process = pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
    let why = last_line.map_or("its log is empty".to_owned(), |line| format!("last in its log: {line}"));
    let hint = match is_guest {
        true => format!("blkq recover {name} serves its virtual machine again"),
        false => "attach the image again".to_owned(),
    };
    format!("{name}: its daemon{process} died, {why}; {hint}, or remove what it left with blkq detach {name}")
}

/// Whether the process lives and has `path` open; a process that cannot be inspected may.
fn has_open(process: u32, path: &std::path::Path) -> bool {
    match fs::read_dir(format!("/proc/{process}/fd")) {
        Ok(files) => files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|open| open == path)),
        Err(e) => e.kind() == io::ErrorKind::PermissionDenied,
    }
}

/// The last lines of a log.
pub(super) fn last_lines(log: &std::path::Path) -> io::Result<Vec<String>> {
    let mut file = File::open(log)?;
    let from = file.metadata()?.len().saturating_sub(TAIL_BYTES);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    let printable = |line: &&str| line.replace(char::is_control, "?");
    Ok(lines[lines.len().saturating_sub(LINES)..].iter().map(printable).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::scratch;

    // Contract: detach
    #[test]
    fn a_daemon_that_exits_well_meanwhile_did_not_die() {
        let dir = scratch("exits-well");
        let lock = dir.file("a", ".lock");
        fs::write(&lock, "7\n").unwrap();
        let exit_well = |_| {
            fs::remove_file(&lock).unwrap();
            false
        };
        assert!(matches!(dir.lock_owner("a", exit_well), Ok(LockOwner::NoLock)));

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
