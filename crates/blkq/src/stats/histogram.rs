//! A log-linear histogram of latencies, with eight buckets per power of two of nanoseconds.

// Not checked by a model checker: readers need no order between counters.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::add;

/// Base-2 logarithm of the number of buckets per power of two.
const SUB_BITS: u32 = 3;
const SUB_BUCKETS: usize = 1 << SUB_BITS;

/// Base-2 logarithm of the histogram's limit in nanoseconds. Latencies above 15/16 of the limit (17 minutes)
/// share the last bucket.
const LIMIT_BITS: u32 = 40;

/// The number of buckets of a [`Histogram`].
pub const LATENCY_BUCKETS: usize = (LIMIT_BITS - SUB_BITS + 1) as usize * SUB_BUCKETS;

/// The bucket of a latency. Below 16 ns, each nanosecond has a bucket. Above, the width of a bucket is at
/// most an eighth of its lower edge.
#[inline]
fn bucket_of(latency_ns: u64) -> usize {
    let ns = latency_ns.min((1 << LIMIT_BITS) - 1);
    let shift = (63 - (ns | SUB_BUCKETS as u64).leading_zeros()) - SUB_BITS;
    ((shift as usize) << SUB_BITS) + (ns >> shift) as usize
}

/// The largest latency of a bucket, in nanoseconds.
fn upper_edge_ns(bucket: usize) -> u64 {
    let shift = (bucket >> SUB_BITS).saturating_sub(1);
    let above = (bucket - (shift << SUB_BITS)) as u64 + 1;
    (above << shift) - 1
}

/// The buckets of a [`Histogram`], counted by one thread while others read them.
#[derive(Debug)]
pub(crate) struct LatencyCounters([AtomicU64; LATENCY_BUCKETS]);

impl Default for LatencyCounters {
    fn default() -> LatencyCounters {
        LatencyCounters([const { AtomicU64::new(0) }; LATENCY_BUCKETS])
    }
}

impl LatencyCounters {
    /// Counts `count` requests with the same latency.
    #[inline]
    pub fn count(&self, latency_ns: u64, count: u64) {
        add(&self.0[bucket_of(latency_ns)], count);
    }

    pub fn add_to(&self, buckets: &mut [u64; LATENCY_BUCKETS]) {
        buckets.iter_mut().zip(&self.0).for_each(|(sum, counter)| *sum += counter.load(Relaxed));
    }
}

/// The latencies of one group of operations.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    /// The number of latencies in each bucket.
    pub buckets: Box<[u64; LATENCY_BUCKETS]>,
    /// The largest latency, in nanoseconds.
    pub max_ns: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: Box::new([0; LATENCY_BUCKETS]), max_ns: 0 }
    }
}

impl Histogram {
    /// Counts one latency, in nanoseconds.
    pub fn record(&mut self, latency_ns: u64) {
        self.buckets[bucket_of(latency_ns)] += 1;
        self.max_ns = self.max_ns.max(latency_ns);
    }

    /// The number of latencies that were recorded.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The latency in nanoseconds that `percent` (0 to 100) of all latencies do not exceed. The result is
    /// never too small, and up to 17 minutes at most an eighth too large. It is 0 if nothing was recorded.
    pub fn percentile_ns(&self, percent: f64) -> u64 {
        let count = self.count();
        let rank = ((count as f64 * percent / 100.0).ceil() as u64).clamp(1, count.max(1));
        let mut seen = 0;
        let reached = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        reached.map_or(0, |bucket| self.edge_ns(bucket))
    }

    fn edge_ns(&self, bucket: usize) -> u64 {
        if bucket == LATENCY_BUCKETS - 1 { self.max_ns } else { upper_edge_ns(bucket).min(self.max_ns) }
    }

    /// How many latencies were below each power of two of nanoseconds, from 2^`from` to 2^`to` (at most 40),
    /// as pairs of power and count. Powers of two are edges of buckets, so the counts are exact.
    pub fn below_powers(&self, from: u32, to: u32) -> Vec<(u64, u64)> {
        let below = |bits: u32| {
            let edge = if bits == LIMIT_BITS { LATENCY_BUCKETS } else { bucket_of(1 << bits) };
            (1 << bits, self.buckets[..edge].iter().sum())
        };
        (from..=to.min(LIMIT_BITS)).map(below).collect()
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *mine += theirs;
        }
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The counts since `earlier`. The largest latency is the upper edge of its bucket.
    #[must_use]
    pub fn delta(&self, earlier: &Histogram) -> Histogram {
        let mut delta = self.clone();
        for (mine, theirs) in delta.buckets.iter_mut().zip(earlier.buckets.iter()) {
            *mine = mine.saturating_sub(*theirs);
        }
        let last = delta.buckets.iter().rposition(|&n| n != 0);
        delta.max_ns = last.map_or(0, |bucket| self.edge_ns(bucket));
        delta
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        let mut lower = 0u64;
        for bucket in 0..LATENCY_BUCKETS {
            let upper = upper_edge_ns(bucket);
            assert_eq!(bucket_of(lower), bucket);
            assert_eq!(bucket_of(upper), bucket);
            assert!(upper - lower <= lower / 8, "bucket {bucket}: {lower} to {upper}");
            lower = upper + 1;
        }
        assert_eq!(lower, 1 << LIMIT_BITS);
        assert_eq!(bucket_of(u64::MAX), LATENCY_BUCKETS - 1);
    }

    fn latency() -> impl Strategy<Value = u64> {
        (0u32..48, any::<u64>()).prop_map(|(bits, r)| r & ((1u64 << bits) - 1))
    }

    proptest! {
        // Contract: statistics
        #[test]
        fn percentiles_are_an_eighth_too_large_at_most(
            mut all in proptest::collection::vec(latency(), 1..200),
            percent in 0.0f64..100.0,
        ) {
            let mut histogram = Histogram::default();
            all.iter().for_each(|&ns| histogram.record(ns));
            all.sort_unstable();
            prop_assert_eq!(histogram.percentile_ns(100.0), all[all.len() - 1]);
            let rank = ((all.len() as f64 * percent / 100.0).ceil() as usize).max(1);
            let exact = all[rank - 1];
            let found = histogram.percentile_ns(percent);
            prop_assert!(found >= exact);
            if bucket_of(exact) < LATENCY_BUCKETS - 1 {
                prop_assert!(found - exact <= exact / 8, "{found} for {exact}");
            }
        }

        // Contract: statistics
        #[test]
        fn latencies_below_a_power_of_two_are_counted_exactly(
            all in proptest::collection::vec(latency(), 0..200),
        ) {
            let mut histogram = Histogram::default();
            all.iter().for_each(|&ns| histogram.record(ns));
            for (edge, count) in histogram.below_powers(0, 39) {
                prop_assert_eq!(count, all.iter().filter(|ns| **ns < edge).count() as u64);
            }
            prop_assert_eq!(histogram.below_powers(40, 40), [(1 << 40, histogram.count())]);
        }

        #[test]
        fn a_delta_has_the_latencies_since_the_earlier_snapshot(
            before in proptest::collection::vec(latency(), 0..50),
            after in proptest::collection::vec(latency(), 0..50),
        ) {
            let mut earlier = Histogram::default();
            before.iter().for_each(|&ns| earlier.record(ns));
            let mut between = Histogram::default();
            after.iter().for_each(|&ns| between.record(ns));
            let mut later = earlier.clone();
            later.add(&between);
            let delta = later.delta(&earlier);
            prop_assert_eq!(&delta.buckets, &between.buckets);
            prop_assert!(delta.max_ns >= between.max_ns);
            if later.max_ns < 1 << LIMIT_BITS {
                prop_assert!(delta.max_ns - between.max_ns <= between.max_ns / 8);
            }
        }
    }
}
