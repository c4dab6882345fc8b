//! `side.rs` over `blkq_shared_layout`, a build of blkq's sources without padding to cache lines.

pub use blkq_shared_layout as library;

#[path = "side.rs"]
#[allow(clippy::duplicate_mod, reason = "the same measurement on both builds")]
pub mod side;
