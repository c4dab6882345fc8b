//! The settings that a device has, and why it does not have others.

use blkq_drivers::DriverSpec;

use crate::failure::{Failure, Outcome, closest};
use crate::options::{AttachOptions, FIELDS, Key, NO_GROUP, Row, Scope, Setting};

/// `options`, but writable if the device became writable by the settings that were `changed` since the attach. A device
/// that became read-only stays writable here, because its next daemon first opens the image for writing.
pub fn with_write_access(options: &AttachOptions, changed: &[(String, String)]) -> AttachOptions {
    let is_writable = changed.iter().any(|(key, value)| key == Key::ReadOnly.row().name && value == "off");
    AttachOptions { read_only: options.read_only && !is_writable, ..options.clone() }
}

/// The groups of settings that a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SettingGroups {
    image: bool,
    faults: bool,
    in_group: bool,
}

impl SettingGroups {
    pub fn new(options: &AttachOptions) -> SettingGroups {
        SettingGroups {
            image: matches!(options.image, DriverSpec::Image(_)),
            faults: options.fault.is_some(),
            in_group: options.group.is_some(),
        }
    }

    /// Records that the setting `key` has been changed to this value.
    pub fn note(&mut self, key: &str, value: &str) {
        if key == Key::Group.row().name {
            self.in_group = value != NO_GROUP;
        }
    }

    fn includes(self, scope: Scope) -> bool {
        match scope {
            Scope::All => true,
            Scope::Images => self.image,
            Scope::Faults => self.faults,
            Scope::Groups => self.in_group,
        }
    }

    pub fn has(self, key: &str) -> bool {
        Row::find(key).is_some_and(|row| self.includes(row.scope))
    }

    /// The error lists the settings that the device has if there is none named `key`, or the values that it
    /// accepts.
    pub fn read(self, key: &str, value: &str) -> Outcome<Setting> {
        match Row::find(key) {
            Some(row) if self.includes(row.scope) => (row.read)(value),
            row => Err(self.no_such_setting(key, row.map(|row| row.scope))),
        }
    }

    /// The refusal of the setting `key`, which this device does not have. `scope` are the devices that have it.
    fn no_such_setting(self, key: &str, scope: Option<Scope>) -> Failure {
        let hint = match key {
            "size" | "size-limit" | "capacity" => "to change the size, use `blkq resize`".to_owned(),
            _ if scope == Some(Scope::Images) => "it is for image files, and this device has none".to_owned(),
            _ if scope == Some(Scope::Groups) => {
                "it is for devices in a group; join a group first, with group=NAME".to_owned()
            }
            _ if is_fixed(key) => {
                format!("it is fixed at attach; detach the device and attach it with --{key}")
            }
            _ => {
                let rows = Row::sorted_by_name().into_iter().filter(|row| self.includes(row.scope));
                let names: Vec<&str> = rows.map(|row| row.name).collect();
                if let Some(similar) = closest(key, &names) {
                    return Failure::new(format!("no such setting; did you mean {similar}?"));
                }
                format!(
                    "choose one of {}; use `blkq resize` to change the size, and attach the device again to change anything else",
                    names.join(", ")
                )
            }
        };
        Failure::new(format!("no such setting: {hint}"))
    }
}

/// Whether `key` is an option of `attach`, for a device that does not have it as a setting. The stack of a control
/// thread is too small for clap's definition of the command line.
fn is_fixed(key: &str) -> bool {
    match key {
        // The names of these options are not those of their fields.
        "export" => true,
        "exports" | "image" | "sandbox" => false,
        _ => !key.starts_with("no-") && FIELDS.iter().any(|field| field.replace('_', "-") == key),
    }
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use crate::harness::options;
    use crate::options::ROWS;

    fn values(row: &Row) -> &'static [&'static str] {
        match row.name {
            "clock" => &["cached", "precise"],
            "depth" => &["1", "10240"],
            "direct-io" => &["on", "off", "auto"],
            "dispatch" => &["concurrent", "serial"],
            "fault" => &["none", "seed=7; error=ENOSPC,op=write,rate=1%"],
            "limit" => &["none", "auto", "read-iops=500,burst=2000x10s,bps=1M,iops-size=16K"],
            "group" => &["none", "gold"],
            "weight" => &["1", "10000"],
            "on-error" => &["report", "hold", "hold-enospc"],
            "hang-warning" => &["0", "0.1", "0.3", "5", "86400"],
            "scheduler" => &["none", "mq-deadline", "kyber"],
            "without" => &["none", "huge-pages", "receive-backoff,split-reads"],
            _ => &["on", "off"],
        }
    }

    #[test]
    fn values_survive_a_round_trip() {
        for row in ROWS {
            assert_eq!(Row::find(row.name).map(|found| found.key), Some(row.key));
            for text in values(row) {
                let setting = (row.read)(text).unwrap();
                assert_eq!(setting.to_text(), (row.name.to_owned(), (*text).to_owned()));
                let mut options = options(&["d.img"]);
                options.put(&setting);
                assert_eq!(options.setting(row.key), Some(setting));
            }
            let are_names = row.name == "group";
            for bad in ["", "maybe", "-1", "ON", "on "].iter().filter(|bad| !are_names || bad.len() < 2) {
                let why = (row.read)(bad).unwrap_err().to_string();
                assert!(!why.is_empty() && why.len() < 200, "{why}");
            }
        }
        assert!(Row::find("colour").is_none());
        let why = (Row::find("depth").unwrap().read)("99999").unwrap_err().to_string();
        assert_eq!(why, "depth must be a number from 1 to 10240, not \"99999\"");
    }

    #[test]
    fn fixed_settings_are_options_of_attach() {
        let attach = AttachOptions::augment_args(clap::Command::new("attach"));
        let options: Vec<&str> = attach.get_arguments().filter_map(clap::Arg::get_long).collect();
        let fields = FIELDS.iter().map(|field| field.replace('_', "-"));
        for key in options.iter().map(|option| (*option).to_owned()).chain(fields) {
            let is_option = options.contains(&key.as_str()) && !key.starts_with("no-");
            assert_eq!(is_fixed(&key), is_option || Row::find(&key).is_some(), "{key}");
        }
    }

    #[test]
    fn an_unknown_setting_is_refused_before_its_value() {
        let why = |words: &[&str], key: &str| {
            SettingGroups::new(&options(words)).read(key, "nonsense").unwrap_err().to_string()
        };
        assert!(why(&["ram:1M"], "direct-io").contains("it is for image files"));
        assert!(why(&["disk.img"], "direct-io").contains("on, off or auto"));
        assert!(why(&["disk.img"], "fault").contains("attach it with --fault"));
        assert!(why(&["disk.img", "--fault", "none"], "fault").contains("is not a fault"));
        assert!(why(&["disk.img"], "size").contains("blkq resize"));
        for fixed in ["queues", "vhost-socket", "sector-size", "insecure"] {
            assert!(why(&["disk.img"], fixed).contains(&format!("attach it with --{fixed}")), "{fixed}");
        }
        let all = why(&["ram:1M"], "colour");
        assert!(all.contains("choose one of autoclear, batching") && !all.contains("dispatch"), "{all}");
    }
}
