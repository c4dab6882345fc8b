//! The parts of a device that run while it is served.

use std::sync::Arc;

use blkq::{Disk, EngineHandle, EngineThread};
use blkq_export::nbd::{ConnectionInfo, NbdServer, Paused, RangeLock};
use blkq_export::ublk::{Claimed, UblkDevice};
use blkq_export::vhost_user::{self, VhostUserDevice};

use super::kept_bitmaps::KeptBitmaps;
use crate::failure::{Failure, Outcome};

/// The running parts of a device, in the order in which they stop.
pub(super) struct Running {
    pub(super) servers: Vec<NbdServer>,
    pub(super) vhost: Option<VhostUserDevice>,
    pub(super) ublk: Option<UblkDevice>,
    /// One per hardware queue. They stop with the last use of this, before the disk.
    pub(super) engines: Vec<EngineThread>,
    /// Kept with the image when no engine writes to it any more.
    pub(super) bitmaps: KeptBitmaps,
    pub(super) disk: Arc<Disk>,
    /// The lock of its servers, if they serve parts of blocks.
    pub(super) unaligned: Option<Arc<RangeLock>>,
}

/// Clients and users are kept away until this is dropped.
#[allow(dead_code, reason = "each is there to be dropped")]
pub(super) struct Unused<'a>(Vec<Paused<'a>>, Option<vhost_user::Paused<'a>>, Option<Claimed<'a>>);

impl Running {
    pub(super) fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.servers.iter().flat_map(NbdServer::connections)
    }

    /// Its engines.
    pub(super) fn handles(&self) -> Vec<EngineHandle> {
        self.engines.iter().map(|engine| engine.handle().clone()).collect()
    }

    /// Clients that are connected: of NBD, and a virtual machine.
    pub(super) fn client_count(&self) -> usize {
        let nbd = self.servers.iter().map(NbdServer::connection_count).sum::<usize>();
        nbd + self.vhost.as_ref().map_or(0, VhostUserDevice::connection_count)
    }

    /// Where clients find it, one line each.
    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        let vhost = self.vhost.iter().map(|vhost| vhost.uri().to_owned());
        let nbd = self.servers.iter().map(|server| server.uri().to_owned());
        ublk.chain(vhost).chain(nbd).collect()
    }

    pub(super) fn check_no_clients(&self) -> Outcome {
        match self.client_count() {
            0 => Ok(()),
            clients => Err(busy(clients)),
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
        let (servers, guest) = (self.pause_servers()?, self.pause_guest()?);
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok(Unused(servers, guest, claimed.map_err(Failure::unless_forced)?))
    }

    /// Keeps NBD clients away until what this returns is dropped.
    ///
    /// # Errors
    /// If there are some.
    pub(super) fn pause_servers(&self) -> Outcome<Vec<Paused<'_>>> {
        let paused = self.servers.iter().map(NbdServer::pause_if_empty).collect::<Option<_>>();
        paused.ok_or_else(|| busy(self.connections().count().max(1)))
    }

    /// Keeps virtual machines away until what this returns is dropped.
    ///
    /// # Errors
    /// If there is one.
    pub(super) fn pause_guest(&self) -> Outcome<Option<vhost_user::Paused<'_>>> {
        let paused = self.vhost.as_ref().map(|vhost| vhost.pause_if_empty().ok_or_else(|| busy(1)));
        paused.transpose()
    }

    /// As [`Device::flush`].
    pub(super) fn flush(&self) -> Outcome {
        let limits = self.disk.limits();
        if !limits.write_cache || limits.read_only {
            return Ok(());
        }
        self.disk.submitter().flush().map_err(|e| Failure::new(format!("flush: {e}")))
    }

    /// Stops all servers, even with clients.
    pub(super) fn close_servers(&self) {
        for server in &self.servers {
            // Forced, it does not fail.
            let _ = server.stop(true);
        }
        if let Some(vhost) = &self.vhost {
            let _ = vhost.stop(true);
        }
    }
}

pub(super) fn busy(clients: usize) -> Failure {
    let are = if clients == 1 { "client is" } else { "clients are" };
    Failure::new(format!("{clients} {are} connected; disconnect first, or use --force"))
}
