//! The engine: a thread with one ring that serves several hardware queues and sources (attachments).
//!
//! In one turn the engine reaps completions and completes their requests in a batch. The sources then parse
//! what their clients sent, and submit it under one plug. Finally the engine flushes the plugs and enters the
//! kernel once.

pub(crate) mod local;
mod rounds;
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
use source::{FIRST_SOURCE, Message};
use sources::{EngineParts, Sources};
pub use thread::EngineThread;
pub use worker::Worker;

const RING_ENTRIES: u32 = 512;
/// The owner in the tokens of the engine's own operations, which wait for kicks.
const ENGINE: u16 = u16::MAX;

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
    ring: Ring,
    queues: Vec<Queue>,
    sources: Sources,
    handle: EngineHandle,
    kicks: Vec<Arc<Kick>>,
    messages: Vec<Message>,
    cqes: Vec<Cqe>,
    /// The ring's counters at the time when they were last added to the statistics.
    counted: RingCounters,
    turn: u64,
    exit: bool,
}

impl Engine {
    fn new(queues: Vec<(Arc<Disk>, usize)>, handle: EngineHandle) -> Result<Engine, Error> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        ring.require(&ENGINE_OPERATIONS)?;
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
            ring,
            queues,
            sources: Sources::new(),
            handle,
            kicks,
            messages: Vec::new(),
            cqes: Vec::with_capacity(RING_ENTRIES as usize * 4),
            counted: RingCounters::default(),
            turn: 0,
            exit: false,
        };
        (0..engine.kicks.len()).for_each(|index| engine.arm_kick(index));
        Ok(engine)
    }

    /// Submits an operation to the ring that completes when kick `index` is readable.
    fn arm_kick(&mut self, index: usize) {
        // SAFETY: `Engine::kicks` keeps the kicks, and the ring is dropped before it.
        unsafe { self.ring.watch(&self.kicks[index], Token::new(ENGINE, index as u64)) }
    }

    fn run(&mut self) {
        // Declared in the innermost scope: unwinding drops the guard before it frees the requests.
        let _guard = AbortOnUnwind;
        loop {
            self.turn();
            // Checked before the engine waits again, because no completion would wake it.
            if self.exit && self.is_stopped() {
                break;
            }
            self.enter();
        }
        self.queues.iter_mut().for_each(|queue| queue.close(Some(&mut self.ring)));
    }

    fn is_stopped(&self) -> bool {
        self.sources.are_stopped() && self.queues.iter().all(Queue::is_drained)
    }

    fn turn(&mut self) {
        self.turn += 1;
        let mut cqes = std::mem::take(&mut self.cqes);
        self.ring.reap_all(&mut cqes);
        for cqe in cqes.drain(..) {
            self.route(cqe);
        }
        self.cqes = cqes;
        self.count_enters();
        self.take_messages();
        for queue in &mut self.queues {
            queue.begin_turn(Some(&mut self.ring));
        }
        self.run_rounds();
        self.sources.drop_stopped();
    }

    /// Counts system calls for the first queue. The queues of an engine usually belong to one disk, whose
    /// statistics are the sum over its queues.
    fn count_enters(&mut self) {
        let now = self.ring.counters();
        let before = std::mem::replace(&mut self.counted, now);
        let early = now.early_submissions - before.early_submissions;
        self.queues[0].count_enters(now.enters - before.enters, early);
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
                let (sources, parts) = self.split();
                sources.on_cqe(source, cqe, parts);
            }
        }
    }

    #[inline]
    fn split(&mut self) -> (&mut Sources, EngineParts<'_>) {
        let Engine { ring, queues, sources, handle, turn, exit, .. } = self;
        (sources, EngineParts { ring, queues, handle, turn: *turn, exits: *exit })
    }

    fn take_messages(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.handle.take_messages(&mut messages);
        for message in messages.drain(..) {
            match message {
                Message::Add(make, reply) => {
                    // Sending fails only if the receiver was dropped, and then no thread waits for the
                    // answer.
                    let _ = reply.send(self.add(make()));
                }
                Message::To(id, message) => {
                    let (sources, parts) = self.split();
                    sources.with_id(id, parts, |source, cx| source.on_message(cx, message));
                }
                Message::Stop { id, force, stopped } => {
                    let (sources, parts) = self.split();
                    sources.stop(id, force, stopped, parts);
                }
                Message::Register(job) => job(Registrar::new(&mut self.ring)),
                Message::ScanForHangs { now_ns, limit_ns, found } => {
                    let _ = found.send(self.scan_for_hangs(now_ns, limit_ns));
                }
                Message::Trace(disk, memory) => {
                    let of_disk = self.queues.iter_mut().filter(|queue| Arc::ptr_eq(queue.disk(), &disk));
                    of_disk.for_each(|queue| queue.set_trace(memory.as_ref()));
                }
                Message::Exit => {
                    self.exit = true;
                    self.queues.iter_mut().for_each(Queue::close_to_submitters);
                    let (sources, parts) = self.split();
                    sources.stop_all(parts);
                }
            }
        }
        self.messages = messages;
    }

    fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut all = HangScan::default();
        let Engine { queues, sources, .. } = self;
        for queue in queues {
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
        if self.exit {
            return Err(source::exited());
        }
        let (sources, parts) = self.split();
        sources.add(source, parts)
    }

    /// Enters the kernel once: submits, and waits for a completion if there is no other work.
    fn enter(&mut self) {
        if self.has_work() {
            return self.ring.enter(0, None);
        }
        self.kicks.iter().for_each(|kick| kick.prepare_sleep());
        // A thread that added work before the engine was seen to sleep has not kicked it. So the engine must
        // check for work once more.
        if self.has_work() {
            self.ring.enter(0, None);
        } else {
            self.queues.iter_mut().for_each(Queue::idle);
            self.ring.enter(1, time_until(self.deadline_ns()));
            self.queues.iter_mut().for_each(Queue::woke);
        }
        self.kicks.iter().for_each(|kick| kick.woke());
    }

    fn has_work(&self) -> bool {
        self.handle.has_messages() || self.queues.iter().any(Queue::has_work)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let queues = self.queues.iter().filter_map(Queue::deadline_ns);
        queues.chain(self.sources.deadline_ns()).min()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Drops messages that were posted too late, so that threads that wait for a reply stop waiting.
        self.handle.close();
    }
}
