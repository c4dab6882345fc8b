//! A small fast generator of positions.

/// A linear congruential generator (Knuth's constants), of which the upper bits are used.
pub struct Random(pub u64);

impl Random {
    /// A number below `limit`.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((u128::from(self.0) * u128::from(limit)) >> 64) as u64
    }
}
