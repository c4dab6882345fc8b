//! The parts of a device that run while it is served.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkq::disk::Exchange;
use blkq::{Disk, EngineHandle, EngineThread};
use blkq_drivers::{Image, Opened};
use blkq_export::ublk::{Claimed, UblkDevice};

use super::kept_bitmaps::KeptBitmaps;
use super::servers::{Connected, PausedServers, Servers};
use crate::failure::{Failure, Outcome};

/// The running parts of a device, in the order in which they stop.
pub(super) struct Running {
    pub(super) servers: Servers,
    pub(super) ublk: Option<UblkDevice>,
    /// One per hardware queue. They stop with the last use of this, before the disk.
    pub(super) engines: Vec<EngineThread>,
    /// Kept with the image when no engine writes to it any more.
    pub(super) bitmaps: KeptBitmaps,
    /// That of the disk's driver, if it has one.
    pub(super) image: Mutex<Option<Arc<dyn Image>>>,
    pub(super) disk: Arc<Disk>,
}

/// Clients and users are kept away until this is dropped.
#[allow(dead_code, reason = "each is there to be dropped")]
pub(super) struct Unused<'a>(PausedServers<'a>, Option<Claimed<'a>>);

impl Running {
    /// Its engines.
    pub(super) fn handles(&self) -> Vec<EngineHandle> {
        self.engines.iter().map(|engine| engine.handle().clone()).collect()
    }

    fn locked_image(&self) -> MutexGuard<'_, Option<Arc<dyn Image>>> {
        self.image.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The image, which no other change exchanges.
    pub(super) fn image(&self) -> Option<Arc<dyn Image>> {
        self.locked_image().clone()
    }

    /// Exchanges the driver in the freeze of `exchange`, and the image with it.
    ///
    /// # Errors
    /// As [`Exchange::replace`]; nothing has changed then.
    pub(super) fn replace(&self, exchange: &Exchange<'_>, next: Opened) -> Outcome {
        exchange.replace(next.driver)?;
        *self.locked_image() = next.image;
        Ok(())
    }

    /// Where clients find it, one line each.
    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.uris()).collect()
    }

    /// Refuses while clients are connected.
    ///
    /// # Errors
    /// How many.
    pub(super) fn check_no_clients(&self) -> Outcome {
        match self.servers.client_count() {
            0 => Ok(()),
            clients => Err(Connected(clients).unless_forced()),
        }
    }

    /// Keeps clients and users of the block device away until what this returns is dropped.
    ///
    /// # Errors
    /// If there are some, or `user` is one.
    pub(super) fn claim_unused(&self, user: Option<String>) -> Outcome<Unused<'_>> {
        if let Some(user) = user {
            return Err(Failure::new(user));
        }
        let paused = self.servers.pause().map_err(Connected::unless_forced)?;
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok(Unused(paused, claimed.map_err(Failure::unless_forced)?))
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// If this or an earlier write cannot be made durable.
    pub(super) fn flush(&self) -> Outcome {
        let limits = self.disk.limits();
        if !limits.write_cache || limits.read_only {
            return Ok(());
        }
        self.disk.submitter().flush().map_err(|e| Failure::new(format!("flush: {e}")))
    }
}

/// Why nothing more can be done with a device.
pub(super) fn stopping() -> Failure {
    Failure::new("the device is stopping")
}
