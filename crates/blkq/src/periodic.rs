use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::Error;

/// The reason why the function of a [`PeriodicThread`] runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wakeup {
    /// The time that the previous run returned has passed.
    Due,
    /// A thread has called [`PeriodicThread::wake`].
    Called,
}

/// A thread that runs a function periodically. Dropping it waits for a current run, and stops the thread.
pub struct PeriodicThread {
    /// `None` only while the value is dropped.
    running: Option<(Sender<()>, JoinHandle<()>)>,
}

impl PeriodicThread {
    /// Starts a thread with this name and stack size in bytes. The thread runs `work` after the time `first`,
    /// and again each time after the time that `work` returned. Fails with
    /// [`ErrorKind::System`](crate::ErrorKind::System) if no thread can be started.
    pub fn start(
        name: &str,
        stack_bytes: usize,
        first: Duration,
        mut work: impl FnMut(Wakeup) -> Duration + Send + 'static,
    ) -> Result<PeriodicThread, Error> {
        let (wake, woken) = channel();
        let run = move || {
            let mut wait = first;
            loop {
                let wakeup = match woken.recv_timeout(wait) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => Wakeup::Due,
                    Ok(()) => Wakeup::Called,
                };
                wait = work(wakeup);
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(stack_bytes).spawn(run);
        let thread = thread.map_err(|e| Error::system("cannot start a thread", e))?;
        Ok(PeriodicThread { running: Some((wake, thread)) })
    }

    /// Makes the thread run its function immediately.
    pub fn wake(&self) {
        if let Some((wake, _)) = &self.running {
            // Sending fails only if the thread has panicked.
            let _ = wake.send(());
        }
    }
}

impl Drop for PeriodicThread {
    fn drop(&mut self) {
        if let Some((wake, thread)) = self.running.take() {
            drop(wake);
            // The panic hook has already printed a panic of the thread.
            let _ = thread.join();
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn the_thread_runs_when_due_or_woken_until_dropped() {
        let (sender, worked) = channel();
        let work = move |wakeup| {
            sender.send(wakeup).unwrap();
            LONG
        };
        let thread = PeriodicThread::start("test", 64 << 10, Duration::from_millis(1), work).unwrap();
        assert_eq!(worked.recv(), Ok(Wakeup::Due));
        thread.wake();
        assert_eq!(worked.recv(), Ok(Wakeup::Called));
        drop(thread);
        assert!(worked.recv().is_err(), "the thread has exited");
    }
}
