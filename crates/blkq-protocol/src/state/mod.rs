//! The state directory, which records the devices and owns their names.
//!
//! A device NAME has these files: `NAME.lock`, `.json`, `.options`, `.owner`, `.control`, `.nbd`, `.vhost` and
//! `.log`.
//! The daemon holds a flock(2) lock on `NAME.lock` as long as it runs, so the kernel releases the name of a
//! daemon that was killed. The process that gets the lock next removes the stale files first, unless it is
//! the next daemon of the same device, or the device is the disk of a virtual machine. A new attach of the
//! name keeps the old log as `NAME.log.1` until the device is detached.
//!
//! A block device of the kernel survives its daemon. It is called an orphan then, and its files stay until it
//! is recovered or detached.

mod claim;
mod files;
mod remains;
mod waiting;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::failure::{Failure, Outcome};
use crate::system::{file_names, if_exists, is_byte_locked, lock_byte};

pub use claim::{Claim, Dead, Orphan};
pub(crate) use files::json_line;
pub use files::{OptionsFile, overwrite_state, parse_daemon_state, parse_state};
pub(crate) use remains::quote_last_line;
pub use remains::{Fate, Found, Remains};

/// Environment variable with the path of the state directory, instead of the default.
pub const STATE_DIR_VARIABLE: &str = "BLKQ_STATE_DIR";
/// Maximum length of the path of a unix socket: `sun_path` of unix(7) without its final NUL.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;
/// How long an attach waits for a killed daemon to exit, which it does when its I/O in flight has completed,
/// and then for the image to become free.
pub const DYING_WAIT: Duration = Duration::from_secs(30);
/// The longest suffix of a socket, for which the length of a name must leave room.
const LONGEST_SUFFIX: &str = ".control";
/// All files that a device may have. The lock is removed last.
const SUFFIXES: [&str; 12] = [
    ".control",
    ".nbd",
    ".vhost",
    ".json",
    ".json.new",
    OPTIONS,
    ".options.new",
    OWNER,
    ".owner.new",
    ".log",
    OLD_LOG,
    ".lock",
];
/// The attach options, for the next daemon of the device.
const OPTIONS: &str = ".options";
/// The name of the daemon for the storage of its image ([`StateFile::owner`](crate::info::StateFile::owner)).
const OWNER: &str = ".owner";
/// The log of the previous daemon, if that daemon died.
const OLD_LOG: &str = ".log.1";

// Locks on bytes of `NAME.lock`. A process can find out whether they are held without acquiring them, unlike the
// flock(2) lock on the file, which makes the claim exclusive also for older versions.
/// The byte of `NAME.lock` that is locked while the device is being handed over.
const UPGRADE_BYTE: usize = 0;
/// The byte that is locked as well if only the next daemon may claim the name.
const RESERVED_BYTE: usize = 1;
/// The byte that is locked as long as the name is claimed. Older versions do not lock it.
const OWNER_BYTE: usize = 2;

#[derive(Clone, Debug)]
pub struct StateDir(pub(crate) PathBuf);

impl StateDir {
    /// Returns the state directory of this user, which may not exist yet: `/run/blkq` for root,
    /// `$XDG_RUNTIME_DIR/blkq` for other users. Root's `XDG_RUNTIME_DIR` is not used, because it is removed
    /// at the end of the session, and root's devices stay. Fails if the user has no runtime directory.
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
                "state directory: XDG_RUNTIME_DIR is not set; set it or {STATE_DIR_VARIABLE} to a directory that you own"
            ))),
        }
    }

    /// Creates the directory with mode 0700, unless it exists. Fails if the directory cannot be created,
    /// belongs to another user, or is writable by others.
    pub fn create(&self) -> Outcome {
        let failure = |why: String| {
            Failure::new(format!(
                "state directory {}: {why}; or set {STATE_DIR_VARIABLE} to a directory that you own",
                self.0.display()
            ))
        };
        if let Err(e) = DirBuilder::new().mode(0o700).recursive(true).create(&self.0) {
            return Err(failure(format!("cannot be created ({e}); create it with mode 700")));
        }
        let metadata = fs::metadata(&self.0).map_err(|e| failure(e.to_string()))?;
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(failure(format!("belongs to user {}; run blkq as that user", metadata.uid())));
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(failure("other users can write to it; run `chmod 700` on it".to_owned()));
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Waits for an exclusive lock on the directory, which makes several steps atomic. Closing the returned
    /// file releases the lock.
    pub fn lock(&self) -> Outcome<File> {
        let failure =
            |e: io::Error| Failure::new(format!("cannot lock the state directory {}: {e}", self.0.display()));
        let directory = File::open(&self.0).map_err(failure)?;
        directory.lock().map(|()| directory).map_err(failure)
    }

    /// Locks the device for a handover to another daemon, until the returned file is closed or this process
    /// exits. The lock is a record lock on a byte of `NAME.lock`; the daemons lock the whole file with
    /// flock(2), which is independent of it. If `is_reserved`, no new device can claim the name meanwhile,
    /// and no command removes the files of the last daemon. Returns `None` if there is no such device. Fails
    /// if another process holds the lock.
    pub fn lock_upgrade(&self, name: &str, is_reserved: bool) -> Outcome<Option<File>> {
        let path = self.file(name, ".lock");
        let failure = |e: io::Error| Failure::new(format!("cannot lock {}: {e}", path.display()));
        let opened = OpenOptions::new().read(true).write(true).open(&path);
        let Some(file) = if_exists(opened).map_err(failure)? else { return Ok(None) };
        let reserve = || if is_reserved { lock_byte(&file, RESERVED_BYTE) } else { Ok(()) };
        match lock_byte(&file, UPGRADE_BYTE).and_then(|()| reserve()) {
            Ok(()) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Err(Failure::new(
                "another `blkq upgrade` or `blkq recover` of this device is running; try again when it has returned",
            )),
            Err(e) => Err(failure(e)),
        }
    }

    /// Whether another daemon is taking over the device `name`.
    pub fn is_handed_over(&self, name: &str) -> bool {
        let lock = File::open(self.file(name, ".lock"));
        lock.is_ok_and(|lock| is_byte_locked(&lock, UPGRADE_BYTE))
    }

    pub fn file(&self, name: &str, suffix: &str) -> PathBuf {
        self.0.join(format!("{name}{suffix}"))
    }

    pub fn control_socket(&self, name: &str) -> PathBuf {
        self.file(name, ".control")
    }

    /// Connects to the control socket of `name`. `timeout` must not be 0. Fails with
    /// [`io::ErrorKind::NotFound`] or [`io::ErrorKind::ConnectionRefused`] if no daemon listens, and
    /// [`io::ErrorKind::TimedOut`] if the daemon accepts no connections and its backlog is full.
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

    /// The process that holds the name, as recorded in its lock file.
    pub fn holder(&self, name: &str) -> Option<u32> {
        fs::read_to_string(self.file(name, ".lock")).ok()?.trim().parse().ok()
    }

    /// Waits until the daemon of `name`, if it was killed, has exited; at most [`DYING_WAIT`].
    pub fn wait_for_dying(&self, name: &str) {
        let begin = Instant::now();
        let is_dying = || self.holder(name).is_some_and(|pid| ProcessState::of(pid) == ProcessState::Dying);
        while is_dying() && begin.elapsed() < DYING_WAIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The sorted names of all lock files, including those of daemons that died.
    pub fn names(&self) -> Outcome<Vec<String>> {
        let names = file_names(&self.0, ".lock", |name| check_name(name).is_ok());
        names.map_err(|e| Failure::new(format!("state directory {}: {e}", self.0.display())))
    }

    /// The maximum length of a name in bytes, such that the paths of its sockets fit `sun_path`.
    fn name_bytes_max(&self) -> usize {
        let room = SOCKET_PATH_BYTES_MAX.saturating_sub(self.0.as_os_str().len() + 1 + LONGEST_SUFFIX.len());
        // NAME_MAX (255) need not be checked: SOCKET_PATH_BYTES_MAX is smaller.
        room.min(SOCKET_PATH_BYTES_MAX)
    }
}

/// How far a process is on its way to the exit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessState {
    Running,
    /// Stopped by a signal. A process that a debugger has stopped counts as running.
    Stopped,
    /// Its main thread is exiting, or has exited before the others, or SIGKILL is pending. The kernel may not have closed
    /// its files yet.
    Dying,
    /// There is no such process, or only a zombie without other threads: it has no open files, no matter how late its
    /// parent waits for it.
    Exited,
}

impl ProcessState {
    /// The state of the process `pid`, from its files in /proc: the lock of a name shows that it has an owner, but not
    /// whether the owner was killed or stopped. A process that this one is not permitted to inspect counts as running.
    pub fn of(pid: u32) -> ProcessState {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        match read("status") {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => ProcessState::Running,
            status => ProcessState::parse(&status.unwrap_or_default(), &read("stat").unwrap_or_default()),
        }
    }

    /// `status` is the text of proc_pid_status(5), `stat` that of proc_pid_stat(5).
    fn parse(status: &str, stat: &str) -> ProcessState {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim();
        let is_killed = |signals| u64::from_str_radix(field(signals), 16).is_ok_and(|set| set >> 8 & 1 != 0);
        match field("State:").chars().next() {
            None => ProcessState::Exited,
            Some('Z' | 'X') if field("Threads:") == "1" => ProcessState::Exited,
            Some('Z' | 'X') => ProcessState::Dying,
            _ if is_killed("SigPnd:") || is_killed("ShdPnd:") || is_exiting(stat) => ProcessState::Dying,
            Some('T') => ProcessState::Stopped,
            _ => ProcessState::Running,
        }
    }
}

/// Whether `stat` (proc_pid_stat(5)) shows that the main thread is exiting.
fn is_exiting(stat: &str) -> bool {
    // `PF_EXITING` of linux/sched.h.
    const EXITING: u32 = 4;
    // The name of the process is in parentheses and may contain anything. After its last parenthesis come the
    // state and five numbers, then the flags.
    let flags = stat.rsplit_once(") ").and_then(|(_, fields)| fields.split(' ').nth(6)?.parse::<u32>().ok());
    flags.is_some_and(|flags| flags & EXITING != 0)
}

fn remove(path: &Path) -> io::Result<()> {
    if_exists(fs::remove_file(path)).map(drop)
}

fn allowed(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '@')
}

/// Checks that a device may have the name `name`: letters and digits of any script and `. _ - + @`, beginning
/// with a letter or a digit. Fails with the rule that `name` breaks.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    if !name.starts_with(char::is_alphanumeric) {
        return Err("a name begins with a letter or a digit");
    }
    if !name.chars().all(allowed) {
        return Err("a name consists of letters, digits and . _ - + @");
    }
    Ok(())
}

/// A name of at most `bytes_max` bytes that resembles `wanted`: each run of characters that a name must not
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
mod tests {
    use blkq::testing::wait_until;

    use super::*;
    use crate::harness::scratch;

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

    // Contract: detach
    #[test]
    fn a_killed_process_is_distinguished_from_a_live_one() {
        let status = |state, threads, own, shared| {
            format!("Name:\tblkq\nState:\t{state}\nThreads:\t{threads}\nSigPnd:\t{own}\nShdPnd:\t{shared}\n")
        };
        let none = "0000000000000000";
        use ProcessState::{Dying, Exited, Running, Stopped};
        for (state, threads, own, shared, expected) in [
            ("S (sleeping)", 4, none, none, Running),
            ("T (stopped)", 4, none, "0000000000004200", Stopped),
            ("T (stopped)", 4, none, none, Stopped),
            ("t (tracing stop)", 4, none, none, Running),
            ("Z (zombie)", 4, none, none, Dying),
            ("Z (zombie)", 1, none, "0000000000000100", Exited),
            ("D (disk sleep)", 4, "0000000000000100", none, Dying),
            ("D (disk sleep)", 1, none, "0000000000004100", Dying),
        ] {
            let status = status(state, threads, own, shared);
            assert_eq!(ProcessState::parse(&status, ""), expected, "{status}");
        }
        assert_eq!(ProcessState::parse("", ""), Exited);
        assert_eq!(ProcessState::of(std::process::id()), Running);
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert!(!is_exiting(&own) && !is_exiting(""));
        assert!(is_exiting("7 (a) b) D 1 7 7 0 -1 4194308 60 0 0"));
        assert!(!is_exiting("7 (a) 4 4 4) S 1 7 7 0 -1 4194304 60 0 0"));
    }

    /// The parent of the zombie is this test, which waits for it only at the end.
    #[test]
    fn a_zombie_is_not_waited_for() {
        let dir = scratch("zombie");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        fs::write(dir.file("a", ".lock"), format!("{}\n", child.id())).unwrap();
        let status = format!("/proc/{}/status", child.id());
        wait_until("it is a zombie", || fs::read_to_string(&status).unwrap().contains("State:\tZ"));
        let begin = Instant::now();
        dir.wait_for_dying("a");
        assert!(begin.elapsed() < DYING_WAIT);
        let Ok(Found::Remains(remains)) = dir.inspect("a") else { panic!("the device still has an owner") };
        assert_eq!((remains.state, remains.pid), (Fate::Dead, Some(child.id())));
        child.wait().unwrap();
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
