//! The data path: one queue of a loop device on one ring.
//!
//! What may run at once goes to the ring as it comes. What must not (see [`Turns`]) waits
//! in a FIFO for its turn; adjacent writes that wait are issued as one. Writes that the
//! kernel does one at a time anyway are issued before the ones in front have ended, so that
//! its worker goes from one to the next without waking this thread in between.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fs::File;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::AsFd;

use io_uring::{opcode, squeue, types};

use crate::bio::{BioFlags, Operation};
use crate::buffer::{IoBuffer, Segment};
use crate::driver::{DriverContext, DriverQueue, Taken};
use crate::error::{Error, IoResult, Status};
use crate::request::Request;
use crate::ring::{Cqe, FileSlot, Registrar};
use crate::sync::atomic::Ordering::Relaxed;
use crate::tags::Tag;
use std::sync::Arc;

use super::progress::{NEXT_SHIFT, Progress};
use super::shared::{REQUEST_MAX_BYTES, SEGMENTS_MAX, Shared, Turns};
use super::tail::{self, Tail};

/// Bytes of a call that writes several requests: as many as one request may have.
const GROUP_BYTES: u64 = REQUEST_MAX_BYTES as u64;
/// Calls in flight up to which more follow: enough to keep the kernel's worker busy until
/// they do. What waits meanwhile may be joined.
const CALLS_LOW: usize = 16;
/// Calls in a row after which a queue hands the writer's token to one that waits for it.
const TOKEN_TURNS: u32 = 16;
/// How often a queue looks whether it has the token, should no wake-up reach it (a thread
/// that polls its queue itself sleeps where none does), in nanoseconds.
const TOKEN_POLL_NS: u64 = 1_000_000;
/// Attempts that would have blocked or were interrupted before a worker of the kernel
/// gets the operation, and before it fails.
const ATTEMPTS_INLINE: u64 = 4;
const ATTEMPTS_MAX: u64 = 64;
/// Largest unit of direct I/O: the largest logical block.
const SCRATCH_BYTES: usize = 4096;
/// Marks the completion of what waited for its turn; below it is the tag.
const IN_TURN: u64 = 1 << 16;
/// `BLOCK_URING_CMD_DISCARD` of <linux/blkdev.h>: `_IO(0x12, 0)`, since Linux 6.12.
const BLOCK_URING_CMD_DISCARD: u32 = 0x12 << 8;

/// The operations it submits, to be probed.
pub(super) const OPERATIONS: [(&str, u8); 8] = [
    ("IORING_OP_READ", opcode::Read::CODE),
    ("IORING_OP_WRITE", opcode::Write::CODE),
    ("IORING_OP_READV", opcode::Readv::CODE),
    ("IORING_OP_WRITEV", opcode::Writev::CODE),
    ("IORING_OP_READ_FIXED", opcode::ReadFixed::CODE),
    ("IORING_OP_WRITE_FIXED", opcode::WriteFixed::CODE),
    ("IORING_OP_FSYNC", opcode::Fsync::CODE),
    ("IORING_OP_FALLOCATE", opcode::Fallocate::CODE),
];

/// A call in flight that took its turn.
struct Call {
    first: Tag,
    operation: Operation,
    /// The bytes of the device.
    range: Range<u64>,
}

/// What a completion of the ring means.
enum Outcome {
    /// The requests have ended.
    Ended(IoResult),
    /// There is more to do.
    Unfinished,
}

/// How the queue stands with the writer's token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hold {
    No,
    /// Waits since; looks again at that time.
    Waiting(u64),
    /// Has it, for that many calls so far.
    Yes(u32),
}

/// One queue of a loop device.
pub(super) struct LoopQueue {
    shared: Arc<Shared>,
    index: u16,
    file: Arc<File>,
    slot: FileSlot,
    /// The open file that flushes go to.
    synced: FileSlot,
    /// Unit in which a direct transfer makes progress; 1 if buffered.
    align: u64,
    tail: Tail,
    read_only: bool,
    turns: Turns,
    /// Arguments of the vectored calls in flight: [`SEGMENTS_MAX`] for each tag. Not
    /// initialised, so that what is never used takes no memory.
    iovecs: Box<[MaybeUninit<libc::iovec>]>,
    /// What [`LoopQueue::end_entry`] reads into. Nobody looks at it.
    scratch: IoBuffer,
    /// Requests waiting for their turn, in order.
    waiting: VecDeque<Tag>,
    /// The calls whose turn it is, in no order, and how many there may be.
    calls: Vec<Call>,
    calls_max: usize,
    /// The requests of the call at hand.
    group: Vec<Tag>,
    hold: Hold,
    in_flight: u32,
    reads_in_flight: u32,
    /// What the counters of that name do not count yet.
    reads: u64,
    reads_in_flight_sum: u64,
}

impl LoopQueue {
    pub fn open(
        shared: Arc<Shared>,
        index: u16,
        tags: usize,
        mut ring: Registrar<'_>,
    ) -> Result<LoopQueue, Error> {
        ring.require(&OPERATIONS)?;
        let settings = shared.queue_settings();
        let mut slot = ring.register_file(settings.file.as_fd())?;
        let mut synced =
            ring.register_file(shared.synced.as_fd()).inspect_err(|_| ring.unregister_file(&mut slot))?;
        let tail = Tail::open(settings.tail, settings.direct, &mut ring).inspect_err(|_| {
            ring.unregister_file(&mut slot);
            ring.unregister_file(&mut synced);
        })?;
        let iovecs = Box::new_uninit_slice(tags * usize::from(SEGMENTS_MAX));
        Ok(LoopQueue {
            index,
            file: settings.file,
            slot,
            synced,
            align: settings.align,
            tail,
            read_only: settings.read_only,
            turns: settings.turns,
            iovecs,
            scratch: IoBuffer::zeroed(SCRATCH_BYTES),
            waiting: VecDeque::with_capacity(tags),
            calls: Vec::with_capacity(tags),
            calls_max: settings.calls_max,
            group: Vec::with_capacity(tags),
            hold: Hold::No,
            in_flight: 0,
            reads_in_flight: 0,
            reads: 0,
            reads_in_flight_sum: 0,
            shared,
        })
    }

    fn waits_for_its_turn(&self, operation: Operation) -> bool {
        match self.turns {
            Turns::None => false,
            Turns::Writes => operation.is_write(),
            Turns::All => true,
        }
    }

    /// Counts requests that begin, then submits them.
    fn begin(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool) {
        let operation = cx.request(tags[0]).operation();
        let counters = &self.shared.counters;
        self.in_flight += 1;
        match operation {
            Operation::Read => {
                self.reads_in_flight += 1;
                self.reads += 1;
                self.reads_in_flight_sum += u64::from(self.reads_in_flight);
                if u64::from(self.reads_in_flight) > counters.reads_in_flight_max.load(Relaxed) {
                    counters.reads_in_flight_max.fetch_max(u64::from(self.reads_in_flight), Relaxed);
                }
            }
            Operation::Flush => _ = counters.flushes.fetch_add(1, Relaxed),
            _ if in_turn => {
                if self.calls.is_empty() {
                    let writers = counters.writers.fetch_add(1, Relaxed) + 1;
                    if writers > counters.writers_max.load(Relaxed) {
                        counters.writers_max.fetch_max(writers, Relaxed);
                    }
                }
                if tags.len() > 1 {
                    counters.writes_joined.fetch_add(tags.len() as u64 - 1, Relaxed);
                }
            }
            _ => {}
        }
        if in_turn {
            for two in tags.windows(2) {
                cx.pdu(two[0])[1] = (u64::from(two[1].0) + 1) << NEXT_SHIFT;
            }
            let begin = cx.request(tags[0]).offset();
            let bytes: u64 = tags.iter().map(|&tag| cx.request(tag).bytes()).sum();
            self.calls.push(Call { first: tags[0], operation, range: begin..begin + bytes });
            let in_flight = self.calls.len() as u64;
            if in_flight > counters.turns_in_flight_max.load(Relaxed) {
                counters.turns_in_flight_max.fetch_max(in_flight, Relaxed);
            }
        }
        self.submit(cx, tags, in_turn);
    }

    /// Counts the reads since the last time: once per batch, because other queues count too.
    fn count_reads(&mut self) {
        if self.reads > 0 {
            let counters = &self.shared.counters;
            counters.reads.fetch_add(std::mem::take(&mut self.reads), Relaxed);
            counters.reads_in_flight_sum.fetch_add(std::mem::take(&mut self.reads_in_flight_sum), Relaxed);
        }
    }

    /// Submits what `tags`, adjacent in this order, still have to do.
    fn submit(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool) {
        let first = tags[0];
        let progress = Progress::load(cx.pdu(first));
        let request = cx.request(first);
        let (operation, flags) = (request.operation(), request.flags());
        let bytes = if self.tail.has(request) { self.tail.bytes(request) } else { request.bytes() };
        let offset = self.shared.offset + request.offset() + progress.done;
        let file = cx.file(&self.slot);
        let fallocate = |mode| opcode::Fallocate::new(file, bytes).offset(offset).mode(mode).build();
        let punch_hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let entry = match operation {
            Operation::Flush => self.sync_entry(cx),
            Operation::Read | Operation::Write => self.transfer_entry(cx, tags, offset, progress.done),
            Operation::WriteZeroes if progress.done > 0 => self.end_entry(cx, cx.request(first), offset),
            Operation::Discard if self.shared.discard_by_command.load(Relaxed) => {
                let mut length = [0; 16];
                length[..8].copy_from_slice(&bytes.to_ne_bytes());
                opcode::UringCmd16::new(file, BLOCK_URING_CMD_DISCARD).addr(Some(offset)).cmd(length).build()
            }
            Operation::WriteZeroes if flags.contains(BioFlags::NO_UNMAP) => {
                fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
            Operation::Discard | Operation::WriteZeroes => fallocate(punch_hole),
        };
        let entry =
            if progress.attempts > ATTEMPTS_INLINE { entry.flags(squeue::Flags::ASYNC) } else { entry };
        let payload = u64::from(first.0) | if in_turn { IN_TURN } else { 0 };
        // SAFETY: the memory of a request in flight is kept valid by the block layer; the
        // argument arrays and the registered file live as long as this queue, which ends
        // only when nothing is in flight (see `drop`).
        unsafe { cx.push(entry, payload) }
    }

    /// A read of the last bytes before `end`, which fallocate zeroed. Beyond the end of the file
    /// that does nothing and reports success; only a read finds out.
    fn end_entry(&mut self, cx: &DriverContext<'_>, request: &Request, end: u64) -> squeue::Entry {
        let file = cx.file(self.tail.slot(request, request.bytes()).unwrap_or(&self.slot));
        let unit = self.end_unit(request);
        opcode::Read::new(file, self.scratch.as_mut_ptr(), unit as u32).offset(end - unit).build()
    }

    /// Bytes that [`LoopQueue::end_entry`] reads.
    fn end_unit(&self, request: &Request) -> u64 {
        if self.tail.has(request) { 1 } else { self.align }
    }

    fn sync_entry(&self, cx: &DriverContext<'_>) -> squeue::Entry {
        opcode::Fsync::new(cx.file(&self.synced)).flags(types::FsyncFlags::DATASYNC).build()
    }

    /// The call that transfers `tags` from byte `done` on, which is at `offset` of the
    /// file. If that has more segments than the arguments have room for, the call is
    /// shorter, and goes on as after a short transfer.
    fn transfer_entry(
        &mut self,
        cx: &DriverContext<'_>,
        tags: &[Tag],
        offset: u64,
        done: u64,
    ) -> squeue::Entry {
        let request = cx.request(tags[0]);
        let has_tail = self.tail.has(request);
        let apart = if has_tail { self.tail.slot(request, done) } else { None };
        let file = cx.file(apart.unwrap_or(&self.slot));
        let rw_flags = if request.flags().contains(BioFlags::FUA) { libc::RWF_DSYNC } else { 0 };
        let read = request.operation() == Operation::Read;
        if let Some(pages) = cx.kernel_pages(tags[0]) {
            let rest = pages.part(done as u32, pages.len() - done as u32);
            let (place, len, index) =
                (std::ptr::without_provenance_mut(rest.offset() as usize), rest.len(), rest.index());
            return match read {
                true => opcode::ReadFixed::new(file, place, len, index).offset(offset).build(),
                false => {
                    opcode::WriteFixed::new(file, place, len, index).offset(offset).rw_flags(rw_flags).build()
                }
            };
        }
        let room = usize::from(SEGMENTS_MAX);
        let begin = tags[0].index() * room;
        let iovecs = &mut self.iovecs[begin..begin + room];
        let mut skip = done;
        let mut count = 0;
        let mut only = Segment::new(std::ptr::null_mut(), 0);
        for &tag in tags {
            cx.for_each_segment(tag, |segment| {
                if skip >= u64::from(segment.len) {
                    skip -= u64::from(segment.len);
                    return;
                }
                // What is left may begin in the middle of a segment.
                only = Segment {
                    ptr: segment.ptr.wrapping_add(skip as usize),
                    len: segment.len - skip as u32,
                    registered: segment.registered,
                };
                skip = 0;
                if let Some(place) = iovecs.get_mut(count) {
                    place.write(libc::iovec { iov_base: only.ptr.cast(), iov_len: only.len as usize });
                    count += 1;
                }
            });
        }
        if has_tail {
            (count, only) = tail::cut(iovecs, count, request.bytes() - self.tail.until(request, done));
        }
        let Segment { ptr, len, .. } = only;
        let vectors = iovecs.as_ptr().cast();
        let registered = if count == 1 { cx.registered_buffer(&only) } else { None };
        match (read, count, registered) {
            (true, 1, Some(index)) => opcode::ReadFixed::new(file, ptr, len, index).offset(offset).build(),
            (true, 1, None) => opcode::Read::new(file, ptr, len).offset(offset).build(),
            (true, ..) => opcode::Readv::new(file, vectors, count as u32).offset(offset).build(),
            (false, 1, Some(index)) => {
                opcode::WriteFixed::new(file, ptr, len, index).offset(offset).rw_flags(rw_flags).build()
            }
            (false, 1, None) => opcode::Write::new(file, ptr, len).offset(offset).rw_flags(rw_flags).build(),
            (false, ..) => {
                opcode::Writev::new(file, vectors, count as u32).offset(offset).rw_flags(rw_flags).build()
            }
        }
    }

    /// Takes the result of a call for `tags`.
    fn outcome(&self, cx: &mut DriverContext<'_>, tags: &[Tag], result: i32) -> Outcome {
        let request = cx.request(tags[0]);
        let (operation, has_tail) = (request.operation(), self.tail.has(request));
        let progress = Progress::load(cx.pdu(tags[0]));
        if matches!(result.wrapping_neg(), libc::EAGAIN | libc::EINTR) {
            return self.again(cx, tags[0], progress, Status::Resource);
        }
        if !operation.has_data() {
            return self.outcome_without_data(cx, tags[0], result);
        }
        if result < 0 {
            return Outcome::Ended(Err(Status::from_errno(-result)));
        }
        let total: u64 = match has_tail {
            true => self.tail.bytes(cx.request(tags[0])),
            false => tags.iter().map(|&tag| cx.request(tag).bytes()).sum(),
        };
        let reached = progress.done + result as u64;
        if reached >= total {
            if has_tail && operation == Operation::Read {
                self.tail.clear_padding(cx, tags[0]);
            }
            return Outcome::Ended(Ok(()));
        }
        // What goes on through the page cache was not asked for at once.
        if !has_tail || reached < self.tail.until(cx.request(tags[0]), progress.done) {
            self.shared.counters.short_transfers.fetch_add(1, Relaxed);
        }
        // Direct I/O can go on only at a multiple of its unit: an odd rest is done again.
        let done = reached - reached % self.align;
        if done > progress.done {
            Progress { done, attempts: 0 }.store(cx.pdu(tags[0]));
            return Outcome::Unfinished;
        }
        match (operation, result) {
            // The file has become shorter than the device.
            (Operation::Read, _) => Outcome::Ended(Err(Status::Io)),
            (_, 0) => Outcome::Ended(Err(Status::NoSpace)),
            _ => self.again(cx, tags[0], progress, Status::Io),
        }
    }

    /// An attempt that came to nothing: there is another one, or the request ends as `spent`.
    fn again(&self, cx: &mut DriverContext<'_>, tag: Tag, progress: Progress, spent: Status) -> Outcome {
        let attempts = progress.attempts + 1;
        Progress { attempts, ..progress }.store(cx.pdu(tag));
        self.shared.counters.retries.fetch_add(1, Relaxed);
        if attempts < ATTEMPTS_MAX { Outcome::Unfinished } else { Outcome::Ended(Err(spent)) }
    }

    /// The end of a flush. Pages that could not be written count as clean from then on, and
    /// the next fdatasync knows nothing of them: once one has failed, none can be believed.
    fn flushed(&self, result: i32) -> IoResult {
        let lost = &self.shared.writeback_failed;
        if result < 0 {
            lost.fetch_or(self.align == 1 || self.tail.is_cached(), Relaxed);
            return Err(Status::from_errno(-result));
        }
        if lost.load(Relaxed) { Err(Status::Io) } else { Ok(()) }
    }

    fn outcome_without_data(&self, cx: &mut DriverContext<'_>, tag: Tag, result: i32) -> Outcome {
        let request = cx.request(tag);
        let (operation, flags) = (request.operation(), request.flags());
        let bytes = if self.tail.has(request) { self.tail.bytes(request) } else { request.bytes() };
        let end_unit = self.end_unit(request);
        let shared = &self.shared;
        if operation == Operation::Flush {
            return Outcome::Ended(self.flushed(result));
        }
        let progress = Progress::load(cx.pdu(tag));
        if progress.done > 0 {
            // The file may have become shorter than the device.
            let zeroed = result >= 0 && result as u64 == end_unit;
            let status = if result < 0 { Status::from_errno(-result) } else { Status::Io };
            return Outcome::Ended(if zeroed { Ok(()) } else { Err(status) });
        }
        if result >= 0 && operation == Operation::WriteZeroes && !shared.block_device {
            Progress { done: bytes, attempts: 0 }.store(cx.pdu(tag));
            return Outcome::Unfinished;
        }
        if result >= 0 {
            return Outcome::Ended(Ok(()));
        }
        let status = Status::from_errno(-result);
        let by_command = operation == Operation::Discard && shared.discard_by_command.load(Relaxed);
        if by_command && matches!(status, Status::NotSupported | Status::Invalid) {
            // A kernel before 6.12: there is the slower way through fallocate.
            shared.discard_by_command.store(false, Relaxed);
            return Outcome::Unfinished;
        }
        if status == Status::NotSupported {
            let able = match operation {
                Operation::Discard => &shared.discards,
                _ if flags.contains(BioFlags::NO_UNMAP) => &shared.zeroes_no_unmap,
                _ => &shared.zeroes,
            };
            able.store(false, Relaxed);
            cx.limits_changed();
        }
        Outcome::Ended(Err(status))
    }

    fn end(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool, result: IoResult) {
        self.in_flight -= 1;
        if in_turn && let Some(index) = self.calls.iter().position(|call| call.first == tags[0]) {
            self.calls.swap_remove(index);
        }
        match cx.request(tags[0]).operation() {
            Operation::Read => self.reads_in_flight -= 1,
            Operation::Flush => {}
            _ if in_turn && self.calls.is_empty() => {
                self.shared.counters.writers.fetch_sub(1, Relaxed);
            }
            _ => {}
        }
        for &tag in tags {
            cx.complete(tag, result);
        }
    }

    /// Begins what waits for its turn, as far as it has come.
    fn take_turn(&mut self, cx: &mut DriverContext<'_>) {
        if self.calls.len() > CALLS_LOW.min(self.calls_max - 1) {
            return;
        }
        let holds = matches!(self.hold, Hold::Yes(_));
        if holds && self.calls.is_empty() && (self.waiting.is_empty() || self.is_unfair()) {
            self.release_token();
        }
        while let Some(&first) = self.waiting.front()
            && self.may_begin(cx, first)
            && self.has_token(cx)
        {
            let mut tags = std::mem::take(&mut self.group);
            tags.clear();
            tags.extend(self.waiting.pop_front());
            self.join_adjacent(cx, &mut tags);
            self.begin(cx, &tags, true);
            self.group = tags;
        }
    }

    /// Whether it is another queue's turn to write.
    fn is_unfair(&self) -> bool {
        matches!(self.hold, Hold::Yes(calls) if calls >= TOKEN_TURNS) && self.shared.writer.is_wanted()
    }

    /// Whether the call that begins with `tag` may be in flight together with those that are:
    /// all of them write, and not to the same place.
    fn may_begin(&self, cx: &DriverContext<'_>, tag: Tag) -> bool {
        if self.calls.is_empty() {
            return true;
        }
        let request = cx.request(tag);
        let range = request.offset()..request.offset() + request.bytes();
        let apart = |call: &Call| {
            call.operation.is_write() && (call.range.end <= range.start || range.end <= call.range.start)
        };
        let one_more = self.calls.len() < self.calls_max && !self.is_unfair();
        one_more && request.operation().is_write() && self.calls.iter().all(apart)
    }

    fn has_token(&mut self, cx: &mut DriverContext<'_>) -> bool {
        let token = &self.shared.writer;
        let held = match self.hold {
            Hold::Yes(calls) => {
                self.hold = Hold::Yes(calls + 1);
                return true;
            }
            Hold::Waiting(_) => token.was_handed_to(self.index),
            Hold::No => token.acquire(self.index),
        };
        self.hold = if held { Hold::Yes(1) } else { Hold::Waiting(cx.now_ns() + TOKEN_POLL_NS) };
        held
    }

    fn release_token(&mut self) {
        self.hold = Hold::No;
        if let Some(next) = self.shared.writer.release(self.index) {
            self.shared.wake(next);
        }
    }

    /// Adds the writes to `tags` that come next and go on where it ends.
    fn join_adjacent(&mut self, cx: &DriverContext<'_>, tags: &mut Vec<Tag>) {
        let joinable = |tag: Tag| {
            let request = cx.request(tag);
            let alone = request.flags().intersects(BioFlags::FUA | BioFlags::NO_MERGE);
            let alone = alone || self.tail.has(request);
            request.operation() == Operation::Write && !alone
        };
        let first = tags[0];
        if self.turns != Turns::Writes || !joinable(first) {
            return;
        }
        let mut segments = cx.request(first).segment_count();
        let mut bytes = cx.request(first).bytes();
        let begin = cx.request(first).offset();
        while let Some(&next) = self.waiting.front() {
            let request = cx.request(next);
            segments += request.segment_count();
            let fits = segments <= usize::from(SEGMENTS_MAX) && bytes + request.bytes() <= GROUP_BYTES;
            if !joinable(next) || request.offset() != begin + bytes || !fits || !self.may_begin(cx, next) {
                return;
            }
            bytes += request.bytes();
            self.waiting.pop_front();
            tags.push(next);
        }
    }
}

// SAFETY: a request completes when the ring has completed the one entry that is in flight for it,
// or before there is one.
unsafe impl DriverQueue for LoopQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        for &tag in tags {
            let request = cx.request(tag);
            let operation = request.operation();
            // The kernel writes zeroes where the block device cannot do it, and does not say so.
            let maybe_slow = operation == Operation::WriteZeroes
                && self.shared.block_device
                && request.flags().contains(BioFlags::NO_UNMAP | BioFlags::NO_FALLBACK);
            if self.read_only && operation.is_write() {
                cx.complete(tag, Err(Status::ReadOnly));
            } else if maybe_slow {
                cx.complete(tag, Err(Status::NotSupported));
            } else if self.waits_for_its_turn(operation) {
                self.waiting.push_back(tag);
            } else {
                self.begin(cx, &[tag], false);
            }
        }
        Taken::All
    }

    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        self.take_turn(cx);
        self.count_reads();
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        let payload = cqe.token.payload();
        if payload & IN_TURN == 0 {
            let tags = [Tag(payload as u16)];
            match self.outcome(cx, &tags, cqe.result) {
                Outcome::Ended(result) => self.end(cx, &tags, false, result),
                Outcome::Unfinished => self.submit(cx, &tags, false),
            }
            return;
        }
        let mut tags = std::mem::take(&mut self.group);
        tags.clear();
        let mut next = u64::from(payload as u16) + 1;
        while next > 0 {
            let tag = Tag((next - 1) as u16);
            tags.push(tag);
            next = cx.pdu(tag)[1] >> NEXT_SHIFT;
        }
        match self.outcome(cx, &tags, cqe.result) {
            Outcome::Ended(result) => self.end(cx, &tags, true, result),
            Outcome::Unfinished => self.submit(cx, &tags, true),
        }
        self.group = tags;
        self.take_turn(cx);
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if matches!(self.hold, Hold::Waiting(_)) {
            self.take_turn(cx);
        }
    }

    fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        if self.waiting.contains(&tag) {
            return match self.hold {
                Hold::Waiting(_) => "in the driver, waiting for another queue's buffered writes".into(),
                _ => "in the driver, waiting for its turn at the file".into(),
            };
        }
        let Progress { done, attempts } = Progress::load(&request.pdu);
        let again = if attempts > 0 { format!(", tried {attempts} times more") } else { String::new() };
        let done =
            if done > 0 { format!(", {done} of {} bytes done", request.bytes()) } else { String::new() };
        format!("in the kernel's io_uring{done}{again}").into()
    }

    fn deadline_ns(&self) -> Option<u64> {
        match self.hold {
            Hold::Waiting(again_ns) => Some(again_ns),
            _ => None,
        }
    }

    fn reload(&mut self, cx: &mut DriverContext<'_>) {
        let settings = self.shared.queue_settings();
        self.align = settings.align;
        self.read_only = settings.read_only;
        self.turns = settings.turns;
        self.calls_max = settings.calls_max;
        if self.tail.reload(settings.tail, settings.direct, cx.registrar()).is_err() {
            self.read_only = true;
        }
        if Arc::ptr_eq(&self.file, &settings.file) {
            return;
        }
        let Some(mut ring) = cx.registrar() else { return };
        match ring.register_file(settings.file.as_fd()) {
            Ok(slot) => {
                ring.unregister_file(&mut self.slot);
                self.slot = slot;
                self.file = settings.file;
            }
            // The old file is the same image, opened for reading: it goes on as such.
            Err(_) => self.read_only = true,
        }
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        if let Some(mut ring) = cx.registrar() {
            ring.unregister_file(&mut self.slot);
            ring.unregister_file(&mut self.synced);
            self.tail.close(&mut ring);
        }
    }
}

impl Drop for LoopQueue {
    fn drop(&mut self) {
        self.count_reads();
        match self.hold {
            Hold::Yes(_) => self.release_token(),
            // Handed over after all: pass it on.
            Hold::Waiting(_) if !self.shared.writer.withdraw(self.index) => self.release_token(),
            _ => {}
        }
        if self.in_flight > 0 {
            // Dropped before its requests ended, on the way out of a panic: the kernel may
            // still read the arguments, and read into the scratch.
            std::mem::forget(std::mem::take(&mut self.iovecs));
            std::mem::forget(std::mem::replace(&mut self.scratch, IoBuffer::zeroed(0)));
        }
    }
}
