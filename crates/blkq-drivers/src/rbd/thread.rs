//! The thread that opens an image, asks the cluster about it, and closes it. Each of these may wait for
//! the cluster for ever: others wait for this thread, and not for ever.
//!
//! The data path never comes here. The model checkers do not either, and so the primitives are those of the
//! standard library.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use blkq::{Error, ErrorKind};

use super::image::{Facts, Image, Submission};
use super::options::RbdOptions;

/// How long opening an image may take: a client that died keeps its lock for 30 seconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long closing may take, which writes what librbd has cached and releases the lock.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Stack of the thread.
const STACK_BYTES: usize = 2 << 20;

type Job = Box<dyn FnOnce(&Image) + Send>;

/// The thread of an open image, which is closed when this is dropped.
pub struct ImageThread {
    submission: Submission,
    /// `None` once the image is to be closed.
    jobs: Mutex<Option<Sender<Job>>>,
    /// Disconnected once the image is closed.
    closed: Mutex<Receiver<()>>,
}

/// How far the thread has come with opening.
enum Opening {
    Step(&'static str),
    Opened(Result<(Submission, Facts), Error>),
}

impl ImageThread {
    /// Opens the image of `options`; `changed` is written to when it may have changed its size.
    ///
    /// # Errors
    /// Those of [`Image::open`], and [`ErrorKind::System`] if the cluster does not answer within a minute.
    pub fn open(options: &RbdOptions, changed: Arc<OwnedFd>) -> Result<(ImageThread, Facts), Error> {
        let (progress, opening) = channel();
        let (jobs, queue) = channel::<Job>();
        let (closing, closed) = channel::<()>();
        let spec = options.spec.to_string();
        let options = options.clone();
        let body = move || {
            // Dropped last of all, also by a panic.
            let _closing = closing;
            // It fails once the caller has stopped waiting; then the image is closed at once.
            let step = |step| _ = progress.send(Opening::Step(step));
            match Image::open(&options, changed, &step) {
                Ok((image, facts)) => {
                    let opened = progress.send(Opening::Opened(Ok((image.submission(), facts))));
                    drop(progress);
                    if opened.is_ok() {
                        queue.into_iter().for_each(|job| job(&image));
                    }
                }
                Err(error) => _ = progress.send(Opening::Opened(Err(error))),
            }
        };
        thread::Builder::new()
            .name("blkq-rbd".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map_err(|e| Error::system("cannot start the thread of an RBD image", e))?;
        let until = Instant::now() + OPEN_TIMEOUT;
        let mut at = "starting";
        loop {
            match opening.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Opening::Step(step)) => at = step,
                Ok(Opening::Opened(opened)) => {
                    // Where opening failed, what was open is closed before the reason is known.
                    let (submission, facts) = opened?;
                    let (jobs, closed) = (Mutex::new(Some(jobs)), Mutex::new(closed));
                    return Ok((ImageThread { submission, jobs, closed }, facts));
                }
                Err(RecvTimeoutError::Timeout) => {
                    // The thread is left as it is, and closes the image if the cluster answers.
                    let message = format!(
                        "rbd:{spec}: the cluster did not answer within {} seconds while {at}; check that its monitors and OSDs are running and reachable",
                        OPEN_TIMEOUT.as_secs()
                    );
                    return Err(Error::new(ErrorKind::System, message));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::new(ErrorKind::System, "the thread of the RBD image has exited"));
                }
            }
        }
    }

    /// Closes the image, and returns whether it is closed: the cluster may not answer.
    ///
    /// # Safety
    /// The [`Submission`]s are used no more.
    pub unsafe fn close(&self) -> bool {
        drop(locked(&self.jobs).take());
        // A thread that waits for ever is left as it is, and what it uses stays open until the process exits.
        locked(&self.closed).recv_timeout(CLOSE_TIMEOUT) != Err(RecvTimeoutError::Timeout)
    }

    /// For the data path: the image is open for as long as this, unless it is closed before.
    pub fn submission(&self) -> &Submission {
        &self.submission
    }

    /// Has the thread call `job`, and waits for what that returns, but no longer than `timeout`. `late` is called
    /// where it returns when nobody waits any more.
    ///
    /// # Errors
    /// That of the job, or that the cluster did not answer.
    pub fn call<R: Send + 'static>(
        &self,
        timeout: Duration,
        job: impl FnOnce(&Image) -> Result<R, Error> + Send + 'static,
        late: impl FnOnce() + Send + 'static,
    ) -> Result<R, Error> {
        let (sender, receiver) = channel();
        let job: Job = Box::new(move |image| {
            if sender.send(job(image)).is_err() {
                late();
            }
        });
        // It fails only if the thread has exited, which the next lines see.
        let _ = locked(&self.jobs).as_ref().map(|jobs| jobs.send(job));
        receiver.recv_timeout(timeout).unwrap_or_else(|_| {
            let message = format!("the cluster did not answer within {} seconds", timeout.as_secs());
            Err(Error::new(ErrorKind::System, message))
        })
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for ImageThread {
    fn drop(&mut self) {
        // SAFETY: who has a `Submission` has borrowed it from this.
        unsafe { self.close() };
    }
}
