//! The table of requests in flight of one engine: those that the block layer or a worker is processing.

use std::ops::Range;

use super::proto::Command;
use super::reply::ReplyTo;
use super::split::Part;
use crate::slots::Slots;

/// A request, or a part of a split read, that the block layer or a worker is processing.
#[derive(Clone, Copy)]
pub(super) struct InFlight {
    pub connection: u32,
    pub command: Command,
    pub to: ReplyTo,
    /// Length in bytes; of the part, if the read is split.
    pub length: u64,
    pub part: Option<Part>,
}

/// Requests in flight, by a number that is the `user_data` of their bios.
#[derive(Default)]
pub(super) struct InFlightTable {
    pub requests: Slots<InFlight>,
    /// The ranges of the writes that [`InFlightTable::find_writes`] found: disjoint and ordered by offset.
    writes: Vec<Range<u64>>,
}

impl InFlightTable {
    /// Collects the ranges of all writes, trims and write zeroes in flight.
    pub fn find_writes(&mut self) {
        self.writes.clear();
        let is_write =
            |one: &&InFlight| matches!(one.command, Command::Write | Command::Trim | Command::WriteZeroes);
        let range = |one: &InFlight| one.to.offset..one.to.offset + one.length;
        self.writes.extend(self.requests.iter().filter(is_write).map(range));
        self.writes.sort_unstable_by_key(|range| range.start);
        self.writes.dedup_by(|next, range| {
            let joined = next.start <= range.end;
            if joined {
                range.end = range.end.max(next.end);
            }
            joined
        });
    }

    /// Whether the last [`InFlightTable::find_writes`] found a write to a byte of `range`.
    pub fn wrote_to(&self, range: &Range<u64>) -> bool {
        let first = self.writes.partition_point(|written| written.end <= range.start);
        self.writes.get(first).is_some_and(|written| written.start < range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_in_flight_are_found_until_they_complete() {
        let mut table = InFlightTable::default();
        let in_flight = |command, offset, length| InFlight {
            connection: 0,
            command,
            to: ReplyTo { cookie: 0, offset },
            length,
            part: None,
        };
        let read = table.requests.insert(in_flight(Command::Read, 0, 8192));
        let write = table.requests.insert(in_flight(Command::Write, 1024, 1024));
        let writes_to = |table: &mut InFlightTable, range: Range<u64>| {
            table.find_writes();
            table.wrote_to(&range)
        };
        assert!(!writes_to(&mut table, 0..1024) && !writes_to(&mut table, 2048..4096));
        assert!(writes_to(&mut table, 0..1025) && writes_to(&mut table, 2047..4096));
        table.requests.take(write);
        assert!(!writes_to(&mut table, 0..4096));
        let trim = table.requests.insert(in_flight(Command::Trim, 0, 512));
        assert_eq!(trim, write);
        assert!(writes_to(&mut table, 0..4096));
        table.requests.take(read);
        table.requests.insert(in_flight(Command::WriteZeroes, 4096, 4096));
        table.requests.insert(in_flight(Command::Write, 6144, 512));
        table.requests.insert(in_flight(Command::Write, 9216, 512));
        table.find_writes();
        assert_eq!(table.writes, [0..512, 4096..8192, 9216..9728]);
        let found = [3584, 4096, 7680, 8192, 8704, 9216, 9728].map(|at| table.wrote_to(&(at..at + 512)));
        assert_eq!(found, [false, true, true, false, false, true, false]);
    }
}
