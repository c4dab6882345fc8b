//! Stops a command on signals of the user.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkq_protocol::failure::{EXIT_FAILED, Failure, Outcome, print_error};
use blkq_protocol::system::signals::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, poll};

#[derive(Default)]
pub struct Stop {
    requested: AtomicBool,
    is_over: AtomicBool,
}

impl Stop {
    /// Whether a signal has arrived.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Ignores signals from now on: the outcome is known.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// The first of these signals requests a stop. The second one prints `notice` and exits the process immediately,
/// because the rest of the command may block forever. Must be called before there are other threads.
pub fn stop_on_signals(handled: &[Signal], notice: String) -> Outcome<Arc<Stop>> {
    let mut signals = Signals::install(handled)?;
    let stop = Arc::new(Stop::default());
    let stopped = stop.clone();
    let wait = move || {
        loop {
            let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], None);
            for _ in signals.take() {
                let is_second = stopped.requested.swap(true, Ordering::SeqCst);
                if is_second && !stopped.is_over.load(Ordering::SeqCst) {
                    print_error(&Failure::new(&notice));
                    std::process::exit(EXIT_FAILED.into());
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("blkq-signals".into()).spawn(wait);
    thread.map(|_| stop).map_err(|e| Failure::new(format!("cannot start a thread: {e}")))
}
