//! The integration tests of this crate in one program, which is built faster than one for each file. `cargo nextest`
//! runs each test in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod auto_limit;
mod bitmaps;
mod common;
mod engine;
mod exchange;
mod fairness;
mod flush;
mod hold;
mod kernel_pages;
mod limits;
mod live_changes;
mod local_wait;
mod memory;
mod model;
mod plug;
mod statistics;
mod submitters;
mod trace;
mod watch;
