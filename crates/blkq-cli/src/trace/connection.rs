//! The connection to a daemon that traces its device, and the rings that it writes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use blkq::ErrorKind;
use blkq::trace::{TraceEvent, TraceMemory, TraceReader};

use crate::control::{Dialogue, Request, ask};
use crate::failure::{Failure, Outcome};
use crate::state::StateDir;

use super::item::{Item, What};

/// How long a daemon may take to begin.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A trace, which its daemon stops when this is dropped.
pub struct TraceConnection {
    dialogue: Dialogue,
    readers: Vec<TraceReader>,
    events: Vec<TraceEvent>,
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
        let readers =
            (0..memory.queue_count()).filter_map(|queue| TraceReader::new(&memory, queue)).collect();
        Ok(TraceConnection { dialogue, readers, events: Vec::new() })
    }

    /// How many hardware queues the device has.
    pub fn queue_count(&self) -> usize {
        self.readers.len()
    }

    /// Appends what came since the last time: of each queue in its order, one after the other.
    pub fn read(&mut self, items: &mut Vec<Item>) {
        for (queue, reader) in self.readers.iter_mut().enumerate() {
            let lost = reader.read(&mut self.events);
            let first_ns = self.events.first().map_or(u64::MAX, |event| event.time_ns);
            if lost > 0 {
                items.push(Item { queue, time_ns: first_ns, what: What::Lost(lost) });
            }
            let item = |event: TraceEvent| Item { queue, time_ns: event.time_ns, what: What::Event(event) };
            items.extend(self.events.drain(..).map(item));
        }
    }
}

/// Readable when the daemon has closed the connection.
impl AsFd for TraceConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dialogue.as_fd()
    }
}
