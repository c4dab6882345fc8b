//! ublk: block devices of the kernel, `/dev/ublkbN`, that a process serves.
//!
//! - `abi` declares the kernel's interface, and `control` sends commands to its control device.
//! - `parameters` translates the limits of a disk for the kernel.
//! - `copy` chooses which side copies the data of requests.
//! - `source` serves a queue on an engine.
//! - `device` creates, starts, takes over, stops and removes a device; `identity` finds one without a server.
//! - `setup` is a process that issues the commands that may hang, and `idle` one that detects when the device
//!   has no users. `child` forks both and sends them requests, and `usage` finds users.
//! - [`process`] prepares a process to serve a block device.

#[cfg_attr(fuzz_interface, allow(missing_docs, reason = "private but for fuzz targets"))]
mod abi;
mod child;
mod control;
mod copy;
mod device;
mod identity;
mod idle;
mod parameters;
pub mod process;
mod setup;
mod source;
mod usage;

/// The interface of a fuzz target: words that the kernel writes, and the parameters that it gets.
#[cfg(fuzz_interface)]
#[doc(hidden)]
pub mod fuzzing {
    pub use super::abi::{IoDescriptor, Parameters};
    pub use super::copy::CopyMode;
    pub use super::parameters::{REQUEST_MAX_BYTES, parameters};
    pub use super::source::bio_of;
}

pub use abi::Features;
pub use control::{CONTROL_PATH, ControlDevice, block_path};
pub use copy::CopyMode;
pub use device::{Claimed, UblkDevice, UblkOptions};
pub use identity::Identity;
pub use idle::IdleWatch;
pub use setup::{SETTINGS_DIRECTORY, SetupProcess};
pub use usage::check_unopened;
