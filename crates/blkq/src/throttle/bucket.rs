//! The word of a limit: the time until which admitted requests have used up the limit (the theoretical
//! arrival time of the generic cell rate algorithm, ITU-T I.371).
//!
//! A request may start when that time has come, and advances it by the request's cost in nanoseconds of the
//! monotonic clock. That clock starts when the machine boots, and a burst may be longer than the uptime.
//! Therefore a word is signed, and may be a time before the boot. Nothing ticks, and the word of an idle
//! limit is not written. The charging queue keeps the remainder of each division, so that rates are exact
//! over any time.
//!
//! All accesses are relaxed: no other memory depends on the value of a word.

use crate::sync::atomic::{AtomicI64, Ordering::Relaxed};

pub(crate) const NS_PER_S: u64 = 1_000_000_000;
/// Words in memory that other processes can write are limited to this time in the future, in nanoseconds. A
/// word beyond it is damaged, or the result of one request that is too large for its limit.
pub(crate) const DEBT_NS_MAX: u64 = 60 * NS_PER_S;

/// The word of a limit that was never used.
pub(crate) const NEVER_NS: i64 = i64::MIN;

/// The words of one set of limits, by the number of the key. A group's file contains them, so a change of this layout
/// needs another version of the file.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Buckets {
    /// The words of the limits' rates.
    pub average: [AtomicI64; 6],
    /// The words of the rates of bursts.
    pub peak: [AtomicI64; 6],
}

impl Default for Buckets {
    fn default() -> Buckets {
        let never = || std::array::from_fn(|_| AtomicI64::new(NEVER_NS));
        Buckets { average: never(), peak: never() }
    }
}

impl Buckets {
    /// Drops the debt of earlier requests, because the limits have changed: no request must wait for what was
    /// admitted under the old limits.
    pub fn forgive_debt(&self, now_ns: u64) {
        self.average.iter().chain(&self.peak).for_each(|word| forgive_debt(word, now_ns));
    }
}

/// Makes the word no later than `now_ns`.
pub(crate) fn forgive_debt(word: &AtomicI64, now_ns: u64) {
    let now_ns = now_ns.cast_signed();
    let _ = word.fetch_update(Relaxed, Relaxed, |spent_ns| (spent_ns > now_ns).then_some(now_ns));
}

/// Reads a word in shared memory, after it was cut to [`DEBT_NS_MAX`]. The cut is stored, because a bound
/// relative to the time of each read would move with the time.
#[inline]
pub(crate) fn shared_spent_ns(word: &AtomicI64, now_ns: u64) -> i64 {
    let (spent_ns, most_ns) = (word.load(Relaxed), now_ns.saturating_add(DEBT_NS_MAX).cast_signed());
    if spent_ns <= most_ns {
        return spent_ns;
    }
    word.fetch_min(most_ns, Relaxed).min(most_ns)
}

/// When the next request may start, according to the word. Not before `credit_ns` ago: capacity that was not
/// used before that is lost.
pub(crate) fn start_of(spent_ns: i64, now_ns: u64, credit_ns: u64) -> i64 {
    spent_ns.max(now_ns.cast_signed().saturating_sub_unsigned(credit_ns))
}

/// Converts the time of a word to the clock. Times before the boot become 0.
pub(crate) fn clock_ns(spent_ns: i64) -> u64 {
    spent_ns.max(0).cast_unsigned()
}

/// The number of units that have accrued at `rate` per second since `start_ns`. `None` before `start_ns`.
pub(crate) fn accrued(start_ns: i64, now_ns: u64, rate: u64) -> Option<u64> {
    (start_ns <= now_ns.cast_signed())
        .then(|| scaled(now_ns.cast_signed().abs_diff(start_ns), rate, NS_PER_S))
}

/// The nanoseconds that `units` take at `rate` per second, and the remainder for the next call, which is less
/// than `rate`. `rest` is the remainder of the previous call.
#[inline]
pub(crate) fn cost_ns(units: u64, rate: u64, rest: u64) -> (u64, u64) {
    match units.checked_mul(NS_PER_S).and_then(|product| product.checked_add(rest)) {
        Some(product) => (product / rate, product % rate),
        None => {
            let product = u128::from(units) * u128::from(NS_PER_S) + u128::from(rest);
            let rate = u128::from(rate);
            (u64::try_from(product / rate).unwrap_or(u64::MAX), (product % rate) as u64)
        }
    }
}

/// `value * numerator / denominator` without overflow. The denominator must not be 0.
#[inline]
pub(crate) fn scaled(value: u64, numerator: u64, denominator: u64) -> u64 {
    match value.checked_mul(numerator) {
        Some(product) => product / denominator,
        None => u64::try_from(u128::from(value) * u128::from(numerator) / u128::from(denominator))
            .unwrap_or(u64::MAX),
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn costs_do_not_drift() {
        for rate in [1, 3, 7, 999_983, 10_000_000, 1 << 40] {
            let (mut ns, mut rest) = (0, 0);
            for units in 0..10_000 {
                let (cost, left) = cost_ns(units % 97, rate, rest);
                (ns, rest) = (ns + u128::from(cost), left);
            }
            let units: u128 = (0..10_000).map(|units| units % 97).sum();
            assert_eq!(ns, units * 1_000_000_000 / u128::from(rate), "{rate}");
        }
        assert_eq!(cost_ns(u64::MAX, 1, 0), (u64::MAX, 0));
    }

    #[test]
    fn a_word_far_in_the_future_blocks_for_a_minute_at_most() {
        let word = AtomicI64::new(i64::MAX);
        let most_ns = (5 + DEBT_NS_MAX).cast_signed();
        assert_eq!(shared_spent_ns(&word, 5), most_ns);
        // The bound does not move with the time.
        assert_eq!(shared_spent_ns(&word, 900), most_ns);
        assert_eq!(start_of(0, 5, 9), 0);
        assert_eq!(start_of(0, 50, 9), 41);
        assert_eq!(accrued(6, 5, 1), None);
        assert_eq!(accrued(NEVER_NS, i64::MAX.cast_unsigned(), u64::MAX), Some(u64::MAX));
    }

    #[test]
    fn a_limit_that_was_never_used_has_all_of_its_credit() {
        assert_eq!(start_of(NEVER_NS, 5, 9), -4);
        assert_eq!(start_of(NEVER_NS, 5, u64::MAX), NEVER_NS);
        assert_eq!(accrued(-4, 5, NS_PER_S), Some(9));
        assert_eq!((clock_ns(-4), clock_ns(4)), (0, 4));
        let word = AtomicI64::new(-4);
        forgive_debt(&word, 5);
        assert_eq!(word.load(Relaxed), -4);
    }
}
