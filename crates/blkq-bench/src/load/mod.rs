//! Generates the same load on different targets: raw io_uring on the file ([`raw`]), threads with blocking calls on the
//! file ([`workers`]), a queue that the measuring thread owns ([`local`]), threads that submit through an engine
//! ([`submitters`]), and a vhost-user-blk server ([`mod@vhost`]).

use blkq::random::Random;

use crate::shuffle::Shuffle;

pub mod local;
pub mod raw;
pub mod submitters;
pub mod vhost;
pub mod workers;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    Random,
    /// Each I/O begins at the end of the previous one.
    Sequential,
}

#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub pattern: Pattern,
    pub write: bool,
    pub block_bytes: u32,
    /// Maximum number of I/Os in flight.
    pub depth: usize,
    /// New I/Os are submitted together, as soon as this number of them is not in flight.
    pub batch: usize,
    pub registered: bool,
    /// Whether each I/O is submitted by its own system call.
    pub one_by_one: bool,
    /// The load stops after this number of I/Os, each at another offset, or when each block of the device was used.
    pub ios_max: Option<u64>,
}

impl Load {
    /// Reads of 4 KiB; each completed read is replaced by a new one.
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

    /// I/Os of 4 KiB as `rw` describes them, in words like those of fio: `randread`, `write`, `random write`.
    pub fn named(rw: &str, depth: usize) -> Load {
        let pattern = if rw.starts_with("rand") { Pattern::Random } else { Pattern::Sequential };
        Load { write: rw.contains("write"), ..Load::read(pattern, depth) }
    }

    /// Writes of 4 KiB; each completed write is replaced by a new one.
    pub fn write(pattern: Pattern, depth: usize) -> Load {
        Load { write: true, ..Load::read(pattern, depth) }
    }

    /// The byte offsets of the I/Os on a device of `bytes`.
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

pub struct Offsets {
    pattern: Pattern,
    blocks: u64,
    block_bytes: u64,
    next: u64,
    /// Number of offsets that [`Offsets::next_bytes`] can still return.
    pub left: u64,
    random: Random,
    shuffle: Option<Shuffle>,
}

impl Offsets {
    /// Returns the next offset in bytes. `left` must not be 0.
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

    /// Returns offset number `index` in bytes, counted from 0, or `None` after the last. The load must have
    /// [`Load::ios_max`] set.
    pub fn nth_bytes(&self, index: u64) -> Option<u64> {
        let block = self.shuffle.as_ref().map_or(index, |shuffle| shuffle.at(index.min(self.blocks - 1)));
        (index < self.left).then_some(block * self.block_bytes)
    }
}
