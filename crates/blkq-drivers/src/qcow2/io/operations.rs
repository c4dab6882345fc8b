//! Operations on the files of an image, as futures. A task submits operations and waits for them; an
//! [`Executor`] polls the tasks that are ready. Nothing here enters the kernel: the queue, or another driver
//! of the executor, performs the operations and reports their results.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use blkq::sync::atomic::AtomicU32;
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{IoBuffer, IoResult, Segment, Status, Tag};
use io_uring::{opcode, squeue, types};

use crate::image_file::ImageFile;
use crate::qcow2::tables::state::Layer;

/// A block of zeroes. Any number of pieces of a write may point to it.
#[repr(align(4096))]
struct Zeroes([u8; 64 << 10]);

static ZEROES: Zeroes = Zeroes([0; _]);

const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Attempts without progress after which an operation fails.
const ATTEMPTS_MAX: u32 = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Action {
    #[default]
    Read,
    Write,
    /// Makes the data of the file durable (fdatasync).
    Sync,
    /// Frees the space of a range. The range reads as zeroes afterwards.
    Punch,
    /// Allocates space for a range, and extends the file if the range ends beyond it.
    Extend,
}

/// Owns the memory that the kernel uses, unless that is the memory of a request.
#[derive(Default)]
pub struct Op {
    pub action: Action,
    /// The number of the image of the chain for whose file this is.
    pub layer: usize,
    pub offset: u64,
    pub bytes: u64,
    /// The memory that is left to transfer: parts of `buffers`, or of the request with `tag`.
    pub(in crate::qcow2) pieces: Vec<libc::iovec>,
    pub buffers: Vec<IoBuffer>,
    tag: Option<Tag>,
    /// Direct I/O makes progress only in multiples of this number of bytes.
    align: u64,
    /// Size that the file is known to have had, in bytes. A read that ends before it found a truncated file.
    file_bytes: u64,
    done: u64,
    attempts: u32,
    /// The epoch in which the operation counts until it completes.
    epoch: Option<usize>,
}

impl Op {
    /// A transfer to or from the file of the image `layer`, whose number is `number`.
    pub fn transfer(action: Action, number: u8, layer: &Layer, offset: u64) -> Op {
        let Layer { align, file_bytes, .. } = *layer;
        Op { action, layer: number.into(), offset, align, file_bytes, ..Op::default() }
    }

    pub fn sync() -> Op {
        Op { action: Action::Sync, ..Op::default() }
    }

    pub fn punch(offset: u64, bytes: u64) -> Op {
        Op { action: Action::Punch, offset, bytes, ..Op::default() }
    }

    pub fn extend(offset: u64, bytes: u64) -> Op {
        Op { action: Action::Extend, offset, bytes, ..Op::default() }
    }

    pub fn with_buffer(mut self, mut buffer: IoBuffer) -> Op {
        self.pieces.push(libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
        self.bytes += buffer.len() as u64;
        self.buffers.push(buffer);
        self
    }

    /// Appends `bytes` zeroes to a write. All pieces share one block of zeroes.
    pub fn with_zeroes(mut self, bytes: u64) -> Op {
        debug_assert_eq!(self.action, Action::Write);
        let Zeroes(zeroes) = &ZEROES;
        let mut left = bytes as usize;
        while left > 0 {
            let iov_len = left.min(zeroes.len());
            self.pieces.push(libc::iovec { iov_base: zeroes.as_ptr().cast_mut().cast(), iov_len });
            left -= iov_len;
        }
        self.bytes += bytes;
        self
    }

    /// Appends `bytes` of a request's memory, from its byte `skip` on.
    pub fn with_memory(mut self, memory: &Memory, skip: u64, bytes: u64) -> Op {
        memory.for_each_piece(skip, bytes, |piece| self.pieces.push(piece));
        self.bytes += bytes;
        self.tag = Some(memory.tag);
        self
    }

    /// Counts the operation in the present epoch until it completes. It must be submitted.
    pub fn in_epoch(mut self, epochs: &Epochs) -> Op {
        self.epoch = Some(epochs.enter());
        self
    }

    /// The bytes of the file that are left to transfer or change.
    pub fn rest(&self) -> Range<u64> {
        self.offset + self.done..self.offset + self.bytes
    }

    /// The submission to a ring of the rest of the operation.
    pub fn entry(&self, file: types::Fixed) -> squeue::Entry {
        let (pieces, count) = (self.pieces.as_ptr(), self.pieces.len() as u32);
        let offset = self.offset + self.done;
        let fallocate = |mode| opcode::Fallocate::new(file, self.bytes).offset(offset).mode(mode).build();
        match self.action {
            Action::Read => opcode::Readv::new(file, pieces, count).offset(offset).build(),
            Action::Write => opcode::Writev::new(file, pieces, count).offset(offset).build(),
            Action::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
            Action::Punch => fallocate(PUNCH_HOLE),
            Action::Extend => fallocate(0),
        }
    }

    /// Performs the operation with a system call; of a transfer at least a part of the first piece. Returns the result
    /// as io_uring does: the count, or a negative errno.
    pub fn perform(&self, files: &[Arc<ImageFile>]) -> i32 {
        let file = files[self.layer].file.as_raw_fd();
        let Range { start, end } = self.rest();
        let (Ok(offset), Ok(bytes)) = (i64::try_from(start), i64::try_from(end - start)) else {
            return -libc::EINVAL;
        };
        let (memory, length) = self.pieces.first().map_or((std::ptr::null_mut(), 0), |piece| {
            (piece.iov_base, piece.iov_len.min(i32::MAX as usize))
        });
        // SAFETY: the pieces of an operation that has not completed point to valid memory. Nothing else uses the
        // memory of a read, and the file is open.
        let result = unsafe {
            match self.action {
                Action::Read => libc::pread64(file, memory, length, offset) as i64,
                Action::Write => libc::pwrite64(file, memory, length, offset) as i64,
                Action::Sync => i64::from(libc::fdatasync(file)),
                Action::Punch => i64::from(libc::fallocate64(file, PUNCH_HOLE, offset, bytes)),
                Action::Extend => i64::from(libc::fallocate64(file, 0, offset, bytes)),
            }
        };
        match i32::try_from(result) {
            Ok(done) if done >= 0 => done,
            _ => -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        }
    }

    /// Applies a result of the kernel. Returns `None` if the rest of the operation must be submitted.
    fn progress(&mut self, result: i32) -> Option<IoResult> {
        if matches!(result.wrapping_neg(), libc::EAGAIN | libc::EINTR) {
            self.attempts += 1;
            return (self.attempts >= ATTEMPTS_MAX).then_some(Err(Status::Resource));
        }
        if result < 0 {
            return Some(Err(Status::from_errno(-result)));
        }
        if !matches!(self.action, Action::Read | Action::Write) {
            return Some(Ok(()));
        }
        let reached = self.done + result as u64;
        if reached >= self.bytes {
            return Some(Ok(()));
        }
        let step = reached - reached % self.align - self.done;
        if step > 0 {
            self.skip(step);
            self.done += step;
            return None;
        }
        match self.action {
            // The file was truncated.
            Action::Read if self.offset + reached < self.file_bytes => Some(Err(Status::Io)),
            // The last cluster of a file may be incomplete. The bytes beyond the end of the file read as
            // zeroes.
            Action::Read => {
                self.skip(reached - self.done);
                self.clear();
                Some(Ok(()))
            }
            _ if result == 0 => Some(Err(Status::NoSpace)),
            _ => {
                self.attempts += 1;
                (self.attempts >= ATTEMPTS_MAX).then_some(Err(Status::Io))
            }
        }
    }

    fn skip(&mut self, bytes: u64) {
        let mut left = bytes as usize;
        self.pieces.retain_mut(|piece| {
            let part = left.min(piece.iov_len);
            left -= part;
            piece.iov_base = piece.iov_base.wrapping_byte_add(part);
            piece.iov_len -= part;
            piece.iov_len > 0
        });
    }

    fn clear(&mut self) {
        for piece in &self.pieces {
            // SAFETY: the kernel has completed the read, and its memory belongs to the operation until the
            // operation is done.
            unsafe { piece.iov_base.cast::<u8>().write_bytes(0, piece.iov_len) }
        }
    }
}

pub struct Memory {
    tag: Tag,
    segments: Vec<Segment>,
}

impl Memory {
    /// The memory of the request with `tag`.
    ///
    /// # Safety
    /// `segments` must be all segments of the request. The request must not complete before the [`Io`] to
    /// which operations on this memory are submitted returns the request from [`Io::take_finished`].
    pub unsafe fn new(tag: Tag, segments: Vec<Segment>) -> Memory {
        Memory { tag, segments }
    }

    fn for_each_piece(&self, mut skip: u64, mut bytes: u64, mut each: impl FnMut(libc::iovec)) {
        for segment in &self.segments {
            let len = u64::from(segment.len);
            if skip >= len {
                skip -= len;
                continue;
            }
            let part = bytes.min(len - skip);
            if part == 0 {
                return;
            }
            let iov_base = segment.ptr.wrapping_add(skip as usize).cast();
            each(libc::iovec { iov_base, iov_len: part as usize });
            (skip, bytes) = (0, bytes - part);
        }
    }

    /// Copies `from` into a read's memory from byte `skip` on.
    pub fn fill(&self, skip: u64, from: &[u8]) {
        let mut rest = from;
        self.for_each_piece(skip, from.len() as u64, |piece| {
            let (part, others) = rest.split_at(piece.iov_len);
            // SAFETY: until the read has completed, the driver may fill its memory, and no operation of the
            // kernel uses this part of it.
            unsafe { piece.iov_base.cast::<u8>().copy_from_nonoverlapping(part.as_ptr(), part.len()) }
            rest = others;
        });
    }

    /// Zeroes `bytes` of a read's memory from byte `skip` on.
    pub fn clear(&self, skip: u64, bytes: u64) {
        self.for_each_piece(skip, bytes, |piece| {
            // SAFETY: as for `fill`.
            unsafe { piece.iov_base.cast::<u8>().write_bytes(0, piece.iov_len) }
        });
    }
}

/// Counts the I/O on clusters of an image in two epochs, to delay the reuse of a released cluster until no I/O that began
/// before its release is in flight. A flush that releases clusters begins the other epoch, and frees the clusters when the
/// one before is idle.
///
/// All accesses are `Relaxed`: they run on the queue's thread, or on another thread while no queue does I/O,
/// so that handing over the image orders them.
#[derive(Default)]
pub struct Epochs {
    in_flight: [AtomicU32; 2],
    present: AtomicU32,
}

impl Epochs {
    pub fn enter(&self) -> usize {
        let epoch = self.present.load(Relaxed) as usize;
        self.in_flight[epoch].fetch_add(1, Relaxed);
        epoch
    }

    pub fn leave(&self, epoch: usize) {
        self.in_flight[epoch].fetch_sub(1, Relaxed);
    }

    /// Whether the other epoch is idle, so that it can begin.
    pub fn may_turn(&self) -> bool {
        self.is_idle(1 - self.present.load(Relaxed) as usize)
    }

    /// Begins the other epoch, which must be idle. Returns the epoch before.
    pub fn turn(&self) -> usize {
        self.present.fetch_xor(1, Relaxed) as usize
    }

    pub fn is_idle(&self, epoch: usize) -> bool {
        self.in_flight[epoch].load(Relaxed) == 0
    }
}

struct Slot {
    op: Op,
    result: Option<IoResult>,
    /// The task that waits for the operation; `None` if the task was dropped.
    task: Option<u32>,
}

#[derive(Default)]
struct State {
    slots: Vec<Option<Slot>>,
    free: Vec<u32>,
    submitted: VecDeque<u32>,
    ready: VecDeque<u32>,
    paused: Vec<u32>,
    /// Tasks that wait for a change of the image's state.
    waiting: Vec<u32>,
    current: u32,
    finished: Vec<(Tag, IoResult)>,
    /// For each tag, the number of operations in flight on the request's memory.
    of_tag: Vec<u32>,
    epochs: Arc<Epochs>,
}

/// The operations in flight of one thread, and the tasks that wait for them.
pub struct Io(RefCell<State>);

impl Io {
    /// `epochs` are those of the image.
    pub fn new(epochs: Arc<Epochs>) -> Io {
        Io(RefCell::new(State { epochs, ..State::default() }))
    }

    /// Submits an operation. Its memory stays valid until it has completed, even if the waiting task is
    /// dropped.
    pub fn submit(&self, op: Op) -> Running<'_> {
        let state = &mut *self.0.borrow_mut();
        if let Some(tag) = op.tag {
            let index = tag.index();
            if state.of_tag.len() <= index {
                state.of_tag.resize(index + 1, 0);
            }
            state.of_tag[index] += 1;
        }
        let slot = Slot { op, result: None, task: Some(state.current) };
        let place = state.free.pop().unwrap_or_else(|| {
            state.slots.push(None);
            state.slots.len() as u32 - 1
        });
        state.slots[place as usize] = Some(slot);
        state.submitted.push_back(place);
        Running { io: self, place }
    }

    /// Waits for the next call of [`Io::changed`].
    pub async fn wait(&self) {
        self.suspend(|state| &mut state.waiting).await;
    }

    /// Yields to everything else on the thread, including the operations of other tasks.
    pub async fn pause(&self) {
        self.suspend(|state| &mut state.paused).await;
    }

    /// Adds the present task to a list of suspended tasks, and yields once.
    async fn suspend(&self, list: fn(&mut State) -> &mut Vec<u32>) {
        let mut suspended = false;
        poll_fn(|_| {
            if std::mem::replace(&mut suspended, true) {
                return Poll::Ready(());
            }
            let mut state = self.0.borrow_mut();
            let current = state.current;
            list(&mut state).push(current);
            Poll::Pending
        })
        .await;
    }

    /// Whether a task has yielded, so that [`Executor::run`] must be called without waiting for a completion.
    pub fn has_paused(&self) -> bool {
        !self.0.borrow().paused.is_empty()
    }

    /// Makes the tasks ready that wait for a change.
    pub fn changed(&self) {
        let state = &mut *self.0.borrow_mut();
        state.ready.extend(state.waiting.drain(..));
    }

    pub fn finish(&self, tag: Tag, result: IoResult) {
        self.0.borrow_mut().finished.push((tag, result));
    }

    /// Takes a request that has its result and whose memory no operation uses any longer.
    pub fn take_finished(&self) -> Option<(Tag, IoResult)> {
        let mut state = self.0.borrow_mut();
        let free = |(tag, _): &(Tag, IoResult)| state.of_tag.get(tag.index()).is_none_or(|count| *count == 0);
        let index = state.finished.iter().position(free)?;
        Some(state.finished.swap_remove(index))
    }

    /// Takes the next submitted operation: its place, and what `begin` returns for it. The memory of the operation
    /// stays valid until [`Io::complete`] gets the result.
    pub fn next<T>(&self, begin: impl FnOnce(&Op) -> T) -> Option<(u32, T)> {
        let mut state = self.0.borrow_mut();
        let place = state.submitted.pop_front()?;
        let slot = state.slots[place as usize].as_ref()?;
        Some((place, begin(&slot.op)))
    }

    pub fn complete(&self, place: u32, result: i32) {
        let state = &mut *self.0.borrow_mut();
        let Some(slot) = state.slots.get_mut(place as usize).and_then(Option::as_mut) else { return };
        let Some(result) = slot.op.progress(result) else {
            state.submitted.push_back(place);
            return;
        };
        if let Some(tag) = slot.op.tag {
            state.of_tag[tag.index()] -= 1;
        }
        slot.result = Some(result);
        let epoch = slot.op.epoch;
        match slot.task {
            Some(task) => state.ready.push_back(task),
            None => {
                state.slots[place as usize] = None;
                state.free.push(place);
            }
        }
        // A flush of the metadata may wait until the epoch is idle.
        if let Some(epoch) = epoch {
            state.epochs.leave(epoch);
            state.ready.extend(state.waiting.drain(..));
        }
    }

    pub fn in_flight(&self) -> usize {
        self.0.borrow().slots.iter().flatten().filter(|slot| slot.result.is_none()).count()
    }

    /// Leaks the memory of all operations in flight, because the kernel may still use it.
    pub fn leak(&self) {
        std::mem::forget(std::mem::take(&mut self.0.borrow_mut().slots));
    }
}

pub struct Running<'a> {
    io: &'a Io,
    place: u32,
}

impl Future for Running<'_> {
    type Output = Result<Op, Status>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.io.0.borrow_mut();
        let place = self.place as usize;
        let result = state.slots[place].as_ref().and_then(|slot| slot.result);
        let Some(result) = result else { return Poll::Pending };
        let op = state.slots[place].take().map(|slot| slot.op);
        state.free.push(self.place);
        drop(state);
        // The slot may belong to another operation from now on, so `drop` must not touch it.
        self.get_mut().place = u32::MAX;
        Poll::Ready(result.and(op.ok_or(Status::Io)))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut state = self.io.0.borrow_mut();
        let place = self.place as usize;
        match state.slots.get_mut(place) {
            Some(Some(slot)) if slot.result.is_none() => slot.task = None,
            Some(slot @ Some(_)) => {
                *slot = None;
                state.free.push(self.place);
            }
            _ => {}
        }
    }
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

#[derive(Default)]
pub struct Executor {
    tasks: Vec<Option<Task>>,
    free: Vec<u32>,
}

impl Executor {
    pub fn spawn(&mut self, io: &Io, task: impl Future<Output = ()> + 'static) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.tasks.push(None);
            self.tasks.len() as u32 - 1
        });
        self.tasks[index as usize] = Some(Box::pin(task));
        io.0.borrow_mut().ready.push_back(index);
    }

    /// Polls the tasks that are ready or have yielded before, until all wait or have yielded.
    pub fn run(&mut self, io: &Io) {
        {
            let state = &mut *io.0.borrow_mut();
            state.ready.extend(state.paused.drain(..));
        }
        self.run_ready(io);
    }

    /// [`Executor::run`] without the tasks that have yielded.
    pub fn run_ready(&mut self, io: &Io) {
        loop {
            let Some(index) = io.0.borrow_mut().ready.pop_front() else { return };
            io.0.borrow_mut().current = index;
            let Some(task) = self.tasks.get_mut(index as usize).and_then(Option::as_mut) else { continue };
            if task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                self.tasks[index as usize] = None;
                self.free.push(index);
            }
        }
    }

    pub fn is_idle(&self) -> bool {
        self.tasks.len() == self.free.len()
    }
}
