use std::sync::Arc;

use crate::disk::Disk;
use crate::error::Error;

use super::{Engine, EngineHandle, Source, SourceId};

/// An engine that runs a turn when its owner calls for one, for the simulation and for fuzzers.
pub struct SimulatedEngine(Engine);

impl SimulatedEngine {
    /// Builds an engine as [`EngineThread::spawn`] does, with the same errors, but on this thread.
    pub fn new(queues: Vec<(Arc<Disk>, usize)>) -> Result<SimulatedEngine, Error> {
        Engine::new(queues).map(SimulatedEngine)
    }

    /// A handle for sending messages to the engine's sources.
    pub fn handle(&self) -> &EngineHandle {
        &self.0.parts.handle
    }

    /// Adds a source as [`EngineHandle::add_source`] does, with the same errors.
    pub fn add_source(&mut self, source: Box<dyn Source>) -> Result<SourceId, Error> {
        self.0.add(source)
    }

    /// Runs one turn, and enters the kernel after it.
    pub fn turn(&mut self) {
        self.0.turn();
        self.0.enter();
    }

    /// Runs [`SimulatedEngine::turn`] for an engine whose sources depend only on the ring, messages and
    /// deadlines. Panics if the turn issues requests although the engine had no work, no completion and no
    /// due deadline: an engine on a thread would have slept.
    #[cfg(simulation)]
    pub fn turn_as_woken(&mut self) {
        let (had_work, deadline_ns) = (self.0.has_work(), self.0.deadline_ns());
        let disk = self.0.parts.queues[0].disk().clone();
        let batches = || disk.counter(crate::stats::Counter::DispatchBatches);
        let (reaped_before, batches_before) = (self.0.parts.ring.reaped, batches());
        // Requests that wait for a limit may start before their deadline if the limit of a group has changed.
        // A queue that waits for shared tags is woken when a batch of tags is free, but a turn before the
        // wake-up may already find the first of these tags.
        let may_be_early = disk.throttled() > 0 && !disk.control.is_frozen()
            || self.0.parts.queues.iter().any(|queue| queue.waits_for_batch());
        self.0.turn();
        let has_reaped = self.0.parts.ring.reaped != reaped_before;
        if batches() != batches_before && !had_work && !may_be_early && !has_reaped {
            let is_due = deadline_ns.is_some_and(|deadline_ns| deadline_ns <= crate::clock::monotonic_ns());
            assert!(is_due, "a sleeping engine would have missed the work of this turn");
        }
        self.0.enter();
    }

    /// Runs one turn, and collects completions for the next turn without waiting.
    #[cfg(fuzz_interface)]
    pub fn poll(&mut self) {
        self.0.turn();
        self.0.parts.ring.poll();
    }

    /// Runs turns until nothing is in flight, then closes the queues.
    pub fn stop(mut self) {
        self.0.parts.handle.post(Engine::exit);
        for _ in 0..100_000 {
            self.turn();
            if self.0.is_stopped() {
                self.0.parts.queues.iter_mut().for_each(|queue| queue.close(Some(&mut self.0.parts.ring)));
                return;
            }
        }
        panic!("the engine does not stop");
    }
}
