//! The data path: the only queue of an image, on one ring. A request for contiguous data that is allocated
//! already takes the fast path: one operation of the ring. All other requests run as tasks.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;

use blkq::{
    BioFlags, Cqe, DriverContext, DriverQueue, Error, FileSlot, Operation, Registrar, Request, Segment,
    Status, Tag, Taken, Wake,
};
use io_uring::{opcode, squeue};

use crate::image_file::OPERATIONS;
use crate::qcow2::tables::state::Found;

use super::env::{Env, Shared};
use super::flush_metadata::flush_metadata;
use super::operations::{Executor, Memory};
use super::read::read;
use super::write::{Source, write};
use super::zero::{Wanted, clear};

pub const SEGMENTS_MAX: u16 = 128;

/// Marks the completion of a request on the fast path; the bits below are its tag. Without this bit, the
/// payload is the slot of a task's operation.
const PLAIN: u64 = 1 << 40;

pub struct Qcow2Queue {
    env: Rc<Env>,
    executor: Executor,
    files: Vec<FileSlot>,
    /// The iovecs of vectored calls on the fast path, [`SEGMENTS_MAX`] for each tag. They are not
    /// initialised, so that unused ones take no memory.
    iovecs: Box<[MaybeUninit<libc::iovec>]>,
    plain_in_flight: usize,
    writable: bool,
}

impl Qcow2Queue {
    /// Opens the queue for `tags` requests at a time, on the thread that `wake` wakes.
    pub fn open(
        shared: Arc<Shared>,
        writable: bool,
        (tags, wake): (usize, Arc<dyn Wake>),
        mut ring: Registrar<'_>,
    ) -> Result<Qcow2Queue, Error> {
        ring.require(&OPERATIONS)?;
        let mut slots = Vec::with_capacity(shared.files.len());
        for file in &shared.files {
            let slot = ring.register_file(file.file.as_fd());
            let slot = slot.inspect_err(|_| slots.iter_mut().for_each(|slot| ring.unregister_file(slot)))?;
            slots.push(slot);
        }
        Ok(Qcow2Queue {
            env: Env::new(shared, Some(wake)),
            executor: Executor::default(),
            files: slots,
            iovecs: Box::new_uninit_slice(tags * usize::from(SEGMENTS_MAX)),
            plain_in_flight: 0,
            writable,
        })
    }

    /// Starts a request on the fast path, or completes it if it reads only zeroes. Returns false, without
    /// effect, if the request needs a task.
    fn begin_plain(&mut self, cx: &mut DriverContext<'_>, tag: Tag) -> bool {
        let request = cx.request(tag);
        let (offset, bytes) = (request.offset(), request.bytes());
        let mut state = self.env.state();
        let depth = state.layers.len();
        let (layer, host) = match request.operation() {
            Operation::Read => match state.find(depth, offset, bytes, None) {
                Ok((Found::Data { layer, host }, _, run)) if run == bytes => (layer, host),
                Ok((Found::Zero | Found::Unallocated, _, run)) if run == bytes => {
                    drop(state);
                    self.memory(cx, tag).clear(0, bytes);
                    cx.complete(tag, Ok(()));
                    return true;
                }
                _ => return false,
            },
            _ => match state.find_in_place(offset, bytes) {
                Ok(Some((host, run))) if run == bytes => (0, host),
                _ => return false,
            },
        };
        // The epoch is entered under the lock of the state, so that no flush can free the cluster before.
        let epoch = self.env.shared.epochs.enter();
        drop(state);
        cx.pdu(tag)[0] = epoch as u64;
        self.plain_in_flight += 1;
        let entry = self.plain_entry(cx, tag, layer, host);
        // SAFETY: the block layer keeps the memory of a request in flight valid. The arguments and the
        // registered files live as long as this queue, which is dropped only when nothing is in flight (see
        // `drop`).
        unsafe { cx.push(entry, PLAIN | u64::from(tag.0)) }
        true
    }

    fn plain_entry(&mut self, cx: &DriverContext<'_>, tag: Tag, layer: u8, host: u64) -> squeue::Entry {
        let read = cx.request(tag).operation() == Operation::Read;
        let file = cx.file(&self.files[usize::from(layer)]);
        let room = usize::from(SEGMENTS_MAX);
        let iovecs = &mut self.iovecs[tag.index() * room..][..room];
        let mut count = 0;
        let mut only = Segment::new(std::ptr::null_mut(), 0);
        cx.for_each_segment(tag, |segment| {
            only = segment;
            if let Some(place) = iovecs.get_mut(count) {
                place.write(libc::iovec { iov_base: segment.ptr.cast(), iov_len: segment.len as usize });
            }
            count += 1;
        });
        let Segment { ptr, len, .. } = only;
        let vectors = iovecs.as_ptr().cast();
        let registered = if count == 1 { cx.registered_buffer(&only) } else { None };
        match (read, count, registered) {
            (true, 1, Some(index)) => opcode::ReadFixed::new(file, ptr, len, index).offset(host).build(),
            (true, 1, None) => opcode::Read::new(file, ptr, len).offset(host).build(),
            (true, ..) => opcode::Readv::new(file, vectors, count as u32).offset(host).build(),
            (false, 1, Some(index)) => opcode::WriteFixed::new(file, ptr, len, index).offset(host).build(),
            (false, 1, None) => opcode::Write::new(file, ptr, len).offset(host).build(),
            (false, ..) => opcode::Writev::new(file, vectors, count as u32).offset(host).build(),
        }
    }

    fn memory(&self, cx: &DriverContext<'_>, tag: Tag) -> Memory {
        let mut segments = Vec::with_capacity(cx.request(tag).segment_count());
        cx.for_each_segment(tag, |segment| segments.push(segment));
        // SAFETY: these are all segments of the request. It completes after `take_finished` has returned it,
        // or right here before an operation was submitted.
        unsafe { Memory::new(tag, segments) }
    }

    fn begin_task(&mut self, cx: &DriverContext<'_>, tag: Tag) {
        let request = cx.request(tag);
        let (operation, flags) = (request.operation(), request.flags());
        let (offset, bytes) = (request.offset(), request.bytes());
        let memory = self.memory(cx, tag);
        let env = Rc::clone(&self.env);
        let kept = flags.contains(BioFlags::NO_UNMAP);
        self.executor.spawn(&self.env.io, async move {
            let result = match operation {
                Operation::Read => read(&env, offset, bytes, &memory).await,
                Operation::Write => write(&env, offset, bytes, Source::Memory(&memory)).await,
                Operation::Flush => flush_metadata(&env, true).await,
                Operation::Discard => clear(&env, offset, bytes, Wanted::Discard).await,
                Operation::WriteZeroes if kept => clear(&env, offset, bytes, Wanted::ZeroesKept).await,
                Operation::WriteZeroes => clear(&env, offset, bytes, Wanted::Zeroes).await,
            };
            if operation.is_write() {
                env.shared.changes.note(offset, bytes);
            }
            env.io.finish(tag, result);
        });
    }

    /// Polls the ready tasks, submits their operations, and completes the requests that are done.
    fn run(&mut self, cx: &mut DriverContext<'_>) {
        self.executor.run_ready(&self.env.io);
        let files = &self.files;
        while let Some((place, entry)) = self.env.io.next(|op| op.entry(cx.file(&files[op.layer]))) {
            // SAFETY: an operation's own memory is kept until its completion is taken. The block layer keeps
            // a request's memory until the request completes, which is later.
            unsafe { cx.push(entry, u64::from(place)) }
        }
        while let Some((tag, result)) = self.env.io.take_finished() {
            cx.complete(tag, result);
        }
    }
}

// SAFETY: a request on the fast path completes when the ring has completed its one operation. Any other
// request completes when its task is done and no operation on its memory is in flight (`Io::take_finished`).
unsafe impl DriverQueue for Qcow2Queue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        for &tag in tags {
            let operation = cx.request(tag).operation();
            if operation == Operation::Flush && !self.writable {
                cx.complete(tag, Ok(()));
            } else if operation.is_write() && !self.writable {
                cx.complete(tag, Err(Status::ReadOnly));
            } else if !operation.has_data() || !self.begin_plain(cx, tag) {
                self.begin_task(cx, tag);
            }
        }
        Taken::All
    }

    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        self.run(cx);
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        let payload = cqe.token.payload();
        if payload & PLAIN == 0 {
            self.env.io.complete(payload as u32, cqe.result);
            return self.run(cx);
        }
        let tag = Tag(payload as u16);
        self.env.shared.epochs.leave(cx.pdu(tag)[0] as usize);
        self.plain_in_flight -= 1;
        let request = cx.request(tag);
        if i64::from(cqe.result) == request.bytes() as i64 {
            if request.operation().is_write() {
                self.env.shared.changes.note(request.offset(), request.bytes());
            }
            cx.complete(tag, Ok(()));
        } else {
            // The operation was short, interrupted or failed. A task repeats it and completes the request.
            self.begin_task(cx, tag);
        }
        // A flush of the metadata may wait until the epoch is idle.
        if !self.executor.is_idle() {
            self.env.io.changed();
            self.run(cx);
        }
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if !self.executor.is_idle() {
            self.env.take_inflated();
            // Tasks that have yielded continue only here, which is once per turn.
            self.executor.run(&self.env.io);
            self.run(cx);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        // A task has yielded and is ready to run.
        self.env.io.has_paused().then_some(0)
    }

    fn state(&self, _: Tag, _: &Request) -> Cow<'static, str> {
        format!("in the driver, with {} operations on the image's files in flight", self.env.io.in_flight())
            .into()
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        if let Some(mut ring) = cx.registrar() {
            self.files.iter_mut().for_each(|slot| ring.unregister_file(slot));
        }
    }
}

impl Drop for Qcow2Queue {
    fn drop(&mut self) {
        if self.plain_in_flight > 0 {
            // The queue is dropped by a panic before its requests completed, and the kernel may still read
            // the iovecs.
            std::mem::forget(std::mem::take(&mut self.iovecs));
        }
        if self.env.io.in_flight() > 0 {
            self.env.io.leak();
        }
    }
}
