use crate::clock::ClockMode;
use crate::sched::SchedulerKind;

/// Default number of requests per queue (BLKDEV_DEFAULT_RQ; the loop driver's depth).
pub const DEPTH_DEFAULT: u16 = 128;
/// Largest number of requests per queue (BLK_MQ_MAX_DEPTH).
pub const DEPTH_MAX: u16 = 10240;

/// A setting of a disk with its new value, for [`Disk::set`](crate::Disk::set). Settings of the driver are
/// [`DriverSetting`](crate::DriverSetting)s.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Setting {
    /// A new value for [`Settings::depth`], from 1 to [`Disk::depth_max`](crate::Disk::depth_max).
    Depth(u16),
    /// A new value for [`Settings::scheduler`].
    Scheduler(SchedulerKind),
    /// A new value for [`Settings::merge`].
    Merge(bool),
    /// A new value for [`Settings::batching`].
    Batching(bool),
    /// A new value for [`Settings::early_submission`].
    EarlySubmission(bool),
    /// A new value for [`Settings::iostats`].
    Iostats(bool),
    /// A new value for [`Settings::clock`].
    Clock(ClockMode),
    /// Whether writes are rejected ([`QueueLimits::read_only`](crate::QueueLimits::read_only)).
    ReadOnly(bool),
}

/// The settings in force. All of them can be changed while I/O runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// The largest number of requests per queue that the driver has at the same time.
    pub depth: u16,
    /// The scheduler, which orders requests before the driver gets them.
    pub scheduler: SchedulerKind,
    /// Whether neighbouring bios are merged.
    pub merge: bool,
    /// Whether submitters get requests in batches when the device is full.
    pub batching: bool,
    /// Whether a batch of I/O enters the kernel a few requests at a time, so that the device starts while the
    /// rest is prepared. If false, everything is submitted together at the end of a turn.
    pub early_submission: bool,
    /// Whether I/O is counted and timed.
    pub iostats: bool,
    /// How time stamps are taken.
    pub clock: ClockMode,
}

impl Settings {
    /// Requests per queue: the depth, or with a scheduler twice the depth (at most 256), so that the
    /// scheduler has requests to choose from (`q->nr_requests` in block/blk-mq-sched.c).
    pub fn requests(&self) -> u16 {
        match self.scheduler {
            SchedulerKind::None => self.depth,
            _ => self.depth.max(2 * self.depth.min(128)),
        }
    }
    /// Requests that all submitters together may have (`nr_requests`): the number of all tags.
    pub(crate) fn gate_requests(&self, queues: usize, shared_tags: bool) -> u32 {
        let sets = if shared_tags { 1 } else { queues as u32 };
        u32::from(self.requests()) * sets
    }

    /// Tags with which a disk of this depth is built. They leave room for a scheduler and a larger depth.
    pub(crate) fn tags(&self) -> u16 {
        self.depth.saturating_mul(2).clamp(256, DEPTH_MAX)
    }
}
