//! The settings of a device as its state file has them, and how its next daemon gets them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use blkq::disk::DEPTH_MAX;
use blkq::{Disk, ErrorKind};
use blkq_drivers::r#loop::LoopSetting;

use crate::failure::{Failure, Outcome};
use crate::options::AttachOptions;
use crate::settings::{Setting, SettingGroups, is_removed};

/// The settings of a device: those that it has, and what was changed since it was attached.
pub(super) struct DeviceSettings {
    groups: SettingGroups,
    /// Each by its last value, as the state file has it. Never locked while something waits: reports read it.
    changed: Mutex<Vec<(String, String)>>,
}

impl DeviceSettings {
    /// Those of a device with `options`, of which a daemon before has `changed` some.
    pub(super) fn new(options: &AttachOptions, mut changed: Vec<(String, String)>) -> DeviceSettings {
        changed.retain(|(key, _)| !is_removed(key));
        DeviceSettings { groups: SettingGroups::new(options), changed: Mutex::new(changed) }
    }

    /// The ones that were changed, to be in force again.
    pub(super) fn kept(&self) -> KeptSettings {
        KeptSettings::read(self.groups, &self.lock())
    }

    /// The ones that were changed, as text.
    pub(super) fn changed(&self) -> Vec<(String, String)> {
        self.lock().clone()
    }

    /// The setting that `key` and `value` say.
    ///
    /// # Errors
    /// The settings that the device has, if there is no such; the values, if it cannot have that one.
    pub(super) fn read(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.groups.read(key, value)
    }

    /// Has `text` stand for the setting `key`; none, if it was not changed.
    pub(super) fn replace(&self, key: &str, text: Option<(String, String)>) {
        let mut changed = self.lock();
        changed.retain(|(other, _)| other != key);
        changed.extend(text);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(String, String)>> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The settings that a device's last daemon had, for the next one.
pub(super) struct KeptSettings {
    settings: Vec<Setting>,
    /// Settings that are not in force again, and why.
    pub warnings: Vec<String>,
}

impl KeptSettings {
    /// Reads those of a state file.
    pub fn read(has: SettingGroups, text: &[(String, String)]) -> KeptSettings {
        let mut kept = KeptSettings { settings: Vec::new(), warnings: Vec::new() };
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

/// Rejects a depth beyond what the disk was attached with.
///
/// # Errors
/// The largest depth, and the cure.
pub(super) fn check_depth(disk: &Disk, depth: u16) -> Outcome {
    if depth <= disk.depth_max() {
        return Ok(());
    }
    let more = match depth {
        ..=DEPTH_MAX => format!("; for more, detach, and attach with --depth {depth}"),
        _ => String::new(),
    };
    Err(Failure::new(format!("depth is a number from 1 to {} here{more}", disk.depth_max())))
}

/// Changes a setting of the disk or its driver; one of the daemon's own is none.
///
/// # Errors
/// If the disk cannot be set to that.
pub(super) fn set_disk(disk: &Disk, setting: &Setting) -> Outcome {
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
        | Setting::ReceiveBackoff(_)
        | Setting::SplitReads(_) => Ok(()),
    };
    changed.map_err(not_set)
}

/// Why a setting stays as it was, with the cure.
pub(super) fn not_set(error: blkq::Error) -> Failure {
    Failure::of(error, ErrorKind::Lost, "detach it, and attach it again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::tests::options;

    /// As of a service whose unit has another command line than before.
    #[test]
    fn a_kept_limit_that_the_options_exclude_is_dropped() {
        let text =
            |value: &str| [("limit".to_owned(), value.to_owned()), ("depth".to_owned(), "16".to_owned())];
        let put = |words: &[&str], value| {
            let mut options = options(&[&["ram:1M", "--export", "nbd"], words].concat());
            let mut kept = KeptSettings::read(SettingGroups::new(&options), &text(value));
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
}
