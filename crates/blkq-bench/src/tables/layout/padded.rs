//! The measurement on blkq itself.

pub use blkq as library;

#[path = "side.rs"]
#[allow(clippy::duplicate_mod, reason = "the same measurement on both builds")]
pub mod side;
