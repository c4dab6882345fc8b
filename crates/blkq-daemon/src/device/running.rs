use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use blkq::disk::Exchange;
use blkq::sync::lock;
use blkq::{Disk, EngineThread};
use blkq_drivers::{Image, Opened};
use blkq_export::ublk::{Claimed, UblkDevice};
use blkq_protocol::failure::{Failure, Outcome};

use super::persistent_bitmaps::PersistentBitmaps;
use super::servers::{Connected, PausedServers, Servers};

/// How often a caller that waits for a flush checks whether requests are held. The flush cannot complete
/// before these requests.
const HELD_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The parts of a device that exist while it is served, in the order in which they must stop: fields are
/// dropped in order.
pub(super) struct Running {
    pub(super) servers: Servers,
    pub(super) ublk: Option<UblkDevice>,
    /// One engine per hardware queue. Dropping the last reference stops the engines, before the disk.
    pub(super) engines: Vec<EngineThread>,
    /// Saved when this is dropped, after the engines have stopped writing to the image.
    pub(super) bitmaps: PersistentBitmaps,
    /// Replaced together with the driver. `None` if the driver has no image.
    pub(super) image: Mutex<Option<Image>>,
    pub(super) disk: Arc<Disk>,
}

impl Running {
    /// Changes of the device replace the image, so a caller that needs it to stay must exclude them.
    pub(super) fn image(&self) -> Option<Image> {
        lock(&self.image).clone()
    }

    /// Replaces the image with the driver. Fails as [`Exchange::replace`] does; nothing has changed then.
    pub(super) fn replace(&self, exchange: &Exchange<'_>, next: Opened) -> Outcome {
        exchange.replace(next.driver)?;
        *lock(&self.image) = next.image;
        Ok(())
    }

    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.uris()).collect()
    }

    /// Keeps clients and users of the block device away until the returned guards are dropped. Fails if there
    /// are clients or users, or `user` is given.
    pub(super) fn claim_unused(
        &self,
        user: Option<String>,
    ) -> Outcome<(PausedServers<'_>, Option<Claimed<'_>>)> {
        if let Some(user) = user {
            return Err(Failure::new(user));
        }
        let paused = self.servers.pause().map_err(Connected::unless_forced)?;
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok((paused, claimed.map_err(Failure::unless_forced)?))
    }

    /// Fails if an earlier write or this flush failed.
    pub(super) fn flush(&self) -> Outcome {
        let limits = self.disk.limits();
        if !limits.write_cache || limits.read_only {
            return Ok(());
        }
        self.disk.submitter().flush().map_err(|e| Failure::new(format!("cannot flush the image: {e}")))
    }
}

pub(super) fn stopping() -> Failure {
    Failure::new("the device is stopping")
}

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
