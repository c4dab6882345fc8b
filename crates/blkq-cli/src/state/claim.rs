//! Ownership of a name, and its next owner after a daemon that died.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::dying::DYING_WAIT;
use super::orphan::{self, orphan};
use super::remains::last_lines;
use super::{OLD_LOG, OPTIONS, STATE_DIR_VARIABLE, SUFFIXES, StateDir, check_name, name_from, remove};
use crate::failure::{Failure, Outcome};
use crate::info::StateFile;
use crate::options::Record;

/// How long an attach waits for a name whose owner is just exiting.
const CLAIM_WAIT: Duration = Duration::from_millis(200);
/// How long a daemon may take to accept a connection before it counts as hung.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);
/// Devices of one image's name before attach gives up finding a free one.
const UNIQUE_NAMES_MAX: u32 = 10_000;

impl StateDir {
    /// Takes `name` for a new device.
    ///
    /// # Errors
    /// If the name is malformed, too long for this directory, or taken.
    pub fn claim(&self, name: &str) -> Outcome<Claim> {
        self.claim_as(name, Taker::Attach)
    }

    /// As [`StateDir::claim`], for the next daemon of the device: the state file stays until this daemon serves the
    /// device, and if it does not, stays for another attempt.
    ///
    /// # Errors
    /// As [`StateDir::claim`].
    pub fn claim_for_successor(&self, name: &str) -> Outcome<Claim> {
        self.claim_as(name, Taker::Successor)
    }

    fn claim_as(&self, name: &str, taker: Taker) -> Outcome<Claim> {
        check_name(name).map_err(|why| Failure::new(format!("name {name:?}: {why}")))?;
        let max = self.name_bytes_max();
        if name.len() > max {
            return Err(Failure::new(format!(
                "name {name:?}: its sockets' paths in {} would be too long; take at most {max} characters",
                self.0.display()
            )));
        }
        let begin = Instant::now();
        loop {
            match Claim::take(self, name, taker)? {
                Attempt::Claim(claim) => return Ok(claim),
                Attempt::Orphan(orphan) => return Err(orphan.refusal()),
                Attempt::Locked => {}
            }
            // The lock may be held for a moment by a command that clears up after a dead daemon. While a
            // daemon dies its socket still takes connections.
            let dying = self.holder_is_dying(name);
            // One that hangs lives, and takes no connection.
            let serving = || match self.connect(name, CONNECT_TIMEOUT) {
                Ok(_) => true,
                Err(e) => e.kind() == io::ErrorKind::TimedOut,
            };
            let waited = begin.elapsed();
            if !dying && serving() || waited > if dying { DYING_WAIT } else { CLAIM_WAIT } {
                return Err(Failure::new(format!(
                    "name {name:?}: taken by another device; choose another --name, or blkq detach {name}"
                )));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Takes the first free one of `wanted`, `wanted-2`, `wanted-3`, ...; what a name may
    /// not contain is replaced.
    ///
    /// # Errors
    /// If the directory's path leaves no room for names, or cannot be written.
    pub fn claim_unique(&self, wanted: &str) -> Outcome<Claim> {
        let room = self.name_bytes_max();
        // Room for "-9999" as well.
        if room < 8 {
            return Err(Failure::new(format!(
                "state directory {}: the path is too long for sockets; set {STATE_DIR_VARIABLE} to a shorter one",
                self.0.display()
            )));
        }
        let base = name_from(wanted, room - 5);
        for number in 1..UNIQUE_NAMES_MAX {
            let name = if number == 1 { base.clone() } else { format!("{base}-{number}") };
            match Claim::take(self, &name, Taker::Attach)? {
                Attempt::Claim(claim) => return Ok(claim),
                // Most likely of the same image, which must not be attached twice.
                Attempt::Orphan(orphan) => return Err(orphan.refusal()),
                // Nor while the one before it has not exited yet.
                Attempt::Locked if self.holder_is_dying(&name) => return self.claim(&name),
                Attempt::Locked => {}
            }
        }
        Err(Failure::new(format!("name {base:?}: taken, and so are its variants; give one with --name")))
    }

    /// Takes the orphan `name`, for its next daemon; `None` if another process has it, or there is none.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn take_orphan(&self, name: &str) -> Outcome<Option<Orphan>> {
        Ok(match Claim::take(self, name, Taker::Successor)? {
            Attempt::Orphan(orphan) => Some(*orphan),
            Attempt::Claim(_) | Attempt::Locked => None,
        })
    }

    /// Clears up after a daemon that died: takes its name and drops it, unless it left an orphan, or the device is being
    /// handed over to another daemon.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn clear_dead(&self, name: &str) -> Outcome<Dead> {
        let last_line = last_lines(&self.file(name, ".log")).ok().and_then(|mut lines| lines.pop());
        Ok(match Claim::take(self, name, Taker::Cleaner)? {
            Attempt::Claim(_claim) => Dead::Cleared(last_line.unwrap_or_default()),
            Attempt::Orphan(orphan) => Dead::Orphan(orphan),
            Attempt::Locked => Dead::No,
        })
    }
}

/// The result of [`StateDir::clear_dead`].
#[derive(Debug)]
pub enum Dead {
    /// A daemon that had died, with this last line in its log; nothing is left of it.
    Cleared(String),
    /// The device of a daemon that had died.
    Orphan(Box<Orphan>),
    /// It lives, or there is none.
    No,
}

/// The process that takes a name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taker {
    /// The daemon of a new device.
    Attach,
    /// The next daemon of a device: the state file of the last one stays.
    Successor,
    /// A command that removes stale files. It takes only a name that has a lock file.
    Cleaner,
}

/// The result of [`Claim::take`].
enum Attempt {
    Claim(Claim),
    Orphan(Box<Orphan>),
    /// Another process has it; or it must be there, and is not.
    Locked,
}

/// A kernel's block device whose daemon has exited, and its name.
#[derive(Debug)]
pub struct Orphan {
    /// Keeps the files.
    pub claim: Claim,
    /// Its state file.
    pub state: StateFile,
}

impl Orphan {
    /// Why it is in the way, and what can be done.
    pub fn refusal(&self) -> Failure {
        Failure::new(orphan::refusal(self.claim.name(), &self.state.exports))
    }
}

/// Ownership of a name: dropped, the name is free and nothing is left of the device.
#[derive(Debug)]
pub struct Claim {
    dir: StateDir,
    name: String,
    /// The files stay when it is dropped.
    kept: bool,
    /// The log of the daemon before stays when it is dropped.
    old_log_kept: bool,
    /// The daemon that had the name and died.
    after: Option<Before>,
    /// Locked; the kernel unlocks it when this process exits, in any way.
    lock: File,
}

/// A daemon that died: what it served, and [`StateFile::owner`].
#[derive(Debug)]
struct Before {
    image: String,
    owner: Option<String>,
}

impl Claim {
    /// Takes the lock of `name` if it is free, and removes what a dead owner left unless its device lives.
    fn take(dir: &StateDir, name: &str, taker: Taker) -> Outcome<Attempt> {
        let create = taker != Taker::Cleaner;
        let path = dir.file(name, ".lock");
        let failure = |e: io::Error| {
            let cure = match e.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space in its file system",
                _ => "make the directory writable",
            };
            Failure::new(format!(
                "lock {}: {e}; {cure}, or set {STATE_DIR_VARIABLE} to another directory",
                path.display()
            ))
        };
        loop {
            let lock = match OpenOptions::new().read(true).write(true).create(create).mode(0o600).open(&path)
            {
                Ok(lock) => lock,
                Err(e) if !create && e.kind() == io::ErrorKind::NotFound => return Ok(Attempt::Locked),
                Err(e) => return Err(failure(e)),
            };
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(Attempt::Locked),
                Err(e) => return Err(failure(e.into())),
            }
            // A device that is being handed over is its next daemon's.
            if taker != Taker::Successor && StateDir::is_reserved(&lock) {
                return Ok(Attempt::Locked);
            }
            // The owner before us may have removed the file between our open and our lock.
            let ours = lock.metadata().map_err(failure)?;
            match fs::symlink_metadata(&path) {
                Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {}
                _ => continue,
            }
            let state = dir.read_state(name);
            let before =
                |state: &StateFile| Before { image: state.image.clone(), owner: state.owner.clone() };
            let after = state.as_ref().map(before);
            let orphan = orphan(state)?;
            if orphan.is_none() {
                if create {
                    keep_log(dir, name).map_err(failure)?;
                }
                let stays = |suffix: &str| {
                    [".lock", OLD_LOG].contains(&suffix)
                        || taker == Taker::Successor && [".json", OPTIONS].contains(&suffix)
                };
                for suffix in SUFFIXES.iter().filter(|suffix| !stays(suffix)) {
                    remove(&dir.file(name, suffix)).map_err(failure)?;
                }
            }
            // From here on a failure leaves nothing behind, unless another daemon can serve the device.
            let kept = orphan.is_some() || taker == Taker::Successor && dir.read_state(name).is_some();
            let claim =
                Claim { dir: dir.clone(), name: name.to_owned(), kept, old_log_kept: create, after, lock };
            let pid = format!("{}\n", std::process::id());
            claim
                .lock
                .set_len(0)
                .and_then(|()| claim.lock.write_all_at(pid.as_bytes(), 0))
                .map_err(failure)?;
            return Ok(match orphan {
                Some(state) => Attempt::Orphan(Box::new(Orphan { claim, state })),
                None => Attempt::Claim(claim),
            });
        }
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is taken.
    pub fn dir(&self) -> &StateDir {
        &self.dir
    }

    /// Whether the daemon that had the name before served `image` and died: its last I/O may be in flight.
    pub fn is_after(&self, image: &str) -> bool {
        self.after.as_ref().is_some_and(|before| before.image == image)
    }

    /// As the backing store of `image` knew that daemon ([`StateFile::owner`]).
    pub fn owner_before(&self, image: &str) -> Option<String> {
        self.after.as_ref().filter(|before| before.image == image)?.owner.clone()
    }

    /// The path of one of the device's files.
    pub fn file(&self, suffix: &str) -> PathBuf {
        self.dir.file(&self.name, suffix)
    }

    /// Whether the files stay when the name is given up.
    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Sets whether the files stay when the name is released: for the next daemon of the device. The
    /// log of the daemon before is removed with the others; until this is called it stays, for an attach
    /// that fails must not remove it.
    pub fn keep(&mut self, kept: bool) {
        (self.kept, self.old_log_kept) = (kept, kept);
    }

    /// Whether the state file names a block device that the kernel has and nobody serves. The
    /// remains of one that was not started are removed. If the kernel cannot be asked there may be one.
    pub fn has_orphan(&self) -> bool {
        !matches!(orphan(self.dir.read_state(&self.name)), Ok(None))
    }

    /// Removes a socket on which nobody listens any more.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn remove_socket(&self, suffix: &str) -> Outcome {
        let path = self.file(suffix);
        remove(&path).map_err(|e| Failure::new(format!("socket {}: {e}", path.display())))
    }

    /// As [`StateDir::write_state`].
    ///
    /// # Errors
    /// As [`StateDir::write_state`].
    pub fn write_state(&self, state: &impl serde::Serialize) -> Outcome<File> {
        self.dir.write_state(&self.name, state)
    }

    /// Records how the device is attached: with `options` to the image at `path`, and with the kernel's block device of
    /// the cookie `ublk`. Returns the number of the image. To be called before there are clients.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_options(&self, path: &str, options: &Record, ublk: Option<u64>) -> Outcome<u64> {
        self.dir.write_options(&self.name, path, options, ublk)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let stays = |suffix: &str| self.kept || self.old_log_kept && suffix == OLD_LOG;
        for suffix in SUFFIXES.iter().filter(|suffix| !stays(suffix)) {
            // A file that cannot be removed now is removed by the next daemon that takes the name.
            let _ = remove(&self.file(suffix));
        }
    }
}

/// Keeps the log of a daemon that died, if it has one that is not empty.
fn keep_log(dir: &StateDir, name: &str) -> io::Result<()> {
    let log = dir.file(name, ".log");
    match fs::symlink_metadata(&log) {
        Ok(metadata) if metadata.len() > 0 => fs::rename(&log, dir.file(name, OLD_LOG)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::{files, scratch};
    use crate::state::{Fate, Found, SOCKET_PATH_BYTES_MAX};

    // Contract: detach
    #[test]
    fn a_name_has_one_owner_and_leaves_nothing() {
        let dir = scratch("owner");
        let claim = dir.claim("a").unwrap();
        claim.write_state(&"x").unwrap();
        assert!(dir.claim("a").unwrap_err().to_string().contains("taken"));
        assert!(matches!(dir.clear_dead("a"), Ok(Dead::No)));
        assert_eq!(files(&dir), ["a.json", "a.lock"]);
        drop(claim);
        assert!(files(&dir).is_empty());
        drop(dir.claim("a").unwrap());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    // Contract: detach
    #[test]
    fn a_daemon_that_accepts_no_connection_holds_nobody_up() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let dir = scratch("hung");
        let _owner = dir.claim("a").unwrap();
        let server = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&server, &SocketAddrUnix::new(dir.control_socket("a")).unwrap()).unwrap();
        listen(&server, 0).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match dir.connect("a", CONNECT_TIMEOUT) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::TimedOut, "after {}", waiting.len());
        let (sender, claimed) = std::sync::mpsc::channel();
        let of_another = dir.clone();
        std::thread::spawn(move || sender.send(of_another.claim("a").map(drop)));
        let refused = claimed.recv_timeout(Duration::from_secs(60)).expect("it waits").unwrap_err();
        assert!(refused.to_string().contains("taken"), "{refused}");
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn unique_names_count_on() {
        let dir = scratch("unique");
        let first = dir.claim_unique("d.img").unwrap();
        let second = dir.claim_unique("d.img").unwrap();
        assert_eq!((first.name(), second.name()), ("d.img", "d.img-2"));
        drop(first);
        assert_eq!(dir.claim_unique("d.img").unwrap().name(), "d.img");
        drop(second);
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn leftovers_of_the_dead_are_cleared_under_the_lock() {
        let dir = scratch("dead");
        for suffix in SUFFIXES {
            fs::write(dir.file("a", suffix), "first\nlast\n").unwrap();
        }
        fs::write(dir.file("ab", ".nbd"), "of another").unwrap();
        assert_eq!(dir.names().unwrap(), ["a"]);
        let Ok(Found::Remains(remains)) = dir.inspect("a") else { panic!("it is dead") };
        assert_eq!((remains.state, remains.log_lines.join(" ")), (Fate::Dead, "first last".to_owned()));
        assert!(matches!(dir.clear_dead("a"), Ok(Dead::Cleared(last)) if last == "last"));
        assert_eq!(files(&dir), ["ab.nbd"]);
        assert!(matches!(dir.inspect("a"), Ok(Found::Nothing)));
        assert!(matches!(dir.clear_dead("a"), Ok(Dead::No)));
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn a_log_outlives_attaches_that_fail_and_goes_with_the_device() {
        let dir = scratch("log");
        for suffix in [".lock", ".log"] {
            fs::write(dir.file("a", suffix), "what happened\n").unwrap();
        }
        for _ in 0..2 {
            drop(dir.claim("a").unwrap());
            assert_eq!(files(&dir), ["a.log.1"]);
        }
        let mut claim = dir.claim("a").unwrap();
        claim.keep(false);
        assert_eq!(fs::read_to_string(dir.file("a", ".log.1")).unwrap(), "what happened\n");
        let Ok(Found::Busy(busy)) = dir.inspect("a") else { panic!("this process has it") };
        let own = std::process::id();
        assert!(busy.describe().contains(&format!("socket was removed: then kill {own} detaches it")));
        drop(claim);
        assert!(files(&dir).is_empty());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn info_of_a_dead_device_hides_its_name_from_nobody() {
        let dir = scratch("inspecting");
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    dir.inspect("a").unwrap();
                }
            });
            for _ in 0..1000 {
                fs::write(dir.file("a", ".lock"), "4194305\n").unwrap();
                assert!(matches!(dir.clear_dead("a"), Ok(Dead::Cleared(_))));
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn many_threads_never_own_one_name_together() {
        let dir = scratch("race");
        let owners = std::sync::atomic::AtomicU32::new(0);
        let taken = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        if let Attempt::Claim(claim) = Claim::take(&dir, "a", Taker::Attach).unwrap() {
                            use std::sync::atomic::Ordering::SeqCst;
                            assert_eq!(owners.fetch_add(1, SeqCst), 0);
                            taken.fetch_add(1, SeqCst);
                            owners.fetch_sub(1, SeqCst);
                            drop(claim);
                        }
                    }
                });
            }
        });
        assert!(taken.into_inner() > 0);
        assert!(files(&dir).is_empty());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn names_that_do_not_fit_a_socket_path_are_rejected() {
        let dir = scratch("long");
        let max = dir.name_bytes_max();
        let fits = "n".repeat(max);
        drop(dir.claim(&fits).unwrap());
        assert!(dir.control_socket(&fits).as_os_str().len() == SOCKET_PATH_BYTES_MAX);
        assert!(dir.claim(&"n".repeat(max + 1)).unwrap_err().to_string().contains("at most"));
        assert!(dir.claim_unique(&"n".repeat(400)).unwrap().name().len() <= max);
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
