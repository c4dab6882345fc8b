//! The data path: one queue of a loop device on one ring.
//!
//! Requests that may run concurrently are submitted immediately. Requests that take turns (see [`Turns`]) wait in a
//! FIFO, and adjacent writes that wait are submitted as one call. Where the kernel executes writes one at a time,
//! several calls are submitted ahead, so that its worker continues with the next write without waking this thread.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use blkq::stats::add;
use blkq::{
    BioFlags, Cqe, DriverContext, DriverQueue, Error, IoResult, Operation, Registrar, Request, Status, Tag,
    Taken,
};
use io_uring::squeue;

use crate::image_file::OPERATIONS;

use super::counters::QueueCounters;
use super::image::Image;
use super::outcome;
use super::progress::{NEXT_SHIFT, Progress};
use super::shared::{REQUEST_MAX_BYTES, SEGMENTS_MAX, Shared, Turns};

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
/// Flag of the payload of a call that took its turn. The bits below are the tag of its first request.
const IN_TURN: u64 = 1 << 16;

/// A call in flight that took its turn.
struct Call {
    first: Tag,
    operation: Operation,
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

pub(super) struct LoopQueue {
    shared: Arc<Shared>,
    index: u16,
    image: Image,
    read_only: bool,
    turns: Turns,
    waiting: VecDeque<Tag>,
    /// The calls in flight that took their turn, in no order; at most `calls_max`.
    calls: Vec<Call>,
    calls_max: usize,
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
        let settings = shared.queue_settings();
        let (read_only, turns, calls_max) = (settings.read_only, settings.turns, settings.calls_max);
        let image = Image::open(&shared, index, settings, tags, &mut ring)?;
        Ok(LoopQueue {
            index,
            image,
            read_only,
            turns,
            waiting: VecDeque::with_capacity(tags),
            calls: Vec::with_capacity(tags),
            calls_max,
            group: Vec::with_capacity(tags),
            token: Token::No,
            in_flight: 0,
            reads_in_flight: 0,
            shared,
        })
    }

    /// Whether a discard contains no whole unit of the block device. The discard then
    /// completes without doing anything, because a discard is only advice.
    fn discards_nothing(&self, request: &Request) -> bool {
        self.shared.discard_range(request.offset(), self.image.bytes(request)).is_empty()
    }

    fn waits_for_its_turn(&self, operation: Operation) -> bool {
        match self.turns {
            Turns::None => false,
            Turns::Writes => operation.is_write(),
            Turns::All => true,
        }
    }

    /// Counts the requests of a new call, and submits the call.
    fn begin(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool) {
        let operation = cx.request(tags[0]).operation();
        self.in_flight += 1;
        match operation {
            Operation::Read => {
                self.reads_in_flight += 1;
                self.counters().read(self.reads_in_flight);
            }
            Operation::Flush => add(&self.counters().flushes, 1),
            _ if in_turn => {
                if self.calls.is_empty() {
                    self.shared.counters.begin_writing();
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
            self.calls.push(Call { first: tags[0], operation, range: begin..begin + bytes });
            self.counters().turn(self.calls.len());
        }
        self.submit(cx, tags, in_turn);
    }

    fn submit(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool) {
        let first = tags[0];
        let progress = Progress::load(cx.pdu(first));
        let entry = self.image.entry(cx, &self.shared, tags, progress.done);
        let entry =
            if progress.attempts > ATTEMPTS_INLINE { entry.flags(squeue::Flags::ASYNC) } else { entry };
        let payload = u64::from(first.0) | if in_turn { IN_TURN } else { 0 };
        // SAFETY: the block layer keeps the memory of a request in flight valid. The argument arrays and the
        // registered file stay valid until this queue is dropped, with nothing in flight, or are leaked (see
        // `drop`).
        unsafe { cx.push(entry, payload) }
    }

    /// Completes the requests of a call for which the ring returned `result`, or submits the call again.
    #[inline]
    fn advance(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool, result: i32) {
        match outcome::of(&self.image, &self.shared, self.counters(), cx, tags, result) {
            Some(result) => self.complete(cx, tags, in_turn, result),
            None => self.submit(cx, tags, in_turn),
        }
    }

    fn counters(&self) -> &QueueCounters {
        self.shared.counters.queue(self.index)
    }

    fn complete(&mut self, cx: &mut DriverContext<'_>, tags: &[Tag], in_turn: bool, result: IoResult) {
        self.in_flight -= 1;
        if in_turn && let Some(index) = self.calls.iter().position(|call| call.first == tags[0]) {
            self.calls.swap_remove(index);
        }
        match cx.request(tags[0]).operation() {
            Operation::Read => self.reads_in_flight -= 1,
            Operation::Flush => {}
            _ if in_turn && self.calls.is_empty() => self.shared.counters.finish_writing(),
            _ => {}
        }
        for &tag in tags {
            cx.complete(tag, result);
        }
    }

    /// Begins waiting requests as far as the limits on calls in flight and the writer token allow.
    fn take_turn(&mut self, cx: &mut DriverContext<'_>) {
        if self.calls.len() > CALLS_LOW.min(self.calls_max - 1) {
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
            self.begin(cx, &tags, true);
            self.group = tags;
        }
    }

    /// Whether this queue has had its share of the token and another queue waits for it.
    fn is_unfair(&self) -> bool {
        matches!(self.token, Token::Yes(calls) if calls >= TOKEN_TURNS) && self.shared.writer.is_wanted()
    }

    /// Whether a call that begins with `tag` may be in flight together with those that are. Several calls may be in
    /// flight only if all of them write and no two overlap, so that overlapping writes complete in order.
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
        if let Some(next) = self.shared.writer.release(self.index) {
            self.shared.wake(next);
        }
    }

    /// Moves waiting writes that directly continue the last request of `tags` from the FIFO to `tags`.
    fn join_adjacent(&mut self, cx: &DriverContext<'_>, tags: &mut Vec<Tag>) {
        let joinable = |tag: Tag| {
            let request = cx.request(tag);
            let alone = request.flags().intersects(BioFlags::FUA | BioFlags::NO_MERGE);
            let alone = alone || self.image.tail.is_reached_by(request);
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
            if self.read_only && operation.is_write() {
                cx.complete(tag, Err(Status::ReadOnly));
            } else if maybe_slow {
                cx.complete(tag, Err(Status::NotSupported));
            } else if operation == Operation::Discard && self.discards_nothing(request) {
                cx.complete(tag, Ok(()));
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
    }

    fn complete_cqe(&mut self, cx: &mut DriverContext<'_>, cqe: Cqe) {
        let payload = cqe.token.payload();
        if payload & IN_TURN == 0 {
            return self.advance(cx, &[Tag(payload as u16)], false, cqe.result);
        }
        let mut tags = std::mem::take(&mut self.group);
        tags.clear();
        let mut next = u64::from(payload as u16) + 1;
        while next > 0 {
            let tag = Tag((next - 1) as u16);
            tags.push(tag);
            next = cx.pdu(tag)[1] >> NEXT_SHIFT;
        }
        self.advance(cx, &tags, true, cqe.result);
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
        let settings = self.shared.queue_settings();
        self.read_only = settings.read_only;
        self.turns = settings.turns;
        self.calls_max = settings.calls_max;
        // If the new file cannot be registered, the queue keeps the old one, which is the same image opened for
        // reading only.
        self.read_only |= self.image.reload(settings, cx).is_err();
    }

    fn close(&mut self, cx: &mut DriverContext<'_>) {
        if let Some(mut ring) = cx.registrar() {
            self.image.close(&mut ring);
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
            // Requests are still in flight because the thread panicked, and the kernel may use their memory.
            self.image.leak();
        }
    }
}
