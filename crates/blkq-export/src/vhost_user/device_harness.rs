//! A device for simulations, models and fuzz targets: a session without a socket or thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkq::{Disk, EngineHandle};

use super::channel::Incoming;
use super::control::take_wakeup;
use super::message::{HEADER_BYTES, Header};
use super::session::Session;
use super::status::{Shared, VhostUserCounters};
use super::untrusted_fd::UntrustedFd;

/// The serial number of each device.
pub const SERIAL: &str = "simulated";

/// A device, and the session of its front end.
pub struct Device {
    pub(super) shared: Arc<Shared>,
    session: Session,
}

/// The bytes of a reply, and its descriptor.
pub type Reply = (Vec<u8>, Option<OwnedFd>);

impl Device {
    /// `engine` serves all rings, and drivers are shown `queues` queues. Fails if there can be no session.
    pub fn connect(disk: &Arc<Disk>, engine: &EngineHandle, queues: usize) -> Result<Device, blkq::Error> {
        let shared = Arc::new(Shared::new(disk, vec![engine.clone(); queues], SERIAL)?);
        shared.registry.admit("simulated");
        Ok(Device { session: Session::new(shared.clone(), "simulated"), shared })
    }

    /// Executes a message, or returns how it violates the protocol. Panics if it is shorter than a header.
    pub fn handle(&mut self, message: &[u8], files: Vec<OwnedFd>) -> Result<Option<Reply>, String> {
        let (header, payload) = message.split_at(HEADER_BYTES);
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(header);
        let header = Header::parse(bytes).map_err(|error| error.to_string())?;
        let files = files.into_iter().map(UntrustedFd::new).collect();
        let incoming = Incoming { header, payload: payload.to_vec(), files };
        let reply = self.session.handle(incoming).map_err(|error| error.to_string())?;
        Ok(reply.map(|reply| (reply.bytes, reply.file)))
    }

    /// Notifies the device that the size of the disk has changed.
    pub fn resized(&mut self) {
        self.shared.change_config();
        self.turn();
    }

    /// Handles a wake-up, as the control thread does.
    pub fn turn(&mut self) {
        take_wakeup(&self.shared, Some(&mut self.session));
    }

    /// Closes the connection of the front end, and returns the counters of the device.
    pub fn disconnect(self) -> VhostUserCounters {
        let Device { shared, session } = self;
        drop(session);
        shared.registry.counters()
    }

    /// Why a ring was rejected, if one was.
    pub fn rejection(&self) -> Option<String> {
        self.shared.registry.front_end()?.rings.into_iter().find_map(|(_, rejected)| rejected)
    }

    /// The counters of all rings.
    pub fn counters(&self) -> VhostUserCounters {
        self.shared.registry.counters()
    }
}
