//! `blkq trace`: reads the events of a device from its daemon's memory, and processes them. `rings` reads the
//! events and merges the queues by time. `io_tracker` follows each I/O through its events, and
//! `filter` selects I/Os. `blktrace` and `output` write the output.

pub mod blktrace;
pub mod filter;
pub mod io_tracker;
pub mod item;
pub mod output;
pub mod rings;

#[cfg(test)]
mod tests;
