//! Requests that are not whole blocks, over a block layer that knows only these.
//!
//! Reads take the blocks around them, and reply with a part. Writes read the blocks at their edges,
//! put the payload between and write all of it: under a [`RangeLock`], so that no other write to
//! these blocks is undone. Zeroes do so at their edges, and leave the blocks between to the device.
//! Trims leave their edges alone.
//!
//! Writes of whole blocks come by here only while a range of that lock is taken.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use blkq::{Bio, BioFlags, Completion, Data, IoBuffer, IoResult, Operation, Sector, SourceContext, Status};

use crate::buffers::BufferPool;
use crate::slots::Slots;

use super::in_flight::{InFlight, InFlightTable};
use super::plan::{Blocks, bio_flags, buffer_bytes};
use super::ranges::{Member, RangeLock};
use super::transmission::Request;

/// Marks the bios of this module. Above the key of its write are the kinds.
const ORDERED_BIT: u64 = 1 << 40;
const KIND_SHIFT: u32 = 32;
/// The block at the beginning, or at the end, is being read; or something is being written.
const READ_HEAD: u64 = 0;
const READ_TAIL: u64 = 1;
const WRITE: u64 = 2;

/// A message to a source: it has a range to check, or was granted one.
pub(super) struct RangesChanged;

/// A write for the lock to order.
pub(super) struct OrderedWrite {
    /// The request that it is of.
    request: InFlight,
    queue: usize,
    operation: Operation,
    flags: BioFlags,
    range: Range<u64>,
    block: u64,
    data: Option<IoBuffer>,
    /// Bytes that its connection counts for its buffers.
    buffered: usize,
}

impl OrderedWrite {
    /// A write, write zeroes or discard of the bytes of `range` on a device with blocks of `block`
    /// bytes. A discard is whole blocks. The data of a write is that of the blocks around the range,
    /// with the payload in its place.
    pub fn new(
        request: &Request,
        in_flight: InFlight,
        queue: usize,
        operation: Operation,
        range: Range<u64>,
        block: u64,
        data: Data,
    ) -> OrderedWrite {
        let (flags, buffered) = (bio_flags(request, operation), buffer_bytes(request, block));
        OrderedWrite {
            request: in_flight,
            queue,
            operation,
            flags,
            range,
            block,
            data: data.into_buffer(),
            buffered,
        }
    }

    fn blocks(&self) -> Blocks {
        Blocks::around(&self.range, self.block)
    }

    fn is_whole(&self) -> bool {
        self.blocks().range == self.range
    }

    fn bio(&self, blocks: &Range<u64>, operation: Operation, data: Data) -> Bio {
        let flags = match operation {
            Operation::Read => BioFlags::empty(),
            // An edge of zeroes is written: it has no holes anyway.
            Operation::Write => self.flags & BioFlags::FUA,
            _ => self.flags,
        };
        let (sector, sectors) = (Sector(blocks.start >> 9), (blocks.end - blocks.start) >> 9);
        Bio { operation, flags, sector, sectors, data, user_data: 0 }
    }
}

/// An ordered write that has not completed.
struct OrderedInFlight {
    write: OrderedWrite,
    /// Of the lock, once it is queued there.
    ticket: Option<u64>,
    /// Bios that have not completed.
    bios: u32,
    result: IoResult,
}

/// An ordered write that has completed.
pub(super) struct Finished {
    pub request: InFlight,
    pub result: IoResult,
    /// Bytes of buffers that are free with that.
    pub freed: usize,
}

/// The results of ordering: bios to submit, each with its queue, and writes to answer.
#[derive(Default)]
pub(super) struct OrderingResults {
    pub bios: Vec<(usize, Bio)>,
    pub finished: Vec<Finished>,
}

/// Where buffers come from.
pub(super) struct BufferSource<'a, 'b> {
    pub buffers: &'a mut BufferPool,
    pub cx: &'a mut SourceContext<'b>,
}

/// The ordered writes of one engine's connections.
pub(super) struct Unaligned {
    lock: Arc<RangeLock>,
    /// Once the source is part of its engine, if it serves parts of blocks.
    member: Option<Member>,
    writes: Slots<OrderedInFlight>,
    /// Those that the lock does not know yet, and the tickets to release.
    arrived: VecDeque<u32>,
    released: Vec<u64>,
    /// Those that are being begun, with and without the lock. Kept for their capacity.
    granted: Vec<u32>,
    at_once: Vec<(u32, u32)>,
    /// The lock has something for this source.
    notified: bool,
    /// There are ranges to check when writes have completed.
    unchecked: bool,
    /// The lock's table was in use.
    contended: bool,
}

impl Unaligned {
    /// With the lock of the disk; without one there is nothing to order.
    pub fn new(lock: Option<Arc<RangeLock>>) -> Unaligned {
        Unaligned {
            lock: lock.unwrap_or_default(),
            member: None,
            writes: Slots::default(),
            arrived: VecDeque::new(),
            released: Vec::new(),
            granted: Vec::new(),
            at_once: Vec::new(),
            notified: false,
            unchecked: false,
            contended: false,
        }
    }

    /// From now on this engine's writes count.
    pub fn join(&mut self, cx: &SourceContext<'_>) {
        let (handle, id) = (cx.handle().clone(), cx.id());
        // Without size, so nothing is allocated for the message.
        self.member = Some(self.lock.join(Arc::new(move || handle.send(id, Box::new(RangesChanged)))));
    }

    /// Whether writes of whole blocks have to be ordered now.
    #[inline]
    pub fn must_order(&self) -> bool {
        self.lock.is_taken()
    }

    /// The lock has something for this source.
    pub fn notify(&mut self) {
        self.notified = true;
    }

    /// Whether [`Unaligned::order_writes`] is to be called again soon.
    pub fn is_contended(&self) -> bool {
        self.contended
    }

    /// Whether there is none in flight, and all tickets are released.
    pub fn is_idle(&self) -> bool {
        self.writes.len() == 0 && self.released.is_empty()
    }

    /// Whether `user_data` is that of a bio of an ordered write.
    #[inline]
    pub fn is_ordered(user_data: u64) -> bool {
        user_data & ORDERED_BIT != 0
    }

    /// The request that the write whose bio has this `user_data` is of.
    pub fn request_of(&self, user_data: u64) -> Option<&InFlight> {
        Some(&self.writes.get(u64::from(user_data as u32))?.write.request)
    }

    /// Takes a write to be ordered; it begins when [`Unaligned::order_writes`] is called.
    pub fn push(&mut self, write: OrderedWrite) {
        let write = OrderedInFlight { write, ticket: None, bios: 0, result: Ok(()) };
        let key = self.writes.insert(write) as u32;
        self.arrived.push_back(key);
    }

    fn remove(&mut self, key: u32) -> Option<OrderedInFlight> {
        let write = self.writes.take(key.into())?;
        self.released.extend(write.ticket);
        Some(write)
    }

    fn get(&mut self, key: u32) -> Option<&mut OrderedInFlight> {
        self.writes.get_mut(key.into())
    }

    fn is_quiet(&self) -> bool {
        self.arrived.is_empty() && self.released.is_empty() && !self.notified && !self.unchecked
    }

    /// Does what is to be done with the lock, and begins what was granted.
    pub fn order_writes(
        &mut self,
        in_flight: &mut InFlightTable,
        memory: &mut BufferSource<'_, '_>,
        ready: &mut OrderingResults,
    ) {
        if self.is_quiet() {
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
            let write = &arrived.write;
            if !write.is_whole() {
                arrived.ticket = Some(session.lock(write.blocks().range, key));
                continue;
            }
            arrived.ticket = session.wait(write.range.clone(), key);
            if arrived.ticket.is_none() {
                // As if no range were taken; known as in flight before the check below.
                self.at_once.push((key, in_flight.remember(write.request)));
            }
        }
        let mut found = false;
        self.unchecked = session.check(|range| {
            if !std::mem::replace(&mut found, true) {
                in_flight.find_writes();
            }
            in_flight.wrote_to(range)
        });
        session.take_granted(&mut self.granted);
        drop(session);
        let mut at_once = std::mem::take(&mut self.at_once);
        for (key, user_data) in at_once.drain(..) {
            let Some(OrderedInFlight { write, .. }) = self.remove(key) else { continue };
            let mut bio = write.bio(&write.range, write.operation, Data::None);
            bio.data = write.data.map_or(Data::None, Data::Buffer);
            bio.user_data = user_data.into();
            ready.bios.push((write.queue, bio));
        }
        self.at_once = at_once;
        let mut granted = std::mem::take(&mut self.granted);
        for key in granted.drain(..) {
            self.begin(key, memory, ready);
            self.finish(key, memory, ready);
        }
        self.granted = granted;
    }

    /// Begins a write that has the lock on its blocks.
    fn begin(&mut self, key: u32, memory: &mut BufferSource<'_, '_>, ready: &mut OrderingResults) {
        let Some(OrderedInFlight { write, .. }) = self.get(key) else { return };
        let (range, block, operation) = (write.range.clone(), write.block, write.operation);
        if write.is_whole() {
            return self.write_blocks(key, range, operation, ready);
        }
        let edges = write.blocks().edges(&range);
        let within = Blocks::within(&range, block);
        if operation == Operation::WriteZeroes && within.length() > 0 {
            self.write_blocks(key, within.range, operation, ready);
        }
        for (kind, edge) in [READ_HEAD, READ_TAIL].into_iter().zip(edges) {
            let Some(edge) = edge else { continue };
            match memory.buffers.take(block as u32, memory.cx.registrar()) {
                Some(buffer) => {
                    self.push_bio(key, kind, edge..edge + block, Operation::Read, buffer.into(), ready);
                }
                None => self.note(key, Err(Status::Resource)),
            }
        }
    }

    /// Writes whole blocks of the write: of its data, zeroes, or a discard.
    fn write_blocks(
        &mut self,
        key: u32,
        blocks: Range<u64>,
        operation: Operation,
        ready: &mut OrderingResults,
    ) {
        let Some(ordered) = self.get(key) else { return };
        let data = ordered.write.data.take().map_or(Data::None, Data::Buffer);
        self.push_bio(key, WRITE, blocks, operation, data, ready);
    }

    fn push_bio(
        &mut self,
        key: u32,
        kind: u64,
        blocks: Range<u64>,
        operation: Operation,
        data: Data,
        ready: &mut OrderingResults,
    ) {
        let Some(ordered) = self.get(key) else { return };
        ordered.bios += 1;
        let mut bio = ordered.write.bio(&blocks, operation, data);
        bio.user_data = ORDERED_BIT | kind << KIND_SHIFT | u64::from(key);
        ready.bios.push((ordered.write.queue, bio));
    }

    fn note(&mut self, key: u32, result: IoResult) {
        if let Some(ordered) = self.get(key) {
            ordered.result = ordered.result.and(result);
        }
    }

    /// A bio of an ordered write completed.
    pub fn complete(
        &mut self,
        completion: Completion,
        memory: &mut BufferSource<'_, '_>,
        ready: &mut OrderingResults,
    ) {
        let key = completion.user_data as u32;
        let kind = completion.user_data >> KIND_SHIFT & 0xff;
        let buffer = completion.data.into_buffer();
        self.note(key, completion.result);
        let Some(ordered) = self.get(key) else { return };
        ordered.bios -= 1;
        match buffer {
            Some(edge) if kind != WRITE && completion.result.is_ok() => {
                self.complete_edge(key, kind, edge, memory, ready);
            }
            Some(buffer) => memory.buffers.put(buffer),
            None => {}
        }
        self.finish(key, memory, ready);
    }

    /// The block at an edge was read.
    fn complete_edge(
        &mut self,
        key: u32,
        kind: u64,
        mut edge: IoBuffer,
        memory: &mut BufferSource<'_, '_>,
        ready: &mut OrderingResults,
    ) {
        let Some(OrderedInFlight { write, bios, result, .. }) = self.get(key) else { return };
        let blocks = write.blocks();
        let at = if kind == READ_HEAD { blocks.range.start } else { blocks.range.end - write.block };
        // The part of the edge that changes, in its bytes.
        let from = write.range.start.saturating_sub(at) as usize;
        let until = (write.range.end - at).min(write.block) as usize;
        let block = write.block as usize;
        if write.operation == Operation::WriteZeroes {
            edge[from..until].fill(0);
            return self.push_bio(key, WRITE, at..at + block as u64, Operation::Write, edge.into(), ready);
        }
        if let Some(data) = &mut write.data {
            let place = (at - blocks.range.start) as usize;
            data[place..place + from].copy_from_slice(&edge[..from]);
            data[place + until..place + block].copy_from_slice(&edge[until..block]);
        }
        let complete = *bios == 0 && result.is_ok();
        memory.buffers.put(edge);
        if complete {
            self.write_blocks(key, blocks.range, Operation::Write, ready);
        }
    }

    /// Removes the write, if it has no bio in flight any more.
    fn finish(&mut self, key: u32, memory: &mut BufferSource<'_, '_>, ready: &mut OrderingResults) {
        if self.get(key).is_none_or(|ordered| ordered.bios > 0) {
            return;
        }
        let Some(OrderedInFlight { write, result, .. }) = self.remove(key) else { return };
        if let Some(data) = write.data {
            memory.buffers.put(data);
        }
        ready.finished.push(Finished { request: write.request, result, freed: write.buffered });
    }
}
