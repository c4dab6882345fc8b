use crate::bio::Outline;
use crate::error::IoResult;
use crate::limits::MergeSide;
use crate::request::Request;
use crate::tags::Tag;

pub(super) const NS_PER_MS: u64 = 1_000_000;

/// A scheduler of one queue (`struct elevator_mq_ops`), used only by the owner of the queue. Flushes bypass
/// it. `requests` are always the requests of the queue, by tag. Times are in nanoseconds of one monotonic
/// clock, which a queue with a scheduler reads even if statistics are off.
pub(crate) trait Scheduler: Send {
    fn insert(&mut self, tag: Tag, requests: &[Request], now_ns: u64);

    /// Removes and returns the request to be dispatched next: a read only if `open[0]`, any other operation
    /// only if `open[1]`. `None` if nothing is queued, or if the queued requests must wait until a dispatched
    /// one completes.
    fn dispatch(&mut self, requests: &[Request], open: [bool; 2], now_ns: u64) -> Option<Tag>;

    /// Finds a queued request that `bio` continues without a gap, with the same operation. The caller
    /// decides whether flags and limits allow the merge.
    fn find_merge(&self, requests: &[Request], bio: &Outline) -> Option<(Tag, MergeSide)>;

    /// Called after a bio was merged into the request, which changes its start or its length.
    fn merged(&mut self, _tag: Tag, _requests: &[Request]) {}

    /// Finds the queued request that touches `tag` on `side` after a merge there: the request that follows it
    /// for the back, the one before it for the front. `None` if the scheduler does not join requests.
    fn find_neighbour(&self, _requests: &[Request], _tag: Tag, _side: MergeSide) -> Option<Tag> {
        None
    }

    /// Called after `gone`, the neighbour behind `kept`, was merged into `kept`. Both keep the earlier of
    /// their insertion times.
    fn joined(&mut self, kept: Tag, gone: Tag);

    fn holds(&self, tag: Tag) -> bool;

    /// Removes a request. Returns whether it was queued here.
    fn remove(&mut self, tag: Tag) -> bool;

    fn len(&self) -> usize;

    /// Called when the driver has failed the request, and the request is held instead of being completed
    /// (`requeue_request` in the kernel). If it is reissued, it does not pass through the scheduler again.
    fn requeued(&mut self, _tag: Tag) {}

    /// Called when the driver has completed these requests, some of which may have bypassed the scheduler.
    fn completed(&mut self, _completed: &[(Tag, IoResult)], _now_ns: u64) {}
}
