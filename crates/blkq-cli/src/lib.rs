//! The parts of the `blkq` command: how it finds its daemons and talks to them.

pub mod control;
pub mod failure;
pub mod info;
pub mod log;
pub mod size;
pub mod state;
pub mod statistics;
pub mod systemd;
pub mod table;
