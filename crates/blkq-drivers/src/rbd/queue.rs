//! The data path: the only queue of an image, and the results of librbd as statuses. Each request becomes an
//! asynchronous call of librbd. librbd writes to an eventfd when calls complete, the ring of the queue polls that
//! eventfd, and the queue then fetches all completions.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use blkq::clock::monotonic_ns;
use blkq::sync::atomic::AtomicBool;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{
    BioFlags, Cqe, DriverContext, DriverQueue, Error, IoResult, Operation, Registrar, Request, Status, Tag,
    Taken,
};
use io_uring::{opcode, types};

use crate::errors::invalid;

use super::image::{ImageThread, RbdSpec};
use super::library::{Handle, WRITE_ZEROES_THICK};

/// How often completions are fetched while the ring cannot poll the eventfd, in nanoseconds.
const FETCH_INTERVAL_NS: u64 = 1_000_000;
/// Largest number of segments of a request: each request is one vectored call of librbd.
pub const SEGMENTS_MAX: u16 = 128;

/// The parts that the device shares with its queue.
pub struct Shared {
    pub spec: RbdSpec,
    pub image: ImageThread,
    pub losses: Losses,
}

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

pub struct RbdQueue {
    shared: Arc<Shared>,
    /// Arguments of the vectored calls in flight, which librbd reads until they complete: [`SEGMENTS_MAX`] for each tag.
    /// The array stays uninitialised, so that the kernel allocates no pages for tags that are never used.
    iovecs: Box<[MaybeUninit<libc::iovec>]>,
    /// The target of a fetch, with room for the completions of all tags.
    fetched: Box<[Handle]>,
    in_flight: usize,
    /// Whether the ring polls the eventfd.
    polled: bool,
    /// When to fetch next and try to poll again, after the ring could not poll.
    fetch_ns: Option<u64>,
}

impl RbdQueue {
    /// Opens the queue for up to `tags` requests in flight. Fails with [`blkq::ErrorKind::Invalid`] without a ring,
    /// and if the kernel does not support IORING_OP_POLL_ADD.
    pub fn open(shared: Arc<Shared>, tags: usize, ring: Option<Registrar<'_>>) -> Result<RbdQueue, Error> {
        let ring = ring.ok_or_else(|| invalid("the rbd driver needs an io_uring"))?;
        ring.require(&[("IORING_OP_POLL_ADD", opcode::PollAdd::CODE)])?;
        Ok(RbdQueue {
            shared,
            iovecs: Box::new_uninit_slice(tags * usize::from(SEGMENTS_MAX)),
            fetched: vec![std::ptr::null_mut(); tags].into_boxed_slice(),
            in_flight: 0,
            polled: false,
            fetch_ns: None,
        })
    }

    /// Polls the eventfd (multishot). The eventfd is never read: each write completes the poll again.
    fn poll_completions(&mut self, cx: &mut DriverContext<'_>) {
        let fd = types::Fd(self.shared.image.submission.completed.as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build();
        self.polled = true;
        // SAFETY: the descriptor is open while this queue exists, and no memory is passed.
        unsafe { cx.push(entry, 0) }
    }

    fn submit(&mut self, cx: &mut DriverContext<'_>, tag: Tag) -> Result<(), Status> {
        let submission = &self.shared.image.submission;
        let (library, image) = (submission.library, submission.image);
        let request = cx.request(tag);
        let (operation, flags) = (request.operation(), request.flags());
        let (offset, bytes) = (request.offset(), request.bytes());
        let no_unmap = flags.contains(BioFlags::NO_UNMAP);
        if operation == Operation::WriteZeroes && no_unmap && flags.contains(BioFlags::NO_FALLBACK) {
            // librbd writes these zeroes, which is no faster than a write, and the flag demands a fast way.
            return Err(Status::NotSupported);
        }
        let count = if operation.has_data() { self.gather(cx, tag) } else { 0 };
        let iovecs = self.iovecs[tag.index() * usize::from(SEGMENTS_MAX)..].as_ptr().cast();
        let argument = std::ptr::without_provenance_mut(tag.index());
        let mut completion = std::ptr::null_mut();
        // SAFETY: there is no callback, and the argument is a number that nothing dereferences.
        let created = unsafe { (library.rbd_aio_create_completion)(argument, None, &mut completion) };
        if created < 0 {
            return Err(Status::Resource);
        }
        // SAFETY: the image is open, and the completion was just made. The block layer keeps the memory of the request,
        // and this queue keeps the arguments, until the request completes, which is when librbd returns the completion.
        let submitted = unsafe {
            match operation {
                Operation::Read => (library.rbd_aio_readv)(image, iovecs, count, offset, completion),
                Operation::Write => (library.rbd_aio_writev)(image, iovecs, count, offset, completion),
                Operation::Flush => (library.rbd_aio_flush)(image, completion),
                Operation::Discard => (library.rbd_aio_discard)(image, offset, bytes, completion),
                Operation::WriteZeroes => {
                    let thick = if no_unmap { WRITE_ZEROES_THICK } else { 0 };
                    (library.rbd_aio_write_zeroes)(image, offset, bytes as usize, completion, thick, 0)
                }
            }
        };
        if submitted < 0 {
            // SAFETY: librbd did not accept the call, so it will not return the completion.
            unsafe { (library.rbd_aio_release)(completion) };
            return self.shared.losses.result(operation, bytes, i64::from(submitted));
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Fills in the arguments of a vectored call, and returns their number.
    fn gather(&mut self, cx: &DriverContext<'_>, tag: Tag) -> i32 {
        let room = usize::from(SEGMENTS_MAX);
        let iovecs = &mut self.iovecs[tag.index() * room..][..room];
        let mut count = 0;
        cx.for_each_segment(tag, |segment| {
            iovecs[count].write(libc::iovec { iov_base: segment.ptr.cast(), iov_len: segment.len as usize });
            count += 1;
        });
        count as i32
    }

    fn fetch(&mut self, cx: &mut DriverContext<'_>) {
        let submission = &self.shared.image.submission;
        let library = submission.library;
        while self.in_flight > 0 {
            let room = self.in_flight.min(self.fetched.len());
            // SAFETY: the image is open, and the list has `room` entries.
            let count = unsafe {
                (library.rbd_poll_io_events)(submission.image, self.fetched.as_mut_ptr(), room as i32)
            };
            let Ok(count @ 1..) = usize::try_from(count) else { return };
            for &completion in &self.fetched[..count] {
                // SAFETY: librbd returns each completion once, and it is released once.
                let (tag, value) = unsafe {
                    let tag = (library.rbd_aio_get_arg)(completion).addr();
                    let value = (library.rbd_aio_get_return_value)(completion);
                    (library.rbd_aio_release)(completion);
                    (Tag(tag as u16), value)
                };
                let request = cx.request(tag);
                let result = self.shared.losses.result(request.operation(), request.bytes(), value as i64);
                cx.complete(tag, result);
            }
            self.in_flight -= count;
        }
    }
}

// SAFETY: a request completes when librbd has returned its only completion, or if librbd did not accept the call.
unsafe impl DriverQueue for RbdQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        if !self.polled && self.fetch_ns.is_none() {
            self.poll_completions(cx);
        }
        for &tag in tags {
            if let Err(status) = self.submit(cx, tag) {
                cx.complete(tag, Err(status));
            }
        }
        Taken::All
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        // This entry only wakes the queue. `poll` fetches the completions, once per turn.
        if cqe.more() {
            return;
        }
        self.polled = false;
        if cqe.result < 0 {
            // The kernel ended the poll, for example because it is out of memory. `poll` submits it again later.
            self.fetch_ns = Some(monotonic_ns() + FETCH_INTERVAL_NS);
        } else {
            self.poll_completions(cx);
        }
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        self.fetch(cx);
        if self.fetch_ns.is_some_and(|due_ns| due_ns <= monotonic_ns()) {
            self.fetch_ns = None;
            self.poll_completions(cx);
        }
    }

    fn state(&self, _: Tag, _: &Request) -> Cow<'static, str> {
        format!("in librbd, waiting for the cluster of rbd:{}", self.shared.spec).into()
    }

    fn deadline_ns(&self) -> Option<u64> {
        self.fetch_ns.filter(|_| self.in_flight > 0)
    }
}

impl Drop for RbdQueue {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Requests are still in flight because the thread panicked. librbd may read the arguments, and needs the
            // image open.
            std::mem::forget(std::mem::take(&mut self.iovecs));
            std::mem::forget(self.shared.clone());
        }
    }
}

#[cfg(all(test, not(model_check)))]
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
