//! The writes of a simulation that were held after an error and have not completed. The simulated clients
//! check with this list that no flush overtakes such a write, independently of the count on which the flushes
//! of a disk wait. Each thread has its own list, because each has its own simulated world.

use std::cell::RefCell;
use std::collections::BTreeMap;

thread_local! {
    static WRITES: RefCell<Writes> = const { RefCell::new(Writes { count: 0, held: BTreeMap::new() }) };
}

struct Writes {
    count: u64,
    /// The number of each held write, by queue and tag.
    held: BTreeMap<(usize, u16), u64>,
}

/// Records that the write with this tag of this queue is held, possibly again.
pub(crate) fn write_held(queue: usize, tag: u16) {
    WRITES.with_borrow_mut(|writes| {
        writes.held.entry((queue, tag)).or_insert(writes.count);
        writes.count += 1;
    });
}

pub(crate) fn request_completed(queue: usize, tag: u16) {
    WRITES.with_borrow_mut(|writes| writes.held.remove(&(queue, tag)));
}

/// The numbers of the writes that were held and have not completed. Each number is unique.
pub fn held_writes() -> Vec<u64> {
    WRITES.with_borrow(|writes| writes.held.values().copied().collect())
}

/// Clears the list, because another simulated process starts.
pub fn forget_held_writes() {
    WRITES.with_borrow_mut(|writes| writes.held.clear());
}
