//! The measurement on a build of the same sources without padding.

pub use blkq_shared_layout as library;

#[path = "side.rs"]
#[allow(clippy::duplicate_mod, reason = "the same measurement on both builds")]
pub mod side;
