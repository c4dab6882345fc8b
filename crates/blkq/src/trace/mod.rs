//! Tracing: each step of each I/O as a [`TraceEvent`], in a ring buffer per hardware queue that another
//! process reads (the kernel's blktrace, kernel/trace/blktrace.c).
//!
//! The buffers are one memory file. The thread that owns a queue writes, and nobody keeps it from
//! writing: the oldest events are overwritten, and it never looks at what a reader does. A reader maps
//! the file without the right to write, and finds by the count of events what it missed.
//!
//! An event is a record of its own, or, of bios in the fast lane, part of a record for a whole plug or batch of
//! completions, which the reader expands.
//!
//! While tracing is off a queue takes one branch per batch for each kind of event. Times are those of the queue's
//! clock: with [`ClockMode::Cached`](crate::ClockMode::Cached) what happens under one plug, or in one batch of
//! completions, has one time; but an attachment's plug, which lasts while its clients are read, is flushed and issued
//! at a time of its own.

mod event;
mod memory;
#[cfg(all(test, model_check))]
mod model;
mod probes;
mod record;
mod ring;

pub use event::{EventKind, NO_BIO, TraceClient, TraceEvent};
pub use memory::{MEMORY_MAX_BYTES, PAGE_BYTES, RING_BYTES_MIN, TraceMemory};
pub(crate) use probes::Probes;
pub(crate) use record::{PlugRecord, RECORD_CAPACITY_SECTORS, RECORD_REQUESTS_MAX};
pub(crate) use ring::TraceWriter;
pub use ring::{PAGE_EVENTS_MAX, TracePage, TraceReader};
