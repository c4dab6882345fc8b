//! A random order in which to read every block of a file once.

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
