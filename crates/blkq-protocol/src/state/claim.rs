//! Claims: the exclusive ownership of a device name, and what a new owner does with the files that the last
//! daemon left.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use blkq_drivers::DriverSpec;

use super::remains::{last_lines, orphaned};
use super::{
    DYING_WAIT, OLD_LOG, OPTIONS, OWNER, OWNER_BYTE, ProcessState, RESERVED_BYTE, STATE_DIR_VARIABLE,
    SUFFIXES, StateDir, check_name, name_from, remove,
};
use crate::failure::{Failure, Outcome};
use crate::info::{FileId, StateFile};
use crate::options::{AttachOptions, Export, find_ceph_files, with_write_access};
use crate::system::{is_byte_locked, lock_byte};

/// How long an attach waits for a name that is locked while no daemon answers: a command may be removing
/// stale files, or the old owner may be about to exit.
const CLAIM_WAIT: Duration = Duration::from_millis(200);
/// A daemon that accepts no connection within this time is treated as running but hung.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);
/// How many names (`disk.img`, `disk.img-2`, ...) [`StateDir::claim_unique`] tries.
const UNIQUE_NAMES_MAX: u32 = 10_000;

impl StateDir {
    /// Claims `name` for a new device. Fails if the name is malformed, too long for this directory, or in
    /// use. The state of a virtual machine's disk whose daemon died stays: see [`Claim::check_continues`].
    pub fn claim(&self, name: &str) -> Outcome<Claim> {
        self.claim_as(name, Taker::Attach)
    }

    /// Claims `name` for the next daemon of an existing device. Unlike [`StateDir::claim`], this keeps the
    /// state file, so that recovery can be tried again if this daemon fails to start.
    pub fn claim_for_successor(&self, name: &str) -> Outcome<Claim> {
        self.claim_as(name, Taker::Successor)
    }

    fn claim_as(&self, name: &str, taker: Taker<'_>) -> Outcome<Claim> {
        check_name(name).map_err(|why| Failure::new(format!("name {name:?}: {why}")))?;
        let max = self.name_bytes_max();
        if name.len() > max {
            return Err(Failure::new(format!(
                "the name {name} is too long for a socket path in {}; use at most {max} characters",
                self.0.display()
            )));
        }
        match self.take_when_free(name, taker)? {
            Attempt::Claim(claim) => Ok(*claim),
            Attempt::Orphan(orphan) => Err(orphan.refusal()),
            Attempt::Locked | Attempt::OfAnother => Err(in_use(name)),
        }
    }

    /// As [`Claim::take`], but tries again while the process that holds the lock exits: its image must not be attached
    /// under another name before its I/O in flight has completed. Fails if that takes too long. A command that removes
    /// stale files holds the lock only briefly.
    fn take_when_free(&self, name: &str, taker: Taker<'_>) -> Outcome<Attempt> {
        let (begin, has_other_names) = (Instant::now(), matches!(taker, Taker::AnyName(_)));
        loop {
            // Read before and after the attempt, so that a process that exits in between does not count as running.
            let holder = self.holder(name).map(ProcessState::of);
            let attempt = Claim::take(self, name, taker)?;
            if !matches!(attempt, Attempt::Locked) {
                return Ok(attempt);
            }
            if self.holder(name).map(ProcessState::of) != holder && begin.elapsed() < DYING_WAIT {
                continue;
            }
            // A daemon that is running but hung lets the connection time out. Its name is in use.
            let is_served = || match self.connect(name, CONNECT_TIMEOUT) {
                Ok(_) => true,
                Err(e) => e.kind() == io::ErrorKind::TimedOut,
            };
            let wait = match holder {
                // Its socket still accepts connections.
                Some(ProcessState::Dying) => DYING_WAIT,
                _ if holder != Some(ProcessState::Exited) && has_other_names || is_served() => {
                    return Ok(attempt);
                }
                // Another process has just locked the name, or this process cannot see the holder.
                Some(ProcessState::Exited) => DYING_WAIT,
                _ => CLAIM_WAIT,
            };
            if begin.elapsed() > wait {
                return if holder == Some(ProcessState::Dying) { Err(in_use(name)) } else { Ok(attempt) };
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Claims the first free name of `wanted`, `wanted-2`, `wanted-3` and so on, for a device with `options`. The name
    /// of a virtual machine's disk whose daemon died is free for the same image only. Characters that a name must
    /// not contain are replaced. Fails if the path of the directory is too long for any name, or if the
    /// directory cannot be written.
    pub fn claim_unique(&self, wanted: &str, options: &AttachOptions) -> Outcome<Claim> {
        let room = self.name_bytes_max();
        // The shortest name that is accepted here is three bytes long; the suffix needs five more ("-9999").
        if room < 8 {
            return Err(Failure::new(format!(
                "the path of the state directory {} is too long for sockets; set {STATE_DIR_VARIABLE} to a shorter path",
                self.0.display()
            )));
        }
        let base = name_from(wanted, room - 5);
        for number in 1..UNIQUE_NAMES_MAX {
            let name = if number == 1 { base.clone() } else { format!("{base}-{number}") };
            match self.take_when_free(&name, Taker::AnyName(options))? {
                Attempt::Claim(claim) => return Ok(*claim),
                // The orphaned block device most likely serves the same image, which must not be attached
                // twice.
                Attempt::Orphan(orphan) => return Err(orphan.refusal()),
                Attempt::Locked | Attempt::OfAnother => {}
            }
        }
        let why = format!("{base}, {base}-2, {base}-3 and so on are in use; choose a name with --name");
        Err(Failure::new(why))
    }

    /// Claims the orphaned device `name` for its next daemon. Returns `None` if another process holds the
    /// name, or if there is no such orphan.
    pub fn take_orphan(&self, name: &str) -> Outcome<Option<Orphan>> {
        Ok(match Claim::take(self, name, Taker::Successor)? {
            Attempt::Orphan(orphan) => Some(*orphan),
            Attempt::Claim(_) | Attempt::Locked | Attempt::OfAnother => None,
        })
    }

    /// Removes the files of a daemon that has died, unless its block device still exists (see
    /// [`Dead::Orphan`]) or another daemon is taking over the device.
    pub fn clear_dead(&self, name: &str) -> Outcome<Dead> {
        let last_line = last_lines(&self.last_log(name)).ok().and_then(|mut lines| lines.pop());
        Ok(match Claim::take(self, name, Taker::Cleaner)? {
            Attempt::Claim(_claim) => Dead::Cleared(last_line.unwrap_or_default()),
            Attempt::Orphan(orphan) => Dead::Orphan(orphan),
            Attempt::Locked | Attempt::OfAnother => Dead::No,
        })
    }
}

#[derive(Debug)]
pub enum Dead {
    /// The daemon had died, and its files were removed. Holds the last line of its log.
    Cleared(String),
    /// The daemon had died, but its block device still exists; nothing was removed.
    Orphan(Box<Orphan>),
    /// The daemon is running, or there is no such device.
    No,
}

/// The command that claims a name, which decides which of the existing files stay.
#[derive(Clone, Copy)]
enum Taker<'a> {
    Attach,
    /// An attach that may take another name: the files of a virtual machine's disk whose daemon died stay unless it is
    /// the image of these options.
    AnyName(&'a AttachOptions),
    /// The next daemon of an existing device: the state file and the options stay.
    Successor,
    /// A command that removes stale files. It never creates a lock file.
    Cleaner,
}

enum Attempt {
    Claim(Box<Claim>),
    Orphan(Box<Orphan>),
    /// Another process holds the lock, or a [`Taker::Cleaner`] found no lock file.
    Locked,
    /// The name belongs to another device, which is being handed over, or is not the disk of [`Taker::AnyName`].
    OfAnother,
}

/// A block device of the kernel whose daemon has exited. The claim keeps other processes from recovering the
/// device at the same time.
#[derive(Debug)]
pub struct Orphan {
    pub claim: Claim,
    pub state: StateFile,
}

impl Orphan {
    pub fn refusal(&self) -> Failure {
        Failure::new(orphaned(self.claim.name(), &self.state.exports))
    }
}

/// Ownership of a device name. Dropping the claim releases the name and removes the files of the device,
/// unless [`Claim::keep`] was called.
#[derive(Debug)]
pub struct Claim {
    dir: StateDir,
    name: String,
    kept: bool,
    /// Whether the log of the previous daemon stays when the claim is dropped.
    old_log_kept: bool,
    /// The state of the daemon that held the name before and died.
    before: Option<StateFile>,
    /// Holds the flock(2) lock and the lock on [`OWNER_BYTE`]. The kernel releases them when this process exits,
    /// however that happens.
    lock: File,
}

impl Claim {
    /// Locks `name` if no other process holds it. Removes the files of a dead daemon, unless its block device
    /// still exists.
    fn take(dir: &StateDir, name: &str, taker: Taker<'_>) -> Outcome<Attempt> {
        let create = !matches!(taker, Taker::Cleaner);
        let path = dir.file(name, ".lock");
        let failure = |e: io::Error| {
            let hint = match e.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "free space in its file system",
                _ => "make the directory writable",
            };
            Failure::new(format!(
                "cannot lock {}: {e}; {hint}, or set {STATE_DIR_VARIABLE} to another directory",
                path.display()
            ))
        };
        loop {
            let opened = OpenOptions::new().read(true).write(true).create(create).mode(0o600).open(&path);
            let lock = match opened {
                Ok(lock) => lock,
                Err(e) if !create && e.kind() == io::ErrorKind::NotFound => return Ok(Attempt::Locked),
                Err(e) => return Err(failure(e)),
            };
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Attempt::Locked),
                Err(TryLockError::Error(e)) => return Err(failure(e)),
            }
            // The previous owner may have removed the file after this process opened it and before it got the
            // lock. Then the lock protects nothing: open the new file.
            if lock.metadata().map_err(failure)?.nlink() == 0 {
                continue;
            }
            // Only the next daemon may claim a device that is being handed over.
            if !matches!(taker, Taker::Successor) && is_byte_locked(&lock, RESERVED_BYTE) {
                return Ok(Attempt::OfAnother);
            }
            let state = dir.read_state(name);
            if let (Taker::AnyName(options), Some(state)) = (taker, &state)
                && state.is_of_another_guest(options)
            {
                return Ok(Attempt::OfAnother);
            }
            let continues = match taker {
                Taker::Successor => true,
                Taker::Attach | Taker::AnyName(_) => state.as_ref().is_some_and(StateFile::is_guest),
                Taker::Cleaner => false,
            };
            let before = state.clone();
            let orphan = orphan(state)?;
            if orphan.is_none() {
                if create {
                    keep_log(dir, name).map_err(failure)?;
                }
                let stays = |suffix: &str| {
                    [".lock", OLD_LOG].contains(&suffix)
                        || continues && [".json", OPTIONS, OWNER].contains(&suffix)
                };
                for suffix in SUFFIXES.iter().filter(|suffix| !stays(suffix)) {
                    remove(&dir.file(name, suffix)).map_err(failure)?;
                }
            }
            // If a step fails from here on, dropping the claim removes all files, unless another daemon can
            // still serve the device.
            let kept = orphan.is_some() || continues && dir.read_state(name).is_some();
            let claim =
                Claim { dir: dir.clone(), name: name.to_owned(), kept, old_log_kept: create, before, lock };
            let pid = format!("{}\n", std::process::id());
            // In this order, a file that names this process is locked.
            let locked = claim.lock.set_len(0).and_then(|()| lock_byte(&claim.lock, OWNER_BYTE));
            locked.and_then(|()| claim.lock.write_all_at(pid.as_bytes(), 0)).map_err(failure)?;
            return Ok(match orphan {
                Some(state) => Attempt::Orphan(Box::new(Orphan { claim, state })),
                None => Attempt::Claim(Box::new(claim)),
            });
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn dir(&self) -> &StateDir {
        &self.dir
    }

    /// The state of the previous daemon of this name if that daemon served `image` and died. Then its last writes may
    /// still be in flight.
    pub fn predecessor_of(&self, image: &str) -> Option<&StateFile> {
        self.before.as_ref().filter(|before| before.image == image)
    }

    /// Refuses to attach a device with `options` under a name that belongs to the disk of a virtual machine whose
    /// daemon died, unless the next daemon would serve the same disk ([`StateFile::is_continued_by`]).
    pub fn check_continues(&self, options: &AttachOptions) -> Outcome {
        let Some(before) = self.before.as_ref().filter(|before| !before.is_continued_by(&self.dir, options))
        else {
            return Ok(());
        };
        let name = &self.name;
        let other_name = if before.is_of_another_guest(options) { "; or choose another --name" } else { "" };
        Err(Failure::new(format!(
            "the name {name} belongs to the disk of a virtual machine, which waits because the daemon was killed or \
             crashed; run `blkq recover {name}` to serve it again, or `blkq detach {name}` to remove it{other_name}"
        )))
    }

    /// As [`Claim::check_continues`], for an attach. Also fails if another file is at the path of the image or of a
    /// backing file ([`StateFile::check_image`]).
    pub fn check_attach(&self, options: &AttachOptions) -> Outcome {
        self.check_continues(options)?;
        let guest = self.before.as_ref().filter(|before| before.is_guest());
        guest.map_or(Ok(()), |before| before.check_image(options, false))
    }

    /// Whether the previous daemon of this name served the disk of a virtual machine, and died.
    pub fn is_of_guest(&self) -> bool {
        self.before.as_ref().is_some_and(StateFile::is_guest)
    }

    pub fn file(&self, suffix: &str) -> PathBuf {
        self.dir.file(&self.name, suffix)
    }

    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// Sets whether the files stay when the claim is dropped, for the next daemon of the device. Until the
    /// first call, the log of the previous daemon stays in any case: a failed attach must not remove it.
    pub fn keep(&mut self, kept: bool) {
        (self.kept, self.old_log_kept) = (kept, kept);
    }

    /// Whether the state file names a block device that exists in the kernel and has no daemon. A block
    /// device that was never started is removed. If the kernel cannot be asked, the result is `true`, so that
    /// nothing is removed by mistake.
    pub fn has_orphan(&self) -> bool {
        !matches!(orphan(self.dir.read_state(&self.name)), Ok(None))
    }

    pub fn remove_socket(&self, suffix: &str) -> Outcome {
        let path = self.file(suffix);
        remove(&path).map_err(|e| Failure::new(format!("socket {}: {e}", path.display())))
    }
}

impl StateFile {
    /// Whether a daemon with `options`, those for Ceph included, serves the same disk at the same socket, if this is the
    /// disk of a virtual machine. Otherwise the machine would later overwrite newer data with the requests that it
    /// submits again, or these would fail. The caller restores the settings that `blkq set` changed only if
    /// `options` contain them ([`with_write_access`]).
    pub fn is_continued_by(&self, dir: &StateDir, options: &AttachOptions) -> bool {
        let Ok(Some(mut before)) = self.guest_options() else { return true };
        before = with_write_access(&before, &self.settings);
        find_ceph_files(&mut before, |name| std::env::var_os(name));
        let is_disk = self.is_of_image(&before, options)
            && before.ceph_conf == options.ceph_conf
            && before.offset == options.offset
            && before.size_limit == options.size_limit
            && before.sector_size == options.sector_size
            && (before.read_only || !options.read_only)
            && before.is_qcow2() == options.is_qcow2();
        // A machine that waits at another socket would submit its requests again to some later daemon.
        let own = dir.file(&self.name, ".vhost");
        let socket = |options: &AttachOptions| options.vhost_socket.clone().unwrap_or_else(|| own.clone());
        let exports = &options.exports;
        let is_served = exports.contains(&Export::VhostUserBlk) && !exports.contains(&Export::Ublk);
        is_disk && is_served && socket(&before) == socket(options)
    }

    /// Whether this is the disk of a virtual machine, and not the image of `options`.
    fn is_of_another_guest(&self, options: &AttachOptions) -> bool {
        matches!(self.guest_options(), Ok(Some(theirs)) if !self.is_of_image(&theirs, options))
    }

    /// Whether `options` serve the image of this device, which has the options `of_device`. The image may have been
    /// moved since.
    fn is_of_image(&self, of_device: &AttachOptions, options: &AttachOptions) -> bool {
        match (&of_device.image, &options.image) {
            (one, other) if one == other => true,
            (DriverSpec::Image(one), DriverSpec::Image(other)) => {
                FileId::of(other).is_some_and(|other| [self.file, FileId::of(one)].contains(&Some(other)))
            }
            _ => false,
        }
    }
}

fn in_use(name: &str) -> Failure {
    Failure::new(format!(
        "the name {name} is in use by another device; choose another --name, or run `blkq detach {name}`"
    ))
}

impl Drop for Claim {
    fn drop(&mut self) {
        let stays = |suffix: &str| self.kept || self.old_log_kept && suffix == OLD_LOG;
        for suffix in SUFFIXES.iter().filter(|suffix| !stays(suffix)) {
            // If this fails, the next process that claims the name removes the file.
            let _ = remove(&self.file(suffix));
        }
    }
}

/// Returns the state file if its block device exists in the kernel and has no daemon.
fn orphan(state: Option<StateFile>) -> Outcome<Option<StateFile>> {
    let Some(mut state) = state else { return Ok(None) };
    let Some(ublk) = &mut state.ublk else { return Ok(None) };
    let Some(survivor) = ublk.identity().survivor()? else { return Ok(None) };
    if ublk.id != survivor.id {
        // The daemon died before it recorded the number of the block device.
        ublk.id = survivor.id;
        state.exports = vec![survivor.path()];
    }
    Ok(Some(state))
}

/// Renames the log of a dead daemon to `NAME.log.1`, so that the new daemon does not overwrite it.
fn keep_log(dir: &StateDir, name: &str) -> io::Result<()> {
    let log = dir.file(name, ".log");
    let has_lines = fs::symlink_metadata(&log).is_ok_and(|metadata| metadata.len() > 0);
    if has_lines { fs::rename(&log, dir.file(name, OLD_LOG)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use blkq::testing::assert_stays;

    use super::*;
    use crate::harness::{files, options, scratch};
    use crate::info::DaemonState;
    use crate::options::Record;
    use crate::state::{Fate, Found, SOCKET_PATH_BYTES_MAX};

    // Contract: detach
    #[test]
    fn a_name_has_one_owner_and_leaves_nothing() {
        let dir = scratch("owner");
        let claim = dir.claim("a").unwrap();
        claim.write_state(&"x").unwrap();
        assert!(dir.claim("a").unwrap_err().to_string().contains("in use by another device"));
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
        assert!(refused.to_string().contains("in use by another device"), "{refused}");
        fs::remove_dir_all(&dir.0).unwrap();
    }

    // Contract: exclusive
    #[test]
    fn an_attach_continues_the_disk_of_a_waiting_guest_or_fails() {
        let dir = scratch("continues");
        let [image, other] =
            ["image", "other"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
        fs::write(&image, "x").unwrap();
        fs::write(&other, "x").unwrap();
        let guest = options(&[&image, "--export", "vhost-user-blk", "--offset", "512", "--read-only"]);
        let mut claim = dir.claim("a").unwrap();
        let number = claim.write_options(&image, &Record::new(&guest).unwrap(), None).unwrap();
        let settings = vec![("read-only".to_owned(), "off".to_owned())];
        let state = DaemonState { pid: 1, number, settings, ..DaemonState::default() };
        claim.write_state(&state).unwrap();
        claim.keep(true);
        drop(claim);
        let before = dir.read_state("a");
        let attach = |words: &[&str]| dir.claim("a").unwrap().check_attach(&options(words));
        for words in [
            &[&*image, "--offset", "512", "--export", "nbd"][..],
            &[&image, "--offset", "512", "--export", "vhost-user-blk", "--export", "ublk"],
            &[&image, "--export", "vhost-user-blk"],
            &[&image, "--offset", "512", "--export", "vhost-user-blk", "--read-only"],
            &[&image, "--offset", "512", "--export", "vhost-user-blk", "--size-limit", "1M"],
            &[&image, "--offset", "512", "--export", "vhost-user-blk", "--sector-size", "4096"],
            &[&image, "--offset", "512", "--export", "vhost-user-blk", "--format", "qcow2"],
            &[&other, "--offset", "512", "--export", "vhost-user-blk"],
            &["ram:1M", "--export", "vhost-user-blk"],
            &[&image, "--offset", "512", "--export", "vhost-user-blk", "--vhost-socket", "/run/b"],
        ] {
            let refused = attach(words).unwrap_err().to_string();
            assert!(refused.contains("run `blkq recover a`"), "{words:?}: {refused}");
            assert_eq!(refused.contains("another --name"), words[0] != image, "{refused}");
        }
        let again = ["--offset", "512", "--export", "nbd", "--export", "vhost-user-blk"];
        assert_eq!(attach(&[&[&*image], &again[..]].concat()), Ok(()));
        let socket = dir.file("a", ".vhost");
        let named = ["--vhost-socket", socket.to_str().unwrap()];
        assert_eq!(attach(&[&[&*image], &again[..], &named].concat()), Ok(()));
        let moved = dir.path().join("moved");
        fs::rename(&image, &moved).unwrap();
        assert_eq!(attach(&[&[moved.to_str().unwrap()], &again[..]].concat()), Ok(()));
        fs::copy(&moved, &image).unwrap();
        let refused = attach(&[&[&*image], &again[..]].concat()).unwrap_err().to_string();
        assert!(refused.contains("run `blkq recover --allow-replaced a`"), "{refused}");
        assert_eq!(dir.read_state("a"), before, "an attach that fails changes nothing");
        assert!(matches!(dir.clear_dead("a"), Ok(Dead::Cleared(_))));
        assert!(attach(&[&other, "--export", "nbd"]).is_ok());
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn a_waiting_guest_keeps_its_cluster_and_its_socket() {
        let dir = scratch("cluster");
        let words = ["rbd:pool/image", "--export", "vhost-user-blk"];
        let attached = |more: &[&str]| options(&[&words[..], more].concat());
        let guest = attached(&["--ceph-conf", "/one", "--vhost-socket", "/run/a"]);
        let mut claim = dir.claim("a").unwrap();
        let number = claim.write_options("rbd:pool/image", &Record::new(&guest).unwrap(), None).unwrap();
        let state = DaemonState { pid: 1, number, ..DaemonState::default() };
        claim.write_state(&state).unwrap();
        claim.keep(true);
        drop(claim);
        let claim = dir.claim("a").unwrap();
        assert_eq!(claim.check_continues(&guest), Ok(()));
        for more in [
            &["--ceph-conf", "/two", "--vhost-socket", "/run/a"][..],
            &["--ceph-conf", "/one", "--vhost-socket", "/run/b"],
            &["--ceph-conf", "/one"],
        ] {
            assert!(claim.check_continues(&attached(more)).is_err(), "{more:?}");
        }
        drop(claim);
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn unique_names_count_on() {
        let dir = scratch("unique");
        let ram = options(&["ram:1M", "--export", "nbd"]);
        let first = dir.claim_unique("d.img", &ram).unwrap();
        let second = dir.claim_unique("d.img", &ram).unwrap();
        assert_eq!((first.name(), second.name()), ("d.img", "d.img-2"));
        drop(first);
        assert_eq!(dir.claim_unique("d.img", &ram).unwrap().name(), "d.img");
        drop(second);
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn a_name_is_not_passed_over_while_its_owner_exits() {
        let dir = scratch("just-exited");
        let ram = options(&["ram:1M", "--export", "nbd"]);
        let owner = dir.claim("d.img").unwrap();
        // The owner exits after its lock was tried, and before its state is read.
        fs::write(dir.file("d.img", ".lock"), "4194305\n").unwrap();
        std::thread::scope(|scope| {
            let claim = scope.spawn(|| dir.claim_unique("d.img", &ram).unwrap().name().to_owned());
            assert_stays("the lock is tried again", || !claim.is_finished());
            drop(owner);
            assert_eq!(claim.join().unwrap(), "d.img");
        });
        fs::remove_dir_all(&dir.0).unwrap();
    }

    #[test]
    fn the_name_of_a_waiting_guest_is_free_for_its_image_only() {
        let dir = scratch("unique-guest");
        let [one, other] = ["one", "other"].map(|name| dir.path().join(name).to_str().unwrap().to_owned());
        fs::write(&one, "x").unwrap();
        fs::write(&other, "x").unwrap();
        let [one, other] = [one, other].map(|image| options(&[&image, "--export", "vhost-user-blk"]));
        let mut claim = dir.claim("d.img").unwrap();
        let number = claim.write_options("one", &Record::new(&one).unwrap(), None).unwrap();
        let state = DaemonState { pid: 1, number, ..DaemonState::default() };
        claim.write_state(&state).unwrap();
        claim.keep(true);
        drop(claim);
        let before = dir.read_state("d.img");
        fs::write(dir.file("d.img", ".lock"), "7\n").unwrap();
        assert_eq!(dir.claim_unique("d.img", &other).unwrap().name(), "d.img-2");
        assert_eq!(dir.holder("d.img"), Some(7), "the process of the other device is not the holder");
        assert_eq!(dir.claim_unique("d.img", &one).unwrap().name(), "d.img");
        assert_eq!(dir.read_state("d.img"), before);
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
    fn the_log_of_a_dead_daemon_is_shown_after_a_failed_recovery() {
        let dir = scratch("recovery-log");
        for suffix in [".lock", ".log"] {
            fs::write(dir.file("a", suffix), "what happened\n").unwrap();
        }
        let state = serde_json::json!({"name": "a", "pid": 7, "image": "/i", "exports": [], "settings": {}});
        fs::write(dir.file("a", ".json"), state.to_string()).unwrap();
        drop(dir.claim_for_successor("a").unwrap());
        assert_eq!(files(&dir), ["a.json", "a.lock", "a.log.1"]);
        let Ok(Found::Remains(remains)) = dir.inspect("a") else { panic!("it is dead") };
        assert_eq!(
            (remains.log_lines.join(" "), remains.log),
            ("what happened".to_owned(), dir.file("a", OLD_LOG))
        );
        assert!(matches!(dir.clear_dead("a"), Ok(Dead::Cleared(last)) if last == "what happened"));
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
        assert!(busy.contains(&format!("socket was removed, run `kill {own}` to detach the device")));
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
        assert!(
            dir.claim_unique(&"n".repeat(400), &options(&["ram:1M", "--export", "nbd"]))
                .unwrap()
                .name()
                .len()
                <= max
        );
        fs::remove_dir_all(&dir.0).unwrap();
    }
}
