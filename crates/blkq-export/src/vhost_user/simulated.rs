//! A device of the simulated world: a session without a socket and without a thread of its own; and the
//! guest of this module's tests.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkq::{Disk, EngineHandle};

#[cfg(simulation)]
pub use super::abi::feature;
#[cfg(any(test, simulation))]
pub use super::harness::{Driver, Guest, Offer, USER_OFFSET};
#[cfg(simulation)]
pub use super::message::code;
pub use super::ring::RingSpec;

use super::channel::Incoming;
use super::control::take_wakeup;
use super::foreign::Foreign;
use super::message::{HEADER_BYTES, Header};
use super::session::Session;
use super::shared::Shared;
use super::status::VhostUserCounters;

/// The serial number of every device.
pub const SERIAL: &str = "simulated";

/// A device, and the front end's session with it.
pub struct Device {
    pub(super) shared: Arc<Shared>,
    session: Session,
}

/// A reply, and the descriptor that came with it.
pub type Reply = (Vec<u8>, Option<OwnedFd>);

impl Device {
    /// A front end connects to the device of `disk`, whose rings are all served by `engine`; drivers are
    /// shown as many queues.
    ///
    /// # Errors
    /// Why there can be no session.
    pub fn connect(disk: &Arc<Disk>, engine: &EngineHandle, queues: usize) -> Result<Device, blkq::Error> {
        let shared = Arc::new(Shared::new(disk, vec![engine.clone(); queues], SERIAL)?);
        shared.registry.admit("simulated");
        Ok(Device { session: Session::new(shared.clone(), "simulated")?, shared })
    }

    /// Does what a message, header and payload, asks for.
    ///
    /// # Errors
    /// That it breaks the protocol.
    ///
    /// # Panics
    /// If it has no header.
    pub fn handle(&mut self, message: &[u8], files: Vec<OwnedFd>) -> Result<Option<Reply>, String> {
        let (header, payload) = message.split_at(HEADER_BYTES);
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(header);
        let header = Header::parse(bytes).map_err(|refusal| refusal.0)?;
        let files = files.into_iter().map(Foreign::new).collect();
        let incoming = Incoming { header, payload: payload.to_vec(), files };
        let reply = self.session.handle(incoming).map_err(|refusal| refusal.0)?;
        Ok(reply.map(|reply| (reply.bytes, reply.file)))
    }

    /// The disk has another size.
    pub fn resized(&mut self) {
        self.shared.change_config();
        self.turn();
    }

    /// Does what the control thread does when something woke it.
    pub fn turn(&mut self) {
        take_wakeup(&self.shared, Some(&mut self.session));
    }

    /// The front end closes the connection. Returns the counters of the device.
    pub fn disconnect(self) -> VhostUserCounters {
        let Device { shared, session } = self;
        drop(session);
        shared.registry.counters()
    }

    /// Why a ring of it was rejected, if one was.
    pub fn rejection(&self) -> Option<String> {
        self.shared.registry.front_end()?.rings.into_iter().find_map(|ring| ring.rejected)
    }

    /// Counters of its rings.
    pub fn counters(&self) -> VhostUserCounters {
        self.shared.registry.counters()
    }
}
