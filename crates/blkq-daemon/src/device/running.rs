use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkq::disk::Exchange;
use blkq::{Disk, EngineHandle, EngineThread};
use blkq_drivers::{Image, Opened};
use blkq_export::ublk::{Claimed, UblkDevice};
use blkq_protocol::failure::{Failure, Outcome};

use super::persistent_bitmaps::PersistentBitmaps;
use super::servers::{Connected, PausedServers, Servers};

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
    pub(super) image: Mutex<Option<Arc<dyn Image>>>,
    pub(super) disk: Arc<Disk>,
}

/// Keeps clients and users away until it is dropped.
#[allow(dead_code, reason = "dropped to let clients connect again")]
pub(super) struct Unused<'a>(PausedServers<'a>, Option<Claimed<'a>>);

impl Running {
    pub(super) fn handles(&self) -> Vec<EngineHandle> {
        self.engines.iter().map(|engine| engine.handle().clone()).collect()
    }

    fn locked_image(&self) -> MutexGuard<'_, Option<Arc<dyn Image>>> {
        self.image.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes of the device replace the image, so a caller that needs it to stay must exclude them.
    pub(super) fn image(&self) -> Option<Arc<dyn Image>> {
        self.locked_image().clone()
    }

    /// Replaces the image with the driver. Fails as [`Exchange::replace`] does; nothing has changed then.
    pub(super) fn replace(&self, exchange: &Exchange<'_>, next: Opened) -> Outcome {
        exchange.replace(next.driver)?;
        *self.locked_image() = next.image;
        Ok(())
    }

    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.uris()).collect()
    }

    pub(super) fn check_no_clients(&self) -> Outcome {
        match self.servers.client_count() {
            0 => Ok(()),
            clients => Err(Connected(clients).unless_forced()),
        }
    }

    /// Keeps clients and users of the block device away until the returned guard is dropped. Fails if there
    /// are clients or users, or `user` is given.
    pub(super) fn claim_unused(&self, user: Option<String>) -> Outcome<Unused<'_>> {
        if let Some(user) = user {
            return Err(Failure::new(user));
        }
        let paused = self.servers.pause().map_err(Connected::unless_forced)?;
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok(Unused(paused, claimed.map_err(Failure::unless_forced)?))
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
