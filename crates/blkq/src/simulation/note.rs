//! The fault driver's notes on the requests that it hits, so that a model can expect exactly
//! what a rule did.

use std::path::PathBuf;

use crate::bio::Operation;
use crate::drivers::fault::Effect;
use crate::error::IoResult;

/// A request, and what happens to it.
#[derive(Clone, Debug)]
pub struct Hit {
    /// The request's queue and tag, until it has completed.
    pub request: (u16, u16),
    /// Of the effects all but delays.
    pub effect: Effect,
    /// Of a short or torn transfer the bytes that are done; of a misdirected one where it goes,
    /// in bytes of the device; of a corrupted one the bit, counted from its beginning; else 0.
    pub at: u64,
    /// The requested operation.
    pub operation: Operation,
    /// Whether for good.
    pub fua: bool,
    /// Where, in bytes of the device.
    pub offset: u64,
    /// How much.
    pub bytes: u64,
    /// The data to write; empty for all but writes.
    pub data: Vec<u8>,
}

/// The fault that was injected.
#[derive(Clone, Debug)]
pub enum Noted {
    /// A request is hit.
    Hit(Hit),
    /// The request of this queue with this tag has completed in the wrapped driver.
    Completed((u16, u16), IoResult),
    /// A rule with this trigger file hit a request, at that time.
    Armed(PathBuf, u64),
}
