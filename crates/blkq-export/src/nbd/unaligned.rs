//! Unaligned requests, on a block layer that accepts whole logical blocks only.
//!
//! A read reads the blocks around its range and replies with a part of the data. A write reads the blocks at
//! its ends, merges the payload, and writes all blocks. It does so under the [`RangeLock`], so that it does
//! not overwrite the data of another write to these blocks. Write zeroes does the same for the blocks at its
//! ends, and passes the blocks between them to the device as write zeroes. A trim ignores incomplete blocks.
//!
//! While a range is locked, aligned writes pass through here, because they may have to wait for it.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use blkq::{Bio, BioFlags, Completion, Data, IoBuffer, IoResult, Operation, SourceContext, Status};

use crate::buffers::BufferPool;
use crate::slots::Slots;

use super::in_flight::{InFlight, InFlightTable};
use super::plan::{bio, blocks_around, blocks_within, edges};
use super::ranges::{Member, RangeLock};

/// Marks the `user_data` of this module's bios. The kind of the bio is above the key of the write.
const ORDERED_BIT: u64 = 1 << 40;
const KIND_SHIFT: u32 = 32;
/// Kinds of bios: a read of the first or the last block, and a write.
const READ_HEAD: u64 = 0;
const READ_TAIL: u64 = 1;
const WRITE: u64 = 2;

/// A message to a source: it must check a new range for writes in flight, or one of its ranges was granted.
pub(super) struct RangesChanged;

pub(super) struct OrderedWrite {
    pub request: InFlight,
    pub queue: usize,
    pub operation: Operation,
    pub flags: BioFlags,
    /// The range in bytes; that of a discard must be whole blocks.
    pub range: Range<u64>,
    /// Logical block size in bytes.
    pub block: u64,
    /// The data of a write. It covers the blocks around the range, with the payload at its position in them.
    pub data: Data,
    /// Bytes of buffers that the connection has reserved for the request.
    pub buffered: usize,
}

impl OrderedWrite {
    fn blocks(&self) -> Range<u64> {
        blocks_around(&self.range, self.block)
    }

    fn is_whole(&self) -> bool {
        self.blocks() == self.range
    }

    fn bio(&self, blocks: &Range<u64>, operation: Operation, data: Data) -> Bio {
        let flags = match operation {
            Operation::Read => BioFlags::empty(),
            // The first and the last block of write zeroes are written with data, so NO_UNMAP has no meaning
            // for them.
            Operation::Write => self.flags & BioFlags::FUA,
            _ => self.flags,
        };
        bio(operation, flags, blocks, data)
    }
}

struct OrderedInFlight {
    write: OrderedWrite,
    /// Ticket of the range lock, if the write has an entry there.
    ticket: Option<u64>,
    /// Bios that were submitted and have not completed.
    bios: u32,
    result: IoResult,
}

pub(super) struct Finished {
    pub request: InFlight,
    pub result: IoResult,
    /// Bytes of buffers that the connection no longer needs.
    pub freed: usize,
}

/// The pool for buffers, and the ring that registers them.
pub(super) struct BufferSource<'a, 'b> {
    pub buffers: &'a mut BufferPool,
    pub cx: &'a mut SourceContext<'b>,
}

#[derive(Default)]
pub(super) struct Unaligned {
    lock: Arc<RangeLock>,
    /// `None` until the source has started, and always if unaligned requests are not served.
    member: Option<Member>,
    writes: Slots<OrderedInFlight>,
    /// Writes that get an entry when the table of the lock is free.
    arrived: VecDeque<u32>,
    /// Tickets that are released when the table of the lock is free.
    released: Vec<u64>,
    /// Writes whose ranges are locked and that can begin.
    granted: VecDeque<u32>,
    notified: bool,
    /// Exclusive ranges are left to check when writes of this engine have completed.
    unchecked: bool,
    /// Another thread had locked the table when this source tried.
    contended: bool,
    /// Bios to submit, each with the index of its queue.
    pub bios: VecDeque<(usize, Bio)>,
    /// Completed writes to reply to.
    pub finished: Vec<Finished>,
}

impl Unaligned {
    pub fn new(lock: Option<Arc<RangeLock>>) -> Unaligned {
        Unaligned { lock: lock.unwrap_or_default(), ..Unaligned::default() }
    }

    pub fn join(&mut self, cx: &SourceContext<'_>) {
        let (handle, id) = (cx.handle().clone(), cx.id());
        // [`RangesChanged`] has no size, so the box allocates nothing.
        self.member = Some(self.lock.join(Arc::new(move || handle.send(id, Box::new(RangesChanged)))));
    }

    #[inline]
    pub fn must_order(&self) -> bool {
        self.lock.is_taken()
    }

    pub fn notify(&mut self) {
        self.notified = true;
    }

    pub fn is_contended(&self) -> bool {
        self.contended
    }

    pub fn is_idle(&self) -> bool {
        self.writes.len() == 0 && self.released.is_empty()
    }

    #[inline]
    pub fn is_ordered(user_data: u64) -> bool {
        user_data & ORDERED_BIT != 0
    }

    pub fn request_of(&self, user_data: u64) -> Option<&InFlight> {
        Some(&self.writes.get(u64::from(user_data as u32))?.write.request)
    }

    pub fn push(&mut self, write: OrderedWrite) {
        let write = OrderedInFlight { write, ticket: None, bios: 0, result: Ok(()) };
        let key = self.writes.insert(write) as u32;
        self.arrived.push_back(key);
    }

    fn get(&mut self, key: u32) -> Option<&mut OrderedInFlight> {
        self.writes.get_mut(key.into())
    }

    /// Enters new writes, releases tickets, checks ranges, and begins the writes that were granted.
    pub fn order_writes(&mut self, in_flight: &mut InFlightTable, memory: &mut BufferSource<'_, '_>) {
        if self.arrived.is_empty() && self.released.is_empty() && !self.notified && !self.unchecked {
            return;
        }
        let Some(member) = &mut self.member else { return };
        let Some(mut session) = member.try_enter() else {
            self.contended = true;
            return;
        };
        (self.contended, self.notified) = (false, false);
        self.released.drain(..).for_each(|ticket| session.release(ticket));
        for key in self.arrived.drain(..) {
            let Some(arrived) = self.writes.get_mut(key.into()) else { continue };
            let write = &mut arrived.write;
            if !write.is_whole() {
                arrived.ticket = Some(session.lock(write.blocks(), key));
                continue;
            }
            arrived.ticket = session.wait(write.range.clone(), key);
            if arrived.ticket.is_none() {
                // No overlapping range is locked, so the write runs as a normal one. It is added to the table
                // of requests in flight here, so that the check below finds it.
                let user_data = in_flight.requests.insert(write.request);
                let data = std::mem::take(&mut write.data);
                let bio = Bio { user_data, ..write.bio(&write.range, write.operation, data) };
                self.bios.push_back((write.queue, bio));
                self.writes.take(key.into());
            }
        }
        let mut found = false;
        self.unchecked = session.check(|range| {
            if !std::mem::replace(&mut found, true) {
                in_flight.find_writes();
            }
            in_flight.wrote_to(range)
        });
        self.granted.extend(session.take_granted());
        drop(session);
        while let Some(key) = self.granted.pop_front() {
            self.begin(key, memory);
            self.finish(key, memory);
        }
    }

    fn begin(&mut self, key: u32, memory: &mut BufferSource<'_, '_>) {
        let Some(OrderedInFlight { write, .. }) = self.get(key) else { return };
        let (range, block, operation) = (write.range.clone(), write.block, write.operation);
        if write.is_whole() {
            return self.write_blocks(key, range, operation);
        }
        let within = blocks_within(&range, block);
        if operation == Operation::WriteZeroes && !within.is_empty() {
            self.write_blocks(key, within, operation);
        }
        for (kind, edge) in [READ_HEAD, READ_TAIL].into_iter().zip(edges(&range, block)) {
            let Some(edge) = edge else { continue };
            match memory.buffers.take(block as u32, memory.cx.registrar()) {
                Some(buffer) => {
                    self.push_bio(key, kind, edge..edge + block, Operation::Read, buffer.into());
                }
                None => self.fail(key, Status::Resource),
            }
        }
    }

    fn write_blocks(&mut self, key: u32, blocks: Range<u64>, operation: Operation) {
        let Some(ordered) = self.get(key) else { return };
        let data = std::mem::take(&mut ordered.write.data);
        self.push_bio(key, WRITE, blocks, operation, data);
    }

    fn push_bio(&mut self, key: u32, kind: u64, blocks: Range<u64>, operation: Operation, data: Data) {
        let Some(ordered) = self.get(key) else { return };
        ordered.bios += 1;
        let user_data = ORDERED_BIT | kind << KIND_SHIFT | u64::from(key);
        let bio = Bio { user_data, ..ordered.write.bio(&blocks, operation, data) };
        let queue = ordered.write.queue;
        self.bios.push_back((queue, bio));
    }

    fn fail(&mut self, key: u32, status: Status) {
        if let Some(ordered) = self.get(key) {
            ordered.result = Err(status);
        }
    }

    pub fn complete(&mut self, completion: Completion, memory: &mut BufferSource<'_, '_>) {
        let key = completion.user_data as u32;
        let kind = completion.user_data >> KIND_SHIFT & 0xff;
        let Some(ordered) = self.get(key) else { return };
        ordered.bios -= 1;
        ordered.result = ordered.result.and(completion.result);
        match completion.data.into_buffer() {
            Some(edge) if kind != WRITE && completion.result.is_ok() => {
                self.complete_edge(key, kind, edge, memory);
            }
            Some(buffer) => memory.buffers.put(buffer),
            None => {}
        }
        self.finish(key, memory);
    }

    /// Merges a block at an end of the range with the payload, or zeroes the part of the request.
    fn complete_edge(&mut self, key: u32, kind: u64, mut edge: IoBuffer, memory: &mut BufferSource<'_, '_>) {
        let Some(OrderedInFlight { write, bios, result, .. }) = self.get(key) else { return };
        let blocks = write.blocks();
        let at = if kind == READ_HEAD { blocks.start } else { blocks.end - write.block };
        // The part of the block that the request changes, as offsets in the block.
        let from = write.range.start.saturating_sub(at) as usize;
        let until = (write.range.end - at).min(write.block) as usize;
        let block = write.block as usize;
        if write.operation == Operation::WriteZeroes {
            edge[from..until].fill(0);
            return self.push_bio(key, WRITE, at..at + block as u64, Operation::Write, edge.into());
        }
        if let Data::Buffer(data) = &mut write.data {
            let place = (at - blocks.start) as usize;
            data[place..place + from].copy_from_slice(&edge[..from]);
            data[place + until..place + block].copy_from_slice(&edge[until..block]);
        }
        let complete = *bios == 0 && result.is_ok();
        memory.buffers.put(edge);
        if complete {
            self.write_blocks(key, blocks, Operation::Write);
        }
    }

    fn finish(&mut self, key: u32, memory: &mut BufferSource<'_, '_>) {
        if self.get(key).is_none_or(|ordered| ordered.bios > 0) {
            return;
        }
        let Some(OrderedInFlight { write, ticket, result, .. }) = self.writes.take(key.into()) else {
            return;
        };
        self.released.extend(ticket);
        if let Some(data) = write.data.into_buffer() {
            memory.buffers.put(data);
        }
        self.finished.push(Finished { request: write.request, result, freed: write.buffered });
    }
}
