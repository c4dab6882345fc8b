//! `blkq trace`: the events of a device, as they come from its daemon's memory, and what is made of
//! them. `rings` reads them, in the order that `ordered` has for all queues, `io_tracker` follows each
//! I/O through its events, `filter` chooses; `blktrace`, `lines` and `chrome` write them.

pub mod blktrace;
pub mod chrome;
pub mod client;
pub mod connection;
pub mod filter;
pub mod io_tracker;
pub mod item;
pub mod lines;
pub mod ordered;
pub mod output;
pub mod rings;

#[cfg(test)]
mod tests;
