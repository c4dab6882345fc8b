//! The scheduler slot of a queue: holds the requests that the driver has not yet got,
//! and says which is next. Without a scheduler requests go to the driver in the order
//! of submission.

use std::fmt;
use std::str::FromStr;

use crate::bio::Operation;
use crate::error::{Error, ErrorKind, IoResult};
use crate::request::{Request, Tag};
use crate::sector::Sector;

mod kyber;
mod mq_deadline;

use kyber::Kyber;
use mq_deadline::MqDeadline;

/// The schedulers that a disk can be set to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SchedulerKind {
    /// First come, first served: best where the order of positions does not matter.
    #[default]
    None,
    /// In the order of positions, reads before writes, with a deadline for each request.
    MqDeadline,
    /// First come, first served of each operation, with a share of the device for each
    /// that follows from the latencies seen.
    Kyber,
}

impl SchedulerKind {
    /// Every kind.
    pub const ALL: [SchedulerKind; 3] =
        [SchedulerKind::None, SchedulerKind::MqDeadline, SchedulerKind::Kyber];

    /// The name by which it is chosen.
    pub const fn name(self) -> &'static str {
        match self {
            SchedulerKind::None => "none",
            SchedulerKind::MqDeadline => "mq-deadline",
            SchedulerKind::Kyber => "kyber",
        }
    }

    /// A scheduler of this kind for a queue of `tags` requests.
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
            Error::new(ErrorKind::Invalid, format!("no scheduler is named {name:?}: there are {names}"))
        })
    }
}

/// On which side of a request a bio continues it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MergeSide {
    /// After its last sector.
    Back,
    /// Before its first sector.
    Front,
}

/// A scheduler of one queue, used by the thread of that queue. Flushes never come here.
///
/// `requests` is the queue's tag set everywhere. Times are those of one monotonic clock,
/// in nanoseconds; a queue with a scheduler reads it even with statistics off.
pub(crate) trait Scheduler: Send {
    /// Takes a request.
    fn insert(&mut self, tag: Tag, requests: &[Request], now_ns: u64);

    /// Gives the request that is next to the driver. None if there is none, or if those
    /// held have to wait until one that was given ends.
    fn dispatch(&mut self, requests: &[Request], now_ns: u64) -> Option<Tag>;

    /// A request held that `sectors` from `sector` on would continue without a gap.
    /// Whether flags and limits allow the merge is for the queue to say.
    fn find_merge(
        &self,
        requests: &[Request],
        operation: Operation,
        sector: Sector,
        sectors: u64,
    ) -> Option<(Tag, MergeSide)>;

    /// A bio was merged into the request: its begin or length is another now.
    fn merged(&mut self, tag: Tag, requests: &[Request]);

    /// The request held that `tag`, after a merge on `side`, now touches on that side:
    /// for the back the one after it, for the front the one before it.
    fn find_neighbour(&self, requests: &[Request], tag: Tag, side: MergeSide) -> Option<Tag>;

    /// `gone`, the neighbour after `kept`, became a part of it: the earlier of their
    /// times in the queue is that of both.
    fn joined(&mut self, kept: Tag, gone: Tag);

    /// Whether it holds the request.
    fn holds(&self, tag: Tag) -> bool;

    /// Gives up a request; whether it was held.
    fn remove(&mut self, tag: Tag) -> bool;

    /// How many requests are held.
    fn len(&self) -> usize;

    /// The driver ended these requests, whether all of them came through here or not.
    fn completed(&mut self, _completed: &[(Tag, IoResult)], _now_ns: u64) {}
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
