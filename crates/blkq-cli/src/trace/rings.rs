//! Makes a daemon trace its device, reads the rings of the trace, a bounded amount at a time, and merges the items of
//! several queues by time.

use std::sync::Arc;
use std::time::Duration;

use blkq::ErrorKind;
use blkq::trace::{PAGE_EVENTS_MAX, TraceEvent, TraceMemory, TraceReader};
use blkq_protocol::control::{Dialogue, Request, ask};
use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::state::StateDir;

use super::item::{Item, ItemKind};

/// How long to wait until the daemon has started the trace.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How late an item may be written after its time stamp, in nanoseconds: a cached clock may be old, and the
/// thread may have been preempted.
const LATE_NS: u64 = 20_000_000;

/// Maximum number of waiting items. Beyond it the older half is passed on, even if earlier items may follow.
const WAITING_MAX: usize = 1 << 18;

/// Maximum number of items of a page: its events, and the gap before them.
const PAGE_ITEMS_MAX: usize = PAGE_EVENTS_MAX + 1;

pub struct Rings {
    queues: Vec<QueueRing>,
    ordered: Ordered,
    /// A buffer for the events of a page.
    events: Vec<TraceEvent>,
}

struct QueueRing {
    reader: TraceReader,
    /// Number of events that are missing before the next one.
    lost: u64,
}

impl Rings {
    /// Makes the daemon of `name` trace its device, with `ring_bytes` bytes for the events of each queue. The
    /// daemon stops the trace when the dialogue is dropped, and closes the connection when it exits; the rings
    /// can still be read afterwards. Fails if there is no such device, if it is already being traced, or if the
    /// daemon does not support this trace.
    pub fn open(dir: &StateDir, name: &str, ring_bytes: u64) -> Outcome<(Dialogue, Rings)> {
        // This reports a dead daemon in the same way as other commands.
        ask::<()>(dir, name, &Request::Ping {})?;
        let (dialogue, (), memory) =
            Dialogue::begin_with_file(dir, name, &Request::Trace { ring_bytes }, TIMEOUT)?;
        let memory = memory.ok_or_else(|| Failure::new(format!("{name}: the daemon sent no memory")))?;
        let older = "the daemon is older than this program: run `blkq upgrade`";
        let memory = TraceMemory::open(memory).map_err(|e| Failure::of(e, ErrorKind::Unsupported, older))?;
        Ok((dialogue, Rings::new(&memory)))
    }

    /// Reads the rings in `memory` from their first events on.
    fn new(memory: &Arc<TraceMemory>) -> Rings {
        let readers = (0..memory.queue_count()).filter_map(|queue| TraceReader::new(memory, queue));
        let queues: Vec<_> = readers.map(|reader| QueueRing { reader, lost: 0 }).collect();
        Rings { ordered: Ordered::new(queues.len()), queues, events: Vec::new() }
    }

    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Reads what was written before `now_ns`, or a part of it. `now_ns` must not be in the future. Returns
    /// the items that no later item can precede, and whether there is more to read now.
    pub fn read(&mut self, now_ns: u64) -> (Vec<Item>, bool) {
        let mut lagging = self.ordered.most_lagging_queue(now_ns);
        while let Some(queue) = lagging
            && !self.ordered.is_full()
        {
            let QueueRing { reader, lost } = &mut self.queues[queue];
            let page = reader.read(&mut self.events);
            *lost += page.lost;
            self.ordered.add(queue, items_of(queue, lost, &mut self.events), now_ns, page.more);
            lagging = self.ordered.most_lagging_queue(now_ns);
        }
        (self.ordered.take(), lagging.is_some())
    }

    /// Returns all remaining items, and a gap for each queue whose last events are missing.
    pub fn finish(&mut self) -> Vec<Item> {
        let mut items = self.ordered.take_all();
        for (queue, QueueRing { lost, .. }) in self.queues.iter_mut().enumerate() {
            if *lost > 0 {
                items.push(Item { queue, time_ns: u64::MAX, kind: ItemKind::Lost(std::mem::take(lost)) });
            }
        }
        items
    }
}

/// The `events` of a queue, preceded by a gap of `lost` events. A gap has the time of the next event; if
/// there is none, the gap is kept for later.
fn items_of(queue: usize, lost: &mut u64, events: &mut Vec<TraceEvent>) -> impl Iterator<Item = Item> {
    let gap = events.first().filter(|_| *lost > 0).map(|first| Item {
        queue,
        time_ns: first.time_ns,
        kind: ItemKind::Lost(std::mem::take(lost)),
    });
    let item = move |event: TraceEvent| Item { queue, time_ns: event.time_ns, kind: ItemKind::Event(event) };
    gap.into_iter().chain(events.drain(..).map(item))
}

/// The items of all queues that have not been passed on yet. Their number is bounded, however far the reader lags: it
/// always reads the queue that lags most, and all items up to that queue's position are passed on.
struct Ordered {
    waiting: Vec<Item>,
    /// For each queue, the time up to which all its items have been added.
    read_until_ns: Vec<u64>,
}

impl Ordered {
    fn new(queues: usize) -> Ordered {
        Ordered { waiting: Vec::new(), read_until_ns: vec![0; queues] }
    }

    /// The queue that lags most, if items that were written before `now_ns` are still to be read.
    fn most_lagging_queue(&self, now_ns: u64) -> Option<usize> {
        let (queue, until_ns) =
            self.read_until_ns.iter().enumerate().min_by_key(|(_, until_ns)| **until_ns)?;
        (*until_ns < now_ns).then_some(queue)
    }

    /// Whether there is no room for another page.
    fn is_full(&self) -> bool {
        self.waiting.len() + PAGE_ITEMS_MAX > WAITING_MAX
    }

    /// Adds the items of the next page of a queue, in order. Unless there are `more`, all items of the queue
    /// that were written before `now_ns` have been added afterwards.
    fn add(&mut self, queue: usize, items: impl Iterator<Item = Item>, now_ns: u64, more: bool) {
        let begin = self.waiting.len();
        self.waiting.extend(items);
        let newest_ns = self.waiting[begin..].iter().map(|item| item.time_ns).max().unwrap_or(0);
        let until_ns = &mut self.read_until_ns[queue];
        // An item is written after its time, and its time cannot be in the future.
        *until_ns = if more { (*until_ns).max(newest_ns).min(now_ns) } else { now_ns };
    }

    /// Removes and returns the items that no later item can precede. If there is no room, at least half of
    /// all items.
    fn take(&mut self) -> Vec<Item> {
        // The sort is stable: items of a queue with equal times keep their order.
        self.waiting.sort_by_key(|item| item.time_ns);
        let until_ns = self.read_until_ns.iter().min().map_or(0, |until_ns| until_ns.saturating_sub(LATE_NS));
        let complete = self.waiting.partition_point(|item| item.time_ns < until_ns);
        let surplus = if self.is_full() { self.waiting.len() / 2 } else { 0 };
        self.waiting.drain(..complete.max(surplus)).collect()
    }

    fn take_all(&mut self) -> Vec<Item> {
        self.waiting.sort_by_key(|item| item.time_ns);
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use blkq::clock::monotonic_ns;
    use blkq::drivers::null::{Null, NullOptions};
    use blkq::trace::EventKind;
    use blkq::{Bio, Disk, IoBuffer, LocalQueue, Sector};

    use super::super::item::tests::{event, item};
    use super::*;

    /// Submits `ios` reads. Each one is plugged on its own and traced as six events.
    fn read_blocks(queue: &mut LocalQueue, ios: usize) {
        let mut buffer = IoBuffer::zeroed(512);
        for _ in 0..ios {
            queue.submit(Bio::read(Sector(8), buffer, 0)).unwrap();
            while queue.in_flight() > 0 {
                queue.poll();
            }
            buffer = queue.completions().next().unwrap().data.into_buffer().unwrap();
        }
    }

    #[test]
    fn a_reader_far_behind_takes_all_events_in_bounded_parts() {
        let disk =
            Disk::builder(Box::new(Null::new(NullOptions::new(1 << 20)).unwrap())).queues(2).build().unwrap();
        let mut queues = [0, 1].map(|queue| disk.open_queue(queue).unwrap());
        let memory = TraceMemory::new(2, 16 << 20).unwrap();
        queues.iter_mut().for_each(|queue| queue.trace(Some(&memory)));
        let ios = WAITING_MAX / 3;
        read_blocks(&mut queues[0], ios);
        read_blocks(&mut queues[1], 1);
        read_blocks(&mut queues[0], 1);
        let mut rings = Rings::new(&memory);
        let (mut events, mut last_ns, mut batches) = (0, 0, 0);
        let mut check = |items: &[Item]| {
            assert!(items.len() <= WAITING_MAX, "{}", items.len());
            assert!(items.iter().all(|item| item.event().is_some()), "something is lost");
            assert!(
                items.is_sorted_by_key(|item| item.time_ns)
                    && items.first().is_none_or(|item| item.time_ns >= last_ns)
            );
            last_ns = items.last().map_or(last_ns, |item| item.time_ns);
            events += items.len();
        };
        let now_ns = monotonic_ns();
        loop {
            let (items, more) = rings.read(now_ns);
            check(&items);
            batches += 1;
            if !more {
                break;
            }
        }
        check(&rings.finish());
        assert_eq!(events, (ios + 2) * 6);
        assert!(batches > 1, "the reader did not lag");
    }

    #[test]
    fn a_gap_comes_before_the_next_event_of_its_queue() {
        let mut lost = 5;
        assert_eq!(items_of(1, &mut lost, &mut Vec::new()).count(), 0);
        assert_eq!(lost, 5, "the gap has no time yet");
        let next = event(EventKind::Queue, 7);
        let items: Vec<_> =
            items_of(1, &mut lost, &mut vec![next]).chain(items_of(1, &mut 0, &mut vec![next])).collect();
        let gap = Item { queue: 1, time_ns: 7, kind: ItemKind::Lost(5) };
        assert_eq!(items, [gap, item(1, next), item(1, next)]);
    }

    fn at(queue: usize, time_ns: u64) -> Item {
        item(queue, event(EventKind::Queue, time_ns))
    }

    #[test]
    fn items_of_several_queues_are_ordered_by_time() {
        let mut ordered = Ordered::new(2);
        let lost = Item { queue: 1, time_ns: 3, kind: ItemKind::Lost(2) };
        let now_ns = 2 * LATE_NS + 5;
        ordered.add(0, [at(0, 1), at(0, 4), at(0, LATE_NS + 7)].into_iter(), now_ns, false);
        ordered.add(1, [lost, at(1, 3), at(1, 4)].into_iter(), now_ns, false);
        assert_eq!(ordered.most_lagging_queue(now_ns), None);
        assert_eq!(ordered.take(), [at(0, 1), lost, at(1, 3), at(0, 4), at(1, 4)]);
        ordered.add(1, [at(1, LATE_NS + 6)].into_iter(), now_ns + 1, false);
        assert_eq!(ordered.take_all(), [at(1, LATE_NS + 6), at(0, LATE_NS + 7)]);
    }

    #[test]
    fn items_wait_for_the_queue_that_lags_most() {
        let (mut ordered, now_ns) = (Ordered::new(2), 10 * LATE_NS);
        ordered.add(0, [at(0, 1), at(0, 6 * LATE_NS)].into_iter(), now_ns, true);
        ordered.add(1, [at(1, 2), at(1, 3 * LATE_NS)].into_iter(), now_ns, true);
        assert_eq!(ordered.take(), [at(0, 1), at(1, 2)]);
        assert_eq!(ordered.most_lagging_queue(now_ns), Some(1));
        ordered.add(1, [at(1, 4 * LATE_NS)].into_iter(), now_ns, false);
        assert_eq!(ordered.most_lagging_queue(now_ns), Some(0));
        assert_eq!(ordered.take(), [at(1, 3 * LATE_NS), at(1, 4 * LATE_NS)]);
    }

    #[test]
    fn the_older_half_is_passed_on_before_too_many_items_wait() {
        let (mut ordered, now_ns) = (Ordered::new(2), 10 * LATE_NS);
        for _ in 0..WAITING_MAX / 1000 {
            ordered.add(0, (0..1000).map(|_| at(0, LATE_NS)), now_ns, true);
        }
        let waiting = ordered.waiting.len();
        assert_eq!(ordered.take().len(), waiting / 2, "queue 1 has not been read yet");
        assert!(!ordered.is_full() && ordered.take().is_empty());
    }

    #[test]
    fn a_time_in_the_future_does_not_stop_a_queue() {
        let mut ordered = Ordered::new(1);
        ordered.add(0, [at(0, u64::MAX)].into_iter(), LATE_NS, true);
        assert_eq!(ordered.most_lagging_queue(LATE_NS + 1), Some(0));
    }
}
