//! An engine without a thread of its own, for the simulated world and for fuzzers.

use std::sync::Arc;

use crate::disk::Disk;
use crate::error::Error;

use super::Engine;
use super::source::{EngineHandle, Message, Source, SourceId};

/// An engine that its owner turns.
pub struct SimulatedEngine(Engine);

impl SimulatedEngine {
    /// As [`EngineThread::spawn`], on this thread.
    ///
    /// # Errors
    /// As there.
    pub fn new(queues: Vec<(Arc<Disk>, usize)>) -> Result<SimulatedEngine, Error> {
        let kick = queues[0].0.hardware_queue(queues[0].1).kick.clone();
        let handle = EngineHandle::new(kick);
        Engine::new(queues, handle).map(SimulatedEngine)
    }

    /// A handle for sending messages to its sources.
    pub fn handle(&self) -> &EngineHandle {
        &self.0.handle
    }

    /// As [`EngineHandle::add_source`].
    ///
    /// # Errors
    /// As there.
    pub fn add_source(&mut self, source: Box<dyn Source>) -> Result<SourceId, Error> {
        self.0.add(source)
    }

    /// One turn, and the call into the kernel after it.
    pub fn turn(&mut self) {
        self.0.turn();
        self.0.enter();
    }

    /// One turn, and what the kernel has for the next one: waits for nothing.
    #[cfg(fuzzing)]
    pub fn poll(&mut self) {
        self.0.turn();
        self.0.ring.poll();
    }

    /// Turns until nothing is in flight, then closes the queues.
    pub fn stop(mut self) {
        self.0.handle.post(Message::Exit);
        for _ in 0..100_000 {
            self.turn();
            if self.0.is_stopped() {
                self.0.queues.iter_mut().for_each(|queue| queue.close(Some(&mut self.0.ring)));
                return;
            }
        }
        panic!("the engine does not stop");
    }
}
