//! The parts of a device that exist while it is served.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkq::disk::Exchange;
use blkq::{Disk, EngineHandle, EngineThread};
use blkq_drivers::{Image, Opened};
use blkq_export::ublk::{Claimed, UblkDevice};

use super::persistent_bitmaps::PersistentBitmaps;
use super::servers::{Connected, PausedServers, Servers};
use crate::failure::{Failure, Outcome};

/// The running parts of a device. Fields are dropped in order, which is the order in which the parts must
/// stop.
pub(super) struct Running {
    pub(super) servers: Servers,
    pub(super) ublk: Option<UblkDevice>,
    /// One engine per hardware queue. The engines stop when the last reference to this is dropped, before the
    /// disk.
    pub(super) engines: Vec<EngineThread>,
    /// Saved when this is dropped, after the engines have stopped writing to the image.
    pub(super) bitmaps: PersistentBitmaps,
    /// The image of the disk's driver, if the driver has one. Replaced together with the driver.
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

    /// The image of the driver, if it has one. Changes of the device replace it, so a caller that needs it to stay must
    /// exclude them.
    pub(super) fn image(&self) -> Option<Arc<dyn Image>> {
        self.locked_image().clone()
    }

    /// Exchanges the driver in the freeze of `exchange`, and the image with it.
    ///
    /// # Errors
    ///
    /// As [`Exchange::replace`]; nothing has changed then.
    pub(super) fn replace(&self, exchange: &Exchange<'_>, next: Opened) -> Outcome {
        exchange.replace(next.driver)?;
        *self.locked_image() = next.image;
        Ok(())
    }

    /// The block device and the URIs under which clients reach the device.
    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.uris()).collect()
    }

    /// Fails while clients are connected.
    ///
    /// # Errors
    ///
    /// Says how many clients are connected.
    pub(super) fn check_no_clients(&self) -> Outcome {
        match self.servers.client_count() {
            0 => Ok(()),
            clients => Err(Connected(clients).unless_forced()),
        }
    }

    /// Keeps clients and users of the block device away until the returned guard is dropped.
    ///
    /// # Errors
    ///
    /// Fails if there are clients or users, or `user` is given.
    pub(super) fn claim_unused(&self, user: Option<String>) -> Outcome<Unused<'_>> {
        if let Some(user) = user {
            return Err(Failure::new(user));
        }
        let paused = self.servers.pause().map_err(Connected::unless_forced)?;
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok(Unused(paused, claimed.map_err(Failure::unless_forced)?))
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    ///
    /// Fails if an earlier write or this flush failed.
    pub(super) fn flush(&self) -> Outcome {
        let limits = self.disk.limits();
        if !limits.write_cache || limits.read_only {
            return Ok(());
        }
        self.disk.submitter().flush().map_err(|e| Failure::new(format!("flush: {e}")))
    }
}

/// The failure of a command that arrives while the device stops.
pub(super) fn stopping() -> Failure {
    Failure::new("the device is stopping")
}
