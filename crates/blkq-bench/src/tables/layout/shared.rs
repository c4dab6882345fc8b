//! The same sources without padding.

pub use blkq_shared_layout as library;

#[path = "side.rs"]
pub mod side;
