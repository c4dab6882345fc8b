//! The blkq command.
fn main() {}
