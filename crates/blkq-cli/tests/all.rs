//! The integration tests of this crate in one program, which is built faster than one for each file. `cargo nextest`
//! runs each test in a process of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

mod access;
mod bench;
mod bitmap_places;
mod bitmaps;
mod command;
mod commit;
mod config;
mod confine;
mod daemon;
mod exposition;
#[path = "../../blkq-export/tests/vhost/front_end.rs"]
mod front_end;
mod generate;
mod held;
mod images;
mod kills;
mod limits;
mod losetup;
mod persistent_bitmaps;
mod place;
mod process;
mod qcow2;
mod reports;
mod resize;
mod run;
mod snapshot;
mod tls;
mod upgrade;
mod usage;
mod vhost;
mod watching;
