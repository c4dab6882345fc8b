//! Repairs a group: each member checks regularly whether the file was truncated or overwritten.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

use blkq::throttle::{Group, Member, RateLimits};
use blkq::{Disk, PeriodicThread};
use rustix::fs::ftruncate;

use super::{EXCLUSIVE, Joined, has_room, lock_whole, map, unlock, used_slots};
use crate::failure::{Failure, Outcome};

const INTERVAL: Duration = Duration::from_millis(500);
const STACK_BYTES: usize = 128 << 10;

/// A member's knowledge of its group, which is enough to repair the file.
struct Keeper {
    joined: Joined,
    /// The name of the device as stored in the group, where it may be truncated.
    listed: String,
    /// The limits and the weight at the last check that found no damage.
    limits: RateLimits,
    weight: u32,
}

struct Repaired {
    /// The new membership, if the previous one can no longer be used.
    member: Option<Member>,
    damage: &'static str,
}

impl Keeper {
    fn new(joined: &Joined, member: &Member) -> Keeper {
        let group = member.group();
        let limits = group.limits().map_or_else(RateLimits::default, |(_, limits)| limits);
        let listed = group.member(joined.slot).map_or_else(|| joined.device.clone(), |member| member.name);
        Keeper { joined: joined.clone(), listed, limits, weight: member.weight() }
    }

    /// Returns the damage to the group of `member`, if there is any. Otherwise remembers the limits and the
    /// weight.
    fn damage(&mut self, member: &Member) -> Option<&'static str> {
        // The size is checked before the memory is read, because truncated pages would be lost.
        if self.joined.file.metadata().is_ok_and(|metadata| metadata.size() != Group::BYTES as u64) {
            return Some("its file was truncated or extended");
        }
        if self.joined.mapping.is_broken() {
            return Some("its file was truncated");
        }
        let group = member.group();
        let slot = group.member(self.joined.slot);
        match (group.check(), slot) {
            (Ok(limits), Some(slot)) if slot.name == self.listed => {
                (self.limits, self.weight) = (limits, slot.weight);
                None
            }
            _ if self.joined.mapping.is_broken() => Some("its file was truncated"),
            (Err(_), _) => Some("its file was overwritten"),
            (Ok(_), _) => Some("its list of members was overwritten"),
        }
    }

    /// Checks the group of `member`, and repairs it if it is damaged. Fails if the group cannot be repaired
    /// now, because another command has locked it or its file cannot be written. Also fails if the file was
    /// removed; `blkq group` removes only groups without members.
    fn check(&mut self, member: &Member) -> Outcome<Option<Repaired>> {
        if self.joined.file.metadata().is_ok_and(|metadata| metadata.nlink() == 0) {
            let name = &self.joined.name;
            return Err(Failure::new(format!(
                "its file was removed, so that only its current members share the limits; create it again with `blkq \
                 group set {name} LIMITS`, then run `blkq upgrade {device}`, or detach the device and attach it again",
                device = self.joined.device
            )));
        }
        // A change in progress looks like damage. Once the lock is acquired, the change is complete.
        if self.damage(member).is_none() {
            return Ok(None);
        }
        lock_whole(&self.joined.file, &self.joined.name, EXCLUSIVE)?;
        let repaired = self.repair(member);
        unlock(&self.joined.file);
        repaired
    }

    fn repair(&mut self, member: &Member) -> Outcome<Option<Repaired>> {
        let Some(damage) = self.damage(member) else { return Ok(None) };
        let failed = |e: std::io::Error| Failure::new(format!("group {}: {e}", self.joined.name));
        // The first member that gets the lock repairs the file for all members.
        let mut is_first = self.joined.file.metadata().map_err(failed)?.size() != Group::BYTES as u64;
        if is_first {
            ftruncate(&*self.joined.file, Group::BYTES as u64).map_err(|e| failed(e.into()))?;
        }
        // This process sees zeroes of its own instead of pages that were truncated, so it must map the file
        // again.
        let is_broken = self.joined.mapping.is_broken();
        let group = if is_broken {
            let (group, mapping) = map(&self.joined.name, &self.joined.file)?;
            self.joined.mapping = mapping;
            group
        } else {
            member.group().clone()
        };
        if !group.is_group() {
            is_first = true;
            let slots = used_slots(&self.joined.file).max(self.joined.slot + 1);
            group.reset(self.joined.boot, slots, &self.limits);
        }
        if is_first || group.check().is_err() {
            group.set_limits(&self.limits);
        }
        let is_there = group.member(self.joined.slot).is_some_and(|slot| slot.name == self.listed);
        let join = || group.join(self.joined.slot, &self.joined.device, self.weight);
        let member = (is_broken || !is_there).then(join).transpose()?;
        has_room(&self.joined.name, &self.joined.mapping)?;
        Ok(Some(Repaired { member, damage }))
    }
}

/// Starts the thread of a device's keeper, which runs until the result is dropped and passes its lines to `log`.
pub fn watch(
    joined: &Joined,
    member: &Member,
    disk: Arc<Disk>,
    log: impl Fn(&str) + Send + 'static,
) -> Outcome<PeriodicThread> {
    let mut keeper = Keeper::new(joined, member);
    // A failure is logged only if it differs from the previous one.
    let mut failed = None;
    let watch = move |_| {
        let Some(member) = disk.group_member() else { return INTERVAL };
        let now = match keeper.check(&member) {
            Ok(None) => None,
            Ok(Some(Repaired { member, damage })) => {
                member.into_iter().for_each(|member| disk.join_group(member));
                let Keeper { joined: Joined { name, .. }, limits, .. } = &keeper;
                log(&format!("group {name}: {damage}; repaired, with limits {limits}"));
                None
            }
            Err(failure) => Some(failure.to_string()),
        };
        if let Some(why) = now.as_ref().filter(|_| now != failed) {
            log(&format!("group {} is damaged and cannot be repaired now: {why}", keeper.joined.name));
        }
        failed = now;
        INTERVAL
    };
    Ok(PeriodicThread::start("blkq-group", STACK_BYTES, INTERVAL, watch)?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc::channel;

    use super::super::{GroupFile, path};
    use super::*;
    use crate::harness::scratch;
    use crate::state::StateDir;

    struct Device {
        keeper: Keeper,
        member: Arc<Member>,
        _joined: Joined,
    }

    impl Device {
        fn join(dir: &StateDir, name: &str, weight: u32) -> Device {
            let (joined, member) = Joined::open(dir, "g", name, weight).unwrap();
            let keeper = Keeper::new(&joined, &member);
            Device { keeper, member: Arc::new(member), _joined: joined }
        }

        fn check(&mut self) -> bool {
            let Some(repaired) = self.keeper.check(&self.member).unwrap() else { return false };
            if let Some(member) = repaired.member {
                self.member = Arc::new(member);
            }
            true
        }
    }

    fn members(dir: &StateDir) -> (RateLimits, Vec<(String, u32)>) {
        let (file, limits) = GroupFile::open(dir, "g").unwrap();
        (limits, file.members().into_iter().map(|member| (member.name, member.weight)).collect())
    }

    #[test]
    fn a_damaged_group_is_repaired_while_it_has_members() {
        let dir = scratch("group-keeper");
        let limits: RateLimits = "iops=10,bps=1M".parse().unwrap();
        GroupFile::set(&dir, "g", &limits).unwrap();
        let (mut a, mut b) = (Device::join(&dir, "a", 100), Device::join(&dir, "b", 7));
        assert!(!a.check() && !b.check());
        b.member.set_weight(9).unwrap();
        assert!(!a.check() && !b.check());
        type Damage = fn(&File);
        let damage: [(Damage, &str); 8] = [
            (|file| file.set_len(0).unwrap(), "truncated"),
            (|file| file.set_len(100).unwrap(), "truncated in its header"),
            (|file| file.set_len(4096).unwrap(), "truncated after its header"),
            (|file| file.set_len(1 << 20).unwrap(), "extended"),
            (|file| file.write_all_at(&[0xff], 0).unwrap(), "its magic"),
            (|file| file.write_all_at(&[0xff; 32], 24).unwrap(), "its limits"),
            (|file| file.write_all_at(&vec![0; Group::BYTES], 0).unwrap(), "zeroed"),
            (|file| file.write_all_at(&vec![0xff; Group::BYTES], 0).unwrap(), "all ones"),
        ];
        for (damage, what) in damage {
            for is_used_meanwhile in [false, true] {
                damage(&File::options().write(true).open(path(&dir, "g")).unwrap());
                if is_used_meanwhile {
                    // A queue does this at its next request.
                    let _ = (a.member.group().limits(), a.member.weight(), b.member.weight());
                }
                assert!(a.check(), "{what}");
                b.check();
                assert!(!a.check() && !b.check(), "{what}");
                let both = vec![("a".to_owned(), 100), ("b".to_owned(), 9)];
                assert_eq!(members(&dir), (limits, both), "{what}");
                // Both devices share the same group again.
                let other: RateLimits = "iops=77".parse().unwrap();
                for now in [other, limits] {
                    GroupFile::set(&dir, "g", &now).unwrap();
                    for device in [&a, &b] {
                        assert_eq!(
                            device.member.group().limits().map(|(_, limits)| limits),
                            Some(now),
                            "{what}"
                        );
                    }
                }
                assert!(!a.check() && !b.check(), "{what}");
            }
        }
        // If another command has repaired the group, its limits stay.
        File::options().write(true).open(path(&dir, "g")).unwrap().set_len(0).unwrap();
        let _ = a.member.group().limits();
        let other: RateLimits = "iops=5".parse().unwrap();
        GroupFile::set(&dir, "g", &other).unwrap();
        assert!(a.check() && b.check());
        assert_eq!(members(&dir).0, other);
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_group_whose_file_was_removed_is_reported() {
        let dir = scratch("group-removed");
        let limits: RateLimits = "iops=10".parse().unwrap();
        GroupFile::set(&dir, "g", &limits).unwrap();
        let mut a = Device::join(&dir, "a", 100);
        fs::remove_file(path(&dir, "g")).unwrap();
        for is_created_again in [false, true] {
            if is_created_again {
                GroupFile::set(&dir, "g", &"iops=5".parse().unwrap()).unwrap();
            }
            let why = a.keeper.check(&a.member).err().unwrap().to_string();
            assert!(why.contains("was removed") && why.contains("`blkq group set g LIMITS`"), "{why}");
            assert!(why.contains("`blkq upgrade a`"), "{why}");
            assert_eq!(a.member.group().limits().map(|(_, limits)| limits), Some(limits));
        }
        // An upgrade does the same.
        let mut a = Device::join(&dir, "a", 100);
        assert!(!a.check());
        assert_eq!(members(&dir), ("iops=5".parse().unwrap(), vec![("a".to_owned(), 100)]));
        fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_group_is_watched_until_its_device_stops() {
        use blkq::drivers::null::{Null, NullOptions};
        let dir = scratch("group-watch");
        GroupFile::set(&dir, "g", &"iops=10".parse().unwrap()).unwrap();
        let disk = Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).build().unwrap();
        let (joined, member) = Joined::open(&dir, "g", "a", 3).unwrap();
        disk.join_group(member);
        let (log, lines) = channel();
        let member = disk.group_member().unwrap();
        let log = move |line: &str| log.send(line.to_owned()).unwrap();
        let watch = watch(&joined, &member, disk.clone(), log).unwrap();
        File::options().write(true).open(path(&dir, "g")).unwrap().set_len(0).unwrap();
        let line = lines.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(line.starts_with("group g: its file was truncated") && line.ends_with("iops=10"), "{line}");
        assert_eq!(members(&dir), ("iops=10".parse().unwrap(), vec![("a".to_owned(), 3)]));
        drop(watch);
        assert!(lines.recv().is_err(), "the thread has exited");
        fs::remove_dir_all(dir.path()).unwrap();
    }
}
