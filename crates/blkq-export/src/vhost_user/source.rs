//! A ring on its engine: takes the requests that are available, as far as the budget of a turn allows, submits them
//! under one plug, and calls the guest at most once per turn. It stops when nothing of it is in flight any more.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, Release};

use blkq::trace::TraceClient;
use blkq::{
    Bio, BioFlags, Completion, Cqe, Data, Error, IoBuffer, IoResult, Operation, Sector, Source,
    SourceContext, Status,
};
use io_uring::{opcode, types};

use crate::client_kind;
use crate::slots::Slots;
use crate::work::TurnWork;

use super::abi::{S_IOERR, S_OK};
use super::bounce::{Bounces, copy_in, copy_out};
use super::chain::{Chain, Head, RingError};
use super::config::range_sectors_max;
use super::memory::GuestMemory;
use super::notifier::Notifier;
use super::request::{Action, BlockRequest, Parser, Range, status_of};
use super::ring::Ring;
use super::status::{RingCounters, RingStatus};
use super::wakeup::Wakeup;

/// The engine's queue behind its rings: each engine has one.
const ENGINE_QUEUE: usize = 0;
/// Tokens: the poll for kicks, and its cancellation.
const KICKED: u64 = 1 << 32;
const CANCELLED: u64 = 2 << 32;
/// How often a ring without a kick eventfd is polled.
const POLL_NS: u64 = 1_000_000;
/// How long unused buffers are kept.
const IDLE_NS: u64 = 1_000_000_000;

/// A ring, and all that it is served with.
pub struct VringStart {
    /// Where it goes on.
    pub ring: Ring,
    /// The memory that it is in.
    pub memory: Arc<GuestMemory>,
    /// Becomes readable when there are requests; without it the ring is polled.
    pub kick: Option<Arc<OwnedFd>>,
    /// Notified when there are completions.
    pub call: Arc<Notifier>,
    /// For others to see.
    pub status: Arc<RingStatus>,
    /// Writes are durable when they complete.
    pub write_through: Arc<AtomicBool>,
    /// The serial number.
    pub serial: Arc<str>,
    /// Is woken when the ring was rejected.
    pub wake: Arc<Wakeup>,
    /// The front end, for people.
    pub peer: Arc<str>,
}

/// A message to the source: the descriptor by which the guest is called is another one.
pub struct CallChanged;

/// A request in flight.
struct Slot {
    head: Head,
    /// Guest address of the status byte.
    status: u64,
    writable: u32,
    /// Bios that have not completed.
    bios: u32,
    result: IoResult,
    read: bool,
    sector: Sector,
    bytes: u32,
    /// All addresses and lengths of its data, in one: [`Action::Transfer`].
    unaligned: usize,
    /// The guest's memory, while the data is in a buffer.
    bounced: Option<Data>,
}

/// Data that was read into a buffer, on its way to the guest.
struct CopyOut {
    slot: u64,
    guest: Data,
    buffer: IoBuffer,
}

/// A ring that is served.
pub struct VringSource {
    start: VringStart,
    parser: Parser,
    chain: Chain,
    slots: Slots<Slot>,
    /// Bios for which the queue had no room.
    refused: VecDeque<Bio>,
    bounces: Bounces,
    /// Reads whose bios have completed.
    copies: VecDeque<CopyOut>,
    work: TurnWork,
    idle_since_ns: Option<u64>,
    counters: RingCounters,
    /// Requests have completed that the guest does not see yet.
    unpublished: bool,
    /// There may be requests that nobody is going to kick for.
    more: bool,
    kicks_enabled: bool,
    poll_armed: bool,
    cancel_armed: bool,
    /// No kick will come any more.
    kick_closed: bool,
    next_poll_ns: u64,
    rejected: bool,
    stopping: bool,
    /// Whether the kernel's vectored calls reach registered memory.
    vectors_registered: bool,
    /// The engine exits: what a daemon that died left in flight stays for the next one.
    engine_exits: bool,
}

impl VringSource {
    /// Serves the ring of `start`.
    pub fn new(start: VringStart) -> VringSource {
        VringSource {
            parser: Parser::new(&start.serial),
            chain: Chain::new(),
            slots: Slots::default(),
            refused: VecDeque::new(),
            bounces: Bounces::new(),
            copies: VecDeque::new(),
            work: TurnWork::default(),
            idle_since_ns: None,
            counters: RingCounters::default(),
            unpublished: false,
            more: true,
            kicks_enabled: false,
            poll_armed: false,
            cancel_armed: false,
            kick_closed: false,
            next_poll_ns: 0,
            rejected: false,
            stopping: false,
            vectors_registered: false,
            engine_exits: false,
            start,
        }
    }

    /// Nothing is taken from the ring, nor put into it, any more.
    #[cold]
    fn reject(&mut self, reason: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.rejected, true) {
            // Zeroes that stand in its place are no mistake of the guest.
            let lost = self.start.ring.is_broken().then(|| RingError::MemoryLost.to_string());
            let _ = self.start.status.rejected.set(lost.unwrap_or_else(|| reason.to_string()));
            self.start.wake.wake();
        }
    }

    fn watch_kicks(&mut self, cx: &mut SourceContext<'_>) {
        let Some(kick) = &self.start.kick else { return };
        let entry =
            opcode::PollAdd::new(types::Fd(kick.as_raw_fd()), libc::POLLIN as u32).multi(true).build();
        self.poll_armed = true;
        // SAFETY: the descriptor stays open as long as the source, and no memory is passed.
        unsafe { cx.push(entry, KICKED) }
    }

    fn cancel_watch(&mut self, cx: &mut SourceContext<'_>) {
        if self.poll_armed && !self.cancel_armed {
            self.cancel_armed = true;
            let poll = cx.token(KICKED).0;
            // SAFETY: no memory and no descriptor is passed.
            unsafe { cx.push(opcode::AsyncCancel::new(poll).build(), CANCELLED) }
        }
    }

    /// Whether requests of a daemon that died have yet to begin. They are no longer available, and so they
    /// begin before the ring stops.
    fn has_recovered(&self) -> bool {
        !self.rejected && !self.engine_exits && self.start.ring.has_recovered()
    }

    /// Takes what is available, as far as the turn's budget allows; once it stops, what was in flight before. The guest
    /// chooses how many descriptors a request has, many requests may share one table of them, and requests that
    /// complete immediately are limited by nothing else.
    fn take_requests(&mut self, cx: &mut SourceContext<'_>) {
        self.more = false;
        loop {
            if self.rejected || !self.refused.is_empty() || self.bounces.is_exhausted() {
                return;
            }
            if self.stopping && !self.has_recovered() {
                return;
            }
            if self.work.is_over() {
                self.more = true;
                return;
            }
            match self.start.ring.pop(&mut self.chain) {
                Ok(Some(head)) => {
                    self.kicks_enabled = false;
                    self.work.spend(self.chain.descriptors());
                    self.begin(cx, head);
                }
                Ok(None) if self.kicks_enabled => return,
                Ok(None) => {
                    self.kicks_enabled = true;
                    if !self.start.ring.enable_kicks() {
                        return;
                    }
                }
                Err(error) => return self.reject(&error),
            }
        }
    }

    /// Begins the request of `head`, whose chain has been read.
    fn begin(&mut self, cx: &mut SourceContext<'_>, head: Head) {
        self.counters.requests += 1;
        let BlockRequest { status, writable, action } =
            match self.parser.parse(&self.chain, &self.start.memory) {
                Ok(request) => request,
                Err(error) => return self.reject(&error),
            };
        let mut slot = Slot {
            head,
            status,
            writable,
            bios: 1,
            result: Ok(()),
            read: false,
            sector: Sector(0),
            bytes: 0,
            unaligned: 0,
            bounced: None,
        };
        let limits = cx.limits(ENGINE_QUEUE);
        // For the guest the device ends where its configuration says.
        let end = limits.whole_bytes() >> 9;
        let is_inside = |sector: u64, sectors: u64| sector.checked_add(sectors).is_some_and(|at| at <= end);
        match action {
            Action::Reply(status) => self.finish(slot, status),
            Action::Transfer { bytes: 0, .. } => self.finish(slot, S_OK),
            Action::Transfer { sector, bytes, data, .. } if !is_inside(sector.0, bytes >> 9) => {
                self.parser.recycle(data);
                self.finish(slot, S_IOERR);
            }
            Action::Transfer { operation, sector, bytes, data, unaligned, registered_pieces } => {
                slot.read = operation == Operation::Read;
                (slot.sector, slot.bytes, slot.unaligned) = (sector, bytes as u32, unaligned);
                self.transfer(cx, slot, data, registered_pieces);
            }
            Action::Flush => {
                let user_data = self.slots.insert(slot);
                self.submit(cx, Bio::flush(user_data));
            }
            Action::Ranges { operation } => {
                let sectors_max = range_sectors_max(limits, operation);
                let is_legal =
                    |range: &Range| range.sectors <= sectors_max && is_inside(range.sector.0, range.sectors);
                if !self.parser.ranges.iter().all(is_legal) {
                    return self.finish(slot, S_IOERR);
                }
                if self.start.ring.is_broken() {
                    return self.reject(&RingError::MemoryLost);
                }
                let ranges = std::mem::take(&mut self.parser.ranges);
                self.work.spend(ranges.len());
                slot.bios = ranges.len() as u32;
                let user_data = self.slots.insert(slot);
                for range in &ranges {
                    let mut flags = BioFlags::empty();
                    if operation == Operation::WriteZeroes {
                        flags = self.write_flags();
                        flags.set(BioFlags::NO_UNMAP, !range.unmap);
                    }
                    let (sector, sectors) = (range.sector, range.sectors);
                    self.submit(cx, Bio { operation, flags, sector, sectors, data: Data::None, user_data });
                }
                self.parser.ranges = ranges;
            }
        }
    }

    /// Submits a read or a write of `data`, through a buffer if that is not aligned as the disk needs it.
    fn transfer(&mut self, cx: &mut SourceContext<'_>, mut slot: Slot, data: Data, registered_pieces: usize) {
        let data = if is_aligned(cx, &slot) {
            let is_reached = registered_pieces == 1 || self.vectors_registered;
            self.counters.registered += u64::from(registered_pieces > 0 && is_reached);
            data
        } else {
            let Some(mut buffer) = self.bounces.take(slot.bytes, cx.registrar()) else {
                self.parser.recycle(data);
                return self.finish(slot, S_IOERR);
            };
            self.counters.bounced += 1;
            if !slot.read {
                self.work.spend_bytes(slot.bytes as usize);
                copy_in(&data, &mut buffer[..slot.bytes as usize]);
            }
            slot.bounced = Some(data);
            Data::Buffer(buffer)
        };
        // Zeroes in the place of memory that was lost meanwhile do not reach the disk.
        if self.start.ring.is_broken() {
            return self.reject(&RingError::MemoryLost);
        }
        let (operation, flags) = match slot.read {
            true => (Operation::Read, BioFlags::empty()),
            false => (Operation::Write, self.write_flags()),
        };
        let (sector, sectors) = (slot.sector, u64::from(slot.bytes) >> 9);
        let user_data = self.slots.insert(slot);
        self.submit(cx, Bio { operation, flags, sector, sectors, data, user_data });
    }

    fn write_flags(&self) -> BioFlags {
        if self.start.write_through.load(Relaxed) { BioFlags::FUA } else { BioFlags::empty() }
    }

    fn submit(&mut self, cx: &mut SourceContext<'_>, bio: Bio) {
        // Those that wait go first.
        let refused = if self.refused.is_empty() { self.submit_now(cx, bio) } else { Err(bio) };
        if let Err(bio) = refused {
            self.refused.push_back(bio);
        }
    }

    #[inline]
    fn submit_now(&self, cx: &mut SourceContext<'_>, bio: Bio) -> Result<(), Bio> {
        let ring = self.start.status.index;
        cx.set_trace_client(ENGINE_QUEUE, || TraceClient::new(client_kind::VRING, ring));
        cx.submit(ENGINE_QUEUE, bio)
    }

    fn retry_refused(&mut self, cx: &mut SourceContext<'_>) {
        while let Some(bio) = self.refused.pop_front() {
            if let Err(bio) = self.submit_now(cx, bio) {
                return self.refused.push_front(bio);
            }
        }
    }

    /// Copies data that was read to the guest, as far as the turn's budget allows.
    fn copy_reads(&mut self) {
        while !self.work.is_over()
            && let Some(CopyOut { slot: number, guest, buffer }) = self.copies.pop_front()
        {
            let bytes = self.slots.get(number).map_or(0, |slot| slot.bytes as usize);
            copy_out(&buffer[..bytes], &guest);
            self.work.spend_bytes(bytes);
            self.bounces.put(buffer);
            self.parser.recycle(guest);
            self.complete_bio(number, Ok(()));
        }
    }

    /// A bio of the request in slot `number` is done.
    #[inline]
    fn complete_bio(&mut self, number: u64, result: IoResult) {
        let Some(slot) = self.slots.get_mut(number) else { return };
        slot.result = slot.result.and(result);
        slot.bios -= 1;
        if slot.bios == 0
            && let Some(slot) = self.slots.take(number)
        {
            let status = status_of(slot.result);
            self.finish(slot, status);
        }
    }

    /// Completes a request: the guest sees it with the next [`VringSource::publish`].
    fn finish(&mut self, slot: Slot, status: u8) {
        if status != S_OK {
            self.counters.errors += 1;
        } else if slot.read {
            self.counters.read_bytes += u64::from(slot.bytes);
        } else {
            self.counters.written_bytes += u64::from(slot.bytes);
        }
        if self.rejected {
            return;
        }
        self.parser.write_status(&self.start.memory, slot.status, status);
        let written = BlockRequest::written(slot.writable, status);
        self.start.ring.push_used(slot.head, written);
        self.unpublished = true;
    }

    /// Shows the guest what has completed, and calls it if it wants that.
    fn publish(&mut self) {
        if !std::mem::take(&mut self.unpublished) || self.rejected {
            return;
        }
        let wanted = self.start.ring.publish();
        if wanted {
            self.call();
        }
    }

    fn call(&mut self) {
        match self.start.call.notify() {
            Ok(notified) => self.counters.calls += u64::from(notified),
            Err(error) => self.reject(&format_args!("its driver cannot be called: {error}")),
        }
    }

    fn trim(&mut self, cx: &mut SourceContext<'_>) {
        match (self.bounces.is_idle(), self.idle_since_ns) {
            (false, None) => {}
            (false, Some(_)) => self.idle_since_ns = None,
            (true, None) => self.idle_since_ns = Some(cx.now_ns()),
            (true, Some(since_ns)) => {
                if cx.now_ns() >= since_ns + IDLE_NS {
                    self.bounces.trim(cx.registrar());
                    self.idle_since_ns = None;
                }
            }
        }
    }
}

/// Whether the disk takes its data as it is.
fn is_aligned(cx: &SourceContext<'_>, slot: &Slot) -> bool {
    slot.unaligned & (cx.limits(ENGINE_QUEUE).memory_align as usize - 1) == 0
}

// SAFETY: it is stopped when its poll and all bios are back.
unsafe impl Source for VringSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        self.watch_kicks(cx);
        self.vectors_registered = cx.registrar().supports(opcode::ReadvFixed::CODE);
        Ok(())
    }

    fn on_cqe(&mut self, cx: &mut SourceContext<'_>, cqe: Cqe) {
        if cqe.token.payload() == CANCELLED {
            self.cancel_armed = false;
            return;
        }
        self.poll_armed = cqe.more();
        match u32::try_from(cqe.result) {
            Ok(events) => {
                self.counters.kicks += 1;
                // The other end is closed: the connection reports why.
                self.kick_closed |=
                    events as i32 & i32::from(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0;
                if self.kick_closed {
                    self.cancel_watch(cx);
                }
            }
            Err(_) if self.stopping || self.rejected || self.kick_closed => {}
            Err(_) => {
                let errno = rustix::io::Errno::from_raw_os_error(-cqe.result);
                self.reject(&format_args!("its kick descriptor cannot be polled: {errno}"));
            }
        }
    }

    fn on_bio(&mut self, cx: &mut SourceContext<'_>, completion: Completion) {
        let number = completion.user_data;
        let Some(slot) = self.slots.get_mut(number) else { return };
        if completion.result == Err(Status::Invalid)
            && slot.bounced.is_none()
            && !self.rejected
            && !is_aligned(cx, slot)
        {
            // It waited while a live change raised the alignment.
            if let Some(slot) = self.slots.take(number) {
                self.transfer(cx, slot, completion.data, 0);
            }
            return;
        }
        match (slot.bounced.take(), completion.data) {
            (Some(guest), Data::Buffer(buffer)) if slot.read && completion.result.is_ok() => {
                return self.copies.push_back(CopyOut { slot: number, guest, buffer });
            }
            (Some(guest), Data::Buffer(buffer)) => {
                self.bounces.put(buffer);
                self.parser.recycle(guest);
            }
            (_, data) => self.parser.recycle(data),
        }
        self.complete_bio(number, completion.result);
    }

    fn on_message(&mut self, cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        let _ = cx;
        if message.is::<CallChanged>() {
            // A completion may have been announced to the one before, which nobody reads any more.
            self.call();
        }
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        if self.start.ring.is_broken() {
            self.reject(&RingError::MemoryLost);
        }
        self.work.begin(cx);
        self.retry_refused(cx);
        self.copy_reads();
        self.publish();
        if !self.stopping || self.has_recovered() {
            self.take_requests(cx);
            // Those that needed no bio.
            self.publish();
        }
        if !self.stopping {
            if self.start.kick.is_none() {
                self.next_poll_ns = cx.now_ns() + POLL_NS;
            }
            if self.rejected {
                self.cancel_watch(cx);
            } else if !self.poll_armed && !self.kick_closed {
                self.watch_kicks(cx);
            }
        }
        self.trim(cx);
        self.start.status.publish(&self.counters, self.slots.len());
        self.start.status.base.store(self.start.ring.base(), Release);
    }

    fn deadline_ns(&self) -> Option<u64> {
        if !self.copies.is_empty() {
            return Some(0);
        }
        if self.rejected || self.stopping && !self.has_recovered() {
            return None;
        }
        if self.more {
            return Some(0);
        }
        if self.stopping {
            return None;
        }
        let poll_ns = self.start.kick.is_none().then_some(self.next_poll_ns);
        let idle_ns = self.idle_since_ns.map(|since_ns| since_ns + IDLE_NS);
        poll_ns.into_iter().chain(idle_ns).min()
    }

    fn client_of(&self, mark: u64) -> Option<String> {
        let VringStart { status, peer, .. } = &self.start;
        let descriptor = self.slots.get(mark)?.head.index;
        Some(format!("vhost-user front end ({peer}), ring {}, descriptor {descriptor}", status.index))
    }

    fn is_abandoned(&self, _user_data: u64) -> bool {
        // A ring that was rejected has no answer for its guest, and perhaps zeroes in the place of its data.
        self.stopping || self.rejected
    }

    fn stop(&mut self, cx: &mut SourceContext<'_>, _force: bool) {
        self.stopping = true;
        self.engine_exits |= cx.engine_exits();
        self.cancel_watch(cx);
    }

    fn is_stopped(&self) -> bool {
        let idle = self.slots.len() == 0 && (!self.unpublished || self.rejected) && !self.has_recovered();
        self.stopping && idle && !self.poll_armed && !self.cancel_armed
    }
}
