//! ublk: the kernel's block devices in user space, `/dev/ublkbN`.
//!
//! `abi` is the kernel's interface, `control` its control device, `parameters` the limits of a
//! disk in its words, `copy` how data moves, `source` a queue on its engine with its `descriptors`,
//! `device` the life of a device, `setup` a process that makes it, `usage` its users and `idle` a
//! process that sees when it has none any more, `child` what both are, [`process`] what a process that serves one
//! must be.

mod abi;
mod child;
mod command;
mod control;
mod copy;
mod descriptors;
mod device;
mod identity;
mod idle;
mod parameters;
pub mod process;
mod setup;
mod source;
mod usage;

/// The parts that a fuzzer drives: the words that the kernel writes, and those that it gets.
#[cfg(fuzzing)]
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
