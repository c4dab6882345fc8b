//! The settings of a device, for the refusal of others.

use blkq::Driver;

use crate::failure::Failure;
use crate::settings::{OF_DEVICES, OF_FAULTS, OF_IMAGES};

/// Options of `attach` that stay as they are.
const FIXED: [&str; 18] = [
    "copy",
    "export",
    "fault",
    "format",
    "handshake-timeout",
    "listen",
    "max-connections",
    "metrics",
    "name",
    "offset",
    "partscan",
    "queues",
    "sector-size",
    "shared",
    "socket-group",
    "socket-mode",
    "tls",
    "tls-certificates",
];

/// The refusal of a setting that a device of `driver` does not have.
pub(super) fn no_such_setting(key: &str, driver: &dyn Driver) -> Failure {
    let facts = driver.describe();
    let has = |fact: &str| facts.iter().any(|(name, _)| *name == fact);
    let mut settings = OF_DEVICES.to_vec();
    settings.extend(OF_IMAGES.iter().filter(|_| has("direct-io")));
    settings.extend(OF_FAULTS.iter().filter(|_| has("fault")));
    settings.sort_unstable();
    let cure = match key {
        "size" | "size-limit" | "capacity" => "the size is changed by blkq resize".to_owned(),
        key if OF_IMAGES.contains(&key) => {
            "it is for images, and there is none behind this device".to_owned()
        }
        key if FIXED.contains(&key) => format!("it is fixed at attach; detach, and attach with --{key}"),
        _ => format!(
            "there are {}; the size is changed by blkq resize, and all else by attaching anew",
            settings.join(", ")
        ),
    };
    Failure::new(format!("no such setting: {cure}"))
}
