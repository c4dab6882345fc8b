//! blkq as it is.

pub use blkq as library;

#[path = "side.rs"]
pub mod side;
