//! The drivers, and the one list of them.

pub mod null;
pub mod ram;

#[cfg(test)]
mod harness;
