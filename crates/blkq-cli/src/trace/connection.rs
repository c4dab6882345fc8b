//! The connection to a daemon that traces its device, and the rings that the daemon fills.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use blkq::ErrorKind;
use blkq::trace::TraceMemory;
use blkq_protocol::control::{Dialogue, Request, ask};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::state::StateDir;

use super::rings::Rings;

/// How long to wait until the daemon has started the trace.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A running trace. The daemon stops it when this is dropped.
pub struct TraceConnection {
    dialogue: Dialogue,
    rings: Rings,
}

impl TraceConnection {
    /// Makes the daemon of `name` trace its device, with `ring_bytes` bytes for the events of each queue.
    /// Fails if there is no such device, if it is already being traced, or if the daemon does not support
    /// this trace.
    pub fn open(dir: &StateDir, name: &str, ring_bytes: u64) -> Outcome<TraceConnection> {
        // This reports a dead daemon in the same way as other commands.
        ask::<()>(dir, name, &Request::Ping {})?;
        let (dialogue, (), memory) =
            Dialogue::begin_with_file(dir, name, &Request::Trace { ring_bytes }, TIMEOUT)?;
        let memory = memory.ok_or_else(|| Failure::new(format!("{name}: the daemon sent no memory")))?;
        let memory = TraceMemory::open(memory).map_err(|e| {
            Failure::of(
                e,
                ErrorKind::Unsupported,
                "the daemon is older than this program: run `blkq upgrade`",
            )
        })?;
        Ok(TraceConnection { dialogue, rings: Rings::new(&memory) })
    }

    /// The rings. They can still be read after the daemon has closed the connection.
    pub fn rings(&mut self) -> &mut Rings {
        &mut self.rings
    }
}

/// Readable when the daemon has closed the connection.
impl AsFd for TraceConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dialogue.as_fd()
    }
}
