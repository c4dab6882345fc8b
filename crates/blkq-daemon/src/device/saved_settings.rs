//! The settings of a device that are saved in its state file and restored by its next daemon.

use std::sync::Mutex;

use blkq::sync::lock;
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::options::{AttachOptions, Implementer, Key, Setting, SettingGroups};

pub(super) struct DeviceSettings {
    /// The groups of the attach options.
    groups: SettingGroups,
    /// The last value of each setting changed since the attach, as in the state file. The lock must not be
    /// held while waiting for anything, because reports take it.
    changed: Mutex<Vec<(String, String)>>,
}

impl DeviceSettings {
    /// A previous daemon has `changed` some settings.
    pub(super) fn new(options: &AttachOptions, changed: &[(String, String)]) -> DeviceSettings {
        let changed = options.without.clone().translate(changed);
        DeviceSettings { groups: SettingGroups::new(options), changed: Mutex::new(changed) }
    }

    pub(super) fn saved(&self) -> SavedSettings {
        SavedSettings::read(self.groups(), &lock(&self.changed))
    }

    pub(super) fn changed(&self) -> Vec<(String, String)> {
        lock(&self.changed).clone()
    }

    /// The error lists the settings that the device has if there is none named `key`, or the accepted values.
    pub(super) fn read(&self, key: &str, value: &str) -> Outcome<Setting> {
        self.groups().read(key, value)
    }

    /// `text` is the setting as in the state file; `None` records that it is unchanged.
    pub(super) fn replace(&self, key: &str, text: Option<(String, String)>) {
        let mut changed = lock(&self.changed);
        changed.retain(|(other, _)| other != key);
        changed.extend(text);
    }

    /// Records the group and the device's weight in it for the next daemon. The weight of the attach options
    /// must not apply to a group that was joined later.
    pub(super) fn note_group(&self, group: Option<(&str, u32)>) {
        self.replace(Key::Weight.row().name, group.map(|(_, weight)| Setting::Weight(weight).to_text()));
        let setting = Setting::Group(group.map(|(name, _)| name.to_owned()));
        self.replace(setting.name(), Some(setting.to_text()));
    }

    fn groups(&self) -> SettingGroups {
        let mut groups = self.groups;
        lock(&self.changed).iter().for_each(|(key, value)| groups.note(key, value));
        groups
    }
}

pub(super) struct SavedSettings {
    settings: Vec<Setting>,
    /// One warning per setting that cannot be restored.
    pub warnings: Vec<String>,
}

impl SavedSettings {
    pub fn read(has: SettingGroups, text: &[(String, String)]) -> SavedSettings {
        let mut saved = SavedSettings { settings: Vec::new(), warnings: Vec::new() };
        for (key, value) in text {
            match has.read(key, value) {
                Ok(setting) => saved.settings.push(setting),
                Err(failure) => saved.warn(key, value, &failure),
            }
        }
        saved
    }

    fn warn(&mut self, key: &str, value: &str, failure: &Failure) {
        self.warnings.push(not_restored(key, value, failure));
    }

    /// Gives `options` the settings that the daemon itself implements. A setting that `options` exclude becomes a
    /// warning: they may differ from the options of the last daemon.
    pub fn apply_to(&mut self, options: &mut AttachOptions) {
        for setting in std::mem::take(&mut self.settings) {
            if setting.key().row().implementer == Implementer::Disk {
                self.settings.push(setting);
                continue;
            }
            let mut changed = options.clone();
            changed.put(&setting);
            if matches!(setting, Setting::Group(None)) {
                // A weight is only for a device in a group.
                changed.weight = None;
            }
            match changed.check() {
                // If the options are invalid anyway, no setting is the cause.
                Err(failure) if options.check().is_ok() => {
                    self.warn(setting.name(), &setting.value(), &failure)
                }
                _ => *options = changed,
            }
        }
    }

    /// Passes the settings that the disk implements to `apply`. The disk must not be in use yet, and
    /// is read-only if `is_read_only` is set. Fails if it cannot become writable: the writes that wait would fail.
    pub fn restore(&mut self, is_read_only: bool, apply: impl Fn(&Setting) -> Outcome) -> Outcome {
        for setting in std::mem::take(&mut self.settings) {
            // A driver may be unable to become writable, although it was opened for writing.
            if setting == Setting::ReadOnly(false) && !is_read_only {
                continue;
            }
            match apply(&setting) {
                Err(failure) if setting == Setting::ReadOnly(false) => {
                    return Err(Failure::new(not_restored(setting.name(), &setting.value(), &failure)));
                }
                Err(failure) => self.warn(setting.name(), &setting.value(), &failure),
                Ok(()) => {}
            }
        }
        Ok(())
    }
}

fn not_restored(key: &str, value: &str, failure: &Failure) -> String {
    format!("cannot restore the setting {key}={value}: {failure}")
}

#[cfg(test)]
mod tests {
    use blkq_protocol::harness::options;

    use super::*;

    /// This happens to a service whose unit was given another command line.
    #[test]
    fn a_saved_limit_that_the_options_exclude_is_dropped() {
        let text =
            |value: &str| [("limit".to_owned(), value.to_owned()), ("depth".to_owned(), "16".to_owned())];
        let put = |words: &[&str], value| {
            let mut options = options(&[&["ram:1M", "--export", "nbd"], words].concat());
            let mut saved = SavedSettings::read(SettingGroups::new(&options), &text(value));
            saved.apply_to(&mut options);
            let left: Vec<_> = saved.settings.iter().map(Setting::name).collect();
            (options.limit.to_string(), left.join(" "), saved.warnings)
        };
        let (limit, left, warnings) = put(&["--group", "g", "--limit", "iops=10"], "auto");
        assert_eq!((limit.as_str(), left.as_str()), ("iops=10", "depth"));
        let why = "cannot restore the setting limit=auto: --limit auto is not possible in a group";
        assert!(warnings.len() == 1 && warnings[0].starts_with(why), "{warnings:?}");
        for (words, value) in [(&["--group", "g"][..], "iops=5"), (&[], "auto")] {
            let (limit, left, warnings) = put(words, value);
            assert_eq!((limit.as_str(), left.as_str(), warnings), (value, "depth", Vec::new()));
        }
    }

    #[test]
    fn only_a_disk_that_cannot_become_writable_is_not_served() {
        let options = options(&["ram:1M", "--export", "nbd", "--read-only"]);
        let restored_to = |is_read_only, key: &str, value: &str| {
            let text = [(key.to_owned(), value.to_owned())];
            let mut saved = SavedSettings::read(SettingGroups::new(&options), &text);
            let outcome = saved.restore(is_read_only, |_| Err(Failure::new("it is locked")));
            (outcome.map_err(|failure| failure.to_string()), saved.warnings)
        };
        let restored = |key: &str, value: &str| restored_to(true, key, value);
        let why = |setting: &str| format!("cannot restore the setting {setting}: it is locked");
        assert_eq!(restored("read-only", "off"), (Err(why("read-only=off")), vec![]));
        assert_eq!(restored_to(false, "read-only", "off"), (Ok(()), vec![]), "it is writable already");
        assert_eq!(restored("read-only", "on"), (Ok(()), vec![why("read-only=on")]));
        assert_eq!(restored("depth", "8"), (Ok(()), vec![why("depth=8")]));
    }

    #[test]
    fn a_group_that_was_joined_later_is_restored_with_its_weight() {
        let attached = options(&["ram:1M", "--export", "nbd", "--group", "gold", "--weight", "50"]);
        let restored = |settings: &DeviceSettings| {
            let mut options = attached.clone();
            let mut saved = DeviceSettings::new(&attached, &settings.changed()).saved();
            saved.apply_to(&mut options);
            let left: Vec<_> = saved.settings.iter().map(Setting::to_text).collect();
            (options.group, options.weight, left, saved.warnings)
        };
        let text = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let settings = DeviceSettings::new(&attached, &[]);
        settings.note_group(None);
        assert_eq!(restored(&settings), (None, None, Vec::new(), Vec::new()));
        settings.note_group(Some(("silver", 100)));
        let left = vec![text("weight", "100")];
        assert_eq!(restored(&settings), (Some("silver".to_owned()), Some(50), left, Vec::new()));
    }
}
