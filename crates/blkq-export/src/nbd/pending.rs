//! The requests of one engine's connections that the block layer, or the worker, has.

use std::ops::Range;

use super::proto::Command;
use super::reply::ReplyTo;
use super::transmission::Request;

/// A request that the block layer, or the worker, has.
#[derive(Clone, Copy)]
pub(super) struct Pending {
    pub connection: u32,
    pub command: Command,
    pub to: ReplyTo,
    /// In bytes.
    pub length: u64,
}

impl Pending {
    /// `request` of `connection`.
    pub fn new(connection: u32, request: &Request) -> Pending {
        let to = ReplyTo { cookie: request.cookie, offset: request.offset };
        Pending { connection, command: request.command, to, length: request.length }
    }
}

/// Those requests, by the number that is the mark of their bios.
#[derive(Default)]
pub(super) struct PendingTable {
    requests: Vec<Pending>,
    free: Vec<u32>,
    /// Which are free, while it is searched. Kept for its room.
    is_free: Vec<bool>,
}

impl PendingTable {
    pub fn remember(&mut self, pending: Pending) -> u32 {
        match self.free.pop() {
            Some(index) => {
                self.requests[index as usize] = pending;
                index
            }
            None => {
                self.requests.push(pending);
                self.requests.len() as u32 - 1
            }
        }
    }

    pub fn recall(&mut self, index: u32) -> Pending {
        self.free.push(index);
        self.requests[index as usize]
    }

    /// The request with this number, also one that was recalled.
    pub fn get(&self, index: u32) -> Option<&Pending> {
        self.requests.get(index as usize)
    }

    /// Whether one of them writes to bytes of `range`.
    pub fn writes_to(&mut self, range: &Range<u64>) -> bool {
        self.is_free.clear();
        self.is_free.resize(self.requests.len(), false);
        for index in &self.free {
            self.is_free[*index as usize] = true;
        }
        self.requests.iter().zip(&self.is_free).any(|(pending, is_free)| {
            let writes = matches!(pending.command, Command::Write | Command::Trim | Command::WriteZeroes);
            let offset = pending.to.offset;
            !is_free && writes && offset < range.end && range.start < offset + pending.length
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_in_flight_are_found_until_they_are_recalled() {
        let mut table = PendingTable::default();
        let pending = |command, offset, length| Pending {
            connection: 0,
            command,
            to: ReplyTo { cookie: 0, offset },
            length,
        };
        let read = table.remember(pending(Command::Read, 0, 8192));
        let write = table.remember(pending(Command::Write, 1024, 1024));
        assert!(!table.writes_to(&(0..1024)) && !table.writes_to(&(2048..4096)));
        assert!(table.writes_to(&(0..1025)) && table.writes_to(&(2047..4096)));
        table.recall(write);
        assert!(!table.writes_to(&(0..4096)));
        let trim = table.remember(pending(Command::Trim, 0, 512));
        assert_eq!(trim, write);
        assert!(table.writes_to(&(0..4096)));
        table.recall(read);
    }
}
