//! The state directory: which devices there are, and their names' owners.
//!
//! A device NAME has up to seven files there. `NAME.lock` is locked by its daemon for as
//! long as that lives, so a daemon that was killed owns nothing any more: its other files
//! (`.json`, `.options`, `.control`, `.nbd`, `.vhost`, `.log`) are leftovers, and the process that gets the lock next
//! removes them before it does anything else, unless it is the next daemon of the device; the log becomes `NAME.log.1` when the name is attached
//! anew, and stays until it is detached. But a kernel's block device outlives its daemon:
//! then it is an orphan, and its files stay until it is recovered or detached.

mod claim;
mod dying;
mod files;
mod orphan;
mod remains;
mod upgrade;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::failure::{Failure, Outcome};

pub use claim::{Claim, Dead, Orphan};
pub use dying::{DYING_WAIT, is_process_dying};
pub use files::{OptionsFile, overwrite_state, parse_daemon_state, parse_state};
pub use remains::{Busy, Fate, Found, Remains};

/// Overrides the place of the state directory.
pub const STATE_DIR_VARIABLE: &str = "BLKQ_STATE_DIR";
/// Longest path of a unix socket: `sun_path` of unix(7) without its final NUL.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// The longest of the suffixes, which a name must leave room for.
const LONGEST_SUFFIX: &str = ".control";
/// Everything a device may leave behind, the lock last.
const SUFFIXES: [&str; 10] =
    [".control", ".nbd", ".vhost", ".json", ".json.new", OPTIONS, ".options.new", ".log", OLD_LOG, ".lock"];
/// How the device is attached, for its next daemon.
const OPTIONS: &str = ".options";
/// The log of the daemon before, if that died.
const OLD_LOG: &str = ".log.1";

/// The directory in which the devices of one user are found.
#[derive(Clone, Debug)]
pub struct StateDir(PathBuf);

impl StateDir {
    /// The place for this user, whether it exists or not: `/run/blkq` for root,
    /// `$XDG_RUNTIME_DIR/blkq` for others. (Root's own XDG_RUNTIME_DIR is removed with
    /// the session; root's devices do not.)
    ///
    /// # Errors
    /// If a user has no runtime directory.
    pub fn locate() -> Outcome<StateDir> {
        if let Some(path) = std::env::var_os(STATE_DIR_VARIABLE).filter(|path| !path.is_empty()) {
            let path = std::path::absolute(&path)
                .map_err(|e| Failure::new(format!("state directory {}: {e}", Path::new(&path).display())))?;
            return Ok(StateDir(path));
        }
        if rustix::process::geteuid().is_root() {
            return Ok(StateDir(PathBuf::from("/run/blkq")));
        }
        match std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute()) {
            Some(path) => Ok(StateDir(path.join("blkq"))),
            None => Err(Failure::new(format!(
                "state directory: XDG_RUNTIME_DIR is not set; set it, or {STATE_DIR_VARIABLE}, to a directory of yours"
            ))),
        }
    }

    /// Makes the directory, for its owner alone, if it is not there yet.
    ///
    /// # Errors
    /// If it cannot be made, belongs to another user, or others may write to it.
    pub fn create(&self) -> Outcome {
        let failure = |why: String| {
            Failure::new(format!(
                "state directory {}: {why}; or set {STATE_DIR_VARIABLE} to a directory of yours",
                self.0.display()
            ))
        };
        if let Err(e) = DirBuilder::new().mode(0o700).recursive(true).create(&self.0) {
            return Err(failure(format!("cannot be made ({e}); make it, writable for you alone")));
        }
        let metadata = fs::metadata(&self.0).map_err(|e| failure(e.to_string()))?;
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(failure(format!("belongs to user {}; run blkq as that user", metadata.uid())));
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(failure("others may write to it; chmod it to 700".to_owned()));
        }
        Ok(())
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Waits for a lock on the directory, to do several things as one; it is released
    /// with the file that is returned.
    ///
    /// # Errors
    /// If the directory cannot be opened or locked.
    pub fn lock(&self) -> Outcome<File> {
        let failure = |e: io::Error| Failure::new(format!("lock state directory {}: {e}", self.0.display()));
        let directory = File::open(&self.0).map_err(failure)?;
        flock(&directory, FlockOperation::LockExclusive).map_err(|e| failure(e.into()))?;
        Ok(directory)
    }

    /// The path of a device's file.
    pub fn file(&self, name: &str, suffix: &str) -> PathBuf {
        self.0.join(format!("{name}{suffix}"))
    }

    /// The socket on which a device's daemon takes commands.
    pub fn control_socket(&self, name: &str) -> PathBuf {
        self.file(name, ".control")
    }

    /// Connects to the control socket of `name`, within `timeout` (not 0).
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] or [`io::ErrorKind::ConnectionRefused`] if no daemon listens,
    /// [`io::ErrorKind::TimedOut`] if a daemon does and has taken no connection for so long that no
    /// more can wait.
    pub fn connect(&self, name: &str, timeout: Duration) -> io::Result<UnixStream> {
        let address = SocketAddrUnix::new(self.control_socket(name))?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        match connect(&socket, &address) {
            Ok(()) => Ok(UnixStream::from(socket)),
            Err(Errno::AGAIN) => Err(io::ErrorKind::TimedOut.into()),
            Err(e) => Err(e.into()),
        }
    }

    /// The names that have a lock file, sorted; some may be of daemons that died.
    ///
    /// # Errors
    /// If the directory is there but cannot be read.
    pub fn names(&self) -> Outcome<Vec<String>> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Failure::new(format!("state directory {}: {e}", self.0.display()))),
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter_map(|file| Some(file.strip_suffix(".lock")?.to_owned()))
            .filter(|name| check_name(name).is_ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// Bytes that a name may have here, so that its sockets' paths are not too long.
    fn name_bytes_max(&self) -> usize {
        let room = SOCKET_PATH_BYTES_MAX.saturating_sub(self.0.as_os_str().len() + 1 + LONGEST_SUFFIX.len());
        // NAME_MAX is no limit of its own: SOCKET_PATH_BYTES_MAX is smaller.
        room.min(SOCKET_PATH_BYTES_MAX)
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

fn allowed(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '@')
}

/// Whether `name` may be a device's: letters and digits of any script and `. _ - + @`, beginning
/// with a letter or a digit.
///
/// # Errors
/// The rule that is broken.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    if !name.starts_with(char::is_alphanumeric) {
        return Err("a name begins with a letter or a digit");
    }
    if !name.chars().all(allowed) {
        return Err("a name consists of letters, digits and . _ - + @");
    }
    Ok(())
}

/// A name of at most `bytes_max` bytes that resembles `wanted`: each run of what a name may not
/// contain becomes one `_`.
fn name_from(wanted: &str, bytes_max: usize) -> String {
    let mut name = String::new();
    let mut left_out = false;
    for c in wanted.trim_start_matches(|c: char| !c.is_alphanumeric()).chars() {
        let replaced = std::mem::replace(&mut left_out, !allowed(c));
        let kept = if allowed(c) { c } else { '_' };
        if name.len() + kept.len_utf8() > bytes_max {
            break;
        }
        if !(left_out && replaced) {
            name.push(kept);
        }
    }
    if name.is_empty() { "disk".to_owned() } else { name }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub fn scratch(test: &str) -> StateDir {
        let path = std::env::temp_dir().join(format!("blkq-state-{}-{test}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        let dir = StateDir(path);
        dir.create().unwrap();
        dir
    }

    pub fn files(dir: &StateDir) -> Vec<String> {
        let mut files: Vec<String> =
            fs::read_dir(&dir.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        files
    }

    #[test]
    fn names_are_checked() {
        for good in ["a", "disk.img", "disk.img-2", "9p", "a_b+c@d", "é", "備份.img"] {
            assert_eq!(check_name(good), Ok(()), "{good:?}");
        }
        for bad in ["", ".", "..", "../x", "a/b", "-a", ".a", "a b", "a\n", "(é)", "a\0", "a\u{202e}b"] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        assert_eq!(name_from("my disk.img", 50), "my_disk.img");
        assert_eq!(name_from("..", 50), "disk");
        assert_eq!(name_from("Büro (alt) - 備份.img", 50), "Büro_alt_-_備份.img");
        assert_eq!(name_from(" \u{202e}\n", 50), "disk");
        assert_eq!((name_from("abcdef", 3), name_from("aéé", 4)), ("abc".to_owned(), "aé".to_owned()));
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = scratch("mode");
        assert_eq!(fs::metadata(&dir.0).unwrap().mode() & 0o777, 0o700);
        fs::set_permissions(&dir.0, fs::Permissions::from_mode(0o770)).unwrap();
        assert!(dir.create().unwrap_err().to_string().contains("chmod"));
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
