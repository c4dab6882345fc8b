//! vhost-user-blk: the disk of a virtual machine, read and written in the guest's own memory.
//!
//! `memory` is the guest's memory, made of `mapping`s, with `sigbus` for those that shrink; `ring` a
//! ring of either kind, `split` or `packed`, in `area`s of it, with `descriptor` and `chain` in common;
//! `request` what a chain asks for, with its data as `segments`; `config` what a driver reads of the
//! device, and `abi` the numbers of virtio.

#![allow(dead_code, reason = "the sources that use it are not there yet")]

mod abi;
mod area;
mod chain;
mod config;
mod descriptor;
#[cfg(test)]
mod harness;
mod inflight;
mod inflight_packed;
mod inflight_split;
mod mapping;
mod memory;
mod packed;
mod request;
mod ring;
mod segments;
mod sigbus;
mod split;
