//! Signals, locks, time and the sandbox, as the operating system has them.

pub mod kernel;
pub mod record_lock;
pub mod signals;
pub mod timestamp;
