//! Runs tasks to completion on the calling thread with plain system calls, for changes while no queue does
//! I/O, and for the last flush. The thread may be forbidden to create a ring.

use std::cell::RefCell;
use std::future::Future;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use blkq::{Error, ErrorKind, IoBuffer, Segment, Status, Tag};

use super::env::{Env, Shared};
use super::operations::{Action, Executor, Memory, Submitted};
use super::write::{Source, write};

/// Runs the task that `task` returns, while no queue does I/O. `what` completes the message "cannot ...".
pub fn run<T: 'static, F: Future<Output = Result<T, Status>> + 'static>(
    shared: &Arc<Shared>,
    what: &str,
    task: impl FnOnce(Rc<Env>) -> F,
) -> Result<T, Error> {
    let env = Env::new(Arc::clone(shared), None);
    let mut executor = Executor::default();
    let result = Rc::new(RefCell::new(Err(Status::Io)));
    let (task, kept) = (task(Rc::clone(&env)), Rc::clone(&result));
    executor.spawn(&env.io, async move { drop(kept.replace(task.await)) });
    while !executor.is_idle() {
        executor.run(&env.io);
        let mut idle = !env.io.has_paused();
        while let Some(operation) = env.io.next_operation() {
            idle = false;
            let file = &shared.files[usize::from(operation.layer)];
            let done = perform(file.ring_file().as_raw_fd(), &operation);
            env.io.complete(operation.place, done);
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
    pub fn run<T: 'static, F: Future<Output = Result<T, Status>> + 'static>(
        self: &Arc<Self>,
        what: &str,
        task: impl FnOnce(Rc<Env>) -> F,
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
    let task = move |env: Rc<Env>| async move { write(&env, position, bytes, Source::Memory(&memory)).await };
    run(shared, &format!("write to {}", shared.path().display()), task)
}

/// Performs an operation; of a transfer at least a part of the first piece. Returns the result as io_uring
/// does: the count, or a negative errno.
pub fn perform(file: RawFd, operation: &Submitted) -> i32 {
    let (offset, bytes) = (operation.range.start, operation.range.end - operation.range.start);
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return -libc::EINVAL };
    let (memory, length) = operation
        .pieces
        .first()
        .map_or((std::ptr::null_mut(), 0), |piece| (piece.iov_base, piece.iov_len.min(i32::MAX as usize)));
    let mode = operation.action.fallocate_mode();
    // SAFETY: the pieces of an operation that has not completed point to valid memory. Nothing else uses the
    // memory of a read, and the file is open.
    let result = unsafe {
        match operation.action {
            Action::Read => libc::pread64(file, memory, length, offset) as i64,
            Action::Write => libc::pwrite64(file, memory, length, offset) as i64,
            Action::Sync => i64::from(libc::fdatasync(file)),
            Action::Punch | Action::Extend => i64::from(libc::fallocate64(file, mode, offset, bytes)),
        }
    };
    match i32::try_from(result) {
        Ok(done) if done >= 0 => done,
        _ => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
    }
}
