//! The engine: one thread, one ring, several queues and attachments.
//!
//! A turn is: reap completions, complete requests in a batch, let the sources parse what
//! their clients sent and submit it under one plug, flush the plugs, enter the kernel once.

use std::any::Any;

use io_uring::squeue;

use crate::bio::{Bio, Completion};
use crate::error::Error;
use crate::queue::Queue;
use crate::ring::{Cqe, Ring, Token};

/// Something on an engine that brings I/O: an attachment's server, a test's client.
/// Every method runs on the engine's thread and must not block.
pub trait Source {
    /// The source is now part of the engine: arm what it waits for.
    ///
    /// # Errors
    /// Whatever keeps it from working; it is then dropped.
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error>;

    /// A submission pushed through [`SourceContext::push`] ended; its payload is in the token.
    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe);

    /// A bio submitted through [`SourceContext::submit`] ended.
    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion);

    /// A message from another thread, sent through [`EngineHandle::send`].
    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        let _ = (cx, message);
    }

    /// Once per turn, after everything above: submit what was parsed, send what is ready.
    /// Bios submitted in one turn share a plug.
    fn on_turn(&mut self, cx: &mut SourceContext<'_>);

    /// When [`Source::on_turn`] must be called at the latest, in nanoseconds of the
    /// monotonic clock.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// Begin to stop: take nothing new, end what is in flight; with `force`, drop clients.
    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool);

    /// Whether nothing is left in flight and the source may be dropped.
    fn is_stopped(&self) -> bool;
}

/// What a source sees of its engine.
pub struct SourceContext<'a> {
    ring: &'a mut Ring,
    queues: &'a mut [Queue],
    id: u16,
    handle: &'a EngineHandle,
}

impl SourceContext<'_> {
    /// Submits `entry`; its completion comes to [`Source::on_cqe`] with `payload` (below 2^48).
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until then.
    pub unsafe fn push(&mut self, entry: squeue::Entry, payload: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.ring.push(entry, Token::new(self.id, payload)) }
    }

    /// The ring: for registering files and buffers, and asking what the kernel supports.
    pub fn ring(&mut self) -> &mut Ring {
        self.ring
    }

    /// Submits a bio to the engine's queue number `queue`. `bio.user_data` (below 2^48)
    /// comes back through [`Source::on_bio`].
    ///
    /// # Errors
    /// The bio, when the queue has no room: submit it again after a completion.
    pub fn submit(&mut self, queue: usize, bio: Bio) -> Result<(), Bio>;

    /// The disk behind queue number `queue`.
    pub fn disk(&self, queue: usize) -> &Arc<Disk>;

    /// The current limits of that disk (capacity, block sizes, capabilities, read-only).
    pub fn limits(&self, queue: usize) -> &QueueLimits;

    /// Nanoseconds of the monotonic clock.
    pub fn now_ns(&self) -> u64;

    /// This source's number and a handle with which another thread can send to it.
    pub fn id(&self) -> u16;
    pub fn handle(&self) -> &EngineHandle;

    /// Runs `job` on a worker thread (never the engine's) and delivers what it returns
    /// through [`Source::on_message`]. For what may block: SEEK_HOLE, getaddrinfo.
    pub fn offload(&mut self, job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static);
}
