//! mq-deadline: requests in batches of ascending position, reads before writes, with a deadline for each
//! request. Rules and defaults are those of block/mq-deadline.c, with a single priority class, because bios
//! have no priority.

use std::collections::VecDeque;

use super::scheduler::{NS_PER_MS, Scheduler};
use crate::bio::{Operation, Outline};
use crate::limits::MergeSide;
use crate::request::{NIL, Request};
use crate::sector::Sector;
use crate::tags::Tag;

const READ: usize = 0;
const WRITE: usize = 1;

fn direction_of(operation: Operation) -> usize {
    usize::from(operation.is_write())
}

#[derive(Clone, Debug, Default)]
struct Entry {
    /// The key in the order of positions.
    sector: Sector,
    inserted_ns: u64,
    /// The request before it in the order of arrival.
    previous: u32,
    next: u32,
    direction: usize,
    held: bool,
}

#[derive(Debug)]
struct Direction {
    /// The requests in order of position. A ring buffer with room for every tag: batches are removed at the
    /// front, sequential I/O is added at the back, and nothing is ever allocated. In random order, a tree is
    /// faster only above 1,024 requests.
    sorted: VecDeque<(Sector, Tag)>,
    /// The list in order of arrival.
    oldest: u32,
    newest: u32,
    /// The start of the request that was dispatched last. The next one is searched from here.
    latest: Sector,
    expire_ns: u64,
}

impl Direction {
    fn new(tags: usize, expire_ns: u64) -> Direction {
        let sorted = VecDeque::with_capacity(tags);
        Direction { sorted, oldest: NIL, newest: NIL, latest: Sector(0), expire_ns }
    }

    fn insert_sorted(&mut self, sector: Sector, tag: Tag) {
        let place = self.sorted.partition_point(|&held| held < (sector, tag));
        self.sorted.insert(place, (sector, tag));
    }

    fn remove_sorted(&mut self, sector: Sector, tag: Tag) {
        if let Ok(place) = self.sorted.binary_search(&(sector, tag)) {
            self.sorted.remove(place);
        }
    }

    fn at_or_after(&self, sector: Sector) -> Option<Tag> {
        let place = self.sorted.partition_point(|held| held.0 < sector);
        self.sorted.get(place).map(|held| held.1)
    }

    fn before(&self, sector: Sector) -> Option<Tag> {
        let place = self.sorted.partition_point(|held| held.0 < sector);
        self.sorted.get(place.checked_sub(1)?).map(|held| held.1)
    }

    /// Inserts `index` between two neighbours in the order of arrival.
    fn link(&mut self, entries: &mut [Entry], index: u32, previous: u32, next: u32) {
        entries[index as usize].previous = previous;
        entries[index as usize].next = next;
        match entries.get_mut(previous as usize) {
            Some(entry) => entry.next = index,
            None => self.oldest = index,
        }
        match entries.get_mut(next as usize) {
            Some(entry) => entry.previous = index,
            None => self.newest = index,
        }
    }

    fn unlink(&mut self, entries: &mut [Entry], index: u32) {
        let Entry { previous, next, .. } = entries[index as usize];
        match entries.get_mut(previous as usize) {
            Some(entry) => entry.next = next,
            None => self.oldest = next,
        }
        match entries.get_mut(next as usize) {
            Some(entry) => entry.previous = previous,
            None => self.newest = previous,
        }
    }
}

#[derive(Debug)]
pub(super) struct MqDeadline {
    directions: [Direction; 2],
    entries: Box<[Entry]>,
    /// The direction of the current batch, and the number of requests that it has had. The initial number is
    /// larger than any batch, so that the first dispatch starts a batch.
    batch_direction: usize,
    batched: u32,
    /// Read batches since the last write batch that were dispatched while a write waited.
    starved: u32,
    /// Read batches that may be dispatched while a write waits.
    writes_starved: u32,
    /// Largest number of requests in a batch.
    fifo_batch: u32,
}

impl MqDeadline {
    pub fn new(tags: usize) -> MqDeadline {
        MqDeadline {
            directions: [Direction::new(tags, 500 * NS_PER_MS), Direction::new(tags, 5000 * NS_PER_MS)],
            entries: vec![Entry::default(); tags].into_boxed_slice(),
            batch_direction: READ,
            batched: u32::MAX,
            starved: 0,
            writes_starved: 2,
            fifo_batch: 16,
        }
    }

    fn beginning_at(&self, sector: Sector, operation: Operation, requests: &[Request]) -> Option<Tag> {
        let found = self.directions[direction_of(operation)].at_or_after(sector)?;
        let request = &requests[found.index()];
        (request.sector == sector && request.operation == operation).then_some(found)
    }

    fn ending_at(&self, sector: Sector, operation: Operation, requests: &[Request]) -> Option<Tag> {
        let found = self.directions[direction_of(operation)].before(sector)?;
        let request = &requests[found.index()];
        (request.end() == sector && request.operation == operation).then_some(found)
    }

    /// The open direction of the next batch: reads, unless writes have waited for enough read batches.
    fn choose_direction(&mut self, open: [bool; 2]) -> Option<usize> {
        let [reads, writes] = &self.directions;
        let (reads, writes) = (open[READ] && reads.oldest != NIL, open[WRITE] && writes.oldest != NIL);
        if reads && (!writes || self.starved < self.writes_starved) {
            self.starved += u32::from(writes);
            return Some(READ);
        }
        self.starved = if writes { 0 } else { self.starved };
        writes.then_some(WRITE)
    }

    /// The first request of a batch: the next one by position, or the oldest one if that has expired or the
    /// end of the device was reached.
    fn begin_batch(&self, direction: usize, now_ns: u64) -> Option<Tag> {
        let direction = &self.directions[direction];
        let oldest = self.entries.get(direction.oldest as usize)?;
        let expired = now_ns.saturating_sub(oldest.inserted_ns) >= direction.expire_ns;
        match direction.at_or_after(direction.latest) {
            Some(tag) if !expired => Some(tag),
            _ => Some(Tag(direction.oldest as u16)),
        }
    }
}

impl Scheduler for MqDeadline {
    fn insert(&mut self, tag: Tag, requests: &[Request], now_ns: u64) {
        let Request { sector, operation, .. } = requests[tag.index()];
        let number = direction_of(operation);
        let direction = &mut self.directions[number];
        let entry = &mut self.entries[tag.index()];
        debug_assert!(!entry.held && operation != Operation::Flush);
        *entry = Entry { sector, inserted_ns: now_ns, direction: number, held: true, ..*entry };
        direction.insert_sorted(sector, tag);
        direction.link(&mut self.entries, u32::from(tag.0), direction.newest, NIL);
    }

    fn dispatch(&mut self, _requests: &[Request], open: [bool; 2], now_ns: u64) -> Option<Tag> {
        let mut next = None;
        if self.batched < self.fifo_batch && open[self.batch_direction] {
            let direction = &self.directions[self.batch_direction];
            next = direction.at_or_after(direction.latest);
        }
        if next.is_none() {
            let direction = self.choose_direction(open)?;
            next = self.begin_batch(direction, now_ns);
            self.batch_direction = direction;
            self.batched = 0;
        }
        let tag = next?;
        self.batched += 1;
        self.directions[self.batch_direction].latest = self.entries[tag.index()].sector;
        self.remove(tag);
        Some(tag)
    }

    fn find_merge(&self, requests: &[Request], bio: &Outline) -> Option<(Tag, MergeSide)> {
        let back = self.ending_at(bio.sector, bio.operation, requests).map(|tag| (tag, MergeSide::Back));
        let front = || self.beginning_at(bio.sector + bio.sectors, bio.operation, requests);
        back.or_else(|| front().map(|tag| (tag, MergeSide::Front)))
    }

    fn merged(&mut self, tag: Tag, requests: &[Request]) {
        let entry = &mut self.entries[tag.index()];
        let sector = requests[tag.index()].sector;
        if entry.held && entry.sector != sector {
            let direction = &mut self.directions[entry.direction];
            direction.remove_sorted(entry.sector, tag);
            direction.insert_sorted(sector, tag);
            entry.sector = sector;
        }
    }

    fn find_neighbour(&self, requests: &[Request], tag: Tag, side: MergeSide) -> Option<Tag> {
        let request = &requests[tag.index()];
        match side {
            MergeSide::Back => self.beginning_at(request.end(), request.operation, requests),
            MergeSide::Front => self.ending_at(request.sector, request.operation, requests),
        }
    }

    fn joined(&mut self, kept: Tag, gone: Tag) {
        let (kept, inserted_ns) = (u32::from(kept.0), self.entries[gone.index()].inserted_ns);
        if inserted_ns < self.entries[kept as usize].inserted_ns {
            let direction = &mut self.directions[self.entries[kept as usize].direction];
            direction.unlink(&mut self.entries, kept);
            let next = self.entries[gone.index()].next;
            direction.link(&mut self.entries, kept, u32::from(gone.0), next);
            self.entries[kept as usize].inserted_ns = inserted_ns;
        }
        self.remove(gone);
    }

    fn holds(&self, tag: Tag) -> bool {
        self.entries[tag.index()].held
    }

    fn remove(&mut self, tag: Tag) -> bool {
        let entry = &mut self.entries[tag.index()];
        if !std::mem::take(&mut entry.held) {
            return false;
        }
        let direction = &mut self.directions[entry.direction];
        direction.remove_sorted(entry.sector, tag);
        direction.unlink(&mut self.entries, u32::from(tag.0));
        true
    }

    fn len(&self) -> usize {
        self.directions.iter().map(|direction| direction.sorted.len()).sum()
    }
}

#[cfg(test)]
mod tests;
