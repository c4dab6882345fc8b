//! Flushes of a device, which may wait for ever.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use super::running::{Running, stopping};
use crate::failure::{Failure, Outcome};

/// How often a flush checks whether it waits for held requests.
const HELD_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Flushes; a flush that is not answered is left to itself.
pub(super) fn flush_within(running: &Arc<Running>, wait: Duration) -> Outcome {
    begin_flush(running)?
        .recv_timeout(wait)
        .unwrap_or_else(|_| Err(Failure::new(format!("flush: no answer within {} s", wait.as_secs()))))
}

/// Flushes; a flush that waits for held requests, of now or of later, is left to itself.
pub(super) fn flush_unless_held(running: &Arc<Running>) -> Outcome {
    flush_unless_stopped(running, &|| Ok(()))
}

/// As [`flush_unless_held`], as long as `stop` says so.
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

/// Has a thread flush, which is left to itself if nobody waits any longer.
fn begin_flush(running: &Arc<Running>) -> Outcome<Receiver<Outcome>> {
    let (sender, flushed) = channel();
    let running = running.clone();
    let flush = move || _ = sender.send(running.flush());
    let spawned = thread::Builder::new().name("blkq-flush".to_owned()).spawn(flush);
    spawned.map_err(|e| Failure::new(format!("flush: {e}")))?;
    Ok(flushed)
}
