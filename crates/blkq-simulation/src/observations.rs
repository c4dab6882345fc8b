//! Records the requests that queues of each thread admit, and the writes that they hold. The simulated
//! clients check with the held writes that no flush overtakes such a write, independently of the count on which
//! the flushes of a disk wait.

use std::cell::RefCell;
use std::collections::BTreeMap;

use blkq::Operation;

thread_local! {
    static ADMISSIONS: RefCell<Vec<Admission>> = const { RefCell::new(Vec::new()) };
    static WRITES: RefCell<Writes> = const { RefCell::new(Writes { count: 0, held: BTreeMap::new() }) };
}

/// A request that was admitted and charged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Admission {
    /// The operation of the request.
    pub operation: Operation,
    /// The length of the request in bytes.
    pub bytes: u64,
    /// When the request was admitted, in nanoseconds of the world's clock.
    pub at_ns: u64,
}

/// Returns the requests of this thread's disks that were admitted since the last call, in order.
pub fn take_admissions() -> Vec<Admission> {
    ADMISSIONS.take()
}

pub(crate) fn admitted(operation: u8, bytes: u64, at_ns: u64) {
    let operation = Operation::ALL[usize::from(operation)];
    ADMISSIONS.with_borrow_mut(|all| all.push(Admission { operation, bytes, at_ns }));
}

struct Writes {
    count: u64,
    /// The number of each held write, by queue and tag.
    held: BTreeMap<(usize, u16), u64>,
}

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
