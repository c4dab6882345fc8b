//! vhost-user-blk: the disk of a virtual machine, read and written in the guest's own memory.
//!
//! A `device` has a thread that serves one front end at a time (`control`): whole messages arrive over
//! a `channel`, are parsed by `message`, and a `session` does what they ask for: it makes the table of
//! memory, and has each `vring` served by a `source` on an engine. `shared` and `status` are what all of
//! them see; `foreign` are the descriptors of a front end, which may hang, and a `notifier` signals those by
//! which it is called.
//!
//! `memory` is the guest's memory, made of [`mapping`](crate::mapping)s, and `registration` for rings of the
//! kernel that know it; `ring` a
//! ring of either kind, `split` or `packed`, in `area`s of it, with `descriptor` and `chain` in common;
//! `request` what a chain asks for, with its data as `segments`, which `bounce` copies if it must;
//! `config` what a driver reads of the device, and `abi` the numbers of virtio.

mod abi;
mod area;
mod bounce;
mod chain;
mod channel;
mod config;
mod control;
mod descriptor;
mod device;
mod event;
mod foreign;
#[cfg(any(test, simulation))]
mod harness;
mod inflight;
mod inflight_packed;
mod inflight_split;
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
mod shared;
#[cfg(any(test, simulation, fuzzing))]
pub mod simulated;
mod source;
mod split;
mod status;
#[cfg(test)]
mod truncation_tests;
mod vring;
mod wakeup;

pub use device::{StoppingDevice, VhostUserDevice, VhostUserOptions};
pub use registration::RegistrationLimits;
pub use status::{Event, FrontEndInfo, Paused, Report, RingInfo, VhostUserCounters};

/// The parts that a fuzzer drives: a guest's memory, rings in it, and requests.
#[cfg(fuzzing)]
pub mod fuzzing {
    pub use super::abi::S_OK;
    pub use super::chain::{Chain, Head};
    pub use super::config::RANGES_MAX;
    pub use super::inflight::InflightRegion;
    pub use super::memory::{Cursor, GuestMemory, RegionSpec};
    pub use super::message::{HEADER_BYTES, PAYLOAD_MAX_BYTES};
    pub use super::request::{Action, BlockRequest, Parser};
    pub use super::ring::{Ring, RingSpec};
}
