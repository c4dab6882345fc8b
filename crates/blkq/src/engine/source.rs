use std::any::Any;
use std::fmt;
use std::sync::Arc;

use io_uring::{squeue, types};

use crate::bio::{Bio, Completion};
use crate::clock::monotonic_ns;
use crate::disk::Disk;
use crate::error::Error;
use crate::limits::QueueLimits;
use crate::queue::Queue;
use crate::ring::{Cqe, FileSlot, Registrar, Ring, Token};
use crate::trace::TraceClient;

use super::handle::EngineHandle;
use super::worker::{Job, Worker};

/// Owners in tokens of the ring: queues are numbered from 0, sources from here on, and the engine itself has
/// the last number.
pub(super) const FIRST_SOURCE: u16 = 0x100;

/// A producer of I/O on an engine: the server of an attachment, or the client of a test. All methods run on
/// the engine's thread and must not block.
///
/// # Safety
/// Sources free memory when they are notified that it is no longer in use. Therefore [`Source::is_stopped`]
/// must return true only when nothing that the source pushed or submitted is in flight, because another
/// source will reuse its number; an exception is that the engine exits too. A source that wraps another
/// source must pass on each notification once, and each completion only to the source that submitted it.
pub unsafe trait Source {
    /// Called when the source is part of the engine: submit the operations that the source waits for. If this
    /// fails, the engine stops the source, without force, and drops it.
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error>;

    /// A submission pushed through [`SourceContext::push`] completed; its payload is in the token.
    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe);

    /// A bio submitted through [`SourceContext::submit`] completed.
    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion);

    /// A message from another thread, sent through [`EngineHandle::send`].
    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        let _ = (cx, message);
    }

    /// Called in every turn, after the methods above: submit what was parsed, send what is ready. Called
    /// again in the same turn if bios complete immediately. Bios submitted in one turn share a plug. If
    /// clients decide how much work there is, the source must stop at [`TURN_BUDGET`](crate::TURN_BUDGET),
    /// and return 0 from [`Source::deadline_ns`] while work is left.
    fn on_turn(&mut self, cx: &mut SourceContext<'_>);

    /// The latest time at which [`Source::on_turn`] must be called, in nanoseconds of the monotonic clock.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// Writes a description of the client that submitted the bio with `user_data`, whose completion the
    /// source has not received yet. Writes nothing if the client is unknown. Must not allocate.
    fn write_client(&self, user_data: u64, text: &mut dyn fmt::Write) -> fmt::Result {
        let _ = (user_data, text);
        Ok(())
    }

    /// Whether no client waits for the bio in flight that was submitted with `user_data`. If such a bio is
    /// held after an error ([`ErrorPolicy`](crate::ErrorPolicy)), it completes with that error.
    fn is_abandoned(&self, user_data: u64) -> bool {
        let _ = user_data;
        false
    }

    /// Starts to stop the source: accept no new work, and complete what is in flight; with `force`,
    /// disconnect clients. Called again, with `force`, if the engine exits meanwhile.
    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool);

    /// Whether nothing is in flight and the source may be dropped.
    fn is_stopped(&self) -> bool;
}

/// Identifies a source of an engine. An engine never uses an id twice, so a late message for a dropped source
/// reaches no other source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SourceId {
    /// The owner in the source's tokens, which a later source may reuse.
    pub(super) owner: u16,
    pub(super) generation: u64,
}

impl SourceId {
    pub(super) fn index(self) -> usize {
        usize::from(self.owner - FIRST_SOURCE)
    }
}

/// The parts of the engine that a source borrows during a call.
pub(super) struct EngineParts {
    pub ring: Ring,
    pub queues: Vec<Queue>,
    pub handle: EngineHandle,
    pub turn: u64,
    pub exits: bool,
    pub worker: Worker,
}

/// The part of the engine that a source can access.
pub struct SourceContext<'a> {
    pub(super) parts: &'a mut EngineParts,
    pub(super) id: SourceId,
}

impl SourceContext<'_> {
    /// Submits `entry`. [`Source::on_cqe`] receives its completion, with the low 48 bits of `payload`.
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
    #[inline]
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        self.parts.ring.file(slot)
    }

    /// Submits a bio to the engine's queue number `queue`. [`Source::on_bio`] receives its completion, with
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
    #[inline]
    pub fn set_trace_client(&mut self, queue: usize, client: impl FnOnce() -> TraceClient) {
        self.parts.queues[queue].set_trace_client(client);
    }

    /// The number of the engine's turn. [`Source::on_turn`] may be called several times in one turn, and all
    /// these calls together must respect [`TURN_BUDGET`](crate::TURN_BUDGET).
    #[inline]
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
    #[inline]
    pub fn token(&self, payload: u64) -> Token {
        Token::new(self.id.owner, payload)
    }

    /// A handle for sending messages to this source from any thread.
    pub fn handle(&self) -> &EngineHandle {
        &self.parts.handle
    }

    /// Runs `job` on a worker thread and delivers the value that it returns through [`Source::on_message`],
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
