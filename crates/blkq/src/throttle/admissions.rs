use std::cell::RefCell;

use crate::bio::Operation;
use crate::request::Request;
use crate::tags::Tag;

thread_local! {
    static ADMISSIONS: RefCell<Vec<Admission>> = const { RefCell::new(Vec::new()) };
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

pub(crate) fn admitted(batch: &[Tag], requests: &[Request]) {
    let at_ns = crate::simulation::world().now_ns();
    let admission = |tag: &Tag| {
        let request = &requests[tag.index()];
        Admission { operation: request.operation(), bytes: request.bytes(), at_ns }
    };
    ADMISSIONS.with_borrow_mut(|all| all.extend(batch.iter().map(admission)));
}
