//! Changes settings of a device in use. A new setting needs an arm in [`apply`] and in [`Device::read_back`], and one
//! in [`Device::check_change`] only if it has a rule that depends on the device.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use blkq::sync::lock;
use blkq::throttle::{Ceiling, LimitMode, WEIGHT_DEFAULT};
use blkq::{Disk, DriverSetting, ErrorKind};
use blkq_drivers::r#loop::LoopSetting;
use blkq_export::nbd::NbdSwitches;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::group::{GroupWatch, Joined};
use blkq_protocol::options::{Key, Scope, Setting, is_removed};

use super::running::{Running, stopping};
use super::{Device, Permit};
use crate::log;

impl Device {
    pub fn read_setting(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.settings.read(key, value)
    }

    /// Changes settings of the disk or its driver while no I/O is in flight. Fails as `permit` does, or if the device
    /// rejects the value.
    pub fn set(&self, setting: &Setting, permit: Permit) -> Outcome {
        let running = self.running()?;
        // Serializes concurrent changes, so that the recorded value is the one that was set last.
        let _changing = self.begin_change_if(permit)?;
        self.check_change(&running, setting)?;
        apply(&running.disk, Some((self, &running)), setting)?;
        match setting {
            // Also forgets the weight in the group.
            Setting::Group(None) => self.settings.note_group(None),
            _ => self.settings.replace(setting.name(), Some(setting.to_text())),
        }
        Ok(())
    }

    /// The changes that are necessary for the device to have `settings`. Each is checked as far as is
    /// possible without making it. Fails with the first setting that the device cannot have.
    pub fn prepare_changes(&self, settings: &[(String, String)]) -> Outcome<Vec<Change>> {
        let running = self.running()?;
        let facts = running.disk.driver().describe();
        let mut changes = Vec::new();
        for (key, value) in settings.iter().filter(|(key, _)| !is_removed(key)) {
            let during = |failure: Failure| failure.during(format_args!("{key}={value}"));
            let to = self.settings.read(key, value).map_err(during)?;
            let from = self.read_back(&running, &facts, to.key());
            // Some settings cannot be set at all on this device, not even to the value that they have.
            if from.as_ref() == Some(&to) {
                continue;
            }
            self.check_change(&running, &to).map_err(during)?;
            let saved = self.settings.changed().into_iter().find(|(other, _)| other == key);
            changes.push(Change { to, from, saved });
        }
        Ok(changes)
    }

    /// Undoes a change, for the next daemon as well. Fails as [`Device::set`] does; the change then stays.
    pub fn undo(&self, change: &Change) -> Outcome {
        change.from.as_ref().map_or(Ok(()), |from| self.set(from, &|| Ok(())))?;
        self.settings.replace(change.to.name(), change.saved.clone());
        Ok(())
    }

    /// Checks the rules that depend on the device and not on the value alone.
    fn check_change(&self, running: &Running, setting: &Setting) -> Outcome {
        if setting.key().row().scope == Scope::Nbd && running.servers.nbd.is_empty() {
            let rule = "this setting applies only to NBD, and the device is not served over NBD";
            return Err(Failure::new(rule));
        }
        match setting {
            Setting::Limit(LimitMode::Auto) if running.disk.group_member().is_some() => {
                Err(Failure::new("limit=auto is not possible for a device in a group"))
            }
            // `blkq set` sends another request to join a group, with the file of the group.
            Setting::Group(Some(group)) => {
                let name = running.disk.name();
                Err(Failure::new(format!("only `blkq set {name} group={group}` can change the group")))
            }
            Setting::Depth(depth) => check_depth(&running.disk, *depth),
            Setting::ReadOnly(_) => self.check_not_changed(),
            _ => Ok(()),
        }
    }

    /// The value that is in force; `None` if there is none, for example the weight of a device without a group.
    /// `facts` are those of the driver.
    #[deny(clippy::wildcard_enum_match_arm, reason = "a new setting needs an arm")]
    pub(super) fn read_back(
        &self,
        running: &Running,
        facts: &[(&'static str, String)],
        key: Key,
    ) -> Option<Setting> {
        let Running { servers, disk, .. } = running;
        let now = disk.settings();
        let fact = |name| facts.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str());
        Some(match key {
            Key::Autoclear => Setting::Autoclear(self.is_autoclear()),
            Key::Batching => Setting::Batching(now.batching),
            Key::Clock => Setting::Clock(now.clock),
            Key::Depth => Setting::Depth(now.depth),
            Key::DirectIo => Setting::DirectIo(fact("direct-io-requested")?.parse().ok()?),
            Key::Dispatch => Setting::Dispatch(fact("dispatch")?.parse().ok()?),
            Key::EarlySubmission => Setting::EarlySubmission(now.early_submission),
            Key::Fault => Setting::Fault(fact("fault")?.parse().ok()?),
            Key::Group => Setting::Group(Some(lock(&self.group).as_ref()?.name().to_owned())),
            Key::HangWarning => Setting::HangWarning(lock(&self.background).as_ref()?.hangs.counters.limit()),
            Key::Iostats => Setting::Iostats(now.iostats),
            Key::Limit => Setting::Limit(match disk.ceiling() {
                Ceiling::NotSearched => LimitMode::Fixed(disk.rate_limits()),
                Ceiling::Unknown | Ceiling::Found(_) => LimitMode::Auto,
            }),
            Key::Merge => Setting::Merge(now.merge),
            Key::OnError => Setting::OnError(disk.error_policy()),
            Key::ReadOnly => Setting::ReadOnly(disk.limits().read_only),
            Key::ReceiveBackoff => Setting::ReceiveBackoff(servers.switches.receive_backoff.load(Relaxed)),
            Key::Scheduler => Setting::Scheduler(now.scheduler),
            Key::SplitReads => Setting::SplitReads(servers.switches.split_reads.load(Relaxed)),
            Key::Weight => Setting::Weight(disk.group_member()?.weight()),
        })
    }
}

impl Device {
    /// The device leaves its previous group and keeps its weight. `file` is the open file of the group. Fails
    /// if the group cannot be joined, or if the device has `limit=auto`, and as `permit` does.
    pub fn join_group(&self, name: &str, file: File, permit: Permit) -> Outcome {
        let running = self.running()?;
        let _changing = self.begin_change_if(permit)?;
        if running.disk.ceiling() != Ceiling::NotSearched {
            let rule = "a device with limit=auto cannot be in a group; set limit=none or another limit first";
            return Err(Failure::new(rule));
        }
        let weight = running.disk.group_member().map_or(WEIGHT_DEFAULT, |member| member.weight());
        let (joined, member) = Joined::over(file, name, &self.attached.name, weight)?;
        let mut watch = GroupWatch::new(&joined, &member, running.disk.clone());
        let mut background = lock(&self.background);
        let background = background.as_mut().ok_or_else(stopping)?;
        // The `blkq-group` thread repairs the previous group's file from the member of the disk, so it must
        // stop before the disk gets a member of another group.
        background.group = None;
        running.disk.join_group(member);
        *lock(&self.group) = Some(joined);
        if let Err(failure) = watch.start(log::line) {
            self.remove_from_group(&running);
            self.settings.note_group(None);
            return Err(Failure::new(format!("{failure}; the device is now in no group")));
        }
        background.group = Some(watch);
        self.settings.note_group(Some((name, weight)));
        Ok(())
    }

    /// The caller records that the device is in no group.
    pub(super) fn leave_group(&self, running: &Running) -> Outcome {
        lock(&self.background).as_mut().ok_or_else(stopping)?.group = None;
        self.remove_from_group(running);
        Ok(())
    }

    fn remove_from_group(&self, running: &Running) {
        running.disk.leave_group();
        *lock(&self.group) = None;
    }
}

/// Changes the setting of the disk, or of the device that serves it. There is no device before the disk is in use; the
/// settings that the daemon implements are then options. Fails if the disk or the device rejects the value.
#[deny(clippy::wildcard_enum_match_arm, reason = "a new setting needs an arm")]
pub(super) fn apply(disk: &Arc<Disk>, device: Option<(&Device, &Running)>, setting: &Setting) -> Outcome {
    let of_disk = |setting| disk.set(setting).map_err(not_set);
    let of_driver = |setting: &dyn DriverSetting| disk.set_driver(setting).map_err(not_set);
    let of_device = |set: &dyn Fn(&Device, &Running) -> Outcome| {
        device.map_or(Ok(()), |(device, running)| set(device, running))
    };
    let of_nbd = |switch: fn(&NbdSwitches) -> &AtomicBool, on| {
        let switches = device.map(|(_, running)| &running.servers.switches);
        switches.iter().for_each(|switches| switch(switches).store(on, Relaxed));
        Ok(())
    };
    match setting {
        Setting::Autoclear(on) => of_device(&|device, running| {
            running.ublk.as_ref().map_or(Ok(()), |ublk| ublk.watch_users(*on))?;
            device.autoclear.store(*on, SeqCst);
            Ok(())
        }),
        Setting::Batching(on) => of_disk(blkq::Setting::Batching(*on)),
        Setting::Clock(mode) => of_disk(blkq::Setting::Clock(*mode)),
        Setting::Depth(depth) => {
            check_depth(disk, *depth)?;
            of_disk(blkq::Setting::Depth(*depth))
        }
        Setting::DirectIo(mode) => of_driver(&LoopSetting::DirectIo(*mode)),
        Setting::Dispatch(dispatch) => of_driver(&LoopSetting::Dispatch(*dispatch)),
        Setting::EarlySubmission(on) => of_disk(blkq::Setting::EarlySubmission(*on)),
        Setting::Fault(spec) => of_driver(spec),
        // `Device::join_group` has the file of the group.
        Setting::Group(Some(_)) => Ok(()),
        Setting::Group(None) => of_device(&Device::leave_group),
        Setting::HangWarning(limit) => of_device(&|device, _| {
            lock(&device.background).as_ref().ok_or_else(stopping)?.hangs.set(*limit);
            Ok(())
        }),
        Setting::Iostats(on) => of_disk(blkq::Setting::Iostats(*on)),
        Setting::Limit(mode) => of_device(&|device, _| {
            lock(&device.background).as_mut().ok_or_else(stopping)?.set_limit(disk, *mode)
        }),
        Setting::Merge(on) => of_disk(blkq::Setting::Merge(*on)),
        Setting::OnError(policy) => {
            disk.set_error_policy(*policy);
            Ok(())
        }
        Setting::ReadOnly(on) => {
            let was = disk.limits().read_only;
            of_disk(blkq::Setting::ReadOnly(*on))?;
            of_device(&|_, running| {
                let Some(ublk) = &running.ublk else { return Ok(()) };
                ublk.set_read_only(*on).map_err(|error| {
                    // The error of the block device is the reason for the failure.
                    let _ = disk.set(blkq::Setting::ReadOnly(was));
                    Failure::of(error, ErrorKind::Unsupported, "detach the device and attach it again")
                })
            })
        }
        Setting::ReceiveBackoff(on) => of_nbd(|switches| &switches.receive_backoff, *on),
        Setting::Scheduler(kind) => of_disk(blkq::Setting::Scheduler(*kind)),
        Setting::SplitReads(on) => of_nbd(|switches| &switches.split_reads, *on),
        Setting::Weight(weight) => {
            let set = disk.group_member().map_or(Ok(()), |member| member.set_weight(*weight));
            set.map_err(not_set)
        }
    }
}

pub struct Change {
    pub to: Setting,
    from: Option<Setting>,
    /// The value in the state file, if the setting was changed before.
    saved: Option<(String, String)>,
}

/// Rejects a depth that exceeds the depth with which the disk was attached. The error names the largest
/// depth.
fn check_depth(disk: &Disk, depth: u16) -> Outcome {
    if depth <= disk.depth_max() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "depth must be 1 to {}, not {depth}; to use {depth}, detach the device and attach it with --depth {depth}",
        disk.depth_max()
    )))
}

fn not_set(error: blkq::Error) -> Failure {
    Failure::of(error, ErrorKind::Lost, "detach the device and attach it again")
}

#[cfg(test)]
mod tests {
    use blkq_protocol::control::NewSize;
    use blkq_protocol::control::bitmaps::BitmapChange;
    use blkq_protocol::group::GroupFile;
    use blkq_protocol::harness::{options, scratch};
    use blkq_protocol::options::Row;
    use blkq_protocol::state::parse_state;

    use super::super::Served;
    use super::super::image::Opening;
    use super::super::listen::Sockets;
    use super::super::open::Plan;
    use super::*;

    /// The file was written by an older version, whose daemons stored settings as the user had typed them.
    #[test]
    fn settings_of_older_state_files_are_in_force_again() {
        let dir = scratch("saved");
        dir.create().unwrap();
        let image = dir.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let words = [image.to_str().unwrap(), "--export", "nbd", "--no-sandbox", "--fault", "none"];
        let options = options(&words);
        let mut saved = parse_state(include_bytes!("../../tests/data/state-settings.json")).unwrap().settings;
        assert!(saved.iter().any(|(key, _)| key == "pacing"));
        // A setting that was removed is dropped without a warning.
        saved.retain(|(key, _)| !is_removed(key));
        let claim = dir.claim("saved").unwrap();
        let sockets = Sockets::default();
        let served = Served { image: String::new(), number: 0, attach_options: None };
        let settings = saved.clone();
        let plan = Plan {
            options: &options,
            claim: &claim,
            sockets,
            opening: Opening::default(),
            served,
            has_block_device: false,
            settings,
            is_successor: true,
        };
        let device = Device::serve(plan, |_, _, _, _| unreachable!()).unwrap();
        let info = device.info().unwrap();
        let now = |key: &str| {
            let all = info.settings.iter().chain(&info.driver_facts);
            all.filter(|(other, _)| other == key).map(|(_, value)| value.as_str()).next()
        };
        let running = device.running().unwrap();
        for (key, value) in &saved {
            let value = value.as_str();
            match key.as_str() {
                "autoclear" => assert!(info.autoclear),
                "read-only" => assert!(info.read_only),
                "direct-io" => assert_eq!(info.direct_io.requested, value),
                // Without a server, these settings are not reported.
                "receive-backoff" | "split-reads" => {
                    let now = device.read_back(&running, &[], Row::find(key).unwrap().key).unwrap();
                    assert_eq!(now.value(), value, "{key}");
                }
                "colour" | "depth-of-sea" | "scheduler-of-old" => {
                    let warning = format!("cannot restore the setting {key}={value}: no such setting");
                    assert!(
                        info.warnings.iter().any(|line| line.starts_with(&warning)),
                        "{:?}",
                        info.warnings
                    );
                }
                _ => assert_eq!(now(key), Some(value), "{key}"),
            }
        }
        let warned = info.warnings.iter().filter(|line| line.contains("cannot restore the setting")).count();
        assert_eq!(warned, 3, "{:?}", info.warnings);
        // The state file still has the settings that this daemon did not understand, and gets those that are
        // set from now on.
        assert_eq!(device.state().unwrap().settings, saved);
        let depth = device.read_setting("depth", "16").unwrap();
        let refuse = || {
            assert!(device.changing.try_lock().is_err(), "no other change can begin");
            Err(Failure::new("the client exited"))
        };
        let clear = BitmapChange::Clear { name: "b".to_owned() };
        for refused in [
            device.set(&depth, &refuse),
            device.resize(NewSize::Bytes(512), true, None, &refuse).map(drop),
            device.change_bitmap(&clear, &refuse),
            device.join_group("g", File::open("/dev/null").unwrap(), &refuse),
        ] {
            assert_eq!(refused, Err(Failure::new("the client exited")));
        }
        assert_eq!(device.state().unwrap().settings, saved);
        device.set(&depth, &|| Ok(())).unwrap();
        let mut settings = device.state().unwrap().settings;
        assert_eq!(settings.pop(), Some(("depth".to_owned(), "16".to_owned())));
        assert!(saved.iter().filter(|(key, _)| key != "depth").eq(&settings));

        drop(running);
        device.close(true).unwrap();
        device.stop().unwrap();
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn a_successor_whose_group_is_damaged_serves_without_it() {
        let dir = scratch("groupless");
        dir.create().unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox", "--group", "g"]);
        let claim = dir.claim("groupless").unwrap();
        let serve = |is_successor| {
            let sockets = Sockets::default();
            let served = Served { image: String::new(), number: 0, attach_options: None };
            let plan = Plan {
                options: &options,
                claim: &claim,
                sockets,
                opening: Opening::default(),
                served,
                has_block_device: false,
                settings: Vec::new(),
                is_successor,
            };
            Device::serve(plan, |_, _, _, _| unreachable!())
        };
        // In the first round the group does not exist; in the second its file is empty.
        for why in ["there is no group g", "group g is damaged"] {
            assert!(serve(false).err().unwrap().to_string().starts_with(why));
            let device = serve(true).unwrap();
            let info = device.info().unwrap();
            assert!(info.warnings.iter().any(|line| line.contains(why)), "{:?}", info.warnings);
            assert!(info.settings.iter().all(|(key, _)| key != "group"), "{:?}", info.settings);
            device.close(true).unwrap();
            device.stop().unwrap();
            GroupFile::set(&dir, "g", &"iops=10".parse().unwrap()).unwrap();
            std::fs::File::options()
                .write(true)
                .open(dir.path().join("groups/g"))
                .unwrap()
                .set_len(0)
                .unwrap();
        }
        drop(claim);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
