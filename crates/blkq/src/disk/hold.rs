//! The error policy of a disk: errors of the driver are reported, or the failed requests are held until the
//! operator has fixed the cause, such as a full file system, and resumes the disk (QEMU's `werror` and
//! `rerror`). Control threads change the words here and wake the queues, which apply the change in their next
//! turn (`queue::hold`).

use crate::enumeration::enumeration;
use crate::error::{Error, ErrorKind, Status};
use crate::sync::atomic::{
    AtomicU8, AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};
use crate::sync::{Mutex, NestedSwitch, lock};

enumeration! {
    /// The treatment of requests that the driver fails.
    ///
    /// Some errors are reported under every policy: errors that are the request's own fault (invalid,
    /// unsupported, a write to a read-only device), and errors of flushes. A flush that is reissued could succeed
    /// without the data that the failed flush has lost.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[repr(u8)]
    pub enum ErrorPolicy {
        /// The request completes with its error.
        #[default]
        Report = 0 => "report",
        /// The request is held until [`Disk::resume`](crate::Disk::resume).
        Hold = 1 => "hold",
        /// The request is held if its error is [`Status::NoSpace`]; otherwise it completes.
        HoldNoSpace = 2 => "hold-enospc",
    }

    /// The name of the policy in settings and configuration.
    pub const fn name(self) -> &'static str;
    parse |text| -> Error {
        Error::new(ErrorKind::Invalid, format!("{text:?} is not one of report, hold, hold-enospc"))
    }
}

impl ErrorPolicy {
    /// Whether a request other than a flush is held after this error.
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

/// The treatment of held requests when the disk is resumed ([`Disk::resume`](crate::Disk::resume)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resume {
    /// The requests are issued to the driver again.
    Reissue,
    /// The requests complete with their errors.
    Fail,
}

/// The error policy of a disk, shared by its control threads and its queues.
#[derive(Default)]
pub(crate) struct HoldControl {
    policy: AtomicU8,
    /// While this is on, all errors are reported regardless of the policy.
    reporting: NestedSwitch,
    /// The number of resumes so far that reissued the held requests.
    reissues: AtomicU64,
    /// The number of resumes so far that failed the held requests.
    failures: AtomicU64,
    /// For each queue the sum of both numbers that it has applied.
    followed: Box<[AtomicU64]>,
    /// Locked while a resume is counted, so that two of them do not count the same requests.
    counting: Mutex<()>,
    /// Requests other than reads that were held and have not completed, in all queues.
    writes: AtomicU32,
}

impl HoldControl {
    /// The policy is the first one, which reports errors.
    pub fn new(queues: usize) -> HoldControl {
        HoldControl { followed: (0..queues).map(|_| AtomicU64::new(0)).collect(), ..HoldControl::default() }
    }

    pub fn policy(&self) -> ErrorPolicy {
        ErrorPolicy::ALL[usize::from(self.policy.load(SeqCst)) % ErrorPolicy::ALL.len()]
    }

    /// Changes the policy. The caller must wake the queues afterwards.
    pub fn set_policy(&self, policy: ErrorPolicy) {
        self.policy.store(policy as u8, SeqCst);
    }

    /// Starts or stops to report all errors. The caller must wake the queues afterwards.
    pub fn set_reporting(&self, on: bool) {
        self.reporting.set(on);
    }

    pub fn is_reporting(&self) -> bool {
        self.reporting.is_on()
    }

    /// Resumes the held requests. The caller must wake the queues afterwards. Returns the number of resumed
    /// requests, of which `held` returns those of each queue. Requests that an earlier call has resumed are
    /// not counted again, even if their queue has not noticed yet.
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

    /// Records that `queue` has applied these numbers of reissues and failures, and has updated its count of
    /// held requests. Release, for the load in [`HoldControl::resume`]: a resume that sees the number also
    /// sees that count.
    pub fn follow(&self, queue: usize, (reissues, failures): (u64, u64)) {
        self.followed[queue].store(reissues + failures, Release);
    }

    pub fn resumed(&self) -> (u64, u64) {
        (self.reissues.load(SeqCst), self.failures.load(SeqCst))
    }

    pub fn add_write(&self) {
        self.writes.fetch_add(1, SeqCst);
    }

    /// Counts a held write that has completed. Returns whether it was the last.
    pub fn remove_write(&self) -> bool {
        self.writes.fetch_sub(1, SeqCst) == 1
    }

    /// Whether writes were held and have not completed, so that flushes must wait.
    pub fn has_writes(&self) -> bool {
        // Relaxed: a queue that misses the removal of the last write is woken, because the queue that removes
        // it wakes all others.
        self.writes.load(Relaxed) > 0
    }
}
