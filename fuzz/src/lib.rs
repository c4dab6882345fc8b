//! The fuzz targets. Each is a function that checks one input. libFuzzer runs them instrumented (`fuzz_targets`), and
//! tests replay the corpora in debug builds (`tests/replay.rs`). Empty in other builds.

#![cfg(fuzz_interface)]
#![allow(clippy::unwrap_used, reason = "a target that cannot continue fails")]

pub mod certificates;
pub mod command_line;
pub mod control_socket;
pub mod fault_spec;
mod lines;
pub mod metrics_http;
pub mod nbd_handshake;
pub mod nbd_session;
pub mod nbd_transmission;
pub mod qcow2;
pub mod qcow2_journal;
pub mod state_files;
pub mod tls_records;
pub mod ublk_words;
mod vhost;
pub mod vhost_device;
pub mod vhost_messages;
pub mod vhost_ring;
