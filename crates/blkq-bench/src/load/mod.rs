//! The same load on different sides: raw io_uring on the file ([`raw`]), a queue of the
//! block layer that the measuring thread owns ([`local`]), many threads that own none
//! ([`submitters`]), and io_uring that does nothing ([`nop`]).

use crate::random::Random;

pub mod local;
pub mod nop;
pub mod raw;
pub mod submitters;

/// Where the next I/O goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Anywhere.
    Random,
    /// After the one before.
    Sequential,
}

/// What is asked for, of one thread.
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
}

impl Load {
    /// Reads of 4 KiB, `depth` in flight, submitted as they end.
    pub fn read(pattern: Pattern, depth: usize) -> Load {
        Load {
            pattern,
            write: false,
            block_bytes: 4096,
            depth,
            batch: 1,
            registered: false,
            one_by_one: false,
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

    /// The offsets of its I/Os in bytes, on a device of `bytes`.
    pub fn offsets(&self, bytes: u64) -> Offsets {
        let seed = u64::from(std::process::id()) ^ blkq::clock::monotonic_ns();
        Offsets {
            pattern: self.pattern,
            blocks: bytes / u64::from(self.block_bytes),
            block_bytes: u64::from(self.block_bytes),
            next: 0,
            random: Random(seed),
        }
    }
}

/// The offsets of a load.
pub struct Offsets {
    pattern: Pattern,
    blocks: u64,
    block_bytes: u64,
    next: u64,
    random: Random,
}

impl Offsets {
    /// The next one, in bytes.
    #[inline]
    pub fn next_bytes(&mut self) -> u64 {
        self.block_bytes
            * match self.pattern {
                Pattern::Random => self.random.below(self.blocks),
                Pattern::Sequential => {
                    let block = self.next;
                    self.next = if block + 1 == self.blocks { 0 } else { block + 1 };
                    block
                }
            }
    }
}
