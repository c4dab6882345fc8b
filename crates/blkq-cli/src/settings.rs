//! The settings of `blkq set`: their keys, and their values as text and as typed values.
//!
//! The control socket and the state file contain text, so that commands, daemons and state files of different
//! versions understand each other. Only this module converts it.

use std::time::Duration;

use blkq::ClockMode;
use blkq::ErrorPolicy;
use blkq::SchedulerKind;
use blkq::disk::DEPTH_MAX;
use blkq::throttle::{LimitMode, WEIGHT_MAX};
use blkq_drivers::DriverSpec;
use blkq_drivers::fault::FaultSpec;
use blkq_drivers::r#loop::{DirectIo, Dispatch};

use crate::failure::{Failure, Outcome};
use crate::hangs;
use crate::options::{AttachOptions, parse_group_name};
use crate::similar::closest;

#[derive(Clone, PartialEq, Debug)]
pub enum Setting {
    Autoclear(bool),
    /// Whether threads that wait for a full device submit several requests per wake-up.
    Batching(bool),
    Clock(ClockMode),
    /// Number of requests in flight, per queue.
    Depth(u16),
    DirectIo(DirectIo),
    Dispatch(Dispatch),
    /// Whether I/O is submitted to the kernel before the end of a batch.
    EarlySubmission(bool),
    Fault(FaultSpec),
    Group(Option<String>),
    /// The time in flight after which a request is logged; zero for never.
    HangWarning(Duration),
    Iostats(bool),
    Limit(LimitMode),
    Merge(bool),
    /// Whether a request that fails is reported or held.
    OnError(ErrorPolicy),
    ReadOnly(bool),
    /// Whether the NBD server waits before it receives from a client that is busy reading replies.
    ReceiveBackoff(bool),
    Scheduler(SchedulerKind),
    /// Whether large reads of NBD clients that connect from now on are served in parts.
    SplitReads(bool),
    Weight(u32),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Of {
    All,
    Images,
    /// Devices that were attached with --fault.
    Faults,
    Groups,
    /// Devices with an NBD export. The key is valid for all devices; the daemon checks whether there is an export.
    Nbd,
}

impl Of {
    /// Describes the devices for the help text; empty for all devices.
    pub fn text(self) -> &'static str {
        match self {
            Of::All => "",
            Of::Images => "devices of image files",
            Of::Faults => "devices attached with --fault",
            Of::Groups => "devices in a group",
            Of::Nbd => "NBD exports",
        }
    }
}

#[derive(Debug)]
pub struct Key {
    pub name: &'static str,
    pub of: Of,
    pub values: &'static str,
    read: Read,
}

type Read = fn(&'static str, &str) -> Outcome<Setting>;

/// The keys, sorted by name.
pub static KEYS: [Key; 19] = [
    Key::all("autoclear", "on, off", |key, text| switch(key, text).map(Setting::Autoclear)),
    Key::all("batching", "on, off", |key, text| switch(key, text).map(Setting::Batching)),
    Key::all("clock", "cached, precise", |_, text| Ok(Setting::Clock(text.parse()?))),
    Key::all("depth", "1 to the --depth of attach", |_, text| depth(text).map(Setting::Depth)),
    Key::new("direct-io", Of::Images, "on, off, auto", |_, text| Ok(Setting::DirectIo(text.parse()?))),
    Key::new("dispatch", Of::Images, "concurrent, serial", |_, text| Ok(Setting::Dispatch(text.parse()?))),
    Key::all("early-submission", "on, off", |key, text| switch(key, text).map(Setting::EarlySubmission)),
    Key::new("fault", Of::Faults, "RULES, none", |_, text| Ok(Setting::Fault(text.parse()?))),
    Key::all("group", "GROUP, none", |_, text| group(text).map(Setting::Group)),
    Key::all("hang-warning", "SECONDS, 0 for never", |_, text| {
        hangs::parse(text).map(Setting::HangWarning).map_err(Failure::new)
    }),
    Key::all("iostats", "on, off", |key, text| switch(key, text).map(Setting::Iostats)),
    Key::all("limit", "LIMITS, auto, none", |_, text| Ok(Setting::Limit(text.parse()?))),
    Key::all("merge", "on, off", |key, text| switch(key, text).map(Setting::Merge)),
    Key::all("on-error", "report, hold, hold-enospc", |_, text| Ok(Setting::OnError(text.parse()?))),
    Key::all("read-only", "on, off", |key, text| switch(key, text).map(Setting::ReadOnly)),
    Key::new("receive-backoff", Of::Nbd, "on, off", |key, text| {
        switch(key, text).map(Setting::ReceiveBackoff)
    }),
    Key::all("scheduler", "none, mq-deadline, kyber", |_, text| Ok(Setting::Scheduler(text.parse()?))),
    Key::new("split-reads", Of::Nbd, "on, off", |key, text| switch(key, text).map(Setting::SplitReads)),
    Key::new("weight", Of::Groups, "1 to 10000", |_, text| weight(text).map(Setting::Weight)),
];

/// Settings that are still accepted and ignored, for one release after their removal.
const REMOVED: [&str; 1] = ["pacing"];

pub fn is_removed(key: &str) -> bool {
    REMOVED.contains(&key)
}

impl Key {
    const fn new(name: &'static str, of: Of, values: &'static str, read: Read) -> Key {
        Key { name, of, values, read }
    }

    const fn all(name: &'static str, values: &'static str, read: Read) -> Key {
        Key::new(name, Of::All, values, read)
    }

    pub fn find(name: &str) -> Option<&'static Key> {
        KEYS.iter().find(|key| key.name == name)
    }

    /// The error lists the valid values.
    pub fn read(&self, text: &str) -> Outcome<Setting> {
        (self.read)(self.name, text)
    }
}

impl Setting {
    pub fn key(&self) -> &'static str {
        match self {
            Setting::Autoclear(_) => "autoclear",
            Setting::Batching(_) => "batching",
            Setting::Clock(_) => "clock",
            Setting::Depth(_) => "depth",
            Setting::DirectIo(_) => "direct-io",
            Setting::Dispatch(_) => "dispatch",
            Setting::EarlySubmission(_) => "early-submission",
            Setting::Fault(_) => "fault",
            Setting::Group(_) => "group",
            Setting::HangWarning(_) => "hang-warning",
            Setting::Iostats(_) => "iostats",
            Setting::Limit(_) => "limit",
            Setting::Merge(_) => "merge",
            Setting::OnError(_) => "on-error",
            Setting::ReadOnly(_) => "read-only",
            Setting::ReceiveBackoff(_) => "receive-backoff",
            Setting::Scheduler(_) => "scheduler",
            Setting::SplitReads(_) => "split-reads",
            Setting::Weight(_) => "weight",
        }
    }

    /// The value as text, which [`Key::read`] parses.
    pub fn value(&self) -> String {
        match self {
            Setting::Autoclear(on)
            | Setting::Batching(on)
            | Setting::EarlySubmission(on)
            | Setting::Iostats(on)
            | Setting::Merge(on)
            | Setting::ReadOnly(on)
            | Setting::ReceiveBackoff(on)
            | Setting::SplitReads(on) => if *on { "on" } else { "off" }.to_owned(),
            Setting::Clock(mode) => mode.to_string(),
            Setting::Depth(depth) => depth.to_string(),
            Setting::DirectIo(mode) => mode.name().to_owned(),
            Setting::Dispatch(dispatch) => dispatch.name().to_owned(),
            Setting::Fault(spec) => spec.to_string(),
            Setting::Group(group) => group.as_deref().unwrap_or(NO_GROUP).to_owned(),
            Setting::HangWarning(limit) => limit.as_secs_f64().to_string(),
            Setting::Limit(limits) => limits.to_string(),
            Setting::OnError(policy) => policy.to_string(),
            Setting::Scheduler(kind) => kind.to_string(),
            Setting::Weight(weight) => weight.to_string(),
        }
    }

    pub fn to_text(&self) -> (String, String) {
        (self.key().to_owned(), self.value())
    }
}

/// Options of `attach` with a value that cannot be changed later.
const FIXED: [&str; 31] = [
    "backing-chain",
    "ceph-conf",
    "ceph-keyring",
    "ceph-user",
    "copy",
    "export",
    "export-name",
    "fault",
    "format",
    "handshake-timeout",
    "insecure",
    "listen",
    "max-connections",
    "metrics",
    "name",
    "offset",
    "partscan",
    "pid-file",
    "queues",
    "register-memory",
    "sector-size",
    "shared",
    "size-limit",
    "socket-group",
    "socket-mode",
    "threads-per-queue",
    "tls",
    "tls-certificates",
    "unsafe-flush-ignore",
    "vhost-socket",
    "whole-sectors",
];

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
        if key == "group" {
            self.in_group = value != NO_GROUP;
        }
    }

    fn group(self, of: Of) -> bool {
        match of {
            Of::All | Of::Nbd => true,
            Of::Images => self.image,
            Of::Faults => self.faults,
            Of::Groups => self.in_group,
        }
    }

    pub fn has(self, key: &str) -> bool {
        Key::find(key).is_some_and(|known| self.group(known.of))
    }

    /// The error lists the settings that the device has if there is none named `key`, or the values that it
    /// accepts.
    pub fn read(self, key: &str, value: &str) -> Outcome<Setting> {
        match Key::find(key) {
            Some(known) if self.group(known.of) => known.read(value),
            known => Err(self.no_such_setting(key, known)),
        }
    }

    /// The refusal of the setting `key`, which this device does not have. `known` is the key if other devices
    /// have it.
    fn no_such_setting(self, key: &str, known: Option<&Key>) -> Failure {
        let hint = match key {
            "size" | "size-limit" | "capacity" => "to change the size, use `blkq resize`".to_owned(),
            _ if known.is_some_and(|known| known.of == Of::Images) => {
                "it is for image files, and this device has none".to_owned()
            }
            _ if known.is_some_and(|known| known.of == Of::Groups) => {
                "it is for devices in a group; join a group first, with group=NAME".to_owned()
            }
            _ if FIXED.contains(&key) => {
                format!("it is fixed at attach; detach the device and attach it with --{key}")
            }
            _ => {
                let names: Vec<&str> =
                    KEYS.iter().filter(|key| self.group(key.of)).map(|key| key.name).collect();
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

fn switch(key: &str, text: &str) -> Outcome<bool> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Failure::new(format!("{key} must be on or off, not {text:?}"))),
    }
}

/// The value of `group` for a device that is in no group.
pub const NO_GROUP: &str = "none";

fn group(text: &str) -> Outcome<Option<String>> {
    match text {
        NO_GROUP => Ok(None),
        _ => parse_group_name(text).map(Some).map_err(Failure::new),
    }
}

fn weight(text: &str) -> Outcome<u32> {
    let weight = text.parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight));
    weight
        .ok_or_else(|| Failure::new(format!("weight must be a number from 1 to {WEIGHT_MAX}, not {text:?}")))
}

/// Checks the limits of all disks. The largest depth of a disk may be lower, which the disk itself checks.
fn depth(text: &str) -> Outcome<u16> {
    let depth = text.parse().ok().filter(|depth| (1..=DEPTH_MAX).contains(depth));
    depth.ok_or_else(|| Failure::new(format!("depth must be a number from 1 to {DEPTH_MAX}, not {text:?}")))
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use crate::options::tests::options;

    fn values(key: &Key) -> &'static [&'static str] {
        match key.name {
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
            _ => &["on", "off"],
        }
    }

    #[test]
    fn values_survive_a_round_trip() {
        assert!(KEYS.is_sorted_by_key(|key| key.name));
        for key in &KEYS {
            assert_eq!(Key::find(key.name).map(|found| found.name), Some(key.name));
            for text in values(key) {
                let setting = key.read(text).unwrap();
                assert_eq!(setting.to_text(), (key.name.to_owned(), (*text).to_owned()));
            }
            let are_names = key.name == "group";
            for bad in ["", "maybe", "-1", "ON", "on "].iter().filter(|bad| !are_names || bad.len() < 2) {
                let why = key.read(bad).unwrap_err().to_string();
                assert!(!why.is_empty() && why.len() < 200, "{why}");
            }
        }
        assert!(Key::find("colour").is_none());
        let why = Key::find("depth").unwrap().read("99999").unwrap_err().to_string();
        assert_eq!(why, "depth must be a number from 1 to 10240, not \"99999\"");
    }

    #[test]
    fn every_option_of_attach_can_be_set_or_is_fixed() {
        let command = AttachOptions::augment_args(clap::Command::new("attach"));
        let mut fixed: Vec<&str> = command
            .get_arguments()
            .filter_map(|argument| argument.get_long())
            .filter(|name| !name.starts_with("no-") && Key::find(name).is_none_or(|key| key.of == Of::Faults))
            .collect();
        fixed.sort_unstable();
        assert_eq!(fixed, FIXED);
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
        for fixed in ["queues", "vhost-socket", "sector-size"] {
            assert!(why(&["disk.img"], fixed).contains(&format!("attach it with --{fixed}")), "{fixed}");
        }
        let all = why(&["ram:1M"], "colour");
        assert!(all.contains("choose one of autoclear, batching") && !all.contains("dispatch"), "{all}");
    }
}
