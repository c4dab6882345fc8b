use std::sync::atomic::Ordering::Relaxed;

use blkq::ErrorKind;
use blkq::throttle::LimitMode;

use super::Device;
use super::running::{Running, stopping};
use super::saved_settings::{check_depth, not_set, set_disk};
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::settings::{Setting, is_removed};

impl Device {
    pub fn read_setting(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.settings.read(key, value)
    }

    /// Changes settings of the disk or its driver while no I/O is in flight. Fails if the device rejects the
    /// value.
    pub fn set(&self, setting: &Setting) -> Outcome {
        let running = self.running()?;
        // Serializes concurrent changes, so that the recorded value is the one that was set last.
        let _changing = self.begin_change();
        check(&running, setting)?;
        match setting {
            Setting::HangWarning(limit) => {
                self.background().as_ref().ok_or_else(stopping)?.set_hang_warning(*limit);
            }
            Setting::Limit(mode) => {
                self.background().as_mut().ok_or_else(stopping)?.set_limit(&running.disk, *mode)?;
            }
            Setting::Autoclear(on) => {
                if let Some(ublk) = &running.ublk {
                    ublk.watch_users(*on)?;
                }
                self.autoclear.set(*on);
            }
            Setting::Group(None) => return self.leave_group(&running),
            Setting::ReceiveBackoff(on) => running.servers.switches.receive_backoff.store(*on, Relaxed),
            Setting::SplitReads(on) => running.servers.switches.split_reads.store(*on, Relaxed),
            Setting::ReadOnly(on) => {
                self.check_not_changed()?;
                set_read_only(&running, *on)?;
            }
            _ => set_disk(&running.disk, setting)?,
        }
        let text = setting.to_text();
        self.settings.replace(setting.key(), Some(text));
        Ok(())
    }

    /// The changes that are necessary for the device to have `settings`. Each is checked as far as is
    /// possible without making it. Fails with the first setting that the device cannot have.
    pub fn prepare_changes(&self, settings: &[(String, String)]) -> Outcome<Vec<Change>> {
        let running = self.running()?;
        let info = self.info()?;
        let mut changes = Vec::new();
        for (key, value) in settings.iter().filter(|(key, _)| !is_removed(key)) {
            let during = |failure: Failure| failure.during(format_args!("{key}={value}"));
            let to = self.settings.read(key, value).map_err(during)?;
            let from = value_now(&running, &info, key).and_then(|value| self.settings.read(key, &value).ok());
            // Some settings cannot be set at all on this device, not even to the value that they have.
            if from.as_ref() == Some(&to) {
                continue;
            }
            if matches!(to, Setting::ReadOnly(_)) {
                self.check_not_changed().map_err(during)?;
            }
            check(&running, &to).map_err(during)?;
            let saved = self.settings.changed().into_iter().find(|(other, _)| other == key);
            changes.push(Change { to, from, saved });
        }
        Ok(changes)
    }

    /// Undoes a change, for the next daemon as well. Fails as [`Device::set`] does; the change then stays.
    pub fn undo(&self, change: &Change) -> Outcome {
        change.from.as_ref().map_or(Ok(()), |from| self.set(from))?;
        self.settings.replace(change.to.key(), change.saved.clone());
        Ok(())
    }
}

pub struct Change {
    pub to: Setting,
    from: Option<Setting>,
    /// The value in the state file, if the setting was changed before.
    saved: Option<(String, String)>,
}

/// `None` if the setting is not reported.
fn value_now(running: &Running, info: &DeviceInfo, key: &str) -> Option<String> {
    let switch = |on: bool| Some(if on { "on" } else { "off" }.to_owned());
    match key {
        "autoclear" => switch(info.autoclear),
        "read-only" => switch(info.read_only),
        "direct-io" => Some(info.direct_io.requested.clone()),
        "receive-backoff" => switch(running.servers.switches.receive_backoff.load(Relaxed)),
        "split-reads" => switch(running.servers.switches.split_reads.load(Relaxed)),
        _ => {
            let mut all = info.settings.iter().chain(&info.driver_facts);
            all.find(|(other, _)| other == key).map(|(_, value)| value.clone())
        }
    }
}

fn check(running: &Running, setting: &Setting) -> Outcome {
    match setting {
        Setting::Limit(LimitMode::Auto) if running.disk.group_member().is_some() => {
            Err(Failure::new("limit=auto is not possible for a device in a group"))
        }
        // `blkq set` sends another request to join a group, with the file of the group.
        Setting::Group(Some(group)) => {
            let name = running.disk.name();
            Err(Failure::new(format!("only `blkq set {name} group={group}` can change the group")))
        }
        Setting::ReceiveBackoff(_) | Setting::SplitReads(_) if running.servers.nbd.is_empty() => {
            Err(Failure::new("this setting applies only to NBD, and the device is not served over NBD"))
        }
        Setting::Depth(depth) => check_depth(&running.disk, *depth),
        _ => Ok(()),
    }
}

/// Changes the disk and the kernel's block device, if there is one; both or neither.
fn set_read_only(running: &Running, on: bool) -> Outcome {
    let was = running.disk.limits().read_only;
    running.disk.set(blkq::Setting::ReadOnly(on)).map_err(not_set)?;
    if let Some(ublk) = &running.ublk {
        ublk.set_read_only(on).map_err(|error| {
            // The disk gets its old value back; the error of the block device is the reason for the failure.
            let _ = running.disk.set(blkq::Setting::ReadOnly(was));
            Failure::of(error, ErrorKind::Unsupported, "detach the device and attach it again")
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::Served;
    use super::super::listen::Sockets;
    use super::super::open::Plan;
    use super::*;
    use crate::group::GroupFile;
    use crate::options::tests::options;
    use crate::serve::image::open_driver;
    use crate::state::parse_state;
    use crate::state::tests::scratch;

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
        let open = |_| Ok(open_driver(claim.dir(), &options, false, None, Duration::ZERO, None, None)?);
        let sockets = Sockets::default();
        let served = Served { image: String::new(), number: 0, attach_options: None };
        let settings = saved.clone();
        let plan = Plan {
            options: &options,
            claim: &claim,
            sockets,
            served,
            has_block_device: false,
            settings,
            is_successor: true,
        };
        let device = Device::serve(plan, open, |_, _, _, _| Ok(None)).unwrap();
        let info = device.info().unwrap();
        let now = |key: &str| {
            let all = info.settings.iter().chain(&info.driver_facts);
            all.filter(|(other, _)| other == key).map(|(_, value)| value.as_str()).next()
        };
        let switches = device.running().unwrap().servers.switches.clone();
        for (key, value) in &saved {
            let value = value.as_str();
            match key.as_str() {
                "autoclear" => assert!(info.autoclear),
                "read-only" => assert!(info.read_only),
                "direct-io" => assert_eq!(info.direct_io.requested, value),
                // Without a server, this setting is not reported.
                "receive-backoff" => assert!(!switches.receive_backoff.load(Relaxed)),
                "split-reads" => assert!(!switches.split_reads.load(Relaxed)),
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
        device.set(&device.read_setting("depth", "16").unwrap()).unwrap();
        let mut settings = device.state().unwrap().settings;
        assert_eq!(settings.pop(), Some(("depth".to_owned(), "16".to_owned())));
        assert!(saved.iter().filter(|(key, _)| key != "depth").eq(&settings));

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
            let open = |_| Ok(open_driver(claim.dir(), &options, false, None, Duration::ZERO, None, None)?);
            let attach = |_: &_, _: &[_], _, _| Ok(None);
            let sockets = Sockets::default();
            let served = Served { image: String::new(), number: 0, attach_options: None };
            let plan = Plan {
                options: &options,
                claim: &claim,
                sockets,
                served,
                has_block_device: false,
                settings: Vec::new(),
                is_successor,
            };
            Device::serve(plan, open, attach)
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
