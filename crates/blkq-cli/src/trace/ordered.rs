//! Merges the items of several queues by time. The number of waiting items is bounded, however far the reader
//! lags: it always reads the queue that lags most, and all items up to that queue's position are passed on.

use blkq::trace::PAGE_EVENTS_MAX;

use super::item::Item;

/// How late an item may be written after its time stamp, in nanoseconds: a cached clock may be old, and the
/// thread may have been preempted.
const LATE_NS: u64 = 20_000_000;

/// Maximum number of waiting items. Beyond it the older half is passed on, even if earlier items may follow.
pub const WAITING_MAX: usize = 1 << 18;

/// Maximum number of items of a page: its events, and the gap before them.
const PAGE_ITEMS_MAX: usize = PAGE_EVENTS_MAX + 1;

/// The items that have not been passed on yet.
pub struct Ordered {
    waiting: Vec<Item>,
    /// For each queue, the time up to which all its items have been added.
    read_until_ns: Vec<u64>,
}

impl Ordered {
    pub fn new(queues: usize) -> Ordered {
        Ordered { waiting: Vec::new(), read_until_ns: vec![0; queues] }
    }

    /// The queue that lags most, if items that were written before `now_ns` are still to be read.
    pub fn most_lagging_queue(&self, now_ns: u64) -> Option<usize> {
        let (queue, until_ns) =
            self.read_until_ns.iter().enumerate().min_by_key(|(_, until_ns)| **until_ns)?;
        (*until_ns < now_ns).then_some(queue)
    }

    /// Whether there is no room for another page.
    pub fn is_full(&self) -> bool {
        self.waiting.len() + PAGE_ITEMS_MAX > WAITING_MAX
    }

    /// Adds the items of the next page of a queue, in order. Unless there are `more`, all items of the queue
    /// that were written before `now_ns` have been added afterwards.
    pub fn add(&mut self, queue: usize, items: impl Iterator<Item = Item>, now_ns: u64, more: bool) {
        let begin = self.waiting.len();
        self.waiting.extend(items);
        let newest_ns = self.waiting[begin..].iter().map(|item| item.time_ns).max().unwrap_or(0);
        let until_ns = &mut self.read_until_ns[queue];
        // An item is written after its time, and its time cannot be in the future.
        *until_ns = if more { (*until_ns).max(newest_ns).min(now_ns) } else { now_ns };
    }

    /// Removes and returns the items that no later item can precede. If there is no room, at least half of
    /// all items.
    pub fn take(&mut self) -> Vec<Item> {
        // The sort is stable: items of a queue with equal times keep their order.
        self.waiting.sort_by_key(|item| item.time_ns);
        let until_ns = self.read_until_ns.iter().min().map_or(0, |until_ns| until_ns.saturating_sub(LATE_NS));
        let complete = self.waiting.partition_point(|item| item.time_ns < until_ns);
        let surplus = if self.is_full() { self.waiting.len() / 2 } else { 0 };
        self.waiting.drain(..complete.max(surplus)).collect()
    }

    pub fn take_all(&mut self) -> Vec<Item> {
        self.waiting.sort_by_key(|item| item.time_ns);
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use blkq::trace::EventKind;

    use super::super::item::ItemKind;
    use super::super::item::tests::{event, item};
    use super::*;

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
