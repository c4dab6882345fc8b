//! vhost-user-blk: serves the disk to a virtual machine, whose requests and data are in the guest's memory.
//!
//! - `device` starts and stops a device. Its thread (`control`) serves one front end at a time: a `channel`
//!   receives whole messages, `message` parses them, and a `session` executes them. `status` is the state that
//!   these share with the engines and the owner.
//! - `vring` is a ring as the control thread sees it, and `source` serves the ring on an engine. A `notifier`
//!   signals the front end.
//! - `untrusted_fd` handles descriptors that a front end passes, any of which may hang.
//! - `memory` is the table of guest memory, made of [`mapping`](crate::mapping)s; `registration` registers
//!   guest memory with the rings of engines.
//! - `ring` is a ring of either kind, `split` or `packed`; both use `area` and `chain`. In the memory
//!   of `inflight`, they record the requests in flight for the daemon that follows a killed one.
//! - `request` parses a chain. `segments` collects the memory of its data, and copies data that is not aligned.
//! - `config` is the configuration space of the device, with its features.
#![cfg_attr(fuzz_interface, allow(missing_docs, reason = "most items are private but for fuzz targets"))]

mod area;
mod chain;
mod channel;
mod config;
mod control;
mod device;
#[cfg(any(test, simulation, fuzz_interface))]
mod device_harness;
#[cfg(any(test, simulation))]
mod harness;
mod inflight;
mod memory;
mod message;
#[cfg(all(test, model_check))]
mod model;
mod notifier;
mod packed;
mod registration;
mod request;
mod ring;
mod segments;
mod session;
mod source;
mod split;
mod status;
#[cfg(test)]
mod truncation_tests;
mod untrusted_fd;
mod vring;
#[cfg_attr(model_check, path = "wakeup/model.rs")]
mod wakeup;

pub use device::{StoppingDevice, VhostUserDevice, VhostUserOptions};
pub use registration::RegistrationLimits;
pub use status::{Event, FrontEndInfo, Paused, Report, VhostUserCounters};

/// The interface of simulations and fuzz targets: a device, and the guest of the unit tests.
#[cfg(any(test, simulation, fuzz_interface))]
#[doc(hidden)]
pub mod simulated {
    #[cfg(simulation)]
    pub use super::config::feature;
    pub use super::device_harness::{Device, Reply, SERIAL};
    #[cfg(any(test, simulation))]
    pub use super::harness::{Driver, Guest, Offer, USER_OFFSET};
    #[cfg(simulation)]
    pub use super::message::{BACKEND_CONFIG_CHANGE, code};
    pub use super::ring::RingSpec;
}

/// The interface of fuzz targets: guest memory, rings in it, and requests.
#[cfg(fuzz_interface)]
#[doc(hidden)]
pub mod fuzzing {
    pub use super::chain::{Chain, Head};
    pub use super::config::RANGES_MAX;
    pub use super::inflight::InflightRegion;
    pub use super::memory::{Cursor, GuestMemory, RegionSpec};
    pub use super::message::{HEADER_BYTES, PAYLOAD_MAX_BYTES};
    pub use super::request::{Action, BlockRequest, Parser, S_OK};
    pub use super::ring::{Ring, RingSpec};
}
