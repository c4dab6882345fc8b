//! The settings of a device: how they are changed and kept, and how a device that is taken over gets
//! those of its last daemon.

use std::sync::atomic::Ordering::Relaxed;

use blkq::disk::{AutoLimiter, DEPTH_MAX};
use blkq::drivers::r#loop::LoopSetting;
use blkq::throttle::LimitMode;
use blkq::{Disk, ErrorKind};

use super::running::Running;
use super::{BackgroundThreads, Device, stopping};
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::options::AttachOptions;
use crate::settings::{Setting, SettingGroups};

impl Device {
    /// The setting of this device that `key` and `value` say.
    ///
    /// # Errors
    /// The settings that it has, if there is no such; the values, if it cannot have that one.
    pub fn read_setting(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.has.read(key, value)
    }

    /// Changes a setting; one of the disk or its driver while no I/O is in flight.
    ///
    /// # Errors
    /// If the device cannot be set to that.
    pub fn set(&self, setting: &Setting) -> Outcome {
        let running = self.running()?;
        // Locked in this order; that of the threads only where it is a thread's. The value that is kept is the one that
        // was set last, of several at once too.
        let _changing = self.begin_change();
        check(&running, setting)?;
        let is_of_thread = matches!(setting, Setting::HangWarning(_) | Setting::Limit(_));
        let mut background = is_of_thread.then(|| self.background());
        match setting {
            Setting::HangWarning(limit) => {
                let threads = background.as_ref().and_then(|background| background.as_ref());
                threads.ok_or_else(stopping)?.hangs.set(*limit);
            }
            Setting::Limit(mode) => {
                let threads = background.as_mut().and_then(|background| background.as_mut());
                let BackgroundThreads { auto_limit, wants_auto_limit, .. } = threads.ok_or_else(stopping)?;
                let is_auto = *mode == LimitMode::Auto;
                *wants_auto_limit = false;
                if !is_auto {
                    *auto_limit = None;
                    running.disk.set_rate_limits(&mode.limits());
                } else if auto_limit.is_none() {
                    *auto_limit = Some(AutoLimiter::start(&running.disk)?);
                }
            }
            Setting::Autoclear(on) => {
                if let Some(ublk) = &running.ublk {
                    ublk.watch_users(*on)?;
                }
                self.autoclear.set(*on);
            }
            Setting::Pacing(on) => self.switches.pacing.store(*on, Relaxed),
            Setting::ReceiveBackoff(on) => self.switches.receive_backoff.store(*on, Relaxed),
            Setting::SplitReads(on) => self.switches.split_reads.store(*on, Relaxed),
            Setting::ReadOnly(on) => {
                self.check_not_changed()?;
                set_read_only(&running, *on)?;
            }
            _ => set_disk(&running.disk, setting)?,
        }
        let (key, value) = setting.to_text();
        let mut settings = self.settings();
        settings.retain(|(other, _)| *other != key);
        settings.push((key, value));
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
        for (key, value) in settings {
            let during = |failure: Failure| failure.during(format_args!("{key}={value}"));
            let to = self.has.read(key, value).map_err(during)?;
            let from = self.value_now(&info, key).and_then(|value| self.has.read(key, &value).ok());
            // Some cannot be set where they already are as they are to be.
            if from.as_ref() == Some(&to) {
                continue;
            }
            if matches!(to, Setting::ReadOnly(_)) {
                self.check_not_changed().map_err(during)?;
            }
            check(&running, &to).map_err(during)?;
            let kept = self.settings().iter().find(|(other, _)| other == key).cloned();
            changes.push(Change { to, from, kept });
        }
        Ok(changes)
    }

    /// The value that a setting has now, as text; none if that is not reported.
    fn value_now(&self, info: &DeviceInfo, key: &str) -> Option<String> {
        let switch = |on: bool| Some(if on { "on" } else { "off" }.to_owned());
        match key {
            "autoclear" => switch(info.autoclear),
            "read-only" => switch(info.read_only),
            "direct-io" => Some(info.direct_io.requested.clone()),
            "pacing" => switch(self.switches.pacing.load(Relaxed)),
            "receive-backoff" => switch(self.switches.receive_backoff.load(Relaxed)),
            "split-reads" => switch(self.switches.split_reads.load(Relaxed)),
            _ => {
                let mut all = info.settings.iter().chain(&info.driver_facts);
                all.find(|(other, _)| other == key).map(|(_, value)| value.clone())
            }
        }
    }

    /// Sets what a change has set to what it was, for the next daemon too.
    ///
    /// # Errors
    /// As [`Device::set`]; then it stays.
    pub fn undo(&self, change: &Change) -> Outcome {
        change.from.as_ref().map_or(Ok(()), |from| self.set(from))?;
        let mut settings = self.settings();
        settings.retain(|(key, _)| key != change.to.key());
        settings.extend(change.kept.clone());
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

/// Rejects what the device cannot be set to, whatever it does.
fn check(running: &Running, setting: &Setting) -> Outcome {
    match setting {
        Setting::Limit(LimitMode::Auto) if running.disk.group_member().is_some() => {
            Err(Failure::new("limit=auto is for a device that shares no limits, and it is in a group"))
        }
        Setting::Pacing(_) | Setting::ReceiveBackoff(_) | Setting::SplitReads(_)
            if running.servers.is_empty() =>
        {
            Err(Failure::new("it is for NBD, over which the device is not served"))
        }
        Setting::Depth(depth) => check_depth(&running.disk, *depth),
        _ => Ok(()),
    }
}

fn check_depth(disk: &Disk, depth: u16) -> Outcome {
    if depth <= disk.depth_max() {
        return Ok(());
    }
    let more = match depth {
        ..=DEPTH_MAX => format!("; for more, detach, and attach with --depth {depth}"),
        _ => String::new(),
    };
    Err(Failure::new(format!("depth is a number from 1 to {} here{more}", disk.depth_max())))
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

/// Changes a setting of the disk or its driver; one of the daemon's own is none.
fn set_disk(disk: &Disk, setting: &Setting) -> Outcome {
    let changed = match setting {
        Setting::Batching(on) => disk.set(blkq::Setting::Batching(*on)),
        Setting::Clock(mode) => disk.set(blkq::Setting::Clock(*mode)),
        Setting::Depth(depth) => {
            check_depth(disk, *depth)?;
            disk.set(blkq::Setting::Depth(*depth))
        }
        Setting::Iostats(on) => disk.set(blkq::Setting::Iostats(*on)),
        Setting::Merge(on) => disk.set(blkq::Setting::Merge(*on)),
        Setting::EarlySubmission(on) => disk.set(blkq::Setting::EarlySubmission(*on)),
        Setting::ReadOnly(on) => disk.set(blkq::Setting::ReadOnly(*on)),
        Setting::Scheduler(kind) => disk.set(blkq::Setting::Scheduler(*kind)),
        Setting::Limit(mode) => {
            disk.set_rate_limits(&mode.limits());
            Ok(())
        }
        Setting::OnError(policy) => {
            disk.set_error_policy(*policy);
            Ok(())
        }
        Setting::Weight(weight) => disk.group_member().map_or(Ok(()), |member| member.set_weight(*weight)),
        Setting::DirectIo(mode) => disk.set_driver(&LoopSetting::DirectIo(*mode)),
        Setting::Dispatch(dispatch) => disk.set_driver(&LoopSetting::Dispatch(*dispatch)),
        Setting::Fault(spec) => disk.set_driver(spec),
        Setting::Autoclear(_)
        | Setting::HangWarning(_)
        | Setting::Pacing(_)
        | Setting::ReceiveBackoff(_)
        | Setting::SplitReads(_) => Ok(()),
    };
    changed.map_err(not_set)
}

/// Why a setting stays as it was, with the cure.
fn not_set(error: blkq::Error) -> Failure {
    Failure::of(error, ErrorKind::Lost, "detach it, and attach it again")
}

/// The settings that a device's last daemon had, for the next one.
pub(super) struct Kept {
    settings: Vec<Setting>,
    /// Settings that are not in force again, and why.
    pub warnings: Vec<String>,
}

impl Kept {
    /// Reads those of a state file.
    pub fn read(has: SettingGroups, text: &[(String, String)]) -> Kept {
        let mut kept = Kept { settings: Vec::new(), warnings: Vec::new() };
        for (key, value) in text {
            match has.read(key, value) {
                Ok(setting) => kept.settings.push(setting),
                Err(failure) => kept.warn(key, value, &failure),
            }
        }
        kept
    }

    fn warn(&mut self, key: &str, value: &str, failure: &Failure) {
        self.warnings.push(format!("{key}={value} was set before and cannot be set again: {failure}"));
    }

    /// Has the daemon begin with those of its own, but for those that mean nothing with its options, which may be
    /// others than those of the last daemon.
    pub fn put_into(&mut self, options: &mut AttachOptions) {
        for setting in std::mem::take(&mut self.settings) {
            let mut changed = options.clone();
            match &setting {
                Setting::Autoclear(on) => changed.autoclear = *on,
                Setting::HangWarning(limit) => changed.hang_warning = *limit,
                Setting::Limit(mode) => changed.limit = *mode,
                Setting::Pacing(on) => changed.pacing = *on,
                Setting::ReceiveBackoff(on) => changed.receive_backoff = *on,
                Setting::SplitReads(on) => changed.split_reads = *on,
                _ => {}
            }
            match changed.check() {
                // Options that are invalid anyway are not the fault of a setting.
                Err(failure) if options.check().is_ok() => {
                    self.warn(setting.key(), &setting.value(), &failure);
                }
                _ => {
                    *options = changed;
                    self.settings.push(setting);
                }
            }
        }
    }

    /// Changes those of the disk and its driver, which nobody uses yet.
    pub fn set(&mut self, disk: &Disk) {
        for setting in std::mem::take(&mut self.settings) {
            if let Err(failure) = set_disk(disk, &setting) {
                self.warn(setting.key(), &setting.value(), &failure);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::open::Sockets;
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
        let mut state = parse_state(include_bytes!("../../tests/data/state-settings.json")).unwrap();
        let kept = state.settings.clone();
        // There is no such block device here.
        state.ublk = None;

        let claim = dir.claim("kept").unwrap();
        let open = |_| Ok(open_driver(&options, false, Duration::ZERO, None, None)?);
        let device =
            Device::serve(&options, &claim, open, Sockets::default(), state, true, |_, _, _, _| Ok(None))
                .unwrap();
        let info = device.info().unwrap();
        let now = |key: &str| {
            let all = info.settings.iter().chain(&info.driver_facts);
            all.filter(|(other, _)| other == key).map(|(_, value)| value.as_str()).next()
        };
        for (key, value) in &kept {
            let value = value.as_str();
            match key.as_str() {
                "autoclear" => assert!(info.autoclear),
                "read-only" => assert!(info.read_only),
                "direct-io" => assert_eq!(info.direct_io.requested, value),
                // Without a server it is not reported.
                "pacing" => assert!(!device.switches.pacing.load(Relaxed)),
                "receive-backoff" => assert!(!device.switches.receive_backoff.load(Relaxed)),
                "split-reads" => assert!(!device.switches.split_reads.load(Relaxed)),
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
        assert_eq!(device.state_file().unwrap().settings, kept);
        device.set(&device.read_setting("depth", "16").unwrap()).unwrap();
        let mut settings = device.state_file().unwrap().settings;
        assert_eq!(settings.pop(), Some(("depth".to_owned(), "16".to_owned())));
        assert!(kept.iter().filter(|(key, _)| key != "depth").eq(&settings));

        device.close(true).unwrap();
        device.stop().unwrap();
        drop((device, claim));
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    /// As of a service whose unit has another command line than before.
    #[test]
    fn a_kept_limit_that_the_options_exclude_is_dropped() {
        let text =
            |value: &str| [("limit".to_owned(), value.to_owned()), ("depth".to_owned(), "16".to_owned())];
        let put = |words: &[&str], value| {
            let mut options = options(&[&["ram:1M", "--export", "nbd"], words].concat());
            let mut kept = Kept::read(SettingGroups::new(&options), &text(value));
            kept.put_into(&mut options);
            let left: Vec<_> = kept.settings.iter().map(Setting::key).collect();
            (options.limit.to_string(), left.join(" "), kept.warnings)
        };
        let (limit, left, warnings) = put(&["--group", "g", "--limit", "iops=10"], "auto");
        assert_eq!((limit.as_str(), left.as_str()), ("iops=10", "depth"));
        let why =
            "limit=auto was set before and cannot be set again: --limit auto is for a device that shares no";
        assert!(warnings.len() == 1 && warnings[0].starts_with(why), "{warnings:?}");
        for (words, value) in [(&["--group", "g"][..], "iops=5"), (&[], "auto")] {
            let (limit, left, warnings) = put(words, value);
            assert_eq!((limit.as_str(), left.as_str(), warnings), (value, "limit depth", Vec::new()));
        }
    }

    #[test]
    fn a_successor_whose_group_is_damaged_serves_without_it() {
        let dir = scratch("groupless");
        dir.create().unwrap();
        let options = options(&["ram:1M", "--export", "nbd", "--no-sandbox", "--group", "g"]);
        let claim = dir.claim("groupless").unwrap();
        let serve = |is_successor| {
            let mut state = parse_state(include_bytes!("../../tests/data/state-settings.json")).unwrap();
            (state.ublk, state.settings) = (None, Vec::new());
            let open = |_| Ok(open_driver(&options, false, Duration::ZERO, None, None)?);
            let attach = |_: &_, _: &[_], _, _| Ok(None);
            Device::serve(&options, &claim, open, Sockets::default(), state, is_successor, attach)
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
