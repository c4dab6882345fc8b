//! The items of several queues, in the order of their times.

use super::item::Item;

/// For how long an item may be written after its time: that of a cached clock, and of a thread that
/// does not run meanwhile.
const LATE_NS: u64 = 20_000_000;

/// Items that are not passed on yet.
#[derive(Default)]
pub struct Ordered {
    waiting: Vec<Item>,
}

impl Ordered {
    /// Where to append what was read: of each queue in its order.
    pub fn input(&mut self) -> &mut Vec<Item> {
        &mut self.waiting
    }

    /// Takes what nothing comes before any more, if all that was written until `now_ns` is there; all of it
    /// without one.
    pub fn take(&mut self, now_ns: Option<u64>) -> Vec<Item> {
        // Stable: what a queue did at one time stays in its order.
        self.waiting.sort_by_key(|item| item.time_ns);
        let until_ns = now_ns.map_or(u64::MAX, |now_ns| now_ns.saturating_sub(LATE_NS));
        let count = match now_ns {
            Some(_) => self.waiting.partition_point(|item| item.time_ns < until_ns),
            None => self.waiting.len(),
        };
        self.waiting.drain(..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use blkq::trace::EventKind;

    use super::super::item::tests::{event, item};
    use super::super::item::{Item, ItemKind};
    use super::*;

    #[test]
    fn items_of_several_queues_come_in_the_order_of_their_times() {
        let mut ordered = Ordered::default();
        let at = |queue, time_ns| item(queue, event(EventKind::Queue, time_ns));
        let lost = Item { queue: 1, time_ns: 3, kind: ItemKind::Lost(2) };
        *ordered.input() = vec![at(0, 1), at(0, 4), at(0, LATE_NS + 7), lost, at(1, 3), at(1, 4)];
        let taken = ordered.take(Some(2 * LATE_NS + 5));
        assert_eq!(taken, [at(0, 1), lost, at(1, 3), at(0, 4), at(1, 4)]);
        ordered.input().push(at(1, LATE_NS + 6));
        assert_eq!(ordered.take(None), [at(1, LATE_NS + 6), at(0, LATE_NS + 7)]);
    }
}
