//! Runs tasks to completion on the calling thread with plain system calls, for changes while no queue does
//! I/O, and for the last flush. The thread may be forbidden to create a ring.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use blkq::{Error, ErrorKind, IoBuffer, Segment, Status, Tag};

use super::env::{Env, Shared};
use super::operations::{Executor, Memory};
use super::write::{Source, write};

/// Runs `task` while no queue does I/O. `what` completes the message "cannot ...".
pub fn run<T: 'static>(
    shared: &Arc<Shared>,
    what: &str,
    task: impl AsyncFnOnce(&Env) -> Result<T, Status> + 'static,
) -> Result<T, Error> {
    let env = Env::new(Arc::clone(shared), None);
    let mut executor = Executor::default();
    let result = Rc::new(RefCell::new(Err(Status::Io)));
    let (own, kept) = (Rc::clone(&env), Rc::clone(&result));
    executor.spawn(&env.io, async move { drop(kept.replace(task(&own).await)) });
    while !executor.is_idle() {
        executor.run(&env.io);
        let mut idle = !env.io.has_paused();
        while let Some((place, done)) = env.io.next(|op| op.perform(&shared.files)) {
            idle = false;
            env.io.complete(place, done);
        }
        if idle && !executor.is_idle() {
            // The task waits for a change by another task, and no other task exists.
            let message = format!("cannot {what}: another change of the image is in progress");
            return Err(Error::new(ErrorKind::System, message));
        }
    }
    result.replace(Err(Status::Io)).map_err(|status| Error::system(format!("cannot {what}"), status))
}

impl Shared {
    /// As [`run`]. `what` is completed by the path of the image.
    pub fn run<T: 'static>(
        self: &Arc<Self>,
        what: &str,
        task: impl AsyncFnOnce(&Env) -> Result<T, Status> + 'static,
    ) -> Result<T, Error> {
        run(self, &format!("{what} in {}", self.path().display()), task)
    }
}

/// Writes `data` at `position` of the device, while no queue does I/O.
pub fn write_data(shared: &Arc<Shared>, position: u64, mut data: IoBuffer) -> Result<(), Error> {
    let (bytes, segment) = (data.len() as u64, Segment::new(data.as_mut_ptr(), data.len() as u32));
    // SAFETY: the buffer outlives `run`, which performs all operations before it returns, and no other
    // request in this environment has the tag.
    let memory = unsafe { Memory::new(Tag(0), vec![segment]) };
    run(shared, &format!("write to {}", shared.path().display()), async move |env| {
        write(env, position, bytes, Source::Memory(&memory)).await
    })
}
