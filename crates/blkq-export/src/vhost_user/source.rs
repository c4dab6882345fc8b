//! Serves a ring on its engine. A turn takes the available requests, as far as the budget allows, submits
//! them under one plug, and calls the guest at most once. The source stops when no request is in flight.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
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

use crate::buffers::{BUFFER_MAX_BYTES, BufferPool};
use crate::client_kind;
use crate::submissions::{ENGINE_QUEUE, Slots, Submissions, TurnWork};

use super::chain::{Chain, Head, RingError};
use super::config::range_sectors_max;
use super::inflight::InflightRegion;
use super::memory::GuestMemory;
use super::request::{Action, BlockRequest, Parser, Range, S_IOERR, S_OK, status_of};
use super::ring::Ring;
use super::segments::{copy_in, copy_out};
use super::status::{RingStatus, Shared, VhostUserCounters};

// Token payloads: the poll for kicks, and its cancellation.
const KICKED: u64 = 1 << 32;
const CANCELLED: u64 = 2 << 32;
/// Interval in nanoseconds at which a ring without a kick eventfd is polled.
const POLL_NS: u64 = 1_000_000;
/// While this number of bytes is in bounce buffers, a ring takes no requests. Otherwise a guest with little
/// memory could make this process allocate much, with many requests that name the same memory.
const BOUNCED_MAX_BYTES: usize = 2 * BUFFER_MAX_BYTES as usize;

pub struct RingContext {
    /// The table of guest memory for the engine of the ring.
    pub memory: Arc<GuestMemory>,
    /// The features of virtio that the driver has acknowledged.
    pub features: u64,
    pub inflight: Option<Arc<InflightRegion>>,
    pub write_through: Arc<AtomicBool>,
    pub peer: Arc<str>,
}

pub struct VringStart {
    pub ring: Ring,
    /// Becomes readable when the driver has added requests. Without it the ring is polled.
    pub kick: Option<Arc<OwnedFd>>,
    pub shared: Arc<Shared>,
    pub status: Arc<RingStatus>,
    pub context: RingContext,
}

/// A message to the source: another descriptor for calls was set.
pub struct CallChanged;

#[derive(Default)]
struct Slot {
    head: Head,
    /// Guest address of the status byte.
    status: u64,
    /// The first argument of [`BlockRequest::written`].
    writable: u32,
    bios: u32,
    /// The status of the bios that have completed.
    result: u8,
    read: bool,
    sector: Sector,
    bytes: u32,
    /// A copy of the field of the request's data.
    unaligned: usize,
    /// The guest's memory, while the data is in a bounce buffer.
    bounced: Option<Data>,
}

pub struct VringSource {
    start: VringStart,
    parser: Parser,
    chain: Chain,
    slots: Slots<Slot>,
    submissions: Submissions,
    bounces: BufferPool,
    /// Completed reads whose data must be copied to the guest: the slot, the guest's memory and the data.
    copies: VecDeque<(u64, Data, IoBuffer)>,
    work: TurnWork,
    counters: VhostUserCounters,
    /// There may be requests for which the driver will not kick.
    may_have_more: bool,
    kicks_enabled: bool,
    poll_armed: bool,
    cancel_armed: bool,
    /// The kick descriptor reported an error or a hangup: further kicks cannot arrive.
    kick_closed: bool,
    next_poll_ns: u64,
    rejected: bool,
    stopping: bool,
    /// The engine exits: recovered requests that have not begun stay for the next daemon.
    engine_exits: bool,
}

impl VringSource {
    pub fn new(start: VringStart) -> VringSource {
        VringSource {
            parser: Parser::new(&start.shared.serial),
            chain: Chain::new(),
            slots: Slots::default(),
            submissions: Submissions::new(TraceClient::new(client_kind::VRING, start.status.index)),
            bounces: BufferPool::default(),
            copies: VecDeque::new(),
            work: TurnWork::default(),
            counters: VhostUserCounters::default(),
            may_have_more: true,
            kicks_enabled: false,
            poll_armed: false,
            cancel_armed: false,
            kick_closed: false,
            next_poll_ns: 0,
            rejected: false,
            stopping: false,
            engine_exits: false,
            start,
        }
    }

    /// Rejects the ring: from now on nothing is taken from it or added to it.
    #[cold]
    fn reject(&mut self, reason: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.rejected, true) {
            // If memory was truncated, `reason` may be a consequence of the zeroes that replace it, and not a
            // mistake of the guest.
            let lost = self.start.ring.is_broken().then(|| RingError::MemoryLost.to_string());
            let _ = self.start.status.rejected.set(lost.unwrap_or_else(|| reason.to_string()));
            self.start.shared.wake.wake();
        }
    }

    fn watch_kicks(&mut self, cx: &mut SourceContext<'_>) {
        let Some(kick) = &self.start.kick else { return };
        let entry =
            opcode::PollAdd::new(types::Fd(kick.as_raw_fd()), libc::POLLIN as u32).multi(true).build();
        self.poll_armed = true;
        // SAFETY: the descriptor stays open as long as the source, and the poll has no memory.
        unsafe { cx.push(entry, KICKED) }
    }

    fn cancel_watch(&mut self, cx: &mut SourceContext<'_>) {
        if self.poll_armed && !self.cancel_armed {
            self.cancel_armed = true;
            let poll = cx.token(KICKED).0;
            // SAFETY: the cancellation has no memory and no descriptor.
            unsafe { cx.push(opcode::AsyncCancel::new(poll).build(), CANCELLED) }
        }
    }

    /// Recovered requests are no longer available in the ring, so they must begin before the source stops.
    fn has_recovered(&self) -> bool {
        !self.rejected && !self.engine_exits && self.start.ring.has_recovered()
    }

    /// Whether the source still takes requests: one that stops takes only recovered requests.
    fn takes_requests(&self) -> bool {
        !self.rejected && !self.stopping || self.has_recovered()
    }

    /// Takes the available requests. The budget is needed because the guest chooses the number of descriptors, because
    /// many requests may share an indirect table, and because requests that complete immediately are not limited by the
    /// depth of the queue.
    fn take_requests(&mut self, cx: &mut SourceContext<'_>) {
        self.may_have_more = false;
        loop {
            let full = self.submissions.requeued() > 0 || self.bounces.used_bytes >= BOUNCED_MAX_BYTES;
            if full || !self.takes_requests() {
                return;
            }
            if self.work.is_over() {
                self.may_have_more = true;
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

    fn begin(&mut self, cx: &mut SourceContext<'_>, head: Head) {
        self.counters.requests += 1;
        let BlockRequest { status, writable, action } =
            match self.parser.parse(&self.chain, &self.start.context.memory) {
                Ok(request) => request,
                Err(error) => return self.reject(&error),
            };
        let mut slot = Slot { head, status, writable, bios: 1, result: S_OK, ..Slot::default() };
        let limits = cx.limits(ENGINE_QUEUE);
        // The guest sees a device of whole blocks, which may be smaller than the image.
        let end = limits.whole_bytes() >> 9;
        let is_inside = |sector: u64, sectors: u64| sector.checked_add(sectors).is_some_and(|at| at <= end);
        match action {
            Action::Reply(status) => self.finish(slot, status),
            Action::Transfer { bytes: 0, .. } => self.finish(slot, S_OK),
            Action::Transfer { sector, bytes, gathered, .. } if !is_inside(sector.0, bytes >> 9) => {
                self.parser.recycle(gathered.data);
                self.finish(slot, S_IOERR);
            }
            Action::Transfer { operation, sector, bytes, gathered } => {
                slot.read = operation == Operation::Read;
                (slot.sector, slot.bytes, slot.unaligned) = (sector, bytes as u32, gathered.unaligned);
                self.transfer(cx, slot, gathered.data, gathered.registered_pieces);
            }
            Action::Flush => {
                let user_data = self.slots.insert(slot);
                self.submissions.submit(cx, Bio::flush(user_data));
            }
            Action::Ranges(operation) => {
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
                    self.submissions
                        .submit(cx, Bio { operation, flags, sector, sectors, data: Data::None, user_data });
                }
                self.parser.ranges = ranges;
            }
        }
    }

    /// Uses a bounce buffer if the disk does not accept the alignment of `data`.
    fn transfer(&mut self, cx: &mut SourceContext<'_>, mut slot: Slot, data: Data, registered_pieces: usize) {
        let data = if is_aligned(cx, &slot) {
            // Not all kernels can use registered memory in vectored calls.
            let is_registered = registered_pieces == 1
                || registered_pieces > 1 && cx.registrar().supports(opcode::ReadvFixed::CODE);
            self.counters.registered += u64::from(is_registered);
            data
        } else {
            let fits = slot.bytes <= BUFFER_MAX_BYTES;
            let buffer = if fits { self.bounces.take(slot.bytes, cx.registrar()) } else { None };
            let Some(mut buffer) = buffer else {
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
        // Memory that was truncated in the meantime reads as zeroes, which must not reach the disk.
        if self.start.ring.is_broken() {
            return self.reject(&RingError::MemoryLost);
        }
        let (operation, flags) = match slot.read {
            true => (Operation::Read, BioFlags::empty()),
            false => (Operation::Write, self.write_flags()),
        };
        let (sector, sectors) = (slot.sector, u64::from(slot.bytes) >> 9);
        let user_data = self.slots.insert(slot);
        self.submissions.submit(cx, Bio { operation, flags, sector, sectors, data, user_data });
    }

    /// The load is relaxed for the reason in `Session::update_write_through`.
    fn write_flags(&self) -> BioFlags {
        if self.start.context.write_through.load(Relaxed) { BioFlags::FUA } else { BioFlags::empty() }
    }

    /// Copies data of completed reads to the guest, as far as the turn's budget allows.
    fn copy_reads(&mut self) {
        while !self.work.is_over()
            && let Some((number, guest, buffer)) = self.copies.pop_front()
        {
            let bytes = self.slots.get(number).map_or(0, |slot| slot.bytes as usize);
            copy_out(&buffer[..bytes], &guest);
            self.work.spend_bytes(bytes);
            self.bounces.put(buffer);
            self.parser.recycle(guest);
            self.complete_bio(number, Ok(()));
        }
    }

    fn complete_bio(&mut self, number: u64, result: IoResult) {
        let Some(slot) = self.slots.get_mut(number) else { return };
        if slot.result == S_OK {
            slot.result = status_of(result);
        }
        slot.bios -= 1;
        if slot.bios == 0
            && let Some(slot) = self.slots.take(number)
        {
            let status = slot.result;
            self.finish(slot, status);
        }
    }

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
        self.parser.write_status(&self.start.context.memory, slot.status, status);
        let written = BlockRequest::written(slot.writable, status);
        self.start.ring.push_used(slot.head, written);
    }

    fn publish(&mut self) {
        if !self.rejected && self.start.ring.publish() {
            self.call();
        }
    }

    fn call(&mut self) {
        match self.start.shared.calls[self.start.status.index as usize].notify() {
            Ok(notified) => self.counters.calls += u64::from(notified),
            Err(error) => self.reject(&format_args!("cannot notify the guest's driver: {error}")),
        }
    }
}

fn is_aligned(cx: &SourceContext<'_>, slot: &Slot) -> bool {
    slot.unaligned & (cx.limits(ENGINE_QUEUE).memory_align as usize - 1) == 0
}

// SAFETY: the source has stopped when its poll and all bios have completed.
unsafe impl Source for VringSource {
    fn start(&mut self, cx: &mut SourceContext<'_>) -> Result<(), Error> {
        self.watch_kicks(cx);
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
                // No more kicks can arrive. The end of the connection is reported instead of this.
                self.kick_closed |=
                    events as i32 & i32::from(libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0;
                if self.kick_closed {
                    self.cancel_watch(cx);
                }
            }
            Err(_) if self.stopping || self.rejected || self.kick_closed => {}
            Err(_) => {
                let errno = rustix::io::Errno::from_raw_os_error(-cqe.result);
                self.reject(&format_args!("the kick descriptor cannot be polled: {errno}"));
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
            // A live change raised the required alignment while the bio was waiting: copy the data after all.
            if let Some(slot) = self.slots.take(number) {
                self.transfer(cx, slot, completion.data, 0);
            }
            return;
        }
        match (slot.bounced.take(), completion.data) {
            (Some(guest), Data::Buffer(buffer)) if slot.read && completion.result.is_ok() => {
                return self.copies.push_back((number, guest, buffer));
            }
            (Some(guest), Data::Buffer(buffer)) => {
                self.bounces.put(buffer);
                self.parser.recycle(guest);
            }
            (_, data) => self.parser.recycle(data),
        }
        self.complete_bio(number, completion.result);
    }

    fn on_message(&mut self, _cx: &mut SourceContext<'_>, message: Box<dyn Any + Send>) {
        if message.is::<CallChanged>() {
            // The last completion may have been signaled to the previous descriptor, which the driver no
            // longer reads.
            self.call();
        }
    }

    fn on_turn(&mut self, cx: &mut SourceContext<'_>) {
        if self.start.ring.is_broken() {
            self.reject(&RingError::MemoryLost);
        }
        self.work.begin(cx);
        self.submissions.resubmit(cx);
        self.copy_reads();
        self.publish();
        self.take_requests(cx);
        // Publishes requests that needed no bio.
        self.publish();
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
        self.bounces.trim_if_idle(cx);
        self.start.status.publish(&self.counters, self.slots.len());
        // Release: pairs with the load in `vring::stop_all`.
        self.start.status.base.store(self.start.ring.base(), Release);
    }

    fn deadline_ns(&self) -> Option<u64> {
        if !self.copies.is_empty() || self.may_have_more && self.takes_requests() {
            return Some(0);
        }
        if self.rejected || self.stopping {
            return None;
        }
        let poll_ns = self.start.kick.is_none().then_some(self.next_poll_ns);
        poll_ns.into_iter().chain(self.bounces.trim_at_ns()).min()
    }

    fn write_client(&self, mark: u64, text: &mut dyn fmt::Write) -> fmt::Result {
        let VringStart { status, context: RingContext { peer, .. }, .. } = &self.start;
        let Some(slot) = self.slots.get(mark) else { return Ok(()) };
        let descriptor = slot.head.index;
        write!(text, "vhost-user front end ({peer}), ring {}, descriptor {descriptor}", status.index)
    }

    fn is_abandoned(&self, _user_data: u64) -> bool {
        // A rejected ring cannot return results to its guest, and its memory may have been replaced by
        // zeroes.
        self.stopping || self.rejected
    }

    fn stop(&mut self, cx: &mut SourceContext<'_>, _force: bool) {
        self.stopping = true;
        self.engine_exits |= cx.engine_exits();
        self.cancel_watch(cx);
    }

    fn is_stopped(&self) -> bool {
        // Requests complete only in `on_bio` and `on_turn`, and are published at the end of `on_turn`.
        let idle = self.slots.len() == 0 && !self.has_recovered();
        self.stopping && idle && !self.poll_armed && !self.cancel_armed
    }
}
