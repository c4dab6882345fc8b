//! ublk: the kernel's block devices in user space, `/dev/ublkbN`.
//!
//! `abi` is the kernel's interface, `control` its control device, `parameters` the limits of a
//! disk in its words, `source` a queue on its engine with its `descriptors`, `device` the life of
//! a device, `usage` who uses it, [`process`] what a process that serves one must be.

pub mod abi;
mod control;
mod descriptors;
mod device;
mod parameters;
pub mod process;
mod source;
mod usage;

pub use abi::Features;
pub use control::{CONTROL_PATH, ControlDevice};
pub use device::{Identity, UblkDevice};
