//! The connection to a daemon that traces its device, and the rings that it writes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use blkq::ErrorKind;
use blkq::trace::TraceMemory;

use crate::control::{Dialogue, Request, ask};
use crate::failure::{Failure, Outcome};
use crate::state::StateDir;

use super::rings::Rings;

/// How long a daemon may take to begin.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A trace, which its daemon stops when this is dropped.
pub struct TraceConnection {
    dialogue: Dialogue,
    rings: Rings,
}

impl TraceConnection {
    /// Has the daemon of `name` trace its device, with so many bytes for the events of each queue.
    ///
    /// # Errors
    /// If there is no such device, it is traced already, or its daemon does not know how.
    pub fn open(dir: &StateDir, name: &str, ring_bytes: u64) -> Outcome<TraceConnection> {
        // A daemon that died is reported as every command does.
        ask::<()>(dir, name, &Request::Ping {})?;
        let (dialogue, (), memory) =
            Dialogue::begin_with_file(dir, name, &Request::Trace { ring_bytes }, TIMEOUT)?;
        let memory = memory.ok_or_else(|| Failure::new(format!("{name}: its daemon sent no memory")))?;
        let memory = TraceMemory::open(memory)
            .map_err(|e| Failure::of(e, ErrorKind::Unsupported, "its daemon is older: blkq upgrade"))?;
        Ok(TraceConnection { dialogue, rings: Rings::new(&memory) })
    }

    /// The rings that the daemon writes: also what it had written when it closed the connection.
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
