//! Stops a command on signals of the user.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blkq_protocol::failure::{EXIT_FAILED, Failure, Outcome, print_error};
use blkq_protocol::system::signals::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, poll};

/// The first of these signals sets the returned flag. The second one prints `notice` and exits the process immediately,
/// because the rest of the command may block forever. Must be called before there are other threads.
pub fn stop_on_signals(handled: &[Signal], notice: String) -> Outcome<Arc<AtomicBool>> {
    let mut signals = Signals::install(handled)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let wait = move || {
        loop {
            let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], None);
            for _ in signals.take() {
                if stopped.swap(true, Ordering::SeqCst) {
                    print_error(&Failure::new(&notice));
                    std::process::exit(EXIT_FAILED.into());
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("blkq-signals".into()).spawn(wait);
    thread.map(|_| stop).map_err(|e| Failure::new(format!("cannot start a thread: {e}")))
}
