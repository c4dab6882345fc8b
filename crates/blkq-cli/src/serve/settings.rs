//! How the settings of a device are changed while it is served.

use std::sync::atomic::Ordering::Relaxed;

use blkq::ErrorKind;
use blkq::throttle::LimitMode;

use super::Device;
use super::kept_settings::{check_depth, not_set, set_disk};
use super::running::{Running, stopping};
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::settings::{Setting, is_removed};

impl Device {
    /// The setting of this device that `key` and `value` say.
    ///
    /// # Errors
    /// The settings that it has, if there is no such; the values, if it cannot have that one.
    pub fn read_setting(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.settings.read(key, value)
    }

    /// Changes a setting; one of the disk or its driver while no I/O is in flight.
    ///
    /// # Errors
    /// If the device cannot be set to that.
    pub fn set(&self, setting: &Setting) -> Outcome {
        let running = self.running()?;
        // The value that is kept is the one that was set last, of several at once too.
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

    /// The changes that make the device have `settings`, each checked as far as that can be done before.
    ///
    /// # Errors
    /// The first one that it cannot have.
    pub fn prepare_changes(&self, settings: &[(String, String)]) -> Outcome<Vec<Change>> {
        let running = self.running()?;
        let info = self.info()?;
        let mut changes = Vec::new();
        for (key, value) in settings.iter().filter(|(key, _)| !is_removed(key)) {
            let during = |failure: Failure| failure.during(format_args!("{key}={value}"));
            let to = self.settings.read(key, value).map_err(during)?;
            let from = value_now(&running, &info, key).and_then(|value| self.settings.read(key, &value).ok());
            // Some cannot be set where they already are as they are to be.
            if from.as_ref() == Some(&to) {
                continue;
            }
            if matches!(to, Setting::ReadOnly(_)) {
                self.check_not_changed().map_err(during)?;
            }
            check(&running, &to).map_err(during)?;
            let kept = self.settings.changed().into_iter().find(|(other, _)| other == key);
            changes.push(Change { to, from, kept });
        }
        Ok(changes)
    }

    /// Sets what a change has set to what it was, for the next daemon too.
    ///
    /// # Errors
    /// As [`Device::set`]; then it stays.
    pub fn undo(&self, change: &Change) -> Outcome {
        change.from.as_ref().map_or(Ok(()), |from| self.set(from))?;
        self.settings.replace(change.to.key(), change.kept.clone());
        Ok(())
    }
}

/// A setting that is to change.
pub struct Change {
    /// With the new value.
    pub to: Setting,
    from: Option<Setting>,
    /// As the state file has it, if it was changed before.
    kept: Option<(String, String)>,
}

/// The value that a setting has now, as text; none if that is not reported.
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

/// Rejects what the device cannot be set to, whatever it does.
fn check(running: &Running, setting: &Setting) -> Outcome {
    match setting {
        Setting::Limit(LimitMode::Auto) if running.disk.group_member().is_some() => {
            Err(Failure::new("limit=auto is for a device that shares no limits, and it is in a group"))
        }
        Setting::ReceiveBackoff(_) | Setting::SplitReads(_) if running.servers.nbd.is_empty() => {
            Err(Failure::new("it is for NBD, over which the device is not served"))
        }
        Setting::Depth(depth) => check_depth(&running.disk, *depth),
        _ => Ok(()),
    }
}

/// Of the disk and of the kernel's block device, if there is one: of both or of none.
fn set_read_only(running: &Running, on: bool) -> Outcome {
    let was = running.disk.limits().read_only;
    running.disk.set(blkq::Setting::ReadOnly(on)).map_err(not_set)?;
    if let Some(ublk) = &running.ublk {
        ublk.set_read_only(on).map_err(|error| {
            // Undone; the error is the reason.
            let _ = running.disk.set(blkq::Setting::ReadOnly(was));
            Failure::of(error, ErrorKind::Unsupported, "detach it, and attach it again")
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

    /// The file is in the format of the programs whose daemons kept settings as they were typed.
    #[test]
    fn settings_of_older_state_files_are_in_force_again() {
        let dir = scratch("kept");
        dir.create().unwrap();
        let image = dir.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let words = [image.to_str().unwrap(), "--export", "nbd", "--no-sandbox", "--fault", "none"];
        let options = options(&words);
        let mut kept = parse_state(include_bytes!("../../tests/data/state-settings.json")).unwrap().settings;
        assert!(kept.iter().any(|(key, _)| key == "pacing"));
        // A setting that was removed is dropped without a warning.
        kept.retain(|(key, _)| !is_removed(key));
        let claim = dir.claim("kept").unwrap();
        let open = |_| Ok(open_driver(&options, false, None, Duration::ZERO, None, None)?);
        let sockets = Sockets::default();
        let served = Served { image: String::new(), number: 0, attach_options: None };
        let settings = kept.clone();
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
        for (key, value) in &kept {
            let value = value.as_str();
            match key.as_str() {
                "autoclear" => assert!(info.autoclear),
                "read-only" => assert!(info.read_only),
                "direct-io" => assert_eq!(info.direct_io.requested, value),
                // Without a server it is not reported.
                "receive-backoff" => assert!(!switches.receive_backoff.load(Relaxed)),
                "split-reads" => assert!(!switches.split_reads.load(Relaxed)),
                "colour" | "depth-of-sea" | "scheduler-of-old" => {
                    let warning =
                        format!("{key}={value} was set before and cannot be set again: no such setting");
                    assert!(
                        info.warnings.iter().any(|line| line.starts_with(&warning)),
                        "{:?}",
                        info.warnings
                    );
                }
                _ => assert_eq!(now(key), Some(value), "{key}"),
            }
        }
        let warned = info.warnings.iter().filter(|line| line.contains("was set before")).count();
        assert_eq!(warned, 3, "{:?}", info.warnings);
        // The next daemon reads what this one did not understand, and what is set from now on.
        assert_eq!(device.state().unwrap().settings, kept);
        device.set(&device.read_setting("depth", "16").unwrap()).unwrap();
        let mut settings = device.state().unwrap().settings;
        assert_eq!(settings.pop(), Some(("depth".to_owned(), "16".to_owned())));
        assert!(kept.iter().filter(|(key, _)| key != "depth").eq(&settings));

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
            let open = |_| Ok(open_driver(&options, false, None, Duration::ZERO, None, None)?);
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
        // There is none; it is empty.
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
