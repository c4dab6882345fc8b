//! The engine: one thread, one ring, several queues and attachments.
//!
//! A turn is: reap completions, complete requests in a batch, let the sources parse what
//! their clients sent and submit it under one plug, flush the plugs, enter the kernel once.

pub(crate) mod local;
#[cfg(simulation)]
mod simulated;
mod worker;

use std::any::Any;
use std::sync::{Arc, OnceLock};

use io_uring::{squeue, types};

use crate::bio::{Bio, Completion};
use crate::clock::{monotonic_ns, time_until};
use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::limits::QueueLimits;
use crate::queue::Queue;
use crate::queue::hang::Look;
use crate::queue::plug::PLUG_REQUESTS_SEVERAL_QUEUES;
use crate::remote::kick::Kick;
use crate::ring::{Cqe, ENGINE_OPERATIONS, FileSlot, Registrar, Ring, Token, policy};
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Mutex, lock, try_lock};

#[cfg(simulation)]
pub use simulated::SimulatedEngine;
use worker::Job;
pub use worker::Worker;

/// Submissions that an engine's ring has room for.
const RING_ENTRIES: u32 = 512;
/// Owners on the ring: queues from 0, sources from here, the engine itself last.
const FIRST_SOURCE: u16 = 0x100;
const ENGINE: u16 = u16::MAX;
/// Times in one turn that sources get what has ended and submit more.
const TURN_ROUNDS: usize = 16;
/// Stack of an engine thread and of its worker, in bytes.
const STACK_BYTES: usize = 256 << 10;

/// Something on an engine that brings I/O: an attachment's server, a test's client.
/// Every method runs on the engine's thread and must not block.
///
/// # Safety
/// Sources free memory by what they are notified of. An implementation therefore has
/// [`Source::is_stopped`] return true, unless the engine ends too, only when nothing that it pushed
/// or submitted is in flight: its number goes to another source. If it wraps another source, it
/// passes on what it was passed itself, each completion once, to the source that submitted.
pub unsafe trait Source {
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

    /// Who asked for the bio submitted with `mark`, which has not ended: for people.
    fn client_of(&self, mark: u64) -> Option<String> {
        let _ = mark;
        None
    }

    /// Begin to stop: take nothing new, end what is in flight; with `force`, drop clients.
    /// Called again, with `force`, if the engine ends meanwhile.
    fn stop(&mut self, cx: &mut SourceContext<'_>, force: bool);

    /// Whether nothing is left in flight and the source may be dropped.
    fn is_stopped(&self) -> bool;
}

/// The name of a source of an engine. No two sources of an engine have the same, one after the
/// other neither: what comes late for one that is gone reaches none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SourceId {
    /// Its owner in tokens, which a successor may have again.
    owner: u16,
    generation: u64,
}

impl SourceId {
    fn index(self) -> usize {
        usize::from(self.owner - FIRST_SOURCE)
    }
}

/// A source in its place.
struct Placed {
    id: SourceId,
    source: Box<dyn Source>,
}

/// What a source sees of its engine.
pub struct SourceContext<'a> {
    ring: &'a mut Ring,
    queues: &'a mut [Queue],
    id: SourceId,
    handle: &'a EngineHandle,
    worker: &'a mut Worker,
}

impl SourceContext<'_> {
    /// Submits `entry`; its completion comes to [`Source::on_cqe`] with the low 48 bits of
    /// `payload`.
    ///
    /// # Safety
    /// Memory and descriptors of the entry must stay valid until then. What it names of the tables
    /// of registered files and buffers must be registered with this engine's ring, for this source.
    #[inline]
    pub unsafe fn push(&mut self, entry: squeue::Entry, payload: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.ring.push(entry, self.token(payload)) }
    }

    /// What registers files and buffers with the engine's ring.
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

    /// Hands all that was submitted to the drivers and the kernel now, not at the end of the
    /// turn: what takes long begins before the turn goes on.
    pub fn dispatch(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.flush(Some(self.ring)));
        self.ring.submit();
    }

    /// Number of queues of the engine.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// The disk behind queue number `queue`.
    pub fn disk(&self, queue: usize) -> &Arc<Disk> {
        &self.queues[queue].disk
    }

    /// The current limits of that disk (capacity, block sizes, capabilities, read-only).
    pub fn limits(&self, queue: usize) -> &QueueLimits {
        &self.queues[queue].limits
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

    /// With this another thread can send to the source.
    pub fn handle(&self) -> &EngineHandle {
        self.handle
    }

    /// Runs `job` on a worker thread (never the engine's) and delivers what it returns
    /// through [`Source::on_message`], unless the source is gone by then. For what may block:
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

/// What other threads ask of an engine.
enum Message {
    Add(Box<dyn FnOnce() -> Box<dyn Source> + Send>, Sender<Result<SourceId, Error>>),
    To(SourceId, Box<dyn Any + Send>),
    Stop { id: SourceId, force: bool, stopped: Sender<()> },
    Look { now_ns: u64, limit_ns: u64, found: Sender<Look> },
    Exit,
}

struct Mailbox {
    /// None once the engine has ended.
    messages: Mutex<Option<Vec<Message>>>,
    kick: Arc<Kick>,
    /// As the ring was made.
    kernel_buffers: OnceLock<u16>,
}

impl Mailbox {
    fn new(kick: Arc<Kick>) -> Arc<Mailbox> {
        Arc::new(Mailbox { messages: Mutex::new(Some(Vec::new())), kick, kernel_buffers: OnceLock::new() })
    }
}

/// With this any thread can talk to an engine.
#[derive(Clone)]
pub struct EngineHandle(Arc<Mailbox>);

impl EngineHandle {
    fn post(&self, message: Message) {
        // Dropped if the engine has ended: who waits for an answer sees that.
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
    /// What [`Source::start`] says, or that the engine has ended.
    pub fn add_source(
        &self,
        make: impl FnOnce() -> Box<dyn Source> + Send + 'static,
    ) -> Result<SourceId, Error> {
        let (sender, receiver) = channel();
        self.post(Message::Add(Box::new(make), sender));
        receiver.recv().map_err(|_| Error::new(ErrorKind::System, "the engine has ended"))?
    }

    /// Sends `message` to source `id`; to one that is gone it is dropped.
    pub fn send(&self, id: SourceId, message: Box<dyn Any + Send>) {
        self.post(Message::To(id, message));
    }

    /// Has the engine look for what has been in flight in its queues for more than `limit_ns`
    /// at `now_ns` of the monotonic clock: see [`watch`](crate::queue::hang). Does not wait. An
    /// engine that does not answer for long is itself what hangs.
    pub fn look(&self, now_ns: u64, limit_ns: u64) -> Looked {
        let (found, looked) = channel();
        self.post(Message::Look { now_ns, limit_ns, found });
        looked
    }

    /// Stops source `id` and waits until nothing of it is in flight and it is gone.
    pub fn stop_source(&self, id: SourceId, force: bool) {
        let (stopped, receiver) = channel();
        self.post(Message::Stop { id, force, stopped });
        // An error says that the engine has ended, and the source with it.
        let _ = receiver.recv();
    }
}

/// Where what an engine found will arrive.
pub type Looked = Receiver<Look>;

/// Aborts the process if a panic unwinds through it: the kernel still reads and writes the memory of
/// the requests in flight, which unwinding would free, and their clients would wait for ever.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// An engine's thread. Dropping it ends the engine after its I/O in flight has ended.
///
/// A panic on this thread, after the panic hook, aborts the process: I/O in flight owns memory that
/// must not be freed.
pub struct EngineThread {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Starts a thread with a ring that owns the given queues (disk and queue number).
    /// The first of `queues` is number 0 for the engine's sources, and so on.
    ///
    /// # Errors
    /// What keeps the ring or a queue from opening.
    ///
    /// # Panics
    /// If there is no queue, or more than 256.
    pub fn spawn(name: &str, queues: Vec<(Arc<Disk>, usize)>) -> Result<EngineThread, Error> {
        assert!((1..=usize::from(FIRST_SOURCE)).contains(&queues.len()), "an engine has 1 to 256 queues");
        for (disk, index) in &queues {
            disk.check_queue(*index)?;
        }
        let kick = queues[0].0.hardware_queue(queues[0].1).kick.clone();
        let handle = EngineHandle(Mailbox::new(kick));
        let (sender, receiver) = channel();
        let engine_handle = handle.clone();
        let sealed = |engine| policy().map_or(Ok(()), |policy| (policy.sealed)()).map(|()| engine);
        let body = move || match Engine::new(queues, engine_handle).and_then(sealed) {
            Ok(mut engine) => {
                let _ = sender.send(Ok(()));
                engine.run();
            }
            Err(error) => {
                let _ = sender.send(Err(error));
            }
        };
        let builder = thread::Builder::new().name(name.to_string()).stack_size(STACK_BYTES);
        let thread = builder.spawn(body).map_err(|e| Error::system("cannot start an engine thread", e))?;
        let ended = || Error::new(ErrorKind::System, "the engine thread ended while it started");
        receiver.recv().map_err(|_| ended())??;
        Ok(EngineThread { handle, thread: Some(thread) })
    }

    /// With this any thread can talk to the engine.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.handle.post(Message::Exit);
        if let Some(thread) = self.thread.take() {
            // It does not panic: it aborts.
            let _ = thread.join();
        }
    }
}

struct Engine {
    ring: Ring,
    queues: Vec<Queue>,
    sources: Vec<Option<Placed>>,
    stopping: Vec<(SourceId, Sender<()>)>,
    /// How many sources there were so far.
    generation: u64,
    handle: EngineHandle,
    kicks: Vec<Arc<Kick>>,
    messages: Vec<Message>,
    cqes: Vec<Cqe>,
    worker: Worker,
    exit: bool,
}

impl Engine {
    fn new(queues: Vec<(Arc<Disk>, usize)>, handle: EngineHandle) -> Result<Engine, Error> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        ring.require(&ENGINE_OPERATIONS)?;
        let _ = handle.0.kernel_buffers.set(ring.kernel_buffers_left());
        let kicks: Vec<_> =
            queues.iter().map(|(disk, index)| disk.hardware_queue(*index).kick.clone()).collect();
        let open = |(owner, (disk, index)): (usize, &(Arc<Disk>, usize))| {
            Queue::open(disk, *index, owner as u16, Some(&mut ring))
        };
        let mut queues: Vec<Queue> = queues.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        if queues.len() > 1 {
            queues.iter_mut().for_each(|queue| queue.plug.limit = PLUG_REQUESTS_SEVERAL_QUEUES);
        }
        let mut engine = Engine {
            ring,
            queues,
            sources: Vec::new(),
            generation: 0,
            stopping: Vec::new(),
            handle,
            kicks,
            messages: Vec::new(),
            cqes: Vec::with_capacity(RING_ENTRIES as usize * 4),
            worker: Worker::new("blkq-worker"),
            exit: false,
        };
        (0..engine.kicks.len()).for_each(|index| engine.arm_kick(index));
        Ok(engine)
    }

    /// Waits, on the ring, for kick `index`.
    fn arm_kick(&mut self, index: usize) {
        // SAFETY: the kicks live as long as the ring.
        unsafe { self.kicks[index].arm(&mut self.ring, Token::new(ENGINE, index as u64)) }
    }

    fn run(&mut self) {
        // Inside of what owns the requests, so that it acts before they go.
        let _guard = AbortOnUnwind;
        loop {
            self.turn();
            // Before it waits again: nobody would wake it.
            if self.exit && self.is_stopped() {
                break;
            }
            self.enter();
        }
        self.queues.iter_mut().for_each(|queue| queue.close(Some(&mut self.ring)));
    }

    fn is_stopped(&self) -> bool {
        self.sources.iter().flatten().all(|placed| placed.source.is_stopped())
            && self.queues.iter().all(Queue::is_drained)
    }

    fn turn(&mut self) {
        let mut cqes = std::mem::take(&mut self.cqes);
        self.ring.reap_all(&mut cqes);
        for cqe in cqes.drain(..) {
            self.route(cqe);
        }
        self.cqes = cqes;
        self.take_messages();
        for queue in &mut self.queues {
            queue.run(Some(&mut self.ring));
        }
        // Bounded, so that a source whose bios end at once does not keep the engine from all else.
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            for index in 0..self.sources.len() {
                self.with_source(index, |source, cx| source.on_turn(cx));
            }
            for queue in &mut self.queues {
                queue.flush(Some(&mut self.ring));
            }
            if self.queues.iter().all(|queue| queue.done.is_empty()) {
                break;
            }
        }
        if !self.stopping.is_empty() {
            self.drop_stopped();
        }
    }

    #[inline]
    fn route(&mut self, cqe: Cqe) {
        match cqe.token.owner() {
            ENGINE => {
                let index = cqe.token.payload() as usize;
                self.kicks[index].drain();
                self.arm_kick(index);
            }
            queue if queue < FIRST_SOURCE => {
                self.queues[usize::from(queue)].complete_cqe(cqe, Some(&mut self.ring));
            }
            source => {
                self.with_source(usize::from(source - FIRST_SOURCE), |source, cx| source.on_cqe(cx, cqe));
            }
        }
    }

    /// Lends source `index` the rest of the engine.
    #[inline]
    fn with_source<R>(
        &mut self,
        index: usize,
        call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>) -> R,
    ) -> Option<R> {
        let placed = self.sources.get_mut(index)?.as_mut()?;
        let mut cx = SourceContext {
            ring: &mut self.ring,
            queues: &mut self.queues,
            id: placed.id,
            handle: &self.handle,
            worker: &mut self.worker,
        };
        Some(call(&mut *placed.source, &mut cx))
    }

    /// Lends source `id`, unless it is gone, the rest of the engine.
    fn with_named(&mut self, id: SourceId, call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>)) {
        if self.sources.get(id.index()).is_some_and(|placed| placed.as_ref().is_some_and(|it| it.id == id)) {
            self.with_source(id.index(), call);
        }
    }

    /// Hands ended bios to the sources that submitted them.
    fn deliver(&mut self) {
        for index in 0..self.queues.len() {
            let mut done = std::mem::take(&mut self.queues[index].done);
            for mut completion in done.drain(..) {
                let token = Token(completion.user_data);
                completion.user_data = token.payload();
                let source = usize::from(token.owner() - FIRST_SOURCE);
                self.with_source(source, |source, cx| source.on_bio(cx, completion));
            }
            // Keep the room that it has grown to, unless bios ended at once meanwhile.
            if self.queues[index].done.is_empty() {
                self.queues[index].done = done;
            }
        }
    }

    fn take_messages(&mut self) {
        // Held by a thread that is posting just now: its kick brings the engine back.
        if let Some(mut mail) = try_lock(&self.handle.0.messages)
            && let Some(messages) = &mut *mail
        {
            std::mem::swap(messages, &mut self.messages);
        }
        let mut messages = std::mem::take(&mut self.messages);
        for message in messages.drain(..) {
            match message {
                Message::Add(make, reply) => {
                    // The receiver waits for the answer, or is gone and needs none.
                    let _ = reply.send(self.add(make()));
                }
                Message::To(id, message) => {
                    self.with_named(id, |source, cx| source.on_message(cx, message));
                }
                Message::Stop { id, force, stopped } => {
                    self.with_named(id, |source, cx| source.stop(cx, force));
                    self.stopping.push((id, stopped));
                }
                Message::Look { now_ns, limit_ns, found } => {
                    let _ = found.send(self.look(now_ns, limit_ns));
                }
                Message::Exit => {
                    self.exit = true;
                    self.queues.iter_mut().for_each(|queue| queue.closing = true);
                    for index in 0..self.sources.len() {
                        self.with_source(index, |source, cx| source.stop(cx, true));
                    }
                }
            }
        }
        self.messages = messages;
    }

    fn look(&mut self, now_ns: u64, limit_ns: u64) -> Look {
        let mut all = Look::default();
        for queue in &mut self.queues {
            let mut look = queue.look(now_ns, limit_ns);
            for hang in &mut look.hangs {
                let Some(token) = hang.mark.map(Token) else { continue };
                let index = usize::from(token.owner().wrapping_sub(FIRST_SOURCE));
                let placed = self.sources.get(index).and_then(Option::as_ref);
                hang.client = placed.and_then(|placed| placed.source.client_of(token.payload()));
            }
            all.add(look);
        }
        all
    }

    fn add(&mut self, source: Box<dyn Source>) -> Result<SourceId, Error> {
        if self.exit {
            return Err(Error::new(ErrorKind::System, "the engine has ended"));
        }
        let index = match self.sources.iter().position(Option::is_none) {
            Some(index) => index,
            None => {
                self.sources.push(None);
                self.sources.len() - 1
            }
        };
        self.generation += 1;
        let id = SourceId { owner: FIRST_SOURCE + index as u16, generation: self.generation };
        self.sources[index] = Some(Placed { id, source });
        let started = self.with_source(index, |source, cx| source.start(cx));
        if let Some(Err(error)) = started {
            self.sources[index] = None;
            return Err(error);
        }
        Ok(id)
    }

    fn drop_stopped(&mut self) {
        let sources = &mut self.sources;
        self.stopping.retain(|(id, stopped)| {
            let named = |place: &&mut Option<Placed>| place.as_ref().is_some_and(|it| it.id == *id);
            if let Some(place) = sources.get_mut(id.index()).filter(named) {
                if place.as_ref().is_some_and(|placed| !placed.source.is_stopped()) {
                    return true;
                }
                *place = None;
            }
            let _ = stopped.send(());
            false
        });
    }

    /// Enters the kernel once: submits, and waits if there is nothing else to do.
    fn enter(&mut self) {
        if self.has_work() {
            return self.ring.enter(0, None);
        }
        self.kicks.iter().for_each(|kick| kick.prepare_sleep());
        // Whoever left work before it saw the sleep has not kicked: look again.
        if self.has_work() {
            self.ring.enter(0, None);
        } else {
            self.queues.iter_mut().for_each(|queue| queue.clock.rest());
            self.ring.enter(1, time_until(self.deadline_ns()));
        }
        self.kicks.iter().for_each(|kick| kick.woke());
    }

    fn has_work(&self) -> bool {
        // A poster holds the lock for a moment only, and what it posts is work.
        let mail = try_lock(&self.handle.0.messages)
            .is_none_or(|mail| mail.as_ref().is_some_and(|messages| !messages.is_empty()));
        mail || self.queues.iter().any(Queue::has_work)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let queues = self.queues.iter().filter_map(Queue::deadline_ns);
        let sources = self.sources.iter().flatten().filter_map(|placed| placed.source.deadline_ns());
        queues.chain(sources).min()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Who waits for an answer, to these or to what was posted too late, sees it dropped.
        let late = lock(&self.handle.0.messages).take();
        drop(late);
        for waiting in self.stopping.drain(..) {
            let _ = waiting.1.send(());
        }
    }
}
