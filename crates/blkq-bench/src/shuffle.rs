//! An order in which to read every place of a file once.

/// All numbers below a limit, each once, in random order: what was read
/// once is in the page cache, and would be no cold read a second time.
pub struct Shuffle {
    limit: u64,
    /// One less than the power of two that is not below the limit.
    mask: u64,
    seed: u64,
}

impl Shuffle {
    /// The numbers below `limit`, in the order of `seed`.
    pub fn new(limit: u64, seed: u64) -> Shuffle {
        Shuffle { limit, mask: limit.next_power_of_two() - 1, seed }
    }

    /// The number at place `index`, which is below the limit as well.
    #[inline]
    pub fn at(&self, index: u64) -> u64 {
        // Where the permutation leaves the limit, it is followed until it comes back.
        let mut number = self.mix(index);
        while number >= self.limit {
            number = self.mix(number);
        }
        number
    }

    /// A permutation of the numbers up to `mask`: each step can be undone.
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
    fn a_shuffle_gives_each_number_once_and_neighbours_far_apart() {
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
