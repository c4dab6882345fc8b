//! Tracing: each step of each I/O is recorded as a [`TraceEvent`] in a ring buffer per hardware queue, which
//! another process reads (the kernel's blktrace, kernel/trace/blktrace.c).
//!
//! All buffers are in one memory file. The thread that owns a queue writes events without waiting for a
//! reader: it overwrites the oldest events. A reader maps the file read-only, and finds from the count of
//! events how many it missed.
//!
//! An event has its own record, or, for bios on the fast path, shares a record with all events of a plug or
//! of a batch of completions. The reader expands such a record into events.
//!
//! While tracing is off, a queue executes one branch per batch for each kind of event. The times of events
//! are those of the queue's clock. With [`ClockMode::Cached`](crate::ClockMode::Cached), all events under one
//! plug, or of one batch of completions, have the same time; but the plug of an attachment, which is open
//! while its clients' requests are read, is flushed and issued at its own time.

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
