//! Tracing: each step of each I/O as a [`TraceEvent`], in a ring buffer per hardware queue that another
//! process reads (the kernel's blktrace, kernel/trace/blktrace.c).
//!
//! The buffers are one memory file. The thread that owns a queue writes, and nobody keeps it from
//! writing: the oldest events are overwritten, and it never looks at what a reader does. A reader maps
//! the file without the right to write, and finds by the count of events what it missed.
//!
//! While tracing is off a queue takes one branch per batch for each kind of event. Times are those
//! of the queue's clock: with [`ClockMode::Cached`](crate::ClockMode::Cached) what happens under one plug, or in one batch of
//! completions, has one time.

mod event;
mod memory;
#[cfg(all(test, model_check))]
mod model;
mod probes;
mod ring;

pub use event::{EVENT_BYTES, EventKind, NO_BIO, TraceClient, TraceEvent};
pub use memory::{EVENTS_MAX, EVENTS_MIN, MEMORY_MAX_BYTES, TraceMemory};
pub(crate) use probes::Probes;
pub use ring::TraceReader;
pub(crate) use ring::TraceWriter;
