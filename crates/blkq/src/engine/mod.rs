//! The engine: a thread with one ring that serves several hardware queues and sources (attachments).
//!
//! In one turn the engine reaps completions and completes their requests in a batch. The sources then parse
//! what their clients sent, and submit it under one plug. Finally the engine flushes the plugs and enters the
//! kernel once.

mod handle;
pub(crate) mod local;
#[cfg(any(simulation, fuzz_interface))]
mod simulated;
mod source;
mod worker;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bio::Completion;
use crate::clock::time_until;
use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::kick::Kick;
use crate::queue::Queue;
use crate::queue::hang::HangScan;
use crate::ring::{Cqe, ENGINE_OPERATIONS, KICK, Registrar, Ring, RingCounters, Token};
use crate::sync::mpsc::{Sender, channel};
use crate::sync::{Mutex, lock};

pub use handle::{EngineThread, HangScanReply, StoppingSource};
#[cfg(any(simulation, fuzz_interface))]
#[doc(hidden)]
pub use simulated::SimulatedEngine;
pub use worker::Worker;

const RING_ENTRIES: u32 = 512;
/// The maximum number of rounds of a turn, so that a source whose bios complete immediately does not keep the
/// engine from its other work.
const TURN_ROUNDS: usize = 16;

/// Aborts the process if a panic unwinds through it. Unwinding would free the memory of requests in flight,
/// which the kernel still reads and writes, and their clients would wait forever.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Owners in tokens of the ring: queues are numbered from 0, sources from here on. [`KICK`] is the last number.
const FIRST_SOURCE: u16 = 0x100;

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
    owner: u16,
    generation: u64,
}

/// The parts of the engine that a source borrows during a call.
struct EngineParts {
    ring: Ring,
    queues: Vec<Queue>,
    handle: EngineHandle,
    turn: u64,
    exits: bool,
    worker: Worker,
}

/// The part of the engine that a source can access.
pub struct SourceContext<'a> {
    parts: &'a mut EngineParts,
    id: SourceId,
}

/// A job for the thread of the engine, which runs it at the beginning of its next turn.
type Message = Box<dyn FnOnce(&mut Engine) + Send>;

struct Mailbox {
    /// `None` once the engine has exited.
    messages: Mutex<Option<Vec<Message>>>,
    kick: Arc<Kick>,
    /// The number of kernel buffer slots of the engine's ring.
    kernel_buffers: u16,
}

/// A handle for sending messages to an engine from any thread.
#[derive(Clone)]
pub struct EngineHandle(Arc<Mailbox>);

/// Notifies the thread that waits for a source to stop, when the notice is dropped. The engine drops it after the
/// source. A notice that no longer reaches an engine is dropped immediately.
struct StopNotice {
    id: SourceId,
    stopped: Sender<()>,
}

impl Drop for StopNotice {
    fn drop(&mut self) {
        let _ = self.stopped.send(());
    }
}

fn exited() -> Error {
    Error::new(ErrorKind::System, "the engine has exited")
}

struct AttachedSource {
    id: SourceId,
    source: Box<dyn Source>,
}

struct Engine {
    parts: EngineParts,
    /// The sources, indexed by the owner in their tokens, minus [`FIRST_SOURCE`].
    attached: Vec<Option<AttachedSource>>,
    stopping: Vec<StopNotice>,
    /// The number of sources that were ever added.
    generation: u64,
    messages: Vec<Message>,
    cqes: Vec<Cqe>,
    /// The ring's counters at the time when they were last added to the statistics.
    counted: RingCounters,
}

impl Engine {
    fn new(queues: Vec<(Arc<Disk>, usize)>) -> Result<Engine, Error> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        Registrar::new(&mut ring).require(&ENGINE_OPERATIONS)?;
        let kernel_buffers = ring.kernel_buffers_left();
        let open = |(owner, (disk, index)): (usize, &(Arc<Disk>, usize))| {
            Queue::open(disk, *index, owner as u16, Some(&mut ring))
        };
        let mut opened: Vec<Queue> = queues.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        let kick = |(disk, index): &(Arc<Disk>, usize)| disk.hardware_queue(*index).kick.clone();
        queues.iter().for_each(|queue| ring.watch(&kick(queue)));
        if opened.len() > 1 {
            opened.iter_mut().for_each(|queue| queue.set_several_queues());
        }
        let messages = Mutex::new(Some(Vec::new()));
        let mailbox = Mailbox { messages, kick: kick(&queues[0]), kernel_buffers };
        Ok(Engine {
            parts: EngineParts {
                ring,
                queues: opened,
                handle: EngineHandle(Arc::new(mailbox)),
                turn: 0,
                exits: false,
                worker: Worker::new("blkq-worker"),
            },
            attached: Vec::new(),
            stopping: Vec::new(),
            generation: 0,
            messages: Vec::new(),
            cqes: Vec::with_capacity(RING_ENTRIES as usize * 4),
            counted: RingCounters::default(),
        })
    }

    fn run(&mut self) {
        // Declared in the innermost scope: unwinding drops the guard before it frees the requests.
        let _guard = AbortOnUnwind;
        loop {
            self.turn();
            // Checked before the engine waits again, because no completion would wake it.
            if self.parts.exits && self.is_stopped() {
                break;
            }
            self.enter();
        }
        self.parts.queues.iter_mut().for_each(|queue| queue.close(Some(&mut self.parts.ring)));
    }

    fn is_stopped(&self) -> bool {
        self.sources().all(Source::is_stopped) && self.parts.queues.iter().all(Queue::is_drained)
    }

    fn turn(&mut self) {
        self.parts.turn += 1;
        let mut cqes = std::mem::take(&mut self.cqes);
        self.parts.ring.reap_all(&mut cqes);
        for cqe in cqes.drain(..) {
            self.route(cqe);
        }
        self.cqes = cqes;
        self.count_enters();
        self.run_messages();
        for queue in &mut self.parts.queues {
            queue.begin_turn(Some(&mut self.parts.ring));
        }
        self.run_rounds();
        self.drop_stopped();
    }

    /// Runs rounds until no bio completes immediately, or a queue has used up the budget of its turn.
    fn run_rounds(&mut self) {
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            for index in 0..self.attached.len() {
                self.with_source(index, |source, cx| source.on_turn(cx));
            }
            let EngineParts { ring, queues, .. } = &mut self.parts;
            queues.iter_mut().for_each(|queue| queue.dispatch_all(Some(&mut *ring)));
            // This is the last step, because dispatching a request may make it fail and be held. The next
            // round delivers the bios that complete here.
            self.fail_abandoned();
            let is_over = self.parts.queues.iter().all(|queue| queue.completions().is_empty());
            if is_over || self.parts.queues.iter().any(Queue::is_cut_short) {
                break;
            }
        }
    }

    /// Completes held requests for which no client waits. If such requests were resumed later, they could
    /// overwrite what the same client has meanwhile written over another connection.
    #[inline]
    fn fail_abandoned(&mut self) {
        let Engine { parts: EngineParts { ring, queues, .. }, attached, .. } = self;
        for queue in queues.iter_mut().filter(|queue| queue.has_held()) {
            queue.fail_abandoned(Some(ring), |user_data| {
                submitter(attached, user_data).is_some_and(|(source, own)| source.is_abandoned(own))
            });
        }
    }

    fn deliver(&mut self) {
        for index in 0..self.parts.queues.len() {
            let queue = &mut self.parts.queues[index];
            queue.name_failed(|user_data, text| write_client(&self.attached, user_data, text));
            let mut completed = std::mem::take(queue.completions_mut());
            completed.drain(..).for_each(|completion| self.complete_bio(completion));
            // Keeps the capacity that the list has grown to, unless more bios have completed meanwhile.
            let queue = &mut self.parts.queues[index];
            if queue.completions().is_empty() {
                *queue.completions_mut() = completed;
            }
        }
    }

    #[inline]
    fn complete_bio(&mut self, mut completion: Completion) {
        let token = Token(completion.user_data);
        completion.user_data = token.payload();
        self.with_source(source_index(token.owner()), |source, cx| source.on_bio(cx, completion));
    }

    /// Counts system calls for the first queue. The queues of an engine usually belong to one disk, whose
    /// statistics are the sum over its queues.
    fn count_enters(&mut self) {
        let now = self.parts.ring.counters();
        let before = std::mem::replace(&mut self.counted, now);
        let early = now.early_submissions - before.early_submissions;
        self.parts.queues[0].count_enters(now.enters - before.enters, early);
    }

    #[inline]
    fn route(&mut self, cqe: Cqe) {
        match cqe.token.owner() {
            KICK => self.parts.ring.rewatch(cqe),
            queue if queue < FIRST_SOURCE => {
                self.parts.queues[usize::from(queue)].complete_cqe(cqe, Some(&mut self.parts.ring));
            }
            source => {
                self.with_source(source_index(source), |source, cx| source.on_cqe(cx, cqe));
            }
        }
    }

    fn run_messages(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.parts.handle.take_messages(&mut messages);
        messages.drain(..).for_each(|message| message(self));
        self.messages = messages;
    }

    fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut all = HangScan::default();
        for queue in &mut self.parts.queues {
            let of_source =
                |user_data, text: &mut dyn fmt::Write| write_client(&self.attached, user_data, text);
            all.add(scan_queue(queue, now_ns, limit_ns, of_source));
        }
        all
    }

    fn sources(&self) -> impl Iterator<Item = &dyn Source> {
        self.attached.iter().flatten().map(|attached| &*attached.source)
    }

    #[inline]
    fn with_source<R>(
        &mut self,
        index: usize,
        call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>) -> R,
    ) -> Option<R> {
        let attached = self.attached.get_mut(index)?.as_mut()?;
        Some(call(&mut *attached.source, &mut SourceContext { parts: &mut self.parts, id: attached.id }))
    }

    /// Calls nothing if the source was dropped.
    fn with_id(&mut self, id: SourceId, call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>)) {
        let index = source_index(id.owner);
        let attached = self.attached.get(index).and_then(Option::as_ref);
        if attached.is_some_and(|attached| attached.id == id) {
            self.with_source(index, call);
        }
    }

    fn add(&mut self, source: Box<dyn Source>) -> Result<SourceId, Error> {
        if self.parts.exits {
            return Err(exited());
        }
        let index = self.attached.iter().position(Option::is_none).unwrap_or(self.attached.len());
        if index == self.attached.len() {
            self.attached.push(None);
        }
        self.generation += 1;
        let id = SourceId { owner: FIRST_SOURCE + index as u16, generation: self.generation };
        self.attached[index] = Some(AttachedSource { id, source });
        if let Some(Err(error)) = self.with_source(index, |source, cx| source.start(cx)) {
            // The source may have pushed operations before it failed, so it has to be stopped like any other
            // source.
            self.stop(StopNotice { id, stopped: channel().0 }, false);
            self.drop_stopped();
            return Err(error);
        }
        Ok(id)
    }

    fn stop(&mut self, notice: StopNotice, force: bool) {
        self.with_id(notice.id, |source, cx| source.stop(cx, force));
        self.stopping.push(notice);
    }

    fn drop_stopped(&mut self) {
        let attached = &mut self.attached;
        self.stopping.retain(|&StopNotice { id, .. }| {
            let Some(place) = attached.get_mut(source_index(id.owner)) else { return false };
            place.take_if(|attached| attached.id == id && attached.source.is_stopped());
            place.as_ref().is_some_and(|attached| attached.id == id)
        });
    }

    fn exit(&mut self) {
        self.parts.exits = true;
        self.parts.queues.iter_mut().for_each(Queue::close_to_submitters);
        for index in 0..self.attached.len() {
            self.with_source(index, |source, cx| source.stop(cx, true));
        }
    }

    /// Enters the kernel once: submits, and waits for a completion if there is no other work.
    fn enter(&mut self) {
        if self.has_work() {
            return self.parts.ring.enter(0, None);
        }
        self.parts.ring.prepare_sleep();
        // A thread that added work before the engine was seen to sleep has not kicked it. So the engine must
        // check for work once more.
        if self.has_work() {
            self.parts.ring.enter(0, None);
        } else {
            self.parts.queues.iter_mut().for_each(Queue::idle);
            self.parts.ring.enter(1, time_until(self.deadline_ns()));
            self.parts.queues.iter_mut().for_each(Queue::woke);
        }
        self.parts.ring.woke();
    }

    fn has_work(&self) -> bool {
        self.parts.handle.has_messages() || self.parts.queues.iter().any(Queue::has_work)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let queues = self.parts.queues.iter().filter_map(Queue::deadline_ns);
        queues.chain(self.sources().filter_map(Source::deadline_ns)).min()
    }
}

fn source_index(owner: u16) -> usize {
    usize::from(owner.wrapping_sub(FIRST_SOURCE))
}

/// The source that submitted the bio with this `user_data`, if any did, and the source's own `user_data`.
fn submitter(attached: &[Option<AttachedSource>], user_data: u64) -> Option<(&dyn Source, u64)> {
    let token = Token(user_data);
    let attached = attached.get(source_index(token.owner()))?.as_ref()?;
    Some((&*attached.source, token.payload()))
}

fn write_client(attached: &[Option<AttachedSource>], user_data: u64, text: &mut dyn fmt::Write) {
    if let Some((source, own)) = submitter(attached, user_data) {
        // The buffer may truncate the name.
        let _ = source.write_client(own, text);
    }
}

/// Scans a queue for hangs, and names the clients of those that it finds: `write_client` writes the name of the client
/// that submitted a bio with the given `user_data`.
fn scan_queue(
    queue: &mut Queue,
    now_ns: u64,
    limit_ns: u64,
    write_client: impl Fn(u64, &mut dyn fmt::Write),
) -> HangScan {
    queue.name_failed(&write_client);
    let mut scan = queue.scan_for_hangs(now_ns, limit_ns);
    for hang in &mut scan.hangs {
        // A bio without `user_data` is waited for by a thread, whose name the queue has recorded as the client.
        let Some(user_data) = hang.user_data else { continue };
        let mut client = String::new();
        write_client(user_data, &mut client);
        hang.client = (!client.is_empty()).then_some(client);
    }
    scan
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Drops messages that were posted too late, so that threads that wait for a reply stop waiting. The lock is
        // not held meanwhile.
        let late = lock(&self.parts.handle.0.messages).take();
        drop(late);
    }
}
