use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use blkq_protocol::failure::{Failure, Outcome};

use super::running::{Running, stopping};

/// How often a caller that waits for a flush checks whether requests are held. The flush cannot complete
/// before these requests.
const HELD_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// If the flush takes longer than `wait`, it continues on its own thread and this fails.
pub(super) fn flush_within(running: &Arc<Running>, wait: Duration) -> Outcome {
    begin_flush(running)?.recv_timeout(wait).unwrap_or_else(|_| {
        Err(Failure::new(format!("the flush did not complete within {} s", wait.as_secs())))
    })
}

/// Fails if requests are held: the flush would wait for them, and continues on its own thread.
pub(super) fn flush_unless_held(running: &Arc<Running>) -> Outcome {
    flush_unless_stopped(running, &|| Ok(()))
}

/// As [`flush_unless_held`]; also fails when `stop` does.
pub(super) fn flush_unless_stopped(running: &Arc<Running>, stop: &dyn Fn() -> Outcome) -> Outcome {
    let flushed = begin_flush(running)?;
    loop {
        match (flushed.recv_timeout(HELD_POLL_INTERVAL), running.disk.held()) {
            (Ok(flushed), _) => return flushed,
            (Err(RecvTimeoutError::Timeout), 0) => stop()?,
            (Err(RecvTimeoutError::Timeout), held) => return Err(Failure::held(held)),
            (Err(RecvTimeoutError::Disconnected), _) => return Err(stopping()),
        }
    }
}

/// Flushes on a new thread, which continues even if the receiver is dropped.
fn begin_flush(running: &Arc<Running>) -> Outcome<Receiver<Outcome>> {
    let (sender, flushed) = channel();
    let running = running.clone();
    let flush = move || _ = sender.send(running.flush());
    let spawned = thread::Builder::new().name("blkq-flush".to_owned()).spawn(flush);
    spawned.map_err(|e| Failure::new(format!("cannot start a thread for the flush: {e}")))?;
    Ok(flushed)
}
