//! The data path: the one queue of an image on one ring. Data that is where it belongs already, in one piece,
//! is read and written by one operation; all else is a task.

use std::borrow::Cow;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;

use blkq::{
    BioFlags, Cqe, DriverContext, DriverQueue, Error, FileSlot, Operation, Registrar, Request, Segment,
    Status, Tag, Taken, Wake,
};
use io_uring::{opcode, squeue, types};

use crate::r#loop::backing::OPERATIONS;

use super::commit::commit;
use super::env::{Env, Shared};
use super::io::{Executor, Memory};
use super::read::read;
use super::state::Found;
use super::write::{Source, write};
use super::zero::{Wanted, clear};

/// Segments of a request.
pub(super) const SEGMENTS_MAX: u16 = 128;

/// Marks the completion of a request's one operation; below it is the tag. Else it is an operation of a task.
const PLAIN: u64 = 1 << 40;

/// The queue of an image.
pub(super) struct Qcow2Queue {
    env: Rc<Env>,
    executor: Executor,
    /// The files of the chain, the image's own first.
    files: Vec<FileSlot>,
    /// Arguments of the vectored calls of plain requests: [`SEGMENTS_MAX`] for each tag. Not initialised,
    /// so that what is never used takes no memory.
    iovecs: Box<[MaybeUninit<libc::iovec>]>,
    plain_in_flight: usize,
    writable: bool,
}

impl Qcow2Queue {
    /// For `tags` requests at a time, on the thread that `wake` wakes.
    ///
    /// # Errors
    /// The ring's.
    pub fn open(
        shared: Arc<Shared>,
        files: &[Arc<File>],
        writable: bool,
        (tags, wake): (usize, Arc<dyn Wake>),
        mut ring: Registrar<'_>,
    ) -> Result<Qcow2Queue, Error> {
        ring.require(&OPERATIONS)?;
        let mut slots = Vec::with_capacity(files.len());
        for file in files {
            match ring.register_file(file.as_fd()) {
                Ok(slot) => slots.push(slot),
                Err(error) => {
                    slots.iter_mut().for_each(|slot| ring.unregister_file(slot));
                    return Err(error);
                }
            }
        }
        Ok(Qcow2Queue {
            env: Env::of_queue(shared, wake),
            executor: Executor::default(),
            files: slots,
            iovecs: Box::new_uninit_slice(tags * usize::from(SEGMENTS_MAX)),
            plain_in_flight: 0,
            writable,
        })
    }

    /// Begins a request that is one operation on data in place, or none; returns whether it is.
    fn begin_plain(&mut self, cx: &mut DriverContext<'_>, tag: Tag) -> bool {
        let request = cx.request(tag);
        let (offset, bytes, read) =
            (request.offset(), request.bytes(), request.operation() == Operation::Read);
        let mut state = self.env.state();
        let (layer, host) = match read {
            true => match state.find(offset, bytes, None) {
                Ok((Found::Data { layer, host }, run)) if run == bytes => (layer, host),
                Ok((Found::Zero | Found::Nothing, run)) if run == bytes => {
                    drop(state);
                    self.memory(cx, tag).clear(0, bytes);
                    cx.complete(tag, Ok(()));
                    return true;
                }
                _ => return false,
            },
            false => match state.find_in_place(offset, bytes) {
                Ok(Some((host, run))) if run == bytes => (0, host),
                _ => return false,
            },
        };
        let epoch = self.env.shared.epochs.enter();
        drop(state);
        cx.pdu(tag)[0] = epoch as u64;
        self.plain_in_flight += 1;
        let entry = self.plain_entry(cx, tag, layer, host, read);
        // SAFETY: the memory of a request in flight is kept valid by the block layer; the arguments and the
        // registered files live as long as this queue, which is dropped only when nothing is in flight
        // (see `drop`).
        unsafe { cx.push(entry, PLAIN | u64::from(tag.0)) }
        true
    }

    fn plain_entry(
        &mut self,
        cx: &DriverContext<'_>,
        tag: Tag,
        layer: u8,
        host: u64,
        read: bool,
    ) -> squeue::Entry {
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
        // SAFETY: these are all segments of the request, which completes only as `take_finished` has it,
        // or here before anything was submitted.
        unsafe { Memory::new(tag, segments) }
    }

    /// Begins a request as a task.
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
                Operation::Flush => commit(&env, true).await,
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

    /// Polls the tasks that can go on, submits what they do, and completes those that are done.
    fn run(&mut self, cx: &mut DriverContext<'_>) {
        self.executor.run(&self.env.io);
        while let Some((place, entry)) = self.env.io.next_entry(|layer| self.file(cx, layer)) {
            // SAFETY: the operation's own memory is kept until its completion is taken, and that of its
            // request is kept valid by the block layer until the request completes, which is not before.
            unsafe { cx.push(entry, u64::from(place)) }
        }
        while let Some((tag, result)) = self.env.io.take_finished() {
            cx.complete(tag, result);
        }
    }

    fn file(&self, cx: &DriverContext<'_>, layer: u8) -> types::Fixed {
        cx.file(&self.files[usize::from(layer)])
    }
}

// SAFETY: a plain request completes when the ring has completed its one operation, and every other when its
// task is done and no operation on its memory is in flight (`Io::take_finished`).
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
        let epoch = cx.pdu(tag)[0] as usize;
        self.env.shared.epochs.leave(epoch);
        self.plain_in_flight -= 1;
        let request = cx.request(tag);
        if i64::from(cqe.result) == request.bytes() as i64 {
            if request.operation().is_write() {
                self.env.shared.changes.note(request.offset(), request.bytes());
            }
            cx.complete(tag, Ok(()));
        } else {
            // Short, interrupted or failed: once more, by a task, which completes it whatever comes.
            self.begin_task(cx, tag);
        }
        // A commit may wait for the epoch.
        if !self.executor.is_idle() {
            self.env.io.changed();
            self.run(cx);
        }
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if !self.executor.is_idle() {
            self.env.take_inflated();
            self.run(cx);
        }
    }

    fn deadline_ns(&self) -> Option<u64> {
        // A task that has paused goes on at once.
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
            // Dropped before its requests completed, on the way out of a panic: the kernel reads these.
            std::mem::forget(std::mem::take(&mut self.iovecs));
        }
        if self.env.io.in_flight() > 0 {
            self.env.io.leak();
        }
    }
}
