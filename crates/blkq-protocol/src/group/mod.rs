//! Groups of devices: files in the state directory that the daemons of the members map
//! ([`blkq::throttle::Group`]).
//!
//! A member holds a lock on the byte with the number of its slot, through an open file description, so a
//! killed daemon stops being a member. A command that creates, changes, joins or removes a group holds an
//! exclusive flock(2) on the file meanwhile; a command that reads it holds a shared one.

mod keeper;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use blkq::ErrorKind;
use blkq::throttle::{Group, MEMBERS_MAX, Member, MemberInfo, RateLimits};
use blkq_export::mapping::Mapping;
use rustix::fs::{FlockOperation, OFlags, flock, ftruncate};
use rustix::io::Errno;

use crate::failure::{Failure, Outcome, did_you_mean};
use crate::options::parse_group_name;
use crate::state::StateDir;
use crate::system::{file_names, is_byte_locked, lock_byte};

pub use keeper::watch;

const DIRECTORY: &str = "groups";
/// Times of the monotonic clock in the file are valid only for the boot with this ID.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// How long to wait for other commands that have locked the group. Each holds the lock only briefly.
const LOCK_WAIT: Duration = Duration::from_secs(3);
const LOCK_INTERVAL: Duration = Duration::from_millis(5);
const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
const SHARED: FlockOperation = FlockOperation::NonBlockingLockShared;

pub struct GroupFile {
    file: File,
    group: Arc<Group>,
    mapping: Arc<Mapping>,
}

/// The membership of a device. It owns its slot until this and its clones are dropped.
#[derive(Clone)]
pub struct Joined {
    name: String,
    device: String,
    file: Arc<File>,
    slot: usize,
    boot: [u64; 2],
    mapping: Arc<Mapping>,
}

fn path(dir: &StateDir, name: &str) -> PathBuf {
    dir.path().join(DIRECTORY).join(name)
}

/// The names of all groups, sorted.
pub fn names(dir: &StateDir) -> Outcome<Vec<String>> {
    let directory = dir.path().join(DIRECTORY);
    let names = file_names(&directory, "", |name| parse_group_name(name).is_ok());
    names.map_err(|e| Failure::new(format!("{}: {e}", directory.display())))
}

/// The ID of this boot. It is read only once, because a confined daemon must not open the file.
static BOOT: LazyLock<Outcome<[u64; 2]>> = LazyLock::new(|| {
    let failed = |why: String| Failure::new(format!("{BOOT_ID}: {why}"));
    let text = fs::read_to_string(BOOT_ID).map_err(|e| failed(e.to_string()))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(|e| failed(e.to_string()))?;
    Ok([(id >> 64) as u64, id as u64])
});

/// Reads what a daemon needs to join a group after it is confined.
pub fn prepare() {
    // If this fails, joining a group fails too and reports the error.
    LazyLock::force(&BOOT);
}

/// Locks the whole file. Waits at most [`LOCK_WAIT`].
fn lock_whole(file: &File, name: &str, operation: FlockOperation) -> Outcome {
    let until = Instant::now() + LOCK_WAIT;
    loop {
        match flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < until => thread::sleep(LOCK_INTERVAL),
            Err(Errno::WOULDBLOCK) => {
                return Err(Failure::new(format!("group {name} is locked by another command; try again")));
            }
            Err(e) => return Err(Failure::new(format!("cannot lock the group {name}: {e}"))),
        }
    }
}

/// If `make` is set, creates the file if it does not exist.
fn open(dir: &StateDir, name: &str, make: bool) -> Outcome<File> {
    let path = path(dir, name);
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => {
            let similar = did_you_mean(name, names(dir).unwrap_or_default());
            Failure::new(format!(
                "there is no group {name}{similar}; create it with `blkq group set {name} LIMITS`"
            ))
        }
        _ => Failure::new(format!("group {name}: {}: {e}", path.display())),
    };
    let flags = (OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as i32;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(make).mode(0o600).custom_flags(flags);
    let file = options.open(&path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(Failure::new(format!("group {name}: {} is not a file; remove it", path.display())));
    }
    Ok(file)
}

/// Returns whether the file still has a name: it may have been removed before the lock was acquired.
fn lock_named(file: &File, name: &str, operation: FlockOperation) -> Outcome<bool> {
    lock_whole(file, name, operation)?;
    let links = file.metadata().map(|metadata| metadata.nlink());
    links.map(|links| links > 0).map_err(|e| Failure::new(format!("group {name}: {e}")))
}

fn open_locked(dir: &StateDir, name: &str, make: bool, operation: FlockOperation) -> Outcome<File> {
    loop {
        let file = open(dir, name, make)?;
        if lock_named(&file, name, operation)? {
            return Ok(file);
        }
    }
}

/// Opens an existing group for a confined daemon, which cannot open files, for [`Joined::over`].
pub fn open_for_daemon(dir: &StateDir, name: &str) -> Outcome<File> {
    open(dir, name, false)
}

fn unlock(file: &File) {
    // If unlocking fails, closing the file releases the lock.
    let _ = flock(file, FlockOperation::Unlock);
}

fn map(name: &str, file: &File) -> Outcome<(Arc<Group>, Arc<Mapping>)> {
    let mapping = Mapping::new(file.as_fd(), 0, Group::BYTES as u64)
        .map_err(|e| Failure::from(e).during(format_args!("group {name}")))?;
    let mapping = Arc::new(mapping);
    let start = mapping.start();
    // SAFETY: the mapping is page-aligned, has `Group::BYTES` bytes and stays until the box is dropped.
    // Nothing else in this process accesses it, and pages that a truncation removes are replaced by zeroes.
    let group = unsafe { Group::over(start, Box::new(mapping.clone())) };
    Ok((Arc::new(group), mapping))
}

/// Fails if the file system had no space for a page of the file, so that only this process sees what was
/// written to the group.
fn has_room(name: &str, mapping: &Mapping) -> Outcome {
    let why = format!("group {name}: its file cannot be written; the file system may be full");
    if mapping.is_broken() { Err(Failure::new(why)) } else { Ok(()) }
}

fn damaged(name: &str, why: &str) -> Failure {
    Failure::new(format!(
        "group {name} is damaged: {why}; set its limits again with `blkq group set {name} LIMITS`"
    ))
}

impl GroupFile {
    /// Opens an existing group for reading. Fails if the group does not exist or is damaged.
    pub fn open(dir: &StateDir, name: &str) -> Outcome<(GroupFile, RateLimits)> {
        let file = open_locked(dir, name, false, SHARED)?;
        let opened = GroupFile::over(name, file)?;
        unlock(&opened.0.file);
        Ok(opened)
    }

    fn over(name: &str, file: File) -> Outcome<(GroupFile, RateLimits)> {
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        if bytes != Group::BYTES as u64 {
            return Err(damaged(name, &format!("its file has {bytes} bytes, not {}", Group::BYTES)));
        }
        let (group, mapping) = map(name, &file)?;
        let limits = group.check().map_err(|error| match error.kind() {
            ErrorKind::Format => damaged(name, &error.to_string()),
            _ => error.into(),
        })?;
        Ok((GroupFile { file, group, mapping }, limits))
    }

    /// Sets the limits of a group. Creates the group if it does not exist, and repairs it if it is damaged.
    pub fn set(dir: &StateDir, name: &str, limits: &RateLimits) -> Outcome {
        dir.create()?;
        let directory = dir.path().join(DIRECTORY);
        let failed = |e: io::Error| Failure::new(format!("group {name}: {}: {e}", directory.display()));
        DirBuilder::new().mode(0o700).recursive(true).create(&directory).map_err(failed)?;
        let file = open_locked(dir, name, true, EXCLUSIVE)?;
        if file.metadata().map_err(failed)?.len() != Group::BYTES as u64 {
            ftruncate(&file, Group::BYTES as u64).map_err(|e| failed(e.into()))?;
        }
        let (group, mapping) = map(name, &file)?;
        let boot = BOOT.clone()?;
        if !group.is_group() {
            group.reset(boot, used_slots(&file), limits);
        } else if !group.is_of(boot) {
            group.restart(boot, used_slots(&file));
        }
        group.set_limits(limits);
        has_room(name, &mapping)?;
        unlock(&file);
        Ok(())
    }

    /// Removes a group, even if it is damaged. Fails if the group has members.
    pub fn remove(dir: &StateDir, name: &str) -> Outcome {
        let file = open_locked(dir, name, false, EXCLUSIVE)?;
        if (0..MEMBERS_MAX).any(|slot| is_byte_locked(&file, slot)) {
            let why = format!("group {name} has members (see `blkq group list`); detach them first");
            return Err(Failure::new(why));
        }
        let path = path(dir, name);
        fs::remove_file(&path).map_err(|e| Failure::new(format!("group {name}: {}: {e}", path.display())))
    }

    pub fn members(&self) -> Vec<MemberInfo> {
        let there = (0..MEMBERS_MAX).filter(|slot| is_byte_locked(&self.file, *slot));
        there.filter_map(|slot| self.group.member(slot)).collect()
    }
}

impl Joined {
    /// Opens the group `name`, and makes `device` a member with the given weight. Fails as
    /// [`GroupFile::open`] does, and if the group has no free slot.
    pub fn open(dir: &StateDir, name: &str, device: &str, weight: u32) -> Outcome<(Joined, Member)> {
        Joined::in_locked(open_locked(dir, name, false, EXCLUSIVE)?, name, device, weight)
    }

    /// Joins the group whose file another process has opened ([`open_for_daemon`]). Fails as [`Joined::open`]
    /// does, and if the group was removed meanwhile.
    pub fn over(file: File, name: &str, device: &str, weight: u32) -> Outcome<(Joined, Member)> {
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(Failure::new(format!("group {name}: not a file")));
        }
        match lock_named(&file, name, EXCLUSIVE)? {
            true => Joined::in_locked(file, name, device, weight),
            false => Err(Failure::new(format!("the group {name} was removed meanwhile"))),
        }
    }

    fn in_locked(file: File, name: &str, device: &str, weight: u32) -> Outcome<(Joined, Member)> {
        let (GroupFile { file, group, mapping }, _) = GroupFile::over(name, file)?;
        let boot = BOOT.clone()?;
        if !group.is_of(boot) {
            group.restart(boot, used_slots(&file));
        }
        let Some(slot) = (0..MEMBERS_MAX).find(|slot| lock_byte(&file, *slot).is_ok()) else {
            return Err(Failure::new(format!("group {name} already has {MEMBERS_MAX} members, the maximum")));
        };
        let member = group.join(slot, device, weight)?;
        // The lock on the slot now keeps commands from removing the group.
        unlock(&file);
        let (name, device, file) = (name.to_owned(), device.to_owned(), Arc::new(file));
        Ok((Joined { name, device, file, slot, boot, mapping }, member))
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

/// Number of slots up to the last one in use.
fn used_slots(file: &File) -> usize {
    (0..MEMBERS_MAX).rev().find(|slot| is_byte_locked(file, *slot)).map_or(0, |slot| slot + 1)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, PermissionsExt};

    use super::*;
    use crate::harness::scratch;

    fn limits(text: &str) -> RateLimits {
        text.parse().unwrap()
    }

    #[test]
    fn members_come_and_disappear_with_their_files() {
        let dir = scratch("group-members");
        assert!(GroupFile::open(&dir, "g").err().unwrap().to_string().contains("blkq group set g"));
        GroupFile::set(&dir, "g", &limits("iops=10")).unwrap();
        let mode = fs::metadata(path(&dir, "g")).unwrap().permissions().mode();
        assert_eq!((mode & 0o777, names(&dir).unwrap()), (0o600, vec!["g".to_owned()]));
        let a = Joined::open(&dir, "g", "a", 100).unwrap();
        let b = Joined::open(&dir, "g", "b", 7).unwrap();
        let listed = || {
            let members = GroupFile::open(&dir, "g").unwrap().0.members();
            members.into_iter().map(|member| (member.name, member.weight)).collect::<Vec<_>>()
        };
        assert_eq!(listed(), [("a".to_owned(), 100), ("b".to_owned(), 7)]);
        assert!(GroupFile::remove(&dir, "g").unwrap_err().to_string().contains("has members"));
        drop(a);
        assert_eq!(listed(), [("b".to_owned(), 7)]);
        // The slot is free again.
        let (c, in_c) = Joined::open(&dir, "g", "c", 1).unwrap();
        assert_eq!(listed().len(), 2);
        GroupFile::set(&dir, "g", &limits("none")).unwrap();
        assert_eq!(in_c.group().limits().map(|(_, limits)| limits), Some(limits("none")));
        drop((b, c, in_c));
        GroupFile::remove(&dir, "g").unwrap();
        assert!(names(&dir).unwrap().is_empty());
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_damaged_group_is_reported_in_one_line_and_set_again() {
        let dir = scratch("group-damage");
        GroupFile::set(&dir, "g", &limits("iops=10")).unwrap();
        let whole = fs::read(path(&dir, "g")).unwrap();
        type Damage = fn(&mut Vec<u8>);
        let damage: [Damage; 4] = [
            |bytes| bytes.truncate(100),
            |bytes| bytes[0] ^= 1,
            // A change of the limits was interrupted; then, the first limit is out of range.
            |bytes| bytes[24] |= 1,
            |bytes| bytes[32..40].fill(0xff),
        ];
        for damage in damage {
            let mut bytes = whole.clone();
            damage(&mut bytes);
            fs::write(path(&dir, "g"), &bytes).unwrap();
            let why = Joined::open(&dir, "g", "a", 100).err().unwrap().to_string();
            assert!(why.starts_with("group g is damaged") && why.len() < 200 && !why.contains('\n'), "{why}");
            GroupFile::set(&dir, "g", &limits("bps=1M")).unwrap();
            assert_eq!(GroupFile::open(&dir, "g").unwrap().1, limits("bps=1M"));
        }
        fs::remove_file(path(&dir, "g")).unwrap();
        fs::create_dir(path(&dir, "g")).unwrap();
        assert!(Joined::open(&dir, "g", "a", 100).is_err());
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn setting_a_damaged_group_keeps_its_current_members() {
        let dir = scratch("group-again");
        GroupFile::set(&dir, "g", &limits("iops=10")).unwrap();
        let a = Joined::open(&dir, "g", "a", 100).unwrap();
        let _b = Joined::open(&dir, "g", "b", 7).unwrap();
        drop(a);
        // The magic number, then the boot ID.
        for offset in [0, 8] {
            let file = File::options().write(true).open(path(&dir, "g")).unwrap();
            file.write_all_at(&[0xff], offset).unwrap();
            GroupFile::set(&dir, "g", &limits("iops=20")).unwrap();
            let (group, now) = GroupFile::open(&dir, "g").unwrap();
            let members: Vec<_> =
                group.members().into_iter().map(|member| (member.slot, member.name)).collect();
            assert_eq!((now, members), (limits("iops=20"), vec![(1, "b".to_owned())]), "{offset}");
        }
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_group_that_stays_locked_is_reported() {
        let dir = scratch("group-locked");
        GroupFile::set(&dir, "g", &limits("iops=10")).unwrap();
        let reader = open_locked(&dir, "g", false, SHARED).unwrap();
        GroupFile::open(&dir, "g").expect("readers do not wait for each other");
        thread::scope(|scope| {
            let failures = [
                scope.spawn(|| GroupFile::set(&dir, "g", &limits("iops=20")).err()),
                scope.spawn(|| GroupFile::remove(&dir, "g").err()),
                scope.spawn(|| Joined::open(&dir, "g", "a", 100).err()),
            ];
            for failure in failures {
                let failure = failure.join().unwrap().unwrap().to_string();
                assert!(failure.contains("is locked by another command"), "{failure}");
            }
        });
        drop(reader);
        let joined = Joined::open(&dir, "g", "a", 100).unwrap();
        assert!(GroupFile::remove(&dir, "g").unwrap_err().to_string().contains("has members"));
        drop(joined);
        GroupFile::remove(&dir, "g").unwrap();
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_group_that_shrinks_harms_no_member() {
        let dir = scratch("group-shrinks");
        GroupFile::set(&dir, "g", &limits("iops=10")).unwrap();
        let (_joined, member) = Joined::open(&dir, "g", "a", 100).unwrap();
        File::options().write(true).open(path(&dir, "g")).unwrap().set_len(0).unwrap();
        assert_eq!(member.group().limits(), None);
        assert!(member.weight() > 0);
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
