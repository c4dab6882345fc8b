//! The interface of a scheduler.

use crate::bio::Operation;
use crate::error::IoResult;
use crate::limits::MergeSide;
use crate::request::Request;
use crate::sector::Sector;
use crate::tags::Tag;

/// A scheduler of one queue, used by the thread of that queue. Flushes never come here.
///
/// `requests` is the queue's tag set everywhere. Times are those of one monotonic clock,
/// in nanoseconds; a queue with a scheduler reads it even with statistics off.
pub(crate) trait Scheduler: Send {
    /// Takes a request.
    fn insert(&mut self, tag: Tag, requests: &[Request], now_ns: u64);

    /// Gives the request that is next to the driver: a read only if `open[0]`, any other only if
    /// `open[1]`. None if there is none, or if those queued have to wait until one that was dispatched
    /// completes.
    fn dispatch(&mut self, requests: &[Request], open: [bool; 2], now_ns: u64) -> Option<Tag>;

    /// A queued request that `sectors` from `sector` on would continue without a gap.
    /// Whether flags and limits allow the merge is the queue's decision.
    fn find_merge(
        &self,
        requests: &[Request],
        operation: Operation,
        sector: Sector,
        sectors: u64,
    ) -> Option<(Tag, MergeSide)>;

    /// A bio was merged into the request: its begin or length is another now.
    fn merged(&mut self, tag: Tag, requests: &[Request]);

    /// The queued request that `tag`, after a merge on `side`, now touches on that side:
    /// for the back the one after it, for the front the one before it.
    fn find_neighbour(&self, requests: &[Request], tag: Tag, side: MergeSide) -> Option<Tag>;

    /// `gone`, the neighbour after `kept`, became a part of it: the earlier of their
    /// times in the queue is that of both.
    fn joined(&mut self, kept: Tag, gone: Tag);

    /// Whether the request is queued here.
    fn holds(&self, tag: Tag) -> bool;

    /// Removes a request; whether it was queued.
    fn remove(&mut self, tag: Tag) -> bool;

    /// How many requests are queued.
    fn len(&self) -> usize;

    /// The driver has failed the request, and it is held instead of being completed (the kernel's `requeue_request`). If
    /// it is reissued, it does not come through here a second time.
    fn requeued(&mut self, _tag: Tag) {}

    /// The driver completed these requests, whether all of them came through here or not.
    fn completed(&mut self, _completed: &[(Tag, IoResult)], _now_ns: u64) {}
}
