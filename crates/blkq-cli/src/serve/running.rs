//! The parts of a device that run while it is served.

use std::sync::Arc;

use blkq::{Disk, EngineThread};
use blkq_export::nbd::{ConnectionInfo, NbdServer, Paused, RangeLock};
use blkq_export::ublk::{Claimed, UblkDevice};

use crate::failure::{Failure, Outcome};

/// The running parts of a device, in the order in which they stop.
pub(super) struct Running {
    pub(super) servers: Vec<NbdServer>,
    pub(super) ublk: Option<UblkDevice>,
    /// One per hardware queue. They stop with the last use of this, before the disk.
    pub(super) _engines: Vec<EngineThread>,
    pub(super) disk: Arc<Disk>,
    /// The lock of its servers, if they serve parts of blocks.
    pub(super) unaligned: Option<Arc<RangeLock>>,
}

impl Running {
    pub(super) fn connections(&self) -> impl Iterator<Item = ConnectionInfo> {
        self.servers.iter().flat_map(NbdServer::connections)
    }

    /// Where clients find it, one line each.
    pub(super) fn exports(&self) -> Vec<String> {
        let ublk = self.ublk.iter().map(|ublk| ublk.identity().path());
        ublk.chain(self.servers.iter().map(|server| server.uri().to_owned())).collect()
    }

    pub(super) fn check_no_clients(&self) -> Outcome {
        match self.connections().count() {
            0 => Ok(()),
            clients => Err(busy(clients)),
        }
    }

    /// Keeps clients and users of the block device away until what this returns is dropped.
    ///
    /// # Errors
    /// If there are some, or `user` is one.
    pub(super) fn claim_unused(
        &self,
        user: Option<String>,
    ) -> Outcome<(Vec<Paused<'_>>, Option<Claimed<'_>>)> {
        if let Some(user) = user {
            return Err(Failure::new(user));
        }
        let paused = self.servers.iter().map(NbdServer::pause_if_empty).collect::<Option<_>>();
        let count = || self.servers.iter().map(NbdServer::connection_count).sum::<usize>();
        let paused = paused.ok_or_else(|| busy(count().max(1)))?;
        let claimed = self.ublk.as_ref().map(UblkDevice::claim).transpose();
        Ok((paused, claimed.map_err(Failure::unless_forced)?))
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
    }
}

pub(super) fn busy(clients: usize) -> Failure {
    let are = if clients == 1 { "client is" } else { "clients are" };
    Failure::new(format!("{clients} {are} connected; disconnect first, or use --force"))
}
