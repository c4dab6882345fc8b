//! [`SourceContext`]: the calls of a source on the engine.

use std::any::Any;
use std::sync::Arc;

use io_uring::{squeue, types};

use crate::bio::Bio;
use crate::clock::monotonic_ns;
use crate::disk::Disk;
use crate::limits::QueueLimits;
use crate::ring::{FileSlot, Registrar, Token};
use crate::trace::TraceClient;

use super::worker::{Job, Worker};
use super::{EngineHandle, SourceContext, SourceId};

impl SourceContext<'_> {
    /// Submits `entry`. [`Source::on_cqe`](super::Source::on_cqe) receives its completion, with the low 48 bits of `payload`.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until the completion. Registered files and buffers
    /// that the entry names must be registered with this engine's ring, for this source.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, payload: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.parts.ring.push(entry, self.token(payload)) }
    }

    /// Registers files and buffers with the engine's ring.
    pub fn registrar(&mut self) -> Registrar<'_> {
        Registrar::new(&mut self.parts.ring)
    }

    /// The index of a registered file, for use in an entry. Panics if the engine's ring has no such file.
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        self.parts.ring.file(slot)
    }

    /// Submits a bio to the engine's queue number `queue`. [`Source::on_bio`](super::Source::on_bio) receives its completion, with
    /// the low 48 bits of `bio.user_data`. Returns the bio if the queue has no room: submit the bio again
    /// after a completion.
    #[inline]
    pub fn submit(&mut self, queue: usize, mut bio: Bio) -> Result<(), Bio> {
        let user_data = bio.user_data;
        bio.user_data = self.token(user_data).0;
        let refused = self.parts.queues[queue].submit(bio, Some(&mut self.parts.ring));
        refused.map_err(|bio| Bio { user_data, ..bio })
    }

    /// Names the client that submits the next bio to queue number `queue`. `client` is called only if that
    /// bio is traced.
    pub fn set_trace_client(&mut self, queue: usize, client: impl FnOnce() -> TraceClient) {
        self.parts.queues[queue].set_trace_client(client);
    }

    /// The number of the engine's turn. [`Source::on_turn`](super::Source::on_turn) may be called several times in one turn, and all
    /// these calls together must respect [`TURN_BUDGET`](crate::TURN_BUDGET).
    pub fn turn(&self) -> u64 {
        self.parts.turn
    }

    /// Whether the engine, and its ring, are about to exit.
    pub fn engine_exits(&self) -> bool {
        self.parts.exits
    }

    /// The number of queues of the engine.
    pub fn queue_count(&self) -> usize {
        self.parts.queues.len()
    }

    /// The disk to which queue number `queue` belongs.
    pub fn disk(&self, queue: usize) -> &Arc<Disk> {
        self.parts.queues[queue].disk()
    }

    /// The current limits of the disk of queue number `queue`.
    pub fn limits(&self, queue: usize) -> &QueueLimits {
        self.parts.queues[queue].limits()
    }

    /// The time of the monotonic clock, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    /// The id of this source.
    pub fn id(&self) -> SourceId {
        self.id
    }

    /// The token that [`SourceContext::push`] uses for `payload`, which is needed to cancel that operation.
    pub fn token(&self, payload: u64) -> Token {
        Token::new(self.id.owner, payload)
    }

    /// A handle for sending messages to this source from any thread.
    pub fn handle(&self) -> &EngineHandle {
        &self.parts.handle
    }

    /// Runs `job` on a worker thread and delivers the value that it returns through [`Source::on_message`](super::Source::on_message),
    /// unless the source was dropped meanwhile. For operations that may block, such as SEEK_HOLE and
    /// getaddrinfo. If the job panics, nothing is delivered.
    pub fn offload(&mut self, job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static) {
        let work = self.work(job);
        self.parts.worker.run(work);
    }

    /// Runs `job` as [`SourceContext::offload`] does, but on the source's own `worker`, so that it does not
    /// wait for the jobs of other sources.
    pub fn offload_to(
        &self,
        worker: &mut Worker,
        job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static,
    ) {
        worker.run(self.work(job));
    }

    fn work(&self, job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static) -> Job {
        let (handle, id) = (self.parts.handle.clone(), self.id);
        Box::new(move || handle.send(id, job()))
    }
}
