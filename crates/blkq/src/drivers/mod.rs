//! The drivers, and the one list of them.

pub mod null;

#[cfg(test)]
mod harness;
