//! The same load on different sides: raw io_uring on the file ([`raw`]), blocking calls of
//! threads on it ([`workers`]), a queue of the block layer that the measuring thread owns
//! ([`local`]), many threads that own none ([`submitters`]), and io_uring that does nothing
//! ([`nop`]); and requests to a vhost-user-blk server ([`mod@vhost`]).

use blkq::random::Random;

use crate::shuffle::Shuffle;

pub mod local;
pub mod nop;
pub mod raw;
pub mod submitters;
pub mod vhost;
pub mod workers;

/// The place of the next I/O.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Anywhere.
    Random,
    /// After the one before.
    Sequential,
}

/// The load of one thread.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Where.
    pub pattern: Pattern,
    /// Writes instead of reads.
    pub write: bool,
    /// Bytes per I/O.
    pub block_bytes: u32,
    /// I/Os in flight at most.
    pub depth: usize,
    /// As soon as so many are not in flight, all that are not are submitted at once.
    pub batch: usize,
    /// Buffers registered with the ring.
    pub registered: bool,
    /// A call for each I/O; else one for all that are submitted at once.
    pub one_by_one: bool,
    /// It stops after so many I/Os, no two of which are at the same place.
    pub ios_max: Option<u64>,
}

impl Load {
    /// Reads of 4 KiB, `depth` in flight, resubmitted as they complete.
    pub fn read(pattern: Pattern, depth: usize) -> Load {
        Load {
            pattern,
            write: false,
            block_bytes: 4096,
            depth,
            batch: 1,
            registered: false,
            one_by_one: false,
            ios_max: None,
        }
    }

    /// Writes of the same.
    pub fn write(pattern: Pattern, depth: usize) -> Load {
        Load { write: true, ..Load::read(pattern, depth) }
    }

    /// The same, `batch` at once.
    #[must_use]
    pub fn batch(self, batch: usize) -> Load {
        Load { batch, ..self }
    }

    /// The same with registered buffers.
    #[must_use]
    pub fn registered(self) -> Load {
        Load { registered: true, ..self }
    }

    /// The same, with a call for each.
    #[must_use]
    pub fn one_by_one(self) -> Load {
        Load { one_by_one: true, ..self }
    }

    /// The same, over after `ios`, or when there was one in every place of the device.
    #[must_use]
    pub fn at_most(self, ios: u64) -> Load {
        Load { ios_max: Some(ios), ..self }
    }

    /// The offsets of its I/Os in bytes, on a device of `bytes`.
    pub fn offsets(&self, bytes: u64) -> Offsets {
        let seed = u64::from(std::process::id()) ^ blkq::clock::monotonic_ns();
        let blocks = bytes / u64::from(self.block_bytes);
        let ios_max = self.ios_max.map_or(u64::MAX, |ios| ios.min(blocks));
        let shuffle = match (self.pattern, self.ios_max) {
            (Pattern::Random, Some(_)) => Some(Shuffle::new(blocks, seed)),
            _ => None,
        };
        Offsets {
            pattern: self.pattern,
            blocks,
            block_bytes: u64::from(self.block_bytes),
            next: 0,
            left: ios_max,
            random: Random::new(seed),
            shuffle,
        }
    }
}

/// The offsets of a load.
pub struct Offsets {
    pattern: Pattern,
    blocks: u64,
    block_bytes: u64,
    next: u64,
    left: u64,
    random: Random,
    shuffle: Option<Shuffle>,
}

impl Offsets {
    /// How many there are still.
    #[inline]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// The next one, in bytes. There must be one [left](Offsets::left).
    #[inline]
    pub fn next_bytes(&mut self) -> u64 {
        self.left -= 1;
        let block = match (self.pattern, &self.shuffle) {
            (Pattern::Random, None) => self.random.below(self.blocks),
            (_, shuffle) => {
                let index = self.next;
                self.next = if index + 1 == self.blocks { 0 } else { index + 1 };
                shuffle.as_ref().map_or(index, |shuffle| shuffle.at(index))
            }
        };
        block * self.block_bytes
    }

    /// The one with that number, from 0, in bytes; none after the last. Only of a load that
    /// has one.
    pub fn nth_bytes(&self, index: u64) -> Option<u64> {
        let block = self.shuffle.as_ref().map_or(index, |shuffle| shuffle.at(index.min(self.blocks - 1)));
        (index < self.left).then_some(block * self.block_bytes)
    }
}
