//! Converts the results of librbd to statuses, and remembers the reasons why all further I/O fails.

use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{IoResult, Operation, Status};

/// The reasons why this client can no longer use the image. Each stays until the image is attached again. The
/// flags are relaxed: each is set once and only reported to the user, and no other memory depends on it.
#[derive(Default)]
pub struct Losses {
    /// This client has taken the exclusive lock of the image. Another client can take it only by force.
    locked: bool,
    excluded: AtomicBool,
    unlocked: AtomicBool,
    removed: AtomicBool,
}

impl Losses {
    pub fn new(locked: bool) -> Losses {
        Losses { locked, ..Losses::default() }
    }

    /// One line for the user for each loss.
    pub fn describe(&self) -> impl Iterator<Item = &'static str> {
        let reasons = [
            (
                &self.excluded,
                "the cluster has blocklisted the address of this client, because another client has taken the exclusive lock of the image, or by request of an administrator; I/O fails until the image is attached again",
            ),
            (
                &self.unlocked,
                "another client has taken the exclusive lock of the image; writes fail until the image is attached again",
            ),
            (&self.removed, "the image or a part of it was removed from the cluster"),
        ];
        reasons.into_iter().filter(|(lost, _)| lost.load(Relaxed)).map(|(_, reason)| reason)
    }

    /// The result of an operation of `bytes` bytes for which librbd returned `value`: the number of bytes of a read, or a
    /// negative errno.
    pub fn result(&self, operation: Operation, bytes: u64, value: i64) -> IoResult {
        match value {
            // A short read means that the image has become shorter than the device.
            0.. if operation == Operation::Read && (value as u64) < bytes => Err(Status::Io),
            0.. => Ok(()),
            _ => Err(self.status(operation, i32::try_from(-value).unwrap_or(libc::EIO))),
        }
    }

    #[cold]
    fn status(&self, operation: Operation, errno: i32) -> Status {
        let lost = |reason: &AtomicBool| {
            reason.store(true, Relaxed);
            Status::Offline
        };
        match errno {
            // Ceph defines EBLOCKLISTED as ESHUTDOWN.
            libc::ESHUTDOWN => lost(&self.excluded),
            // Only a lock that this client took can be lost. If it was left to other clients, one of them has it now and
            // may release it later.
            libc::EROFS if self.locked => lost(&self.unlocked),
            libc::ENOENT => lost(&self.removed),
            // The capabilities of the Ceph user do not permit the operation.
            libc::EPERM | libc::EACCES if operation == Operation::Read => Status::Io,
            libc::EACCES => Status::ReadOnly,
            // The request is beyond the end of an image that has become shorter. It was within the device, so it is no
            // invalid request of the client.
            libc::EINVAL => Status::Io,
            errno => Status::from_errno(errno),
        }
    }
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OPERATIONS: [Operation; 5] =
        [Operation::Read, Operation::Write, Operation::Flush, Operation::Discard, Operation::WriteZeroes];

    fn result(operation: Operation, value: i64) -> (IoResult, usize) {
        let losses = Losses::new(true);
        let result = losses.result(operation, 4096, value);
        (result, losses.describe().count())
    }

    #[test]
    fn losses_are_described_and_other_errors_are_not() {
        for operation in OPERATIONS {
            for errno in [libc::ESHUTDOWN, libc::EROFS, libc::ENOENT] {
                assert_eq!(result(operation, -i64::from(errno)), (Err(Status::Offline), 1), "{errno}");
            }
            for errno in [libc::ENOSPC, libc::EDQUOT] {
                assert_eq!(result(operation, -i64::from(errno)), (Err(Status::NoSpace), 0), "{errno}");
            }
            assert_eq!(result(operation, -i64::from(libc::ETIMEDOUT)), (Err(Status::Timeout), 0));
            assert_eq!(result(operation, -i64::from(libc::EINVAL)), (Err(Status::Io), 0));
        }
        assert_eq!(result(Operation::Write, -i64::from(libc::EPERM)).0, Err(Status::ReadOnly));
        assert_eq!(result(Operation::Read, -i64::from(libc::EPERM)).0, Err(Status::Io));
        assert_eq!(result(Operation::Read, 4095).0, Err(Status::Io), "a read is never short");
        assert_eq!(result(Operation::Read, 4096).0, Ok(()));
        assert_eq!(result(Operation::Write, 0).0, Ok(()));
    }

    #[test]
    fn a_lock_that_was_not_held_is_not_lost() {
        let losses = Losses::new(false);
        let value = -i64::from(libc::EROFS);
        assert_eq!(losses.result(Operation::Write, 4096, value), Err(Status::ReadOnly));
        assert_eq!(losses.describe().count(), 0);
    }

    proptest! {
        #[test]
        fn no_negative_value_is_a_success(value in i64::MIN..0, operation in 0..OPERATIONS.len()) {
            prop_assert!(result(OPERATIONS[operation], value).0.is_err());
        }
    }
}
