//! Pseudorandom numbers that are reproducible from a seed: Steele, Lea and Flood's SplitMix64 ("Fast
//! splittable pseudorandom number generators", OOPSLA 2014).
//!
//! This is the only generator of drivers that are slow or fail on purpose, of `blkq bench`, and of the tests.
//! It is fast and small, and not suitable for anything that must be hard to guess.

/// The increment of the state: 2^64 divided by the golden ratio, made odd.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A pseudorandom series.
///
/// ```
/// use blkq::random::Random;
///
/// let (mut one, mut other) = (Random::new(7), Random::new(7));
/// assert_eq!(one.word(), other.word());
/// assert!(one.below(10) < 10);
/// ```
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The series of `seed`. All seeds are equally good.
    pub const fn new(seed: u64) -> Random {
        Random { state: seed }
    }

    /// The next number of the series.
    pub const fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// A number below `limit`; 0 if `limit` is 0.
    pub const fn below(&mut self, limit: u64) -> u64 {
        ((self.word() as u128 * limit as u128) >> 64) as u64
    }

    /// True once in `times` calls on average. If `times` is 0, never true, and the series does not advance.
    pub const fn one_in(&mut self, times: u64) -> bool {
        times != 0 && self.below(times) == 0
    }

    /// A number from 0 (inclusive) to 1 (exclusive).
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Fills `bytes` from a whole number of words, of which the last may be truncated.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for piece in bytes.chunks_mut(8) {
            piece.copy_from_slice(&self.word().to_le_bytes()[..piece.len()]);
        }
    }
}

/// The finalizer of SplitMix64: maps different words to different words, so that each bit of the result
/// depends on all bits of `word`. Useful for content that is determined by its position. 0 is mapped to 0.
pub const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
#[cfg(not(model_check))]
mod tests {
    use super::*;

    #[test]
    fn the_series_is_the_one_of_the_reference() {
        // The first words of splitmix64.c (Vigna) for the state 1234567.
        let mut random = Random::new(1_234_567);
        let words = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([random.word(), random.word(), random.word()], words);
    }

    #[test]
    fn numbers_keep_to_their_limits_and_reach_them() {
        let mut random = Random::new(1);
        let mut seen = [0; 5];
        for _ in 0..10_000 {
            seen[random.below(5) as usize] += 1;
            assert!((0.0..1.0).contains(&random.unit()));
        }
        assert!(seen.iter().all(|count| (1800..2200).contains(count)), "{seen:?}");
        assert_eq!((random.below(0), random.below(1)), (0, 0));
        let before = random.clone().word();
        assert!(!random.one_in(0) && random.word() == before && random.one_in(1));
    }

    #[test]
    fn a_cut_word_does_not_change_what_came_before() {
        let (mut whole, mut cut) = ([0; 24], [0; 19]);
        Random::new(3).fill(&mut whole);
        Random::new(3).fill(&mut cut);
        assert_eq!(whole[..19], cut);
        assert_eq!(whole[..8], Random::new(3).word().to_le_bytes());
    }
}
