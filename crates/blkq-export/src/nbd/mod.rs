//! NBD: fixed newstyle, with structured and extended replies.
//!
//! [`proto`], [`handshake`], [`transmission`] and [`reply`] are the protocol alone, over bytes
//! in memory: no socket, no clock, no block layer.

pub mod handshake;
pub mod proto;
pub mod reply;
pub mod transmission;
