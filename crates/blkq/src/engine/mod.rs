//! The engine: one thread, one ring, several queues and attachments.
//!
//! A turn is: reap completions, complete requests in a batch, let the sources parse what
//! their clients sent and submit it under one plug, flush the plugs, enter the kernel once.

pub(crate) mod local;
#[cfg(simulation)]
mod simulated;
mod source;
mod thread;
mod worker;

use std::sync::Arc;

use crate::clock::time_until;
use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::queue::Queue;
use crate::queue::hang::HangScan;
use crate::queue::plug::PLUG_REQUESTS_SEVERAL_QUEUES;
use crate::remote::kick::Kick;
use crate::ring::{Cqe, ENGINE_OPERATIONS, Ring, Token};
use crate::sync::mpsc::{Sender, channel};

#[cfg(simulation)]
pub use simulated::SimulatedEngine;
pub use source::{EngineHandle, HangScanReply, Source, SourceContext, SourceId};
use source::{FIRST_SOURCE, Message, Placed};
pub use thread::EngineThread;
pub use worker::Worker;

/// Submissions that an engine's ring has room for.
const RING_ENTRIES: u32 = 512;
/// The engine itself, as an owner on the ring.
const ENGINE: u16 = u16::MAX;
/// Times in one turn that sources get completions and submit more.
const TURN_ROUNDS: usize = 16;

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
        handle.set_kernel_buffers(ring.kernel_buffers_left());
        let kicks: Vec<_> =
            queues.iter().map(|(disk, index)| disk.hardware_queue(*index).kick.clone()).collect();
        let open = |(owner, (disk, index)): (usize, &(Arc<Disk>, usize))| {
            Queue::open(disk, *index, owner as u16, Some(&mut ring))
        };
        let mut queues: Vec<Queue> = queues.iter().enumerate().map(open).collect::<Result<_, _>>()?;
        if queues.len() > 1 {
            queues.iter_mut().for_each(|queue| queue.set_plug_limit(PLUG_REQUESTS_SEVERAL_QUEUES));
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
            queue.begin_turn(Some(&mut self.ring));
        }
        // Bounded, so that a source whose bios complete at once does not keep the engine from all else.
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            for index in 0..self.sources.len() {
                self.with_source(index, |source, cx| source.on_turn(cx));
            }
            for queue in &mut self.queues {
                queue.dispatch_all(Some(&mut self.ring));
            }
            if self.queues.iter().all(|queue| queue.completions().is_empty()) {
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
            exits: self.exit,
        };
        Some(call(&mut *placed.source, &mut cx))
    }

    /// Lends source `id`, unless it is gone, the rest of the engine.
    fn with_named(&mut self, id: SourceId, call: impl FnOnce(&mut dyn Source, &mut SourceContext<'_>)) {
        if self.sources.get(id.index()).is_some_and(|placed| placed.as_ref().is_some_and(|it| it.id == id)) {
            self.with_source(id.index(), call);
        }
    }

    /// Passes completed bios to the sources that submitted them.
    fn deliver(&mut self) {
        for index in 0..self.queues.len() {
            let mut done = std::mem::take(self.queues[index].completions_mut());
            for mut completion in done.drain(..) {
                let token = Token(completion.user_data);
                completion.user_data = token.payload();
                let source = usize::from(token.owner() - FIRST_SOURCE);
                self.with_source(source, |source, cx| source.on_bio(cx, completion));
            }
            // Keep the room that it has grown to, unless bios completed at once meanwhile.
            if self.queues[index].completions().is_empty() {
                *self.queues[index].completions_mut() = done;
            }
        }
    }

    fn take_messages(&mut self) {
        let mut messages = std::mem::take(&mut self.messages);
        self.handle.take_messages(&mut messages);
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
                Message::ScanForHangs { now_ns, limit_ns, found } => {
                    let _ = found.send(self.scan_for_hangs(now_ns, limit_ns));
                }
                Message::Exit => {
                    self.exit = true;
                    self.queues.iter_mut().for_each(Queue::close_intake);
                    for index in 0..self.sources.len() {
                        self.with_source(index, |source, cx| source.stop(cx, true));
                    }
                }
            }
        }
        self.messages = messages;
    }

    fn scan_for_hangs(&mut self, now_ns: u64, limit_ns: u64) -> HangScan {
        let mut all = HangScan::default();
        for queue in &mut self.queues {
            let mut look = queue.scan_for_hangs(now_ns, limit_ns);
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
            return Err(Error::new(ErrorKind::System, "the engine has exited"));
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
            // It may have pushed something before: it stops as others do.
            self.with_source(index, |source, cx| source.stop(cx, false));
            self.stopping.push((id, channel().0));
            self.drop_stopped();
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
        // A thread that left work before it saw the sleep has not kicked: check again.
        if self.has_work() {
            self.ring.enter(0, None);
        } else {
            self.queues.iter_mut().for_each(Queue::rest);
            self.ring.enter(1, time_until(self.deadline_ns()));
        }
        self.kicks.iter().for_each(|kick| kick.woke());
    }

    fn has_work(&self) -> bool {
        self.handle.has_messages() || self.queues.iter().any(Queue::has_work)
    }

    fn deadline_ns(&self) -> Option<u64> {
        let queues = self.queues.iter().filter_map(Queue::deadline_ns);
        let sources = self.sources.iter().flatten().filter_map(|placed| placed.source.deadline_ns());
        queues.chain(sources).min()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Threads that wait for a reply, to these or to messages posted too late, see it dropped.
        self.handle.close();
        for waiting in self.stopping.drain(..) {
            let _ = waiting.1.send(());
        }
    }
}
