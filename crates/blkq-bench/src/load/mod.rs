//! Generates the same load on different targets: raw io_uring and blocking calls on the file ([`raw`]), a queue that the
//! measuring thread owns ([`local`]), threads that submit through an engine ([`submitters`]), and a vhost-user-blk server
//! ([`mod@vhost`]).

use blkq::random::Random;

pub mod local;
pub mod raw;
pub mod submitters;
#[cfg_attr(target_env = "musl", path = "no_vhost.rs")]
pub mod vhost;

#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Whether the offsets are random. Otherwise each I/O begins at the end of the previous one.
    pub random: bool,
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
    /// I/Os of 4 KiB. The offsets are random if `rw` begins with `rand`, and the I/Os are writes if `rw` contains
    /// `write`: values of fio's `--rw` such as `randread`, and names such as `random write`, but no mixed loads. Each
    /// completed I/O is replaced by a new one.
    pub fn new(rw: &str, depth: usize) -> Load {
        Load {
            random: rw.starts_with("rand"),
            write: rw.contains("write"),
            block_bytes: 4096,
            depth,
            batch: 1,
            registered: false,
            one_by_one: false,
            ios_max: None,
        }
    }

    /// The byte offsets of the I/Os on a device of `bytes`.
    pub fn offsets(&self, bytes: u64) -> Offsets {
        let seed = u64::from(std::process::id()) ^ blkq::clock::monotonic_ns();
        let blocks = bytes / u64::from(self.block_bytes);
        let (random, once) = (self.random, self.ios_max.is_some());
        Offsets {
            blocks,
            block_bytes: u64::from(self.block_bytes),
            next: 0,
            left: self.ios_max.map_or(u64::MAX, |ios| ios.min(blocks)),
            random: (random && !once).then(|| Random::new(seed)),
            shuffle: (random && once).then(|| Shuffle::new(blocks, seed)),
        }
    }
}

pub struct Offsets {
    blocks: u64,
    block_bytes: u64,
    /// Index of the next block in the sequence, if the order is sequential or shuffled.
    next: u64,
    /// Number of offsets that [`Offsets::next_bytes`] can still return.
    pub left: u64,
    /// For random offsets that may repeat.
    random: Option<Random>,
    /// For random offsets that do not repeat.
    shuffle: Option<Shuffle>,
}

impl Offsets {
    /// Returns the next offset in bytes. `left` must not be 0.
    pub fn next_bytes(&mut self) -> u64 {
        self.left -= 1;
        let block = if let Some(random) = &mut self.random {
            random.below(self.blocks)
        } else {
            let index = self.next;
            self.next = if index + 1 == self.blocks { 0 } else { index + 1 };
            self.block(index)
        };
        block * self.block_bytes
    }

    /// The block at `index` in the sequence.
    fn block(&self, index: u64) -> u64 {
        self.shuffle.as_ref().map_or(index, |shuffle| shuffle.at(index))
    }

    /// Returns offset number `index` in bytes, counted from 0, or `None` after the last. The load must have
    /// [`Load::ios_max`] set.
    pub fn nth_bytes(&self, index: u64) -> Option<u64> {
        (index < self.left).then(|| self.block(index) * self.block_bytes)
    }
}

/// A pseudo-random permutation of the numbers below a limit. A block that was read before is in the page cache, so
/// a cold measurement must not read it a second time.
pub struct Shuffle {
    limit: u64,
    /// The smallest power of two that is not less than the limit, minus 1.
    mask: u64,
    seed: u64,
}

impl Shuffle {
    /// A permutation of the numbers below `limit` that depends on `seed`.
    pub fn new(limit: u64, seed: u64) -> Shuffle {
        Shuffle { limit, mask: limit.next_power_of_two() - 1, seed }
    }

    /// The number at position `index`, which must be below the limit.
    pub fn at(&self, index: u64) -> u64 {
        // `mix` permutes the numbers up to `mask`. Applying it until the result is below the limit gives a permutation
        // of the numbers below the limit.
        let mut number = self.mix(index);
        while number >= self.limit {
            number = self.mix(number);
        }
        number
    }

    /// A permutation of the numbers up to `mask`: addition, multiplication by an odd number and xor with a right shift
    /// are all invertible modulo a power of two.
    fn mix(&self, number: u64) -> u64 {
        let half = self.mask.count_ones() / 2 + 1;
        let mut mixed = number.wrapping_add(self.seed) & self.mask;
        for odd in [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9_u64] {
            mixed = mixed.wrapping_mul(odd) & self.mask;
            mixed ^= mixed >> half;
        }
        mixed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_a_permutation_with_distant_neighbours() {
        for limit in [1, 2, 3, 1000, 4096, 16_384, 65_537] {
            let shuffle = Shuffle::new(limit, 77);
            let order: Vec<u64> = (0..limit).map(|index| shuffle.at(index)).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..limit));
            let near = order.windows(2).filter(|two| two[0].abs_diff(two[1]) <= limit / 1000).count();
            assert!(limit < 1000 || (near as u64) < limit / 100, "{limit}: {near} neighbours");
        }
    }
}
