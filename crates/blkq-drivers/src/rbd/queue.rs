//! The data path: the only queue of an image. Each request becomes an asynchronous call of librbd. librbd writes to an
//! eventfd when calls complete, the ring of the queue polls that eventfd, and the queue then fetches all completions.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use blkq::clock::monotonic_ns;
use blkq::{
    BioFlags, Cqe, DriverContext, DriverQueue, Error, Operation, Registrar, Request, Status, Tag, Taken,
};
use io_uring::{opcode, types};

use crate::errors::invalid;

use super::library::{Handle, WRITE_ZEROES_THICK};
use super::outcome::Losses;
use super::spec::RbdSpec;
use super::thread::ImageThread;

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
        let count = match operation {
            Operation::Read | Operation::Write => self.gather(cx, tag),
            _ => 0,
        };
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
