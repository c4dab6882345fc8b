//! Detects I/O that hangs: which requests have been in flight for too long, where they are, and how they
//! complete in the end. Unlike the kernel's request timeout (block/blk-timeout.c), this only reports: nothing
//! is aborted or retried.
//!
//! The data path does no work for this. A watcher asks the owner of a queue from time to time to scan its
//! requests, and passes the time of its own clock. The scan runs on the owner's thread, so it needs no lock
//! and sees no request half changed. With iostats, requests already carry their start time, for the latency.
//! Without iostats, the first scan that sees a request writes the watcher's time into it, and the request's
//! age is counted from that time.

use std::borrow::Cow;
use std::fmt;

use crate::bio::{BioFlags, Operation};
use crate::error::{IoResult, Status};
use crate::sector::Sector;
use crate::tags::Tag;

use super::failures::Failures;

/// The number of hanging requests of a queue that are reported one by one, until they complete. The others
/// are only counted.
pub const REPORTED_MAX: usize = 32;

/// Where a request, or a bio without a request, waits.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Place {
    /// The bio waits for a tag, with this number of bios ahead.
    ForTag(usize),
    /// The bio or flush waits for the end of a freeze.
    Frozen,
    /// The bio waits for the next flush, which starts when the flush in flight has completed.
    ForFlush,
    /// The flush waits for held writes to complete.
    ForHeldWrites,
    /// The request failed with this error, and is held until the operator resumes the disk.
    Held(Status),
    /// The request is in the plug, until the batch is full or the owner of the queue polls.
    Plug,
    /// The request is queued in the scheduler.
    Scheduler,
    /// The request is requeued, because the driver was busy.
    Dispatch,
    /// The request waits for the end of a quiesce.
    Quiesced,
    /// The driver has the request. The text is from [`DriverQueue::state`](crate::DriverQueue::state).
    Driver(Cow<'static, str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::ForTag(0) => f.write_str("waiting for a tag, first in line"),
            Place::ForTag(before) => write!(f, "waiting for a tag, {before} ahead of it"),
            Place::Frozen => f.write_str("waiting until the device is no longer frozen"),
            Place::ForFlush => f.write_str("waiting for a flush to begin"),
            Place::ForHeldWrites => f.write_str("waiting for writes that are held"),
            Place::Held(status) => write!(f, "held: {status}"),
            Place::Plug => f.write_str("in the plug"),
            Place::Scheduler => f.write_str("in the scheduler"),
            Place::Dispatch => f.write_str("requeued: the driver was busy"),
            Place::Quiesced => f.write_str("waiting until the device is no longer quiesced"),
            Place::Driver(state) => f.write_str(state),
        }
    }
}

/// The identity of a request, or of a bio without a request, in reports.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HungIo {
    /// Number of the report, from 1 in each queue.
    pub number: u64,
    /// Index of the hardware queue.
    pub queue: usize,
    /// The tag of the request, or `None` for a bio without a request.
    pub tag: Option<Tag>,
    /// The operation of the request or bio.
    pub operation: Operation,
    /// The flags of the operation.
    pub flags: BioFlags,
    /// The first sector. 0 for a flush.
    pub sector: Sector,
    /// The length in sectors of 512 bytes. 0 for a flush.
    pub sectors: u64,
}

impl fmt::Display for HungIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HungIo { number, queue, tag, operation, flags, sector, sectors } = self;
        write!(f, "#{queue}.{number} {}", operation.name())?;
        if *operation != Operation::Flush {
            write!(f, " sector {} + {sectors}", sector.0)?;
        }
        if !flags.is_empty() {
            let names: Vec<String> =
                flags.iter_names().map(|(name, _)| name.to_lowercase().replace('_', "-")).collect();
            write!(f, " ({})", names.join(", "))?;
        }
        write!(f, ", queue {queue}")?;
        match tag {
            Some(tag) => write!(f, ", tag {}", tag.0),
            None => f.write_str(", no tag"),
        }
    }
}

/// A request or bio that has been in flight for too long.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Hang {
    /// The request or bio that hangs.
    pub io: HungIo,
    /// How long it has been in flight, in nanoseconds. Without iostats the time since a scan first saw it.
    pub age_ns: u64,
    /// The number of its bios. For a flush, the number of bios that it serves.
    pub bios: u32,
    /// Where the request or bio waits.
    pub place: Place,
    /// The client that submitted its first bio, if known.
    pub client: Option<String>,
    /// The `user_data` of that bio, if the owner of the queue submitted it.
    pub(crate) user_data: Option<u64>,
}

/// The completion of a request or bio that was reported as hanging.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HangCompletion {
    /// The request or bio that hung.
    pub io: HungIo,
    /// How long it was in flight, in nanoseconds. Without iostats or a result, only as exact as the scans.
    pub age_ns: u64,
    /// The result, or `None` if a bio completed between two scans and never became a request.
    pub result: Option<IoResult>,
}

/// The result of a scan.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct HangScan {
    /// Hangs that were found for the first time. A queue with [`REPORTED_MAX`] reported hangs reports further
    /// ones only after some of these have completed.
    pub hangs: Vec<Hang>,
    /// The number of further hangs that were found for the first time.
    pub more: u64,
    /// The number of all requests and bios that are hanging now.
    pub hung: u64,
    /// Hangs that were reported before and have completed since.
    pub completed: Vec<HangCompletion>,
    /// Requests that failed since the last scan, however long they took.
    pub failures: Failures,
}

impl HangScan {
    pub(crate) fn add(&mut self, other: HangScan) {
        self.hangs.extend(other.hangs);
        self.more += other.more;
        self.hung += other.hung;
        self.completed.extend(other.completed);
        self.failures.add(other.failures);
    }
}
