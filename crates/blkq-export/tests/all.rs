//! The integration tests of this crate in one program, which is built faster than one for each file. `cargo nextest`
//! runs each test in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

#[path = "vhost/front_end.rs"]
mod front_end;
mod nbd;
mod nbd_block_status;
mod nbd_handshake;
mod nbd_hostile;
mod nbd_memory;
mod nbd_server;
mod nbd_split;
mod nbd_tls;
mod nbd_transmission;
mod nbd_unaligned;
mod turns;
mod vhost;
mod vhost_blkio;
mod vhost_descriptors;
mod vhost_hostile;
mod vhost_model;
mod vhost_registered;
mod vhost_rings;
mod vhost_user;
