use std::sync::Arc;

use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::ring::policy;
use crate::sync::mpsc::channel;
use crate::sync::thread::{self, JoinHandle};

use super::Engine;
use super::source::{EngineHandle, FIRST_SOURCE, Message};
use super::worker::STACK_BYTES;

/// The thread of an engine. Dropping it stops the engine after its I/O in flight has completed.
///
/// A panic on this thread aborts the process after the panic hook has run, because memory of I/O in flight
/// must not be freed.
pub struct EngineThread {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Starts a thread with a ring that owns `queues`, given as disk and queue number. The engine's sources
    /// address the first of them as queue 0, the next as queue 1, and so on. Fails with the error of setting
    /// up the ring or opening a queue. Panics if `queues` is empty, or has more than 256 elements.
    pub fn spawn(name: &str, queues: Vec<(Arc<Disk>, usize)>) -> Result<EngineThread, Error> {
        assert!((1..=usize::from(FIRST_SOURCE)).contains(&queues.len()), "an engine has 1 to 256 queues");
        for (disk, index) in &queues {
            disk.check_queue(*index)?;
        }
        let kick = queues[0].0.hardware_queue(queues[0].1).kick.clone();
        let handle = EngineHandle::new(kick);
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
        let exited = || Error::new(ErrorKind::System, "the engine thread exited while it started");
        receiver.recv().map_err(|_| exited())??;
        Ok(EngineThread { handle, thread: Some(thread) })
    }

    /// A handle for sending messages to the engine from any thread.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.handle.post(Message::Exit);
        if let Some(thread) = self.thread.take() {
            // The result is no panic: the thread aborts the process instead of panicking.
            let _ = thread.join();
        }
    }
}
