//! A thread on which an engine's sources do what may block.

#[cfg(not(simulation))]
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::mpsc::Sender;
#[cfg(not(simulation))]
use crate::sync::{mpsc::channel, thread};

/// Stack of an engine thread and of its worker, in bytes.
pub(super) const STACK_BYTES: usize = 256 << 10;

/// A job of a worker.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// A thread for what may block, started when first needed. It exits when this is dropped and its jobs
/// are done.
#[cfg_attr(simulation, allow(dead_code, reason = "the simulated world has one thread"))]
pub struct Worker {
    name: &'static str,
    jobs: Option<Sender<Job>>,
}

impl Worker {
    /// A thread of that name, of at most 15 bytes.
    pub fn new(name: &'static str) -> Worker {
        Worker { name, jobs: None }
    }

    /// The simulated world has one thread.
    #[cfg(simulation)]
    pub(super) fn run(&mut self, job: Job) {
        job();
    }

    /// Has the thread do `job` after those before it.
    #[cfg(not(simulation))]
    pub(super) fn run(&mut self, job: Job) {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Job>();
            let body = move || {
                while let Ok(job) = receiver.recv() {
                    // A panic is the job's bug, which the panic hook has printed: those
                    // behind it are done all the same.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            let builder = thread::Builder::new().name(self.name.into()).stack_size(STACK_BYTES);
            // Without a thread the receiver is dropped, and the job runs below.
            let _ = builder.spawn(body);
            sender
        });
        if let Err(refused) = jobs.send(job) {
            // The next one may have a thread again.
            self.jobs = None;
            (refused.0)();
        }
    }
}
