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

use blkq::trace::TraceClient;
use blkq::{Bio, BioFlags, Completion, Data, IoBuffer, IoResult, Operation, Sector, SourceContext, Status};

use crate::buffers::BufferPool;
use crate::submissions::Slots;

use super::in_flight::InFlight;
use super::proto::Command;
use super::ranges::{Member, RangeLock};
use super::transmission::Request;

/// Marks the `user_data` of this module's bios. The kind of the bio is above the key of the write.
const ORDERED_BIT: u64 = 1 << 40;
const KIND: u64 = ORDERED_BIT | 3 << 32;
/// Kinds of bios: a read of the first or the last block, and a write. A write has all bits of [`KIND`], so `id | WRITE`
/// is the write with the key of the read `id`.
const READ_HEAD: u64 = ORDERED_BIT;
const READ_TAIL: u64 = ORDERED_BIT | 1 << 32;
const WRITE: u64 = KIND;

/// The smallest range of whole blocks that contains `range`. `block` is the block size in bytes, a power of two.
pub(super) fn blocks_around(range: &Range<u64>, block: u64) -> Range<u64> {
    range.start & !(block - 1)..range.end.next_multiple_of(block)
}

/// The largest range of whole blocks inside `range`. It may be empty.
pub(super) fn blocks_within(range: &Range<u64>, block: u64) -> Range<u64> {
    let start = range.start.next_multiple_of(block);
    start..start.max(range.end & !(block - 1))
}

/// The offsets of the first and the last block of `range`, if it does not cover them completely. If both are the same
/// block, it is returned once.
pub(super) fn edges(range: &Range<u64>, block: u64) -> [Option<u64>; 2] {
    let around = blocks_around(range, block);
    let (head, tail) = (around.start, around.end - block);
    let in_tail = range.end < around.end && (tail > head || range.start == head);
    [(range.start > head).then_some(head), in_tail.then_some(tail)]
}

/// The bio for whole `blocks`.
pub(super) fn bio(operation: Operation, flags: BioFlags, blocks: &Range<u64>, data: Data) -> Bio {
    // A logical block is a multiple of 512 bytes.
    let (sector, sectors) = (Sector(blocks.start >> 9), (blocks.end - blocks.start) >> 9);
    Bio { operation, flags, sector, sectors, data, user_data: 0 }
}

/// A message to a source: it must check a new range for writes in flight, or one of its ranges was granted.
pub(super) struct RangesChanged;

/// Bios to submit, each with the index of its queue and its client.
type Bios = VecDeque<(usize, TraceClient, Bio)>;

pub(super) struct OrderedWrite {
    pub in_flight: InFlight,
    pub queue: usize,
    pub operation: Operation,
    pub flags: BioFlags,
    /// The range in bytes; that of a discard must be whole blocks.
    pub range: Range<u64>,
    /// Logical block size in bytes.
    pub block: u64,
    /// The data of a write. It covers the blocks around the range, with the payload at its position in them.
    pub data: Data,
}

impl OrderedWrite {
    fn blocks(&self) -> Range<u64> {
        blocks_around(&self.range, self.block)
    }

    fn is_whole(&self) -> bool {
        self.blocks() == self.range
    }
}

struct OrderedInFlight {
    write: OrderedWrite,
    /// Ticket of the range lock, if the write has an entry there.
    ticket: Option<u64>,
    /// The number of bios that were submitted and have not completed.
    pending: u32,
    result: IoResult,
}

impl OrderedInFlight {
    fn begin(&mut self, key: u32, bios: &mut Bios, buffers: &mut BufferPool, cx: &mut SourceContext<'_>) {
        let OrderedWrite { ref range, block, operation, .. } = self.write;
        let (within, edges) = (blocks_within(range, block), edges(range, block));
        if !within.is_empty() && (operation == Operation::WriteZeroes || self.write.is_whole()) {
            let data = std::mem::take(&mut self.write.data);
            self.submit(u64::from(key) | WRITE, operation, within, data, bios);
        }
        for (kind, edge) in [READ_HEAD, READ_TAIL].into_iter().zip(edges) {
            let Some(edge) = edge else { continue };
            match buffers.take(block as u32, cx.registrar()) {
                Some(buffer) => {
                    let id = u64::from(key) | kind;
                    self.submit(id, Operation::Read, edge..edge + block, buffer.into(), bios);
                }
                None => self.result = Err(Status::Resource),
            }
        }
    }

    fn submit(&mut self, id: u64, operation: Operation, blocks: Range<u64>, data: Data, bios: &mut Bios) {
        self.pending += 1;
        let OrderedWrite { in_flight, queue, flags, .. } = self.write;
        let flags = match operation {
            Operation::Read => BioFlags::empty(),
            // The first and the last block of write zeroes are written with data, so NO_UNMAP has no meaning
            // for them.
            Operation::Write => flags & BioFlags::FUA,
            _ => flags,
        };
        let bio = Bio { user_data: id, ..bio(operation, flags, &blocks, data) };
        bios.push_back((queue, in_flight.client, bio));
    }

    /// Merges a block at an end of the range with the payload, or zeroes the part of the request.
    fn complete_edge(&mut self, id: u64, mut edge: IoBuffer, bios: &mut Bios, buffers: &mut BufferPool) {
        let blocks = self.write.blocks();
        let write = &mut self.write;
        let at = if id & KIND == READ_HEAD { blocks.start } else { blocks.end - write.block };
        // The part of the block that the request changes, as offsets in the block.
        let from = write.range.start.saturating_sub(at) as usize;
        let until = (write.range.end - at).min(write.block) as usize;
        if write.operation == Operation::WriteZeroes {
            edge[from..until].fill(0);
            let blocks = at..at + write.block;
            return self.submit(id | WRITE, Operation::Write, blocks, edge.into(), bios);
        }
        if let Data::Buffer(data) = &mut write.data {
            let block = write.block as usize;
            let data = &mut data[(at - blocks.start) as usize..][..block];
            data[..from].copy_from_slice(&edge[..from]);
            data[until..].copy_from_slice(&edge[until..block]);
        }
        buffers.put(edge);
        if self.pending == 0 && self.result.is_ok() {
            let data = std::mem::take(&mut self.write.data);
            self.submit(id | WRITE, Operation::Write, blocks, data, bios);
        }
    }
}

#[derive(Default)]
pub(super) struct Unaligned {
    pub lock: Arc<RangeLock>,
    /// `None` until the source has started, and always if unaligned requests are not served.
    member: Option<Member>,
    writes: Slots<OrderedInFlight>,
    /// Writes that get an entry when the table of the lock is free.
    arrived: VecDeque<u32>,
    /// Tickets that are released when the table of the lock is free.
    released: Vec<u64>,
    /// Writes whose ranges are locked and that can begin.
    granted: VecDeque<u32>,
    /// The ranges of writes that were in flight at the last check. Kept for its capacity.
    writes_found: Vec<Range<u64>>,
    pub notified: bool,
    /// Exclusive ranges are left to check when writes of this engine have completed.
    unchecked: bool,
    /// Another thread had locked the table when this source tried.
    pub contended: bool,
    pub bios: Bios,
    /// Completed writes to reply to.
    pub finished: Vec<(InFlight, IoResult)>,
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

    pub fn is_idle(&self) -> bool {
        self.writes.len() == 0 && self.released.is_empty()
    }

    pub fn is_ordered(user_data: u64) -> bool {
        user_data & ORDERED_BIT != 0
    }

    pub fn request_of(&self, user_data: u64) -> Option<&InFlight> {
        Some(&self.writes.get(u64::from(user_data as u32))?.write.in_flight)
    }

    pub fn push(&mut self, write: OrderedWrite) {
        let write = OrderedInFlight { write, ticket: None, pending: 0, result: Ok(()) };
        self.arrived.push_back(self.writes.insert(write) as u32);
    }

    /// Enters new writes, releases tickets, checks ranges, and begins the writes that were granted.
    pub fn order_writes(
        &mut self,
        in_flight: &mut Slots<InFlight>,
        buffers: &mut BufferPool,
        cx: &mut SourceContext<'_>,
    ) {
        if self.arrived.is_empty() && self.released.is_empty() && !self.notified && !self.unchecked {
            return;
        }
        let Some(member) = &self.member else { return };
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
                let user_data = in_flight.insert(write.in_flight);
                let data = std::mem::take(&mut write.data);
                let bio = Bio { user_data, ..bio(write.operation, write.flags, &write.range, data) };
                self.bios.push_back((write.queue, write.in_flight.client, bio));
                self.writes.take(key.into());
            }
        }
        let mut found = false;
        self.unchecked = session.check(|range| {
            if !std::mem::replace(&mut found, true) {
                find_writes(in_flight, &mut self.writes_found);
            }
            overlaps(&self.writes_found, range)
        });
        self.granted.extend(session.take_granted());
        drop(session);
        while let Some(key) = self.granted.pop_front() {
            if let Some(write) = self.writes.get_mut(key.into()) {
                write.begin(key, &mut self.bios, buffers, cx);
            }
            self.finish(key, buffers);
        }
    }

    pub fn complete(&mut self, completion: Completion, buffers: &mut BufferPool) {
        let key = completion.user_data as u32;
        let Some(write) = self.writes.get_mut(key.into()) else { return };
        write.pending -= 1;
        write.result = write.result.and(completion.result);
        match completion.data.into_buffer() {
            Some(edge) if completion.user_data & KIND != WRITE && completion.result.is_ok() => {
                write.complete_edge(completion.user_data, edge, &mut self.bios, buffers);
            }
            Some(buffer) => buffers.put(buffer),
            None => {}
        }
        self.finish(key, buffers);
    }

    fn finish(&mut self, key: u32, buffers: &mut BufferPool) {
        if self.writes.get(key.into()).is_none_or(|write| write.pending > 0) {
            return;
        }
        let Some(OrderedInFlight { write, ticket, result, .. }) = self.writes.take(key.into()) else {
            return;
        };
        self.released.extend(ticket);
        if let Some(data) = write.data.into_buffer() {
            buffers.put(data);
        }
        self.finished.push((write.in_flight, result));
    }
}

/// Collects the ranges of all writes, trims and write zeroes in flight: disjoint and ordered by offset.
fn find_writes(in_flight: &Slots<InFlight>, writes: &mut Vec<Range<u64>>) {
    writes.clear();
    let requests = in_flight.iter().map(|one| one.request);
    let is_write =
        |one: &Request| matches!(one.command, Command::Write | Command::Trim | Command::WriteZeroes);
    writes.extend(requests.filter(is_write).map(|write| write.range()));
    writes.sort_unstable_by_key(|range| range.start);
    writes.dedup_by(|next, range| {
        let joined = next.start <= range.end;
        if joined {
            range.end = range.end.max(next.end);
        }
        joined
    });
}

/// Whether one of `writes`, which [`find_writes`] found, is a write to a byte of `range`.
fn overlaps(writes: &[Range<u64>], range: &Range<u64>) -> bool {
    let first = writes.partition_point(|written| written.end <= range.start);
    writes.get(first).is_some_and(|written| written.start < range.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::proto::CommandFlags;

    #[test]
    fn blocks_around_and_within_a_range() {
        let edges = |range: Range<u64>| edges(&range, 512);
        assert_eq!(blocks_around(&(511..513), 512), 0..1024);
        assert_eq!(blocks_within(&(1..1535), 512), 512..1024);
        assert!(blocks_within(&(1..511), 512).is_empty());
        assert_eq!(edges(512..1024), [None, None]);
        assert_eq!(edges(513..1024), [Some(512), None]);
        assert_eq!(edges(512..1023), [None, Some(512)]);
        assert_eq!(edges(513..1023), [Some(512), None], "one block is read once");
        assert_eq!(edges(513..1025), [Some(512), Some(1024)]);
        assert_eq!(edges(0..1), [None, Some(0)]);
    }

    #[test]
    fn writes_in_flight_are_found_until_they_complete() {
        let mut table = Slots::default();
        let in_flight = |command, offset, length| InFlight {
            connection: 0,
            client: TraceClient::NONE,
            request: Request { command, flags: CommandFlags::empty(), cookie: 0, offset, length },
            part: None,
        };
        let read = table.insert(in_flight(Command::Read, 0, 8192));
        let write = table.insert(in_flight(Command::Write, 1024, 1024));
        let mut writes = Vec::new();
        let mut writes_to = |table: &Slots<InFlight>, range: Range<u64>| {
            find_writes(table, &mut writes);
            overlaps(&writes, &range)
        };
        assert!(!writes_to(&table, 0..1024) && !writes_to(&table, 2048..4096));
        assert!(writes_to(&table, 0..1025) && writes_to(&table, 2047..4096));
        table.take(write);
        assert!(!writes_to(&table, 0..4096));
        let trim = table.insert(in_flight(Command::Trim, 0, 512));
        assert_eq!(trim, write);
        assert!(writes_to(&table, 0..4096));
        table.take(read);
        table.insert(in_flight(Command::WriteZeroes, 4096, 4096));
        table.insert(in_flight(Command::Write, 6144, 512));
        table.insert(in_flight(Command::Write, 9216, 512));
        find_writes(&table, &mut writes);
        assert_eq!(writes, [0..512, 4096..8192, 9216..9728]);
        let found = [3584, 4096, 7680, 8192, 8704, 9216, 9728].map(|at| overlaps(&writes, &(at..at + 512)));
        assert_eq!(found, [false, true, true, false, false, true, false]);
    }
}
