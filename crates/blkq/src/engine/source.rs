//! [`Source`]: what an engine serves, what it sees of the engine, and how other threads reach it.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use io_uring::{squeue, types};

use crate::bio::{Bio, Completion};
use crate::clock::monotonic_ns;
use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::kick::Kick;
use crate::limits::QueueLimits;
use crate::queue::Queue;
use crate::queue::hang::HangScan;
use crate::ring::{Cqe, FileSlot, Registrar, Ring, Token};
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::{Mutex, lock, receive, try_lock};
use crate::trace::{TraceClient, TraceMemory};

use super::worker::{Job, Worker};

/// Owners on the ring: queues from 0, sources from here, the engine itself last.
pub(super) const FIRST_SOURCE: u16 = 0x100;

/// Something on an engine that brings I/O: an attachment's server, a test's client.
/// Every method runs on the engine's thread and must not block.
///
/// # Safety
/// Sources free memory by what they are notified of. An implementation therefore has
/// [`Source::is_stopped`] return true, unless the engine exits too, only when nothing that it pushed
/// or submitted is in flight: another source gets its number. If it wraps another source, it
/// passes on what it was passed itself, each completion once, to the source that submitted.
pub unsafe trait Source {
    /// The source is now part of the engine: arm what it waits for.
    ///
    /// # Errors
    /// Whatever keeps it from working; it is then stopped, without force, and dropped.
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error>;

    /// A submission pushed through [`SourceContext::push`] completed; its payload is in the token.
    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe);

    /// A bio submitted through [`SourceContext::submit`] completed.
    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion);

    /// A message from another thread, sent through [`EngineHandle::send`].
    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        let _ = (cx, message);
    }

    /// In every turn, after everything above: submit what was parsed, send what is ready. Called again in the same turn
    /// when bios complete immediately. Bios submitted in one turn share a plug. A source whose clients choose how much
    /// there is to do stops at [`TURN_BUDGET`](crate::TURN_BUDGET), and has [`Source::deadline_ns`] return 0 for the rest.
    fn on_turn(&mut self, cx: &mut SourceContext<'_>);

    /// When [`Source::on_turn`] must be called at the latest, in nanoseconds of the
    /// monotonic clock.
    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    /// The client of the bio submitted with `user_data`, which is in flight: for people.
    fn client_of(&self, user_data: u64) -> Option<String> {
        let _ = user_data;
        None
    }

    /// Whether nobody waits any longer for the bio submitted with `user_data`, which is in flight: if it is
    /// held after an error ([`ErrorPolicy`](crate::ErrorPolicy)), it completes with that.
    fn is_abandoned(&self, user_data: u64) -> bool {
        let _ = user_data;
        false
    }

    /// Begin to stop: take nothing new, complete what is in flight; with `force`, drop clients.
    /// Called again, with `force`, if the engine exits meanwhile.
    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool);

    /// Whether nothing is left in flight and the source may be dropped.
    fn is_stopped(&self) -> bool;
}

/// The name of a source of an engine. No two sources of an engine have the same, one after the
/// other neither: what comes late for a dropped one reaches none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SourceId {
    /// Its owner in tokens, which a successor may have again.
    pub(super) owner: u16,
    pub(super) generation: u64,
}

impl SourceId {
    pub(super) fn index(self) -> usize {
        usize::from(self.owner - FIRST_SOURCE)
    }
}

/// The engine as a source sees it.
pub struct SourceContext<'a> {
    pub(super) ring: &'a mut Ring,
    pub(super) queues: &'a mut [Queue],
    pub(super) id: SourceId,
    pub(super) handle: &'a EngineHandle,
    pub(super) worker: &'a mut Worker,
    pub(super) turn: u64,
    pub(super) exits: bool,
}

impl SourceContext<'_> {
    /// Submits `entry`; its completion comes to [`Source::on_cqe`] with the low 48 bits of
    /// `payload`.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until then. Registered files and
    /// buffers that it names must be registered with this engine's ring, for this source.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, payload: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.ring.push(entry, self.token(payload)) }
    }

    /// The registrar of files and buffers with the engine's ring.
    pub fn registrar(&mut self) -> Registrar<'_> {
        Registrar::new(self.ring)
    }

    /// A registered file, to be named in an entry.
    ///
    /// # Panics
    /// If it is not registered with the engine's ring.
    #[inline]
    pub fn file(&self, slot: &FileSlot) -> types::Fixed {
        self.ring.file(slot)
    }

    /// Submits a bio to the engine's queue number `queue`. The low 48 bits of `bio.user_data`
    /// come back through [`Source::on_bio`].
    ///
    /// # Errors
    /// The bio, when the queue has no room: submit it again after a completion.
    #[inline]
    pub fn submit(&mut self, queue: usize, mut bio: Bio) -> Result<(), Bio> {
        let user_data = bio.user_data;
        bio.user_data = self.token(user_data).0;
        let refused = self.queues[queue].submit(bio, Some(self.ring));
        refused.map_err(|bio| Bio { user_data, ..bio })
    }

    /// Names the client that submits the next bio to queue number `queue`, in case that is traced.
    #[inline]
    pub fn set_trace_client(&mut self, queue: usize, client: impl FnOnce() -> TraceClient) {
        self.queues[queue].set_trace_client(client);
    }

    /// The number of the engine's turn. In one turn [`Source::on_turn`] may be called several times: what a source does
    /// in all of them counts for its [`TURN_BUDGET`](crate::TURN_BUDGET).
    #[inline]
    pub fn turn(&self) -> u64 {
        self.turn
    }

    /// Whether the engine exits, and its ring with it.
    pub fn engine_exits(&self) -> bool {
        self.exits
    }

    /// Number of queues of the engine.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// The disk behind queue number `queue`.
    pub fn disk(&self, queue: usize) -> &Arc<Disk> {
        self.queues[queue].disk()
    }

    /// The current limits of that disk (capacity, block sizes, capabilities, read-only).
    pub fn limits(&self, queue: usize) -> &QueueLimits {
        self.queues[queue].limits()
    }

    /// Nanoseconds of the monotonic clock.
    pub fn now_ns(&self) -> u64 {
        monotonic_ns()
    }

    /// This source's name.
    pub fn id(&self) -> SourceId {
        self.id
    }

    /// The token under which [`SourceContext::push`] submits with that payload: for cancelling it.
    #[inline]
    pub fn token(&self, payload: u64) -> Token {
        Token::new(self.id.owner, payload)
    }

    /// A handle for sending messages to the source from any thread.
    pub fn handle(&self) -> &EngineHandle {
        self.handle
    }

    /// Runs `job` on a worker thread (never the engine's) and delivers what it returns
    /// through [`Source::on_message`], unless the source was dropped by then. For what may block:
    /// SEEK_HOLE, getaddrinfo. A job that panics delivers nothing.
    pub fn offload(&mut self, job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static) {
        let work = self.work(job);
        self.worker.run(work);
    }

    /// The same on a thread of the source's own: `job` waits for none of other kinds.
    pub fn offload_to(
        &self,
        worker: &mut Worker,
        job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static,
    ) {
        worker.run(self.work(job));
    }

    /// Delivers what `job` returns.
    fn work(&self, job: impl FnOnce() -> Box<dyn Any + Send> + Send + 'static) -> Job {
        let (handle, id) = (self.handle.clone(), self.id);
        Box::new(move || handle.send(id, job()))
    }
}

/// A message of another thread to an engine.
pub(super) enum Message {
    Add(Box<dyn FnOnce() -> Box<dyn Source> + Send>, Sender<Result<SourceId, Error>>),
    To(SourceId, Box<dyn Any + Send>),
    Stop { id: SourceId, force: bool, stopped: Sender<()> },
    Register(Box<dyn FnOnce(Registrar<'_>) + Send>),
    ScanForHangs { now_ns: u64, limit_ns: u64, found: Sender<HangScan> },
    Trace(Arc<Disk>, Option<Arc<TraceMemory>>),
    Exit,
}

struct Mailbox {
    /// None once the engine has exited.
    messages: Mutex<Option<Vec<Message>>>,
    kick: Arc<Kick>,
    /// As the ring was made.
    kernel_buffers: OnceLock<u16>,
}

/// A handle for sending messages to an engine from any thread.
#[derive(Clone)]
pub struct EngineHandle(Arc<Mailbox>);

impl EngineHandle {
    /// The handle of an engine that `kick` wakes.
    pub(super) fn new(kick: Arc<Kick>) -> EngineHandle {
        let messages = Mutex::new(Some(Vec::new()));
        EngineHandle(Arc::new(Mailbox { messages, kick, kernel_buffers: OnceLock::new() }))
    }

    /// The engine's ring was made with that many slots for the kernel to fill.
    pub(super) fn set_kernel_buffers(&self, slots: u16) {
        let _ = self.0.kernel_buffers.set(slots);
    }

    /// Moves what was posted to `messages`, which is empty.
    pub(super) fn take_messages(&self, messages: &mut Vec<Message>) {
        // Locked by a thread that is posting just now: its kick brings the engine back.
        if let Some(mut mail) = try_lock(&self.0.messages)
            && let Some(posted) = &mut *mail
        {
            std::mem::swap(posted, messages);
        }
    }

    /// Whether something was posted.
    pub(super) fn has_messages(&self) -> bool {
        // A poster has the lock for a moment only, and what it posts is work.
        try_lock(&self.0.messages)
            .is_none_or(|mail| mail.as_ref().is_some_and(|messages| !messages.is_empty()))
    }

    /// The engine has stopped: a thread that waits for an answer sees its message dropped.
    pub(super) fn close(&self) {
        let late = lock(&self.0.messages).take();
        drop(late);
    }

    pub(super) fn post(&self, message: Message) {
        // Dropped if the engine has stopped: a thread that waits for an answer sees that.
        if let Some(messages) = &mut *lock(&self.0.messages) {
            messages.push(message);
        }
        self.0.kick.kick();
    }

    /// How many slots for the kernel to fill the engine's ring was made with
    /// ([`Registrar::keep_kernel_buffers`]); 0 if it could not have its table of registered buffers.
    pub fn kernel_buffers(&self) -> u16 {
        self.0.kernel_buffers.get().copied().unwrap_or(0)
    }

    /// Makes a source on the engine's thread and starts it. Returns its name.
    ///
    /// # Errors
    /// The error of [`Source::start`], or that the engine has exited.
    pub fn add_source(
        &self,
        make: impl FnOnce() -> Box<dyn Source> + Send + 'static,
    ) -> Result<SourceId, Error> {
        let (sender, receiver) = channel();
        self.post(Message::Add(Box::new(make), sender));
        receive(&receiver).map_err(|_| exited())?
    }

    /// Has the engine's thread call `job` with the registrar of its ring, between two turns, and waits
    /// for what that returns. The engine does nothing else meanwhile.
    ///
    /// # Errors
    /// That the engine has exited.
    pub fn with_registrar<R: Send + 'static>(
        &self,
        job: impl FnOnce(Registrar<'_>) -> R + Send + 'static,
    ) -> Result<R, Error> {
        let (sender, receiver) = channel();
        // The receiver waits for it.
        self.post(Message::Register(Box::new(move |registrar| _ = sender.send(job(registrar)))));
        receive(&receiver).map_err(|_| exited())
    }

    /// Sends `message` to source `id`; a message to a stopped one is dropped.
    pub fn send(&self, id: SourceId, message: Box<dyn Any + Send>) {
        self.post(Message::To(id, message));
    }

    /// Has the engine scan for requests that have been in flight in its queues for more than `limit_ns`
    /// at `now_ns` of the monotonic clock: see [`hang`](crate::queue::hang). Does not wait. An
    /// engine that does not answer for long is itself what hangs.
    pub fn scan_for_hangs(&self, now_ns: u64, limit_ns: u64) -> HangScanReply {
        let (found, scanned) = channel();
        self.post(Message::ScanForHangs { now_ns, limit_ns, found });
        scanned
    }

    /// Has the engine trace its queues of `disk` into `memory`, from its next turn on, each into the ring
    /// of its number; without one it traces them no longer. Does not wait.
    pub fn trace(&self, disk: &Arc<Disk>, memory: Option<Arc<TraceMemory>>) {
        self.post(Message::Trace(disk.clone(), memory));
    }

    /// Has source `id` begin to stop, and does not wait. A caller that stops several sources begins with all of them
    /// before it waits for the first: otherwise the others serve their clients meanwhile.
    pub fn begin_stop(&self, id: SourceId, force: bool) -> StoppingSource {
        let (stopped, receiver) = channel();
        self.post(Message::Stop { id, force, stopped });
        StoppingSource(receiver)
    }

    /// Stops source `id` and waits until nothing of it is in flight and it is dropped.
    pub fn stop_source(&self, id: SourceId, force: bool) {
        self.begin_stop(id, force).wait();
    }
}

pub(super) fn exited() -> Error {
    Error::new(ErrorKind::System, "the engine has exited")
}

/// A source that is stopping ([`EngineHandle::begin_stop`]).
#[must_use = "the source may still have I/O in flight"]
pub struct StoppingSource(Receiver<()>);

impl StoppingSource {
    /// Waits until nothing of the source is in flight and it is dropped.
    pub fn wait(self) {
        // An error means that the engine has exited, and the source with it.
        let _ = receive(&self.0);
    }
}

/// The receiver of the findings of a scan.
pub type HangScanReply = Receiver<HangScan>;
