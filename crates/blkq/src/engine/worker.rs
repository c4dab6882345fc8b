#[cfg(not(simulation))]
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::mpsc::Sender;
#[cfg(not(simulation))]
use crate::sync::{mpsc::channel, thread};

/// The stack size of an engine thread and of its worker, in bytes.
pub(super) const STACK_BYTES: usize = 256 << 10;

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// A thread for operations that may block. It is started for its first job. When the worker is dropped, the
/// thread completes its jobs and exits.
#[cfg_attr(simulation, allow(dead_code, reason = "the simulated world has one thread"))]
pub struct Worker {
    name: &'static str,
    jobs: Option<Sender<Job>>,
}

impl Worker {
    /// A worker whose thread will have `name`, which must have at most 15 bytes.
    pub fn new(name: &'static str) -> Worker {
        Worker { name, jobs: None }
    }

    /// Runs the job immediately, because the simulation has only one thread.
    #[cfg(simulation)]
    pub(super) fn run(&mut self, job: Job) {
        job();
    }

    /// Queues `job` for the thread, which runs jobs in order.
    #[cfg(not(simulation))]
    pub(super) fn run(&mut self, job: Job) {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (sender, receiver) = channel::<Job>();
            let body = move || {
                while let Ok(job) = receiver.recv() {
                    // A panic is a defect of this job, which the panic hook has printed. Later jobs must run
                    // nevertheless.
                    let _ = catch_unwind(AssertUnwindSafe(job));
                }
            };
            let builder = thread::Builder::new().name(self.name.into()).stack_size(STACK_BYTES);
            // If no thread can be started, the receiver is dropped, and the job runs below.
            let _ = builder.spawn(body);
            sender
        });
        if let Err(refused) = jobs.send(job) {
            // The next job tries to start a thread again.
            self.jobs = None;
            (refused.0)();
        }
    }
}
