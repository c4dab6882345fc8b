//! The handle and the thread of an engine: the calls of other threads.

use std::any::Any;
use std::sync::Arc;

use crate::disk::Disk;
use crate::error::{Error, ErrorKind};
use crate::queue::hang::HangScan;
use crate::ring::{Registrar, policy};
use crate::sync::mpsc::{Receiver, channel};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{lock, receive, try_lock};
use crate::trace::TraceMemory;

use super::worker::STACK_BYTES;
use super::{Engine, EngineHandle, FIRST_SOURCE, Message, Source, SourceId, StopNotice, exited};

impl EngineHandle {
    /// Moves the posted messages into `messages`, which must be empty.
    pub(super) fn take_messages(&self, messages: &mut Vec<Message>) {
        // If the lock is taken, another thread is just posting a message. Its kick will wake the engine
        // again.
        if let Some(mut mail) = try_lock(&self.0.messages)
            && let Some(posted) = &mut *mail
        {
            std::mem::swap(posted, messages);
        }
    }

    pub(super) fn has_messages(&self) -> bool {
        // If the lock is taken, another thread is just posting a message, so there is work.
        try_lock(&self.0.messages)
            .is_none_or(|mail| mail.as_ref().is_some_and(|messages| !messages.is_empty()))
    }

    pub(super) fn post(&self, job: impl FnOnce(&mut Engine) + Send + 'static) {
        let message: Message = Box::new(job);
        // If the engine has stopped, the job is dropped, and a thread that waits for its result receives an
        // error.
        if let Some(messages) = &mut *lock(&self.0.messages) {
            messages.push(message);
        }
        self.0.kick.kick();
    }

    /// Posts `job`, whose result the receiver gets.
    fn call<R: Send + 'static>(&self, job: impl FnOnce(&mut Engine) -> R + Send + 'static) -> Receiver<R> {
        let (sender, receiver) = channel();
        // Sending fails only if the receiver was dropped, and then no thread waits for the result.
        self.post(move |engine| _ = sender.send(job(engine)));
        receiver
    }

    /// The number of buffer slots for the kernel to fill with which the engine's ring was set up
    /// ([`Registrar::keep_kernel_buffers`]); 0 if the ring has no table of registered buffers.
    pub fn kernel_buffers(&self) -> u16 {
        self.0.kernel_buffers
    }

    /// Builds a source on the engine's thread and starts it. Returns its id. Fails with the error of
    /// [`Source::start`], or [`ErrorKind::System`] if the engine has exited.
    pub fn add_source(
        &self,
        make: impl FnOnce() -> Box<dyn Source> + Send + 'static,
    ) -> Result<SourceId, Error> {
        receive(&self.call(|engine| engine.add(make()))).map_err(|_| exited())?
    }

    /// Runs `job` on the engine's thread between two turns, with the registrar of its ring, waits for it, and
    /// returns its result. The engine does nothing else meanwhile. Fails with [`ErrorKind::System`] if the
    /// engine has exited.
    pub fn with_registrar<R: Send + 'static>(
        &self,
        job: impl FnOnce(Registrar<'_>) -> R + Send + 'static,
    ) -> Result<R, Error> {
        receive(&self.call(|engine| job(Registrar::new(&mut engine.parts.ring)))).map_err(|_| exited())
    }

    /// Sends `message` to source `id`. A message to a source that has stopped is dropped.
    pub fn send(&self, id: SourceId, message: Box<dyn Any + Send>) {
        self.post(move |engine| engine.with_id(id, |source, cx| source.on_message(cx, message)));
    }

    /// Starts a scan for requests that have been in flight in the engine's queues for more than `limit_ns` at
    /// `now_ns` of the monotonic clock: see [`hang`](crate::queue::hang). Does not wait. If the engine does
    /// not answer for a long time, the engine itself hangs.
    pub fn scan_for_hangs(&self, now_ns: u64, limit_ns: u64) -> HangScanReply {
        self.call(move |engine| engine.scan_for_hangs(now_ns, limit_ns))
    }

    /// Starts to trace the engine's queues of `disk`, each into its own ring of `memory`, or stops tracing if
    /// there is no memory. Takes effect at the engine's next turn. Does not wait.
    pub fn trace(&self, disk: &Arc<Disk>, memory: Option<Arc<TraceMemory>>) {
        let disk = disk.clone();
        self.post(move |engine| {
            let of_disk = engine.parts.queues.iter_mut().filter(|queue| Arc::ptr_eq(queue.disk(), &disk));
            of_disk.for_each(|queue| queue.set_trace(memory.as_ref()));
        });
    }

    /// Starts to stop source `id`, and does not wait. To stop several sources, start with all of them before
    /// waiting for the first: otherwise the other sources continue to serve their clients.
    pub fn begin_stop(&self, id: SourceId, force: bool) -> StoppingSource {
        let (stopped, receiver) = channel();
        let notice = StopNotice { id, stopped };
        self.post(move |engine| engine.stop(notice, force));
        StoppingSource(receiver)
    }

    /// Stops source `id`, and waits until it has nothing in flight and was dropped.
    pub fn stop_source(&self, id: SourceId, force: bool) {
        self.begin_stop(id, force).wait();
    }
}

/// A source that is being stopped ([`EngineHandle::begin_stop`]).
#[must_use = "the source may still have I/O in flight"]
pub struct StoppingSource(Receiver<()>);

impl StoppingSource {
    /// Waits until the source has nothing in flight and was dropped.
    pub fn wait(self) {
        // An error means that the engine, and with it the source, has exited.
        let _ = receive(&self.0);
    }
}

/// Receives the result of [`EngineHandle::scan_for_hangs`].
pub type HangScanReply = Receiver<HangScan>;

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
        let (sender, receiver) = channel();
        let sealed = |engine| policy().map_or(Ok(()), |policy| (policy.sealed)()).map(|()| engine);
        let body = move || match Engine::new(queues).and_then(sealed) {
            Ok(mut engine) => {
                let _ = sender.send(Ok(engine.parts.handle.clone()));
                engine.run();
            }
            Err(error) => _ = sender.send(Err(error)),
        };
        let builder = thread::Builder::new().name(name.to_string()).stack_size(STACK_BYTES);
        let thread = builder.spawn(body).map_err(|e| Error::system("cannot start an engine thread", e))?;
        let exited = || Error::new(ErrorKind::System, "the engine thread exited while it started");
        let handle = receiver.recv().map_err(|_| exited())??;
        Ok(EngineThread { handle, thread: Some(thread) })
    }

    /// A handle for sending messages to the engine from any thread.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.handle.post(Engine::exit);
        if let Some(thread) = self.thread.take() {
            // The result is no panic: the thread aborts the process instead of panicking.
            let _ = thread.join();
        }
    }
}
