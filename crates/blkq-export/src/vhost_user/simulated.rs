//! A device of the simulated world: a session without a socket and without a thread of its own; and the
//! guest of this module's tests.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blkq::{Disk, EngineHandle};
use rustix::event::{EventfdFlags, eventfd};

pub use super::harness::{Driver, Guest, Offer, USER_OFFSET};
pub use super::ring::RingSpec;

use super::channel::Incoming;
use super::foreign::Foreign;
use super::message::{HEADER_BYTES, Header};
use super::session::Session;
use super::shared::Shared;
use super::status::{Registry, VhostUserCounters};

/// The serial number of every device.
pub const SERIAL: &str = "simulated";

/// A device, and the front end's session with it.
pub struct Device {
    shared: Arc<Shared>,
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
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| blkq::Error::system("eventfd", errno))?;
        let shared = Arc::new(Shared {
            disk: disk.clone(),
            engines: vec![engine.clone(); queues],
            serial: SERIAL.into(),
            address: None,
            registry: Registry::new(None, None),
            register_memory: None,
            wake: Arc::new(wake),
            stopping: AtomicBool::new(false),
            config_changed: AtomicBool::new(false),
        });
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
        self.session.config_changed();
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
