//! The settings that can be changed on a live disk.

use crate::clock::ClockMode;
use crate::sched::SchedulerKind;

/// Requests of a queue by default (BLKDEV_DEFAULT_RQ, and loop's depth).
pub const DEPTH_DEFAULT: u16 = 128;
/// Most requests of a queue (BLK_MQ_MAX_DEPTH).
pub const DEPTH_MAX: u16 = 10240;

/// A setting of a disk with its new value, for [`Disk::set`](crate::Disk::set). Settings of a driver's
/// own are [`DriverSetting`](crate::DriverSetting)s.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Setting {
    /// [`Settings::depth`], from 1 to [`Disk::depth_max`](crate::Disk::depth_max).
    Depth(u16),
    /// [`Settings::scheduler`].
    Scheduler(SchedulerKind),
    /// [`Settings::merge`].
    Merge(bool),
    /// [`Settings::batching`].
    Batching(bool),
    /// [`Settings::early_submission`].
    EarlySubmission(bool),
    /// [`Settings::iostats`].
    Iostats(bool),
    /// [`Settings::clock`].
    Clock(ClockMode),
    /// Whether writes are refused ([`QueueLimits::read_only`](crate::QueueLimits::read_only)).
    ReadOnly(bool),
}

/// The settings in force on a disk; all can be changed while I/O runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Requests that the driver gets at once, per queue.
    pub depth: u16,
    /// The scheduler that orders requests before the driver.
    pub scheduler: SchedulerKind,
    /// Whether neighbours merge.
    pub merge: bool,
    /// Whether submitters get requests in batches when the device is full.
    pub batching: bool,
    /// Whether a driver's I/O reaches the kernel a few at a time, for the device to begin while the rest of
    /// a batch is prepared; else all at once, when a turn is over.
    pub early_submission: bool,
    /// Whether I/O is counted and timed.
    pub iostats: bool,
    /// How time stamps are taken.
    pub clock: ClockMode,
}

impl Settings {
    /// Requests per queue: the depth, or with a scheduler twice that (at most 256), so
    /// that it has something to choose from (`q->nr_requests` in block/blk-mq-sched.c).
    pub fn requests(&self) -> u16 {
        match self.scheduler {
            SchedulerKind::None => self.depth,
            _ => self.depth.max(2 * self.depth.min(128)),
        }
    }
    /// Requests that all submitters together may have (`nr_requests`): as many as there are tags.
    pub(crate) fn gate_requests(&self, queues: usize, shared_tags: bool) -> u32 {
        let sets = if shared_tags { 1 } else { queues as u32 };
        u32::from(self.requests()) * sets
    }

    /// Tags that a disk of this depth is made with: room for a scheduler and for growing live.
    pub(crate) fn tags(&self) -> u16 {
        self.depth.saturating_mul(2).clamp(256, DEPTH_MAX)
    }
}
