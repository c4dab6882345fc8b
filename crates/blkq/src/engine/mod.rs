//! The engine: a thread with one ring that serves several hardware queues and sources (attachments).
//!
//! In one turn the engine reaps completions and completes their requests in a batch. The sources then parse
//! what their clients sent, and submit it under one plug. Finally the engine flushes the plugs and enters the
//! kernel once.

pub(crate) mod local;
#[cfg(any(simulation, fuzz_interface))]
mod simulated;
mod source;
mod sources;
mod thread;
mod worker;

use std::sync::Arc;

use crate::clock::time_until;
use crate::disk::Disk;
use crate::error::Error;
use crate::kick::Kick;
use crate::queue::Queue;
use crate::queue::hang::HangScan;
use crate::ring::{Cqe, ENGINE_OPERATIONS, Registrar, Ring, RingCounters, Token};

#[cfg(any(simulation, fuzz_interface))]
#[doc(hidden)]
pub use simulated::SimulatedEngine;
pub use source::{EngineHandle, HangScanReply, Source, SourceContext, SourceId, StoppingSource};
use source::{EngineParts, FIRST_SOURCE, Message};
use sources::Sources;
pub use thread::EngineThread;
pub use worker::Worker;

const RING_ENTRIES: u32 = 512;
/// The owner in the tokens of the engine's own operations, which wait for kicks.
const ENGINE: u16 = u16::MAX;
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

struct Engine {
    parts: EngineParts,
    sources: Sources,
    kicks: Vec<Arc<Kick>>,
    messages: Vec<Message>,
    cqes: Vec<Cqe>,
    /// The ring's counters at the time when they were last added to the statistics.
    counted: RingCounters,
}

impl Engine {
    fn new(queues: Vec<(Arc<Disk>, usize)>, handle: EngineHandle) -> Result<Engine, Error> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        Registrar::new(&mut ring).require(&ENGINE_OPERATIONS)?;
        handle.set_kernel_buffers(ring.kernel_buffers_left());
        let kicks: Vec<_> =
            queues.iter().map(|(disk, index)| disk.hardware_queue(*index).kick.clone()).collect();
        let open = |(owner, (disk, index)): (usize, &(Arc<Disk>, usize))| {
            Queue::open(disk, *index, owner as u16, Some(&mut ring))
        };
        let mut queues: Vec<Queue> = queues.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        if queues.len() > 1 {
            queues.iter_mut().for_each(|queue| queue.set_several_queues());
        }
        let mut engine = Engine {
            parts: EngineParts { ring, queues, handle, turn: 0, exits: false },
            sources: Sources::new(),
            kicks,
            messages: Vec::new(),
            cqes: Vec::with_capacity(RING_ENTRIES as usize * 4),
            counted: RingCounters::default(),
        };
        (0..engine.kicks.len()).for_each(|index| engine.arm_kick(index));
        Ok(engine)
    }

    /// Submits an operation to the ring that completes when kick `index` is readable.
    fn arm_kick(&mut self, index: usize) {
        // SAFETY: `Engine::kicks` keeps the kicks, and the ring is dropped before it.
        unsafe { self.parts.ring.watch(&self.kicks[index], Token::new(ENGINE, index as u64)) }
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
        self.sources.are_stopped() && self.parts.queues.iter().all(Queue::is_drained)
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
        self.take_messages();
        for queue in &mut self.parts.queues {
            queue.begin_turn(Some(&mut self.parts.ring));
        }
        self.run_rounds();
        self.sources.drop_stopped();
    }

    /// Runs rounds until no bio completes immediately, or a queue has used up the budget of its turn.
    fn run_rounds(&mut self) {
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            self.sources.on_turn(&mut self.parts);
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
        let Engine { parts: EngineParts { ring, queues, .. }, sources, .. } = self;
        for queue in queues.iter_mut().filter(|queue| queue.has_held()) {
            queue.fail_abandoned(Some(ring), |user_data| sources.is_abandoned(Token(user_data)));
        }
    }

    fn deliver(&mut self) {
        for index in 0..self.parts.queues.len() {
            let Engine { parts, sources, .. } = self;
            let queue = &mut parts.queues[index];
            queue.name_failed(|user_data, text| sources.write_client(Token(user_data), text));
            let mut completed = std::mem::take(queue.completions_mut());
            completed.drain(..).for_each(|completion| sources.on_bio(completion, parts));
            // Keeps the capacity that the list has grown to, unless more bios have completed meanwhile.
            let queue = &mut parts.queues[index];
            if queue.completions().is_empty() {
                *queue.completions_mut() = completed;
            }
        }
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
            ENGINE => {
                let index = cqe.token.payload() as usize;
                self.kicks[index].drain();
                self.arm_kick(index);
            }
            queue if queue < FIRST_SOURCE => {
                self.parts.queues[usize::from(queue)].complete_cqe(cqe, Some(&mut self.parts.ring));
            }
            source => self.sources.on_cqe(source, cqe, &mut self.parts),
        }
    }

    fn take_messages(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.parts.handle.take_messages(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Add(make, reply) => {
                    // Sending fails only if the receiver was dropped, and then no thread waits for the
                    // answer.
                    let _ = reply.send(self.add(make()));
                }
                Message::To(id, message) => {
                    self.sources.with_id(id, &mut self.parts, |source, cx| source.on_message(cx, message));
                }
                Message::Stop { id, force, stopped } => {
                    self.sources.stop(id, force, stopped, &mut self.parts);
                }
                Message::Register(job) => job(Registrar::new(&mut self.parts.ring)),
                Message::ScanForHangs { now_ns, limit_ns, found } => {
                    let _ = found.send(self.scan_for_hangs(now_ns, limit_ns));
                }
                Message::Trace(disk, memory) => {
                    let of_disk =
                        self.parts.queues.iter_mut().filter(|queue| Arc::ptr_eq(queue.disk(), &disk));
                    of_disk.for_each(|queue| queue.set_trace(memory.as_ref()));
                }
                Message::Exit => {
                    self.parts.exits = true;
                    self.parts.queues.iter_mut().for_each(Queue::close_to_submitters);
                    self.sources.stop_all(&mut self.parts);
                }
            }
        }
        self.messages = messages;
    }

    fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut all = HangScan::default();
        let Engine { parts, sources, .. } = self;
        for queue in &mut parts.queues {
            queue.name_failed(|user_data, text| sources.write_client(Token(user_data), text));
            let mut scan = queue.scan_for_hangs(now_ns, limit_ns);
            for hang in &mut scan.hangs {
                // A bio without `user_data` is waited for by a thread, whose name the queue has recorded as
                // the client.
                let Some(user_data) = hang.user_data else { continue };
                let mut client = String::new();
                sources.write_client(Token(user_data), &mut client);
                hang.client = (!client.is_empty()).then_some(client);
            }
            all.add(scan);
        }
        all
    }

    fn add(&mut self, source: Box<dyn Source>) -> Result<SourceId, Error> {
        if self.parts.exits {
            return Err(source::exited());
        }
        self.sources.add(source, &mut self.parts)
    }

    /// Enters the kernel once: submits, and waits for a completion if there is no other work.
    fn enter(&mut self) {
        if self.has_work() {
            return self.parts.ring.enter(0, None);
        }
        self.kicks.iter().for_each(|kick| kick.prepare_sleep());
        // A thread that added work before the engine was seen to sleep has not kicked it. So the engine must
        // check for work once more.
        if self.has_work() {
            self.parts.ring.enter(0, None);
        } else {
            self.parts.queues.iter_mut().for_each(Queue::idle);
            self.parts.ring.enter(1, time_until(self.deadline_ns()));
            self.parts.queues.iter_mut().for_each(Queue::woke);
        }
        self.kicks.iter().for_each(|kick| kick.woke());
    }

    fn has_work(&self) -> bool {
        self.parts.handle.has_messages() || self.parts.queues.iter().any(Queue::has_work)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let queues = self.parts.queues.iter().filter_map(Queue::deadline_ns);
        queues.chain(self.sources.deadline_ns()).min()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Drops messages that were posted too late, so that threads that wait for a reply stop waiting.
        self.parts.handle.close();
    }
}
