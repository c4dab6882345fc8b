//! The data path of a loop device: one queue, which submits requests to the image and interprets the results.
//!
//! The queue executes requests in calls. A call that returns fewer bytes than it has continues with the rest. Where
//! requests take turns ([`Turns`]), a call may write several adjacent ones.
//!
//! If the device ends within a sector, calls are cut at the end of the file: the bytes of the sector beyond it read as
//! zeroes and are never written, so the file does not grow. Direct I/O cannot transfer a part of a sector. With direct
//! I/O the last page of the device is therefore always read and written through the page cache. No direct I/O ever
//! touches that page, because the kernel keeps the page cache and direct I/O coherent by whole pages only. A request
//! that begins before that page takes two calls, one after the other.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;

use blkq::stats::{add, raise};
use blkq::sync::atomic::Ordering::Relaxed;
use blkq::{
    BioFlags, Cqe, DriverContext, DriverQueue, Error, FileSlot, IoBuffer, IoResult, Operation, Registrar,
    Request, Segment, Status, Tag, Taken,
};
use io_uring::{opcode, squeue, types};

use crate::image_file::{ImageFile, OPERATIONS};

use super::shared::{QueueCounters, QueueSettings, REQUEST_MAX_BYTES, SEGMENTS_MAX, Shared, Turns};

/// Largest call that writes several requests, in bytes: no larger than one request may be.
const GROUP_BYTES: u64 = REQUEST_MAX_BYTES as u64;
/// More calls are submitted only when at most this number is in flight. That keeps the kernel's worker busy, and
/// requests that wait in between can be joined.
const CALLS_LOW: usize = 16;
/// Number of calls after which a queue passes the writer token to a queue that waits for it.
const TOKEN_TURNS: u32 = 16;
/// How often a waiting queue checks whether it has the token, in nanoseconds. Usually a wake-up comes first, but a
/// thread that polls its queue itself may sleep where no wake-up reaches it.
const TOKEN_POLL_NS: u64 = 1_000_000;
/// Attempts that would have blocked or were interrupted before the operation is left to a worker thread of the
/// kernel (IOSQE_ASYNC), which can block.
const ATTEMPTS_INLINE: u64 = 4;
/// Consecutive attempts without progress after which an operation fails: a file system may return EAGAIN or
/// empty transfers forever.
const ATTEMPTS_MAX: u64 = 64;
/// Size of the scratch buffer in bytes: the largest alignment of direct I/O, which is the largest logical block.
const SCRATCH_BYTES: usize = 4096;
/// `BLOCK_URING_CMD_DISCARD` of <linux/blkdev.h>: `_IO(0x12, 0)`, since Linux 6.12.
const BLOCK_URING_CMD_DISCARD: u32 = 0x12 << 8;

/// A call in flight that took its turn.
struct Call {
    first: Tag,
    /// In bytes of the device.
    range: Range<u64>,
}

/// Whether the queue has the writer token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Token {
    No,
    /// The queue waits, and checks again at this time, in nanoseconds.
    Waiting(u64),
    /// The queue has the token, and has begun this number of calls with it.
    Yes(u32),
}

/// A file of the image that is registered with the ring.
struct Registered {
    file: Arc<ImageFile>,
    slot: FileSlot,
}

impl Registered {
    fn new(file: Arc<ImageFile>, ring: &mut Registrar<'_>) -> Result<Registered, Error> {
        Ok(Registered { slot: ring.register_file(file.file.as_fd())?, file })
    }

    /// Switches to `file`. If it cannot be registered, the old file stays in use.
    fn replace(&mut self, file: Arc<ImageFile>, ring: &mut Registrar<'_>) -> Result<(), Error> {
        if !Arc::ptr_eq(&self.file, &file) {
            let mut old = std::mem::replace(self, Registered::new(file, ring)?);
            ring.unregister_file(&mut old.slot);
        }
        Ok(())
    }
}

/// The progress of a call, stored in the two words that the driver has in the call's first request.
#[derive(Clone, Copy)]
struct Progress {
    /// Bytes that were transferred.
    done: u64,
    /// Consecutive attempts without progress.
    attempts: u64,
}

/// The first word is `done`. The second word has the attempts below this bit, and above it one more than the tag
/// of the next request of the same call, or 0 for the last request.
const NEXT_SHIFT: u32 = 32;

impl Progress {
    fn load(words: &[u64; 2]) -> Progress {
        Progress { done: words[0], attempts: words[1] & ((1 << NEXT_SHIFT) - 1) }
    }

    fn store(self, words: &mut [u64; 2]) {
        *words = [self.done, words[1] >> NEXT_SHIFT << NEXT_SHIFT | self.attempts];
    }
}

pub(super) struct LoopQueue {
    shared: Arc<Shared>,
    index: u16,
    settings: QueueSettings,
    image: Registered,
    /// The image without direct I/O, if the device may end within a sector.
    tail: Option<Registered>,
    /// The open file that is used for flushes: see [`Shared::synced_by`].
    synced: FileSlot,
    /// Whether the kernel supports vectored calls on registered memory (Linux 6.15).
    vectors_registered: bool,
    /// Arguments of the vectored calls in flight: [`SEGMENTS_MAX`] for each tag. The array stays uninitialised, so
    /// that the kernel allocates no pages for tags that are never used.
    iovecs: Box<[MaybeUninit<libc::iovec>]>,
    /// The target of the reads of [`LoopQueue::end_entry`]. Its content is never used.
    scratch: IoBuffer,
    waiting: VecDeque<Tag>,
    /// The calls in flight that took their turn, in no order; at most [`QueueSettings::calls_max`].
    calls: Vec<Call>,
    /// Empty between uses; a list of requests that is kept to avoid an allocation for each call.
    group: Vec<Tag>,
    token: Token,
    in_flight: u32,
    reads_in_flight: u32,
}

impl LoopQueue {
    pub fn open(
        shared: Arc<Shared>,
        index: u16,
        tags: usize,
        mut ring: Registrar<'_>,
    ) -> Result<LoopQueue, Error> {
        ring.require(&OPERATIONS)?;
        let (file, tail, settings) = shared.queue_settings();
        let synced = shared.synced_by(index)?.as_fd();
        let mut image = Registered::new(file, &mut ring)?;
        let mut synced = ring.register_file(synced).inspect_err(|_| ring.unregister_file(&mut image.slot))?;
        let tail = tail.map(|file| Registered::new(file, &mut ring)).transpose().inspect_err(|_| {
            ring.unregister_file(&mut image.slot);
            ring.unregister_file(&mut synced);
        })?;
        Ok(LoopQueue {
            index,
            settings,
            image,
            tail,
            synced,
            vectors_registered: ring.supports(opcode::ReadvFixed::CODE)
                && ring.supports(opcode::WritevFixed::CODE),
            iovecs: Box::new_uninit_slice(tags * usize::from(SEGMENTS_MAX)),
            scratch: IoBuffer::zeroed(SCRATCH_BYTES),
            waiting: VecDeque::with_capacity(tags),
            calls: Vec::with_capacity(tags),
            group: Vec::with_capacity(tags),
            token: Token::No,
            in_flight: 0,
            reads_in_flight: 0,
            shared,
        })
    }

    /// Counts the requests of a new call, and submits the call.
    fn begin(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) {
        let operation = cx.request(tags[0]).operation();
        let in_turn = self.settings.takes_turns(operation);
        self.in_flight += 1;
        match operation {
            Operation::Read => {
                self.reads_in_flight += 1;
                self.counters().read(self.reads_in_flight);
            }
            Operation::Flush => add(&self.counters().flushes, 1),
            _ if in_turn => {
                if self.calls.is_empty() {
                    let counters = &self.shared.counters;
                    counters.writers_max.fetch_max(counters.writers.fetch_add(1, Relaxed) + 1, Relaxed);
                }
                add(&self.counters().writes_joined, tags.len() as u64 - 1);
            }
            _ => {}
        }
        if in_turn {
            for two in tags.windows(2) {
                cx.pdu(two[0])[1] = (u64::from(two[1].0) + 1) << NEXT_SHIFT;
            }
            let begin = cx.request(tags[0]).offset();
            let bytes: u64 = tags.iter().map(|&tag| cx.request(tag).bytes()).sum();
            self.calls.push(Call { first: tags[0], range: begin..begin + bytes });
            raise(&self.counters().turns_in_flight_max, self.calls.len() as u64);
        }
        self.submit(cx, tags);
    }

    fn submit(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) {
        let first = tags[0];
        let Progress { done, attempts } = Progress::load(cx.pdu(first));
        let entry = self.entry(cx, tags, done);
        let entry = if attempts > ATTEMPTS_INLINE { entry.flags(squeue::Flags::ASYNC) } else { entry };
        // SAFETY: the block layer keeps the memory of a request in flight valid. The argument arrays and the
        // registered file stay valid until this queue is dropped, with nothing in flight, or are leaked (see
        // `drop`).
        unsafe { cx.push(entry, u64::from(first.0)) }
    }

    /// The submission that continues a call at byte `done`. The call consists of the requests `tags`, which are
    /// adjacent in this order.
    fn entry(&mut self, cx: &DriverContext<'_>, tags: &[Tag], done: u64) -> squeue::Entry {
        let request = cx.request(tags[0]);
        let (file, offset) = (cx.file(&self.image.slot), self.shared.window.offset + request.offset() + done);
        let fallocate = |range: Range<u64>, mode| {
            let call = opcode::Fallocate::new(file, range.end - range.start).offset(range.start);
            call.mode(mode | libc::FALLOC_FL_KEEP_SIZE).build()
        };
        match request.operation() {
            Operation::Flush => {
                opcode::Fsync::new(cx.file(&self.synced)).flags(types::FsyncFlags::DATASYNC).build()
            }
            Operation::Read | Operation::Write => self.transfer_entry(cx, tags, done),
            Operation::WriteZeroes if done > 0 => self.end_entry(cx, request, offset),
            Operation::WriteZeroes => {
                let no_unmap = request.flags().contains(BioFlags::NO_UNMAP);
                let mode = if no_unmap { libc::FALLOC_FL_ZERO_RANGE } else { libc::FALLOC_FL_PUNCH_HOLE };
                fallocate(offset..offset + self.settings.bytes(request), mode)
            }
            Operation::Discard if self.shared.discard_by_command.load(Relaxed) => {
                let range = self.discard_range(request);
                let mut length = [0; 16];
                length[..8].copy_from_slice(&(range.end - range.start).to_ne_bytes());
                let command = opcode::UringCmd16::new(file, BLOCK_URING_CMD_DISCARD);
                command.addr(Some(range.start)).cmd(length).build()
            }
            Operation::Discard => fallocate(self.discard_range(request), libc::FALLOC_FL_PUNCH_HOLE),
        }
    }

    /// The whole units of a discard, as a range of the file; it may be empty.
    fn discard_range(&self, request: &Request) -> Range<u64> {
        let (start, unit) = (self.shared.window.offset + request.offset(), self.shared.discard_unit);
        let end = start + self.settings.bytes(request);
        let first = start.next_multiple_of(unit);
        first..(end - end % unit).max(first)
    }

    /// A read of the last bytes before `end`, after fallocate(2) has zeroed a range that ends there. If the file has
    /// become shorter, fallocate(2) does nothing beyond its end and still succeeds. Only a short read reveals this.
    fn end_entry(&mut self, cx: &DriverContext<'_>, request: &Request, end: u64) -> squeue::Entry {
        let (unit, in_tail) = self.settings.end_unit(request);
        let file = cx.file(self.slot(in_tail));
        opcode::Read::new(file, self.scratch.as_mut_ptr(), unit as u32).offset(end - unit).build()
    }

    /// The registered file for a call to the tail, or for any other call.
    fn slot(&self, in_tail: bool) -> &FileSlot {
        self.tail.as_ref().filter(|_| in_tail).map_or(&self.image.slot, |tail| &tail.slot)
    }

    /// The submission that transfers `tags` from byte `done`. If there are more
    /// segments than the arguments have room for, the call is shorter, and continues as after a short transfer.
    fn transfer_entry(&mut self, cx: &DriverContext<'_>, tags: &[Tag], done: u64) -> squeue::Entry {
        let request = cx.request(tags[0]);
        let offset = self.shared.window.offset + request.offset() + done;
        let (end, in_tail) = match self.settings.reaches_tail(request) {
            true => self.settings.tail_call(request, done),
            false => (u64::MAX, false),
        };
        let file = cx.file(self.slot(in_tail));
        let read = request.operation() == Operation::Read;
        let rw_flags = if !read && request.flags().contains(BioFlags::FUA) { libc::RWF_DSYNC } else { 0 };
        macro_rules! transfer {
            ($opcode:ident, $($argument:expr),+) => {
                opcode::$opcode::new(file, $($argument),+).offset(offset).rw_flags(rw_flags).build()
            };
        }
        let (ptr, len, count, registered) = match cx.kernel_pages(tags[0]) {
            Some(pages) => {
                let rest = pages.part(done as u32, pages.len() - done as u32);
                let place = std::ptr::without_provenance_mut(rest.offset() as usize);
                (place, rest.len(), 1, Some(rest.index()))
            }
            None => self.gather(cx, tags, done..end),
        };
        let vectors = self.iovecs[tags[0].index() * usize::from(SEGMENTS_MAX)..].as_ptr().cast();
        match (read, count, registered) {
            (true, 1, Some(index)) => transfer!(ReadFixed, ptr, len, index),
            (true, 1, None) => transfer!(Read, ptr, len),
            (true, _, Some(index)) => transfer!(ReadvFixed, vectors, count as u32, index),
            (true, _, None) => transfer!(Readv, vectors, count as u32),
            (false, 1, Some(index)) => transfer!(WriteFixed, ptr, len, index),
            (false, 1, None) => transfer!(Write, ptr, len),
            (false, _, Some(index)) => transfer!(WritevFixed, vectors, count as u32, index),
            (false, _, None) => transfer!(Writev, vectors, count as u32),
        }
    }

    /// Fills in the arguments of the call that transfers `bytes` of the requests `tags`. Returns the only or last
    /// segment, the number of segments, and the registered buffer that contains all of them.
    fn gather(
        &mut self,
        cx: &DriverContext<'_>,
        tags: &[Tag],
        bytes: Range<u64>,
    ) -> (*mut u8, u32, usize, Option<u16>) {
        let room = usize::from(SEGMENTS_MAX);
        let begin = tags[0].index() * room;
        let iovecs = &mut self.iovecs[begin..begin + room];
        let (mut skip, mut left, mut count) = (bytes.start, bytes.end - bytes.start, 0);
        let mut last = Segment::new(std::ptr::null_mut(), 0);
        // Whether all segments are in one registered buffer.
        let mut together = true;
        for &tag in tags {
            cx.for_each_segment(tag, |mut segment| {
                let skipped = skip.min(u64::from(segment.len));
                skip -= skipped;
                segment.ptr = segment.ptr.wrapping_add(skipped as usize);
                segment.len = left.min(u64::from(segment.len) - skipped) as u32;
                left -= u64::from(segment.len);
                if segment.len > 0
                    && let Some(place) = iovecs.get_mut(count)
                {
                    place.write(libc::iovec { iov_base: segment.ptr.cast(), iov_len: segment.len as usize });
                    together &= count == 0 || last.same_registration(&segment);
                    last = segment;
                    count += 1;
                }
            });
        }
        let is_reached = count == 1 || together && self.vectors_registered;
        let registered = if is_reached { cx.registered_buffer(&last) } else { None };
        (last.ptr, last.len, count, registered)
    }

    /// Completes the requests of a call for which the ring returned `result`, or submits the call again.
    fn advance(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], result: i32) {
        match self.outcome(cx, tags, result) {
            Some(result) => self.complete(cx, tags, result),
            None => self.submit(cx, tags),
        }
    }

    /// Interprets `result`, which the ring returned for the call of the requests `tags`. Returns `None` if the call
    /// must be submitted again, for the rest.
    fn outcome(&self, cx: &mut DriverContext<'_>, tags: &[Tag], result: i32) -> Option<IoResult> {
        let request = cx.request(tags[0]);
        let (operation, has_tail) = (request.operation(), self.settings.reaches_tail(request));
        let progress = Progress::load(&request.pdu);
        if matches!(result.wrapping_neg(), libc::EAGAIN | libc::EINTR) {
            return self.again(cx, tags[0], Status::Resource);
        }
        if !operation.has_data() {
            return self.outcome_without_data(cx, tags[0], result);
        }
        if result < 0 {
            return Some(Err(Status::from_errno(-result)));
        }
        let total: u64 = match has_tail {
            true => self.settings.bytes(request),
            false => tags.iter().map(|&tag| cx.request(tag).bytes()).sum(),
        };
        let reached = progress.done + result as u64;
        if reached >= total {
            if has_tail && operation == Operation::Read {
                clear_padding(cx, tags[0], total);
            }
            return Some(Ok(()));
        }
        // A request that reaches the tail takes two calls; ending at the boundary is not a short transfer.
        if !has_tail || reached < self.settings.tail_call(request, progress.done).0 {
            add(&self.counters().short_transfers, 1);
        }
        // Direct I/O can continue only at a multiple of its alignment, so the bytes beyond the last multiple are
        // transferred again.
        let done = reached - reached % self.settings.align;
        if done > progress.done {
            Progress { done, attempts: 0 }.store(cx.pdu(tags[0]));
            return None;
        }
        match (operation, result) {
            // A read without progress means that the file has become shorter than the device.
            (Operation::Read, _) => Some(Err(Status::Io)),
            (_, 0) => Some(Err(Status::NoSpace)),
            _ => self.again(cx, tags[0], Status::Io),
        }
    }

    fn outcome_without_data(&self, cx: &mut DriverContext<'_>, tag: Tag, result: i32) -> Option<IoResult> {
        let (shared, request) = (&self.shared, cx.request(tag));
        let (operation, flags) = (request.operation(), request.flags());
        if Progress::load(&request.pdu).done > 0 {
            // The read of the end of a zeroed range. If it is short, the file has become shorter than the device.
            return Some(match result {
                ..0 => Err(Status::from_errno(-result)),
                _ if result as u64 == self.settings.end_unit(request).0 => Ok(()),
                _ => Err(Status::Io),
            });
        }
        if result >= 0 {
            return match operation {
                Operation::Flush if shared.writeback_failed.load(Relaxed) => Some(Err(Status::Io)),
                Operation::WriteZeroes if !shared.block_device => {
                    Progress { done: self.settings.bytes(request), attempts: 0 }.store(cx.pdu(tag));
                    None
                }
                _ => Some(Ok(())),
            };
        }
        let status = Status::from_errno(-result);
        match operation {
            // After a failed write-back the kernel marks the pages as clean, and the next fdatasync(2) succeeds without
            // them. So once a flush has failed, all later ones fail, too.
            Operation::Flush => {
                shared.writeback_failed.fetch_or(!self.settings.direct || self.tail.is_some(), Relaxed);
            }
            // Kernels before 6.12 do not have the command. Discards use the slower fallocate(2) from now on.
            Operation::Discard
                if shared.discard_by_command.load(Relaxed)
                    && matches!(status, Status::NotSupported | Status::Invalid) =>
            {
                shared.discard_by_command.store(false, Relaxed);
                return None;
            }
            _ if status == Status::NotSupported => {
                let supported = match operation {
                    Operation::Discard => &shared.discards,
                    _ if flags.contains(BioFlags::NO_UNMAP) => &shared.zeroes_no_unmap,
                    _ => &shared.zeroes,
                };
                supported.store(false, Relaxed);
                cx.limits_changed();
            }
            _ => {}
        }
        Some(Err(status))
    }

    /// Repeats a call that made no progress; once [`ATTEMPTS_MAX`] is reached it fails with `spent`.
    fn again(&self, cx: &mut DriverContext<'_>, tag: Tag, spent: Status) -> Option<IoResult> {
        let mut progress = Progress::load(cx.pdu(tag));
        progress.attempts += 1;
        progress.store(cx.pdu(tag));
        add(&self.counters().retries, 1);
        if progress.attempts < ATTEMPTS_MAX { None } else { Some(Err(spent)) }
    }

    fn counters(&self) -> &QueueCounters {
        &self.shared.counters.queues[usize::from(self.index)]
    }

    fn complete(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], result: IoResult) {
        let operation = cx.request(tags[0]).operation();
        let in_turn = self.settings.takes_turns(operation);
        self.in_flight -= 1;
        if in_turn && let Some(index) = self.calls.iter().position(|call| call.first == tags[0]) {
            self.calls.swap_remove(index);
        }
        match operation {
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

    /// Begins waiting requests as far as the limits on calls in flight and the writer token allow.
    fn take_turn(&mut self, cx: &mut DriverContext<'_>) {
        if self.calls.len() > CALLS_LOW.min(self.settings.calls_max - 1) {
            return;
        }
        let has_token = matches!(self.token, Token::Yes(_));
        if has_token && self.calls.is_empty() && (self.waiting.is_empty() || self.is_unfair()) {
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
            self.begin(cx, &tags);
            self.group = tags;
        }
    }

    /// Whether this queue has had its share of the token and another queue waits for it.
    fn is_unfair(&self) -> bool {
        matches!(self.token, Token::Yes(calls) if calls >= TOKEN_TURNS) && self.shared.writer.is_wanted()
    }

    /// Whether a call that begins with `tag` may be in flight together with those that are. Where several may be, all
    /// of them write. No two overlap, so that overlapping writes complete in order.
    fn may_begin(&self, cx: &DriverContext<'_>, tag: Tag) -> bool {
        let (begin, end) = (cx.request(tag).offset(), cx.request(tag).offset() + cx.request(tag).bytes());
        let apart = |call: &Call| call.range.end <= begin || end <= call.range.start;
        let one_more = self.calls.len() < self.settings.calls_max && !self.is_unfair();
        self.calls.is_empty() || one_more && self.calls.iter().all(apart)
    }

    fn has_token(&mut self, cx: &mut DriverContext<'_>) -> bool {
        let token = &self.shared.writer;
        let taken = match self.token {
            Token::Yes(calls) => {
                self.token = Token::Yes(calls + 1);
                return true;
            }
            Token::Waiting(_) => token.was_handed_to(self.index),
            Token::No => token.acquire(self.index),
        };
        self.token = if taken { Token::Yes(1) } else { Token::Waiting(cx.now_ns() + TOKEN_POLL_NS) };
        taken
    }

    fn release_token(&mut self) {
        self.token = Token::No;
        let next = self.shared.writer.release(self.index);
        if let Some(wake) = next.and_then(|next| self.shared.wakes[usize::from(next)].get()) {
            wake.wake();
        }
    }

    /// Moves waiting writes that directly continue the last request of `tags` from the FIFO to `tags`.
    fn join_adjacent(&mut self, cx: &DriverContext<'_>, tags: &mut Vec<Tag>) {
        let joinable = |tag: Tag| {
            let request = cx.request(tag);
            let alone = request.flags().intersects(BioFlags::FUA | BioFlags::NO_MERGE);
            let alone = alone || self.settings.reaches_tail(request);
            request.operation() == Operation::Write && !alone
        };
        let first = tags[0];
        if self.settings.turns != Turns::Writes || !joinable(first) {
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

/// Zeroes the memory of a read from byte `keep` on, which is beyond the end of the device.
fn clear_padding(cx: &DriverContext<'_>, tag: Tag, mut keep: u64) {
    cx.for_each_segment(tag, |segment| {
        let kept = keep.min(u64::from(segment.len));
        keep -= kept;
        let (kept, len) = (kept as usize, segment.len as usize);
        // SAFETY: the memory of a read that has not completed is valid and ours to fill.
        unsafe { segment.ptr.add(kept).write_bytes(0, len - kept) }
    });
}

// SAFETY: a request completes when the ring has completed the one entry in flight for it, or before there is one.
unsafe impl DriverQueue for LoopQueue {
    fn queue_requests(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag]) -> Taken {
        for &tag in tags {
            let request = cx.request(tag);
            let operation = request.operation();
            // If the block device cannot zero a range, the kernel writes zeroes itself and does not report that. So
            // a fast answer cannot be promised.
            let maybe_slow = operation == Operation::WriteZeroes
                && self.shared.block_device
                && request.flags().contains(BioFlags::NO_UNMAP | BioFlags::NO_FALLBACK);
            if self.settings.read_only && operation.is_write() {
                cx.complete(tag, Err(Status::ReadOnly));
            } else if maybe_slow {
                cx.complete(tag, Err(Status::NotSupported));
            } else if operation == Operation::Discard && self.discard_range(request).is_empty() {
                // The range contains no whole unit of the block device, and a discard is only advice.
                cx.complete(tag, Ok(()));
            } else if self.settings.takes_turns(operation) {
                self.waiting.push_back(tag);
            } else {
                self.begin(cx, &[tag]);
            }
        }
        Taken::All
    }

    fn commit(&mut self, cx: &mut DriverContext<'_>) {
        self.take_turn(cx);
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        let first = Tag(cqe.token.payload() as u16);
        if !self.settings.takes_turns(cx.request(first).operation()) {
            return self.advance(cx, &[first], cqe.result);
        }
        let mut tags = std::mem::take(&mut self.group);
        tags.clear();
        let mut next = u64::from(first.0) + 1;
        while next > 0 {
            let tag = Tag((next - 1) as u16);
            tags.push(tag);
            next = cx.pdu(tag)[1] >> NEXT_SHIFT;
        }
        self.advance(cx, &tags, cqe.result);
        self.group = tags;
        self.take_turn(cx);
    }

    fn poll(&mut self, cx: &mut DriverContext<'_>) {
        if matches!(self.token, Token::Waiting(_)) {
            self.take_turn(cx);
        }
    }

    fn state(&self, tag: Tag, request: &Request) -> Cow<'static, str> {
        if self.waiting.contains(&tag) {
            return match self.token {
                Token::Waiting(_) => "in the driver, waiting for another queue's buffered writes".into(),
                _ => "in the driver, waiting for its turn at the file".into(),
            };
        }
        let Progress { done, attempts } = Progress::load(&request.pdu);
        let again = if attempts > 0 { format!(", retried {attempts} times") } else { String::new() };
        let done =
            if done > 0 { format!(", {done} of {} bytes done", request.bytes()) } else { String::new() };
        format!("in the kernel's io_uring{done}{again}").into()
    }

    fn deadline_ns(&self) -> Option<u64> {
        if let Token::Waiting(again_ns) = self.token { Some(again_ns) } else { None }
    }

    fn reload(&mut self, cx: &mut DriverContext<'_>) {
        let (file, tail, settings) = self.shared.queue_settings();
        self.settings = settings;
        let Some(mut ring) = cx.registrar() else { return };
        let mut replaced = self.image.replace(file, &mut ring);
        if let Some((old, file)) = self.tail.as_mut().zip(tail) {
            replaced = replaced.and(old.replace(file, &mut ring));
        }
        // A queue that keeps an old file has the same image opened for reading only.
        self.settings.read_only |= replaced.is_err();
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        if let Some(mut ring) = cx.registrar() {
            let tail = self.tail.as_mut().map(|tail| &mut tail.slot);
            let slots = [&mut self.image.slot, &mut self.synced].into_iter().chain(tail);
            slots.for_each(|slot| ring.unregister_file(slot));
        }
    }
}

impl Drop for LoopQueue {
    fn drop(&mut self) {
        match self.token {
            Token::Yes(_) => self.release_token(),
            // The token arrived before the withdrawal, so it must be passed on.
            Token::Waiting(_) if !self.shared.writer.withdraw(self.index) => self.release_token(),
            _ => {}
        }
        if self.in_flight > 0 {
            // Requests are still in flight because the thread panicked. The kernel may read the arguments and write to
            // the scratch buffer.
            std::mem::forget(std::mem::take(&mut self.iovecs));
            std::mem::forget(std::mem::replace(&mut self.scratch, IoBuffer::zeroed(0)));
        }
    }
}
