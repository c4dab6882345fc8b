//! Requests that the driver fails: their errors are reported, or they are held until somebody has made
//! room, and resumes the disk (QEMU's `werror` and `rerror`).
//!
//! Control threads change the words here and wake the queues, which take that over in their next turn
//! (`queue::resume`).

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Status};
use crate::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};
use crate::sync::{Mutex, NestedSwitch, lock};

/// The policy for requests that the driver fails.
///
/// Errors that are the request's own fault are reported whatever the policy is: one that is invalid, that
/// the device does not support or that writes to a read-only device. So is that of a flush: reissued,
/// it could succeed without the data that the failed one lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum ErrorPolicy {
    /// It completes with its error.
    #[default]
    Report = 0,
    /// It is held until [`Disk::resume`](crate::Disk::resume).
    Hold = 1,
    /// It is held if its error is [`Status::NoSpace`]; others complete.
    HoldNoSpace = 2,
}

impl ErrorPolicy {
    /// Every policy, in the order of its number.
    pub const ALL: [ErrorPolicy; 3] = [ErrorPolicy::Report, ErrorPolicy::Hold, ErrorPolicy::HoldNoSpace];

    /// Its name, as it is parsed.
    pub const fn name(self) -> &'static str {
        match self {
            ErrorPolicy::Report => "report",
            ErrorPolicy::Hold => "hold",
            ErrorPolicy::HoldNoSpace => "hold-enospc",
        }
    }

    /// Whether a request that is no flush is held after this error.
    pub(crate) fn holds(self, status: Status) -> bool {
        match self {
            ErrorPolicy::Report => false,
            ErrorPolicy::HoldNoSpace => status == Status::NoSpace,
            ErrorPolicy::Hold => {
                !matches!(status, Status::NotSupported | Status::Invalid | Status::ReadOnly | Status::Again)
            }
        }
    }
}

impl fmt::Display for ErrorPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ErrorPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<ErrorPolicy, Error> {
        let of_name = ErrorPolicy::ALL.into_iter().find(|policy| policy.name() == text);
        of_name.ok_or_else(|| {
            Error::new(ErrorKind::Invalid, format!("{text:?} is not one of report, hold, hold-enospc"))
        })
    }
}

/// The way of held requests ([`Disk::resume`](crate::Disk::resume)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resume {
    /// The driver gets them again.
    Reissue,
    /// They complete with their errors.
    Fail,
}

/// The error policy of a disk, for its control threads and its queues.
pub(crate) struct HoldControl {
    policy: AtomicU8,
    /// All errors are reported.
    reporting: NestedSwitch,
    /// How often held requests were to be reissued, and to fail.
    reissues: AtomicU64,
    failures: AtomicU64,
    /// For each queue how many of both it has followed.
    followed: Box<[AtomicU64]>,
    /// Locked by a thread that counts what it resumes.
    counting: Mutex<()>,
    /// Requests other than reads that were held and have not completed, in all queues.
    writes: AtomicU32,
}

impl HoldControl {
    pub fn new(queues: usize) -> HoldControl {
        HoldControl {
            policy: AtomicU8::new(ErrorPolicy::Report as u8),
            reporting: NestedSwitch::new(),
            reissues: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            followed: (0..queues).map(|_| AtomicU64::new(0)).collect(),
            counting: Mutex::new(()),
            writes: AtomicU32::new(0),
        }
    }

    /// The policy that was set.
    pub fn policy(&self) -> ErrorPolicy {
        ErrorPolicy::ALL[usize::from(self.policy.load(SeqCst)) % ErrorPolicy::ALL.len()]
    }

    /// The queues are to be woken after this.
    pub fn set_policy(&self, policy: ErrorPolicy) {
        self.policy.store(policy as u8, SeqCst);
    }

    /// Begins or stops to report all errors. The queues are to be woken after this.
    pub fn set_reporting(&self, on: bool) {
        self.reporting.set(on);
    }

    /// Whether all errors are reported, whatever the policy is.
    pub fn is_reporting(&self) -> bool {
        self.reporting.is_on()
    }

    /// The queues are to be woken after this. Returns how many requests are resumed, of the `held` ones of each queue:
    /// those that an earlier call is about to resume are not counted again.
    pub fn resume(&self, how: Resume, held: impl Fn(usize) -> u64) -> u64 {
        let word = match how {
            Resume::Reissue => &self.reissues,
            Resume::Fail => &self.failures,
        };
        let _counting = lock(&self.counting);
        let (reissues, failures) = self.resumed();
        let has_followed = |queue: &usize| self.followed[*queue].load(Acquire) == reissues + failures;
        let count = (0..self.followed.len()).filter(has_followed).map(held).sum();
        word.fetch_add(1, SeqCst);
        count
    }

    /// `queue` has followed so many requests to reissue, and to fail: its count of held requests is one of after them.
    pub fn follow(&self, queue: usize, (reissues, failures): (u64, u64)) {
        self.followed[queue].store(reissues + failures, Release);
    }

    /// How often held requests were to be reissued, and to fail.
    pub fn resumed(&self) -> (u64, u64) {
        (self.reissues.load(SeqCst), self.failures.load(SeqCst))
    }

    /// Another write is held.
    pub fn add_write(&self) {
        self.writes.fetch_add(1, SeqCst);
    }

    /// One of them has completed. Returns whether it was the last.
    pub fn remove_write(&self) -> bool {
        self.writes.fetch_sub(1, SeqCst) == 1
    }

    /// Whether writes were held and have not completed: flushes wait for them.
    #[inline]
    pub fn has_writes(&self) -> bool {
        // The queue that removes the last one wakes all others.
        self.writes.load(Relaxed) > 0
    }
}
