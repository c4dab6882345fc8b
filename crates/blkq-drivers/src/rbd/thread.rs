//! The thread that opens an image, queries the cluster, and closes the image. Each of these calls may block
//! forever if the cluster does not respond. Other threads wait for this thread with a timeout instead of
//! calling librbd themselves. The data path never waits for this thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use blkq::sync::{Mutex, lock};
use blkq::{Error, ErrorKind};

use crate::options::DriverOptions;

use super::image::{Facts, Image, RbdSpec, Submission};

/// How long opening an image may take. Ceph drops a killed client's lock after 30 seconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long closing an image may take. librbd flushes its cache and releases the lock in that time.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Size of the thread's stack, in bytes. Calls of librbd run on it.
const STACK_BYTES: usize = 2 << 20;

type Job = Box<dyn FnOnce(&Image) + Send>;

/// The thread of an open image. Dropping this value closes the image.
pub struct ImageThread {
    /// The handle for the data path. It is valid until [`ImageThread::close`] or the drop of this value.
    pub submission: Submission,
    /// Jobs for the thread. `None` after a close was requested: without a sender the thread leaves its loop.
    jobs: Mutex<Option<Sender<Job>>>,
    /// Nothing is ever sent. The channel disconnects when the thread has closed the image.
    closed: Mutex<Receiver<()>>,
}

impl ImageThread {
    /// Starts the thread and opens the image `spec`. Fails as [`Image::open`] does, and with
    /// [`ErrorKind::System`] if the cluster does not answer within a minute.
    pub fn open(
        spec: &RbdSpec,
        options: &DriverOptions,
        changed: Arc<OwnedFd>,
    ) -> Result<(ImageThread, Facts), Error> {
        let (sender, opened) = channel();
        let (jobs, queue) = channel::<Job>();
        let (closing, closed) = channel::<()>();
        let step = Arc::new(Mutex::new("starting"));
        let (spec_of_thread, options, own_step) = (spec.clone(), options.clone(), step.clone());
        let body = move || {
            // Declared first, so dropped last, after the image; also if this thread panics.
            let _closing = closing;
            let result = Image::open(&spec_of_thread, &options, changed, &|step| *lock(&own_step) = step);
            // Sending fails once the caller has stopped waiting. The image is then closed immediately.
            match result {
                Ok((image, facts)) => {
                    if sender.send(Ok((image.submission(), facts))).is_ok() {
                        drop(sender);
                        queue.into_iter().for_each(|job| job(&image));
                    }
                }
                Err(error) => _ = sender.send(Err(error)),
            }
        };
        thread::Builder::new()
            .name("blkq-rbd".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(body)
            .map_err(|e| Error::system("cannot start the thread of an RBD image", e))?;
        // If opening has failed, the thread has already closed everything again. After the timeout it keeps waiting, and
        // closes the image if the cluster ever answers.
        let (submission, facts) = opened.recv_timeout(OPEN_TIMEOUT).unwrap_or_else(|e| {
            let message = match e {
                RecvTimeoutError::Timeout => format!(
                    "rbd:{spec}: the cluster did not answer within {} seconds (step: {}); check whether its monitors and OSDs are running and reachable",
                    OPEN_TIMEOUT.as_secs(),
                    *lock(&step)
                ),
                RecvTimeoutError::Disconnected => "the thread of the RBD image has exited".to_owned(),
            };
            Err(Error::new(ErrorKind::System, message))
        })?;
        Ok((ImageThread { submission, jobs: Mutex::new(Some(jobs)), closed: Mutex::new(closed) }, facts))
    }

    /// Closes the image. Returns false if the cluster does not answer in time, and the image stays open.
    ///
    /// # Safety
    /// No [`Submission`] of the image may be used during or after this call.
    pub unsafe fn close(&self) -> bool {
        drop(lock(&self.jobs).take());
        // A thread that blocks forever is not stopped. The image stays open until the process exits.
        lock(&self.closed).recv_timeout(CLOSE_TIMEOUT) != Err(RecvTimeoutError::Timeout)
    }

    /// Runs `job` on the thread, and waits for its result for at most `timeout`. If the job finishes later,
    /// the thread drops the result and calls `late`. Fails with the error of the job, or
    /// [`ErrorKind::System`] if the cluster did not answer in time.
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
        // Sending fails only if the thread has exited. Then `receiver` is disconnected.
        let _ = lock(&self.jobs).as_ref().map(|jobs| jobs.send(job));
        receiver.recv_timeout(timeout).unwrap_or_else(|_| {
            let message = format!("the cluster did not answer within {} seconds", timeout.as_secs());
            Err(Error::new(ErrorKind::System, message))
        })
    }
}

impl Drop for ImageThread {
    fn drop(&mut self) {
        // SAFETY: a queue that uses the `Submission` shares the owner of this value, so there is no such queue now.
        unsafe { self.close() };
    }
}
