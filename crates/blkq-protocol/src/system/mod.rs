//! Signals, locks and time, as the operating system has them.

pub mod record_lock;
pub mod signals;
pub mod timestamp;
