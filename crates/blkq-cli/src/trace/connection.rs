//! The connection to a daemon that traces its device, and the rings that it writes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use blkq::ErrorKind;
use blkq::trace::{TraceEvent, TraceMemory, TraceReader};

use crate::control::{Dialogue, Request, ask};
use crate::failure::{Failure, Outcome};
use crate::state::StateDir;

use super::item::{Item, ItemKind};

/// How long a daemon may take to begin.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A trace, which its daemon stops when this is dropped.
pub struct TraceConnection {
    dialogue: Dialogue,
    readers: Vec<TraceReader>,
    /// How many events are missing before the next one of each queue.
    lost: Vec<u64>,
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
        let readers: Vec<_> =
            (0..memory.queue_count()).filter_map(|queue| TraceReader::new(&memory, queue)).collect();
        let lost = vec![0; readers.len()];
        Ok(TraceConnection { dialogue, readers, lost, events: Vec::new() })
    }

    /// How many hardware queues the device has.
    pub fn queue_count(&self) -> usize {
        self.readers.len()
    }

    /// Appends what came since the last time: of each queue in its order, one after the other.
    pub fn read(&mut self, items: &mut Vec<Item>) {
        for (queue, (reader, lost)) in self.readers.iter_mut().zip(&mut self.lost).enumerate() {
            *lost += reader.read(&mut self.events);
            append(queue, lost, &mut self.events, items);
        }
    }

    /// Appends what is missing behind the last events.
    pub fn finish(&mut self, items: &mut Vec<Item>) {
        for (queue, lost) in self.lost.iter_mut().enumerate().filter(|(_, lost)| **lost > 0) {
            items.push(Item { queue, time_ns: u64::MAX, kind: ItemKind::Lost(std::mem::take(lost)) });
        }
    }
}

/// Appends the events of a queue, behind the gap of `lost` ones; that has no time, and waits, if there are none.
fn append(queue: usize, lost: &mut u64, events: &mut Vec<TraceEvent>, items: &mut Vec<Item>) {
    if let Some(first) = events.first()
        && *lost > 0
    {
        let missing = ItemKind::Lost(std::mem::take(lost));
        items.push(Item { queue, time_ns: first.time_ns, kind: missing });
    }
    let item = |event: TraceEvent| Item { queue, time_ns: event.time_ns, kind: ItemKind::Event(event) };
    items.extend(events.drain(..).map(item));
}

/// Readable when the daemon has closed the connection.
impl AsFd for TraceConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dialogue.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use blkq::trace::EventKind;

    use super::super::item::tests::{event, item};
    use super::*;

    #[test]
    fn a_gap_comes_before_the_next_event_of_its_queue() {
        let (mut lost, mut items) = (5, Vec::new());
        append(1, &mut lost, &mut Vec::new(), &mut items);
        assert_eq!((lost, items.len()), (5, 0), "it has no time yet");
        let next = event(EventKind::Queue, 7);
        append(1, &mut lost, &mut vec![next], &mut items);
        append(1, &mut lost, &mut vec![next], &mut items);
        let gap = Item { queue: 1, time_ns: 7, kind: ItemKind::Lost(5) };
        assert_eq!(items, [gap, item(1, next), item(1, next)]);
    }
}
