//! The schedulers of a queue (the kernel's elevators). A scheduler has the requests that the driver has not
//! taken yet, and selects the next one. Without one, requests reach the driver in the order of submission.

use std::fmt;
use std::str::FromStr;

use crate::bio::Outline;
use crate::enumeration::enumeration;
use crate::error::{Error, ErrorKind, IoResult};
use crate::limits::MergeSide;
use crate::request::Request;
use crate::tags::Tag;

mod kyber;
mod mq_deadline;

use kyber::Kyber;
use mq_deadline::MqDeadline;

const NS_PER_MS: u64 = 1_000_000;

enumeration! {
    /// The schedulers from which a disk can choose.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[non_exhaustive]
    pub enum SchedulerKind {
        /// First in, first out. The best choice if the order of positions does not matter to the device.
        #[default]
        None => "none",
        /// In order of position, reads before writes, with a deadline for each request.
        MqDeadline => "mq-deadline",
        /// First in, first out per operation. Each operation may have a number of requests in the driver, which
        /// follows from the measured latencies.
        Kyber => "kyber",
    }

    /// The name of the scheduler in settings, as in the kernel.
    pub const fn name(self) -> &'static str;
}

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

impl SchedulerKind {
    pub(crate) fn open(self, tags: usize) -> Option<Box<dyn Scheduler>> {
        match self {
            SchedulerKind::None => None,
            SchedulerKind::MqDeadline => Some(Box::new(MqDeadline::new(tags))),
            SchedulerKind::Kyber => Some(Box::new(Kyber::new(tags))),
        }
    }
}

impl fmt::Display for SchedulerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SchedulerKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<SchedulerKind, Error> {
        SchedulerKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = SchedulerKind::ALL.map(SchedulerKind::name).join(", ");
            Error::new(ErrorKind::Invalid, format!("unknown scheduler {name:?}; the schedulers are {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_found_by_name() {
        for kind in SchedulerKind::ALL {
            assert_eq!(kind.to_string().parse::<SchedulerKind>().map_err(|e| e.to_string()), Ok(kind));
            assert_eq!(kind.open(8).is_some(), kind != SchedulerKind::None);
        }
        let error = "bfq".parse::<SchedulerKind>().map_err(|e| e.kind());
        assert_eq!(error, Err(ErrorKind::Invalid));
    }
}
