//! A thread that does something now and then.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::Error;

/// Why the work of a [`PeriodicThread`] runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wakeup {
    /// Its time has come.
    Due,
    /// [`PeriodicThread::wake`] was called.
    Called,
}

/// A thread that works now and then, until this is dropped, which waits for the work in progress.
pub struct PeriodicThread {
    wake: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PeriodicThread {
    /// Starts a thread of that name, with so many bytes of stack. It runs `work` after the time `first`, and again
    /// after the time that `work` returns.
    ///
    /// # Errors
    /// If there can be no more threads.
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
        Ok(PeriodicThread { wake: Some(wake), thread: Some(thread) })
    }

    /// Has it work at once.
    pub fn wake(&self) {
        if let Some(wake) = &self.wake {
            // A thread that panicked does not hear it.
            let _ = wake.send(());
        }
    }
}

impl Drop for PeriodicThread {
    fn drop(&mut self) {
        self.wake = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been printed by the thread itself.
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
    fn it_works_when_due_and_when_called_until_dropped() {
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
