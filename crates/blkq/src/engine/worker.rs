use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::sync::mpsc::{Sender, channel};
use crate::sync::thread;

/// The stack size of an engine thread and of its worker, in bytes.
pub(super) const STACK_BYTES: usize = 256 << 10;

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// A thread for operations that may block. It is started for its first job. When the worker is dropped, the
/// thread completes its jobs and exits.
pub struct Worker {
    name: &'static str,
    jobs: Option<Sender<Job>>,
}

impl Worker {
    /// A worker whose thread will have `name`, which must have at most 15 bytes.
    pub fn new(name: &'static str) -> Worker {
        Worker { name, jobs: None }
    }

    /// Queues `job` for the thread, which runs jobs in order. The simulated world has one thread, where the job
    /// runs immediately.
    pub(super) fn run(&mut self, job: Job) {
        if cfg!(simulation) {
            return job();
        }
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
