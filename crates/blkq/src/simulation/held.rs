//! The writes that were held and have not completed, kept for each thread of a simulated world: its clients
//! check by them that no flush overtakes one, and do not rely on the count that the flushes of a disk wait for.

use std::cell::RefCell;
use std::collections::BTreeMap;

thread_local! {
    static WRITES: RefCell<Writes> = const { RefCell::new(Writes { count: 0, held: BTreeMap::new() }) };
}

struct Writes {
    /// How often one was held.
    count: u64,
    /// The number of each, by its queue and tag.
    held: BTreeMap<(usize, u16), u64>,
}

/// The write with this tag of this queue is held, perhaps not for the first time.
pub(crate) fn write_held(queue: usize, tag: u16) {
    WRITES.with_borrow_mut(|writes| {
        writes.held.entry((queue, tag)).or_insert(writes.count);
        writes.count += 1;
    });
}

/// The request with this tag of this queue has completed.
pub(crate) fn request_completed(queue: usize, tag: u16) {
    WRITES.with_borrow_mut(|writes| writes.held.remove(&(queue, tag)));
}

/// The numbers of the writes that were held and have not completed; each has one of its own.
pub fn held_writes() -> Vec<u64> {
    WRITES.with_borrow(|writes| writes.held.values().copied().collect())
}

/// Another process begins, which holds nothing.
pub fn forget_held_writes() {
    WRITES.with_borrow_mut(|writes| writes.held.clear());
}
