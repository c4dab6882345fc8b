//! Searches for the ceiling of a device, and limits the rate of the device to just under it.
//!
//! Cloud providers limit their disks. Requests beyond the rate wait in the provider's queue for the next
//! refill of a token bucket, so a disk that is always at its ceiling has many times the latency of a disk
//! that stays one percent below. No description of the disk contains the ceiling, and it changes over time.
//! Therefore it is found by trial: when the load is steady, the rate is lowered a little. If the 99th
//! percentile of the latency then falls by the factor [`WORTH`], the device was at its ceiling, and the limit
//! stays. Otherwise the limit is removed, and the next trial comes after a longer time.
//!
//! # Phases
//!
//! * `Measure`: no limit, until two measurements in a row find the same rate.
//! * `Drain`, then `Trial`: first a low rate, so that the device completes its queued requests, then a rate
//!   just below the measured one. There are several trials with decreasing rates.
//! * `Away`: no trial has helped. No limit, until some time has passed or the device becomes slow.
//! * `Held`: the limit stays while the latency is good. It is lowered when the latency grows (`Recover` first
//!   drains the device again), raised step by step after some time at the limit (`Raise`), and removed when
//!   the load no longer needs it.
//!
//! [`AutoLimit`] uses neither a clock nor a device: it decides only from the loads that it is passed.

// The counters are not checked by a model checker, like other statistics: readers need no order between them.
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::stats::{Histogram, LatencyCounters, add, raise};
use crate::throttle::{LimitKey, RateLimit, RateLimits};

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

/// How long the rate is measured without a limit, in nanoseconds.
const MEASURE_NS: u64 = S;
/// How much two such measurements of a steady load may differ, in percent.
const STEADY_PERCENT: f64 = 6.0;
/// The number of I/Os that a 99th percentile needs.
const IOS_MIN: u64 = 32;
/// If a measurement has too few I/Os, it may take this many times as long.
const EXTENDED: u64 = 8;
/// As [`EXTENDED`], but for a limit in force: the longest measurement, in nanoseconds.
const JUDGE_NS_MAX: u64 = 10 * S;
/// The fractions of the measured rate that are tried, one after the other.
const TRIALS: [f64; 2] = [0.985, 0.97];
/// The fraction of the rate while the device completes its queued requests.
const DRAIN: f64 = 0.7;
const DRAIN_NS: u64 = 300 * MS;
/// How long after a change of the rate the latency is ignored, in nanoseconds.
const SETTLE_NS: u64 = 200 * MS;
/// How long the latency is measured in a trial, in nanoseconds.
const TRIAL_NS: u64 = 600 * MS;
/// A limit is useful if the 99th percentile of the latency falls by this factor.
const WORTH: f64 = 3.0;
/// The time to the next trial after one without success, in nanoseconds. This time doubles for each trial.
const AWAY_NS: u64 = 3 * S;
const AWAY_NS_MAX: u64 = 160 * S;
/// How often the latency is judged while a limit is in force, in nanoseconds.
const JUDGE_NS: u64 = 250 * MS;
/// How many judgements in a row must find a long latency before the limit is lowered. A single one may be due
/// to a thread that was scheduled late.
const SLOW: u32 = 2;
/// How many judgements in a row must find a long latency before a new search starts, if there is no limit.
const SLOW_AWAY: u32 = 4;
/// A limit is removed if the device's rate stays below this fraction of the limit for [`IDLE_NS`] and no
/// request waits. Either the load needs no limit now, or the limit makes slow clients sleep too often.
const IDLE: f64 = 0.9;
const IDLE_NS: u64 = 30 * S;
/// The time at the limit before a higher rate is tried, in nanoseconds. Doubles after each failure.
const RAISE_NS: u64 = 4 * S;
const RAISE_NS_MAX: u64 = 64 * S;
/// The first fraction by which the rate is raised. The fraction doubles as long as the latency stays good.
const RAISE: f64 = 0.02;
const RAISE_MAX: f64 = 1.0;
/// How soon a raise that was too large is followed by a smaller one, in nanoseconds.
const RETRY_NS: u64 = 500 * MS;
/// The first fraction by which the rate is lowered when the latency grows. The fraction doubles each time.
const LOWER: f64 = 0.02;
/// A rate that has been good for this time at the limit, in nanoseconds, is sustainable, not a burst.
const SURE_NS: u64 = 2 * S;
/// If the rate falls below this fraction of the highest sustainable rate, the search starts again: the
/// latency may have another cause than the rate, and then a lower rate does not help.
const LOWEST: f64 = 0.85;
/// Requests with a larger mean size are limited by their bytes, as providers do.
const SMALL_BYTES: u64 = 32 << 10;
/// If the mean size of requests changes by this factor, the ceiling is a different one.
const SIZE_FACTOR: f64 = 2.0;

/// The work that a device has done so far. All numbers but `in_flight` only grow.
#[derive(Clone, Debug, Default)]
pub struct DeviceLoad {
    /// The current time in nanoseconds, of any clock.
    pub now_ns: u64,
    /// The time from dispatch to completion of all completed reads and writes.
    pub latency: Histogram,
    /// Bytes of these reads and writes.
    pub bytes: u64,
    /// All completed requests, including flushes and discards, as a limit counts them.
    pub ios: u64,
    /// How long requests have waited for the limit, in nanoseconds.
    pub throttled_ns: u64,
    /// Requests that the device has now.
    pub in_flight: u64,
}

/// The counters of one queue, which measure how long the device itself has requests, without the time for which they
/// wait for a limit. Only the owner of the queue writes them.
#[derive(Debug, Default)]
pub(crate) struct DeviceTimes {
    latencies: LatencyCounters,
    latency_max_ns: AtomicU64,
    bytes: AtomicU64,
    ios: AtomicU64,
    in_flight: AtomicU64,
}

impl DeviceTimes {
    /// Counts `count` completed requests of any operation. The driver has `left` other requests.
    pub fn completed(&self, count: u64, left: u64) {
        add(&self.ios, count);
        self.in_flight.store(left, Relaxed);
    }

    /// Counts one of them, a read or write of `bytes` that took `latency_ns`.
    pub fn timed(&self, latency_ns: u64, bytes: u64) {
        self.latencies.count(latency_ns, 1);
        add(&self.bytes, bytes);
        raise(&self.latency_max_ns, latency_ns);
    }

    pub fn add_to(&self, load: &mut DeviceLoad) {
        self.latencies.add_to(&mut load.latency.buckets);
        load.latency.max_ns = load.latency.max_ns.max(self.latency_max_ns.load(Relaxed));
        load.bytes += self.bytes.load(Relaxed);
        load.ios += self.ios.load(Relaxed);
        load.in_flight += self.in_flight.load(Relaxed);
    }
}

#[derive(Clone, Copy, Debug)]
struct Measurement {
    iops: f64,
    bps: f64,
    /// The mean size of reads and writes, in bytes.
    bytes: f64,
    p99_ns: f64,
    /// Requests waited for the limit in more than half of the period.
    is_limited: bool,
}

#[derive(Clone, Copy, PartialEq, Debug, Default)]
enum Phase {
    /// No limit. The rate is measured.
    #[default]
    Measure,
    /// The device completes its queued requests before the trial with this index in [`TRIALS`].
    Drain { trial: usize },
    /// The latency at the rate of the trial is measured, once it has settled.
    Trial { trial: usize, is_settled: bool },
    /// No limit, and no trial before `until_ns` unless the last `slow` judgements have found a slow device
    /// and one more does.
    Away { until_ns: u64, slow: u32 },
    /// The limit is in force. The device has been at the limit with a good latency for `at_limit_ns`; the
    /// last `slow` judgements have found a long latency.
    Held { at_limit_ns: u64, slow: u32 },
    /// The limit stays in force, at a lower rate while the device completes its queued requests.
    Recover,
    /// A rate that is higher by this fraction is tried.
    Raise { by: f64 },
}

/// Searches for the ceiling of a device by trial: lowers the rate a little, and keeps the limit if the latency
/// falls much.
#[derive(Debug, Default)]
pub struct AutoLimit {
    phase: Phase,
    /// The rate of the previous measurement without a limit, if there was one.
    measured: Option<f64>,
    key: LimitKey,
    /// The highest sustainable rate per second: the measured one, or a higher one that was good for
    /// [`SURE_NS`].
    ceiling: f64,
    /// The rate per second that is in force.
    pace: f64,
    /// The 99th percentile of the latency without a limit, in nanoseconds.
    open_p99_ns: f64,
    /// The 99th percentile that is too long with a limit, in nanoseconds.
    long_ns: f64,
    /// The mean size of requests when the ceiling was found, in bytes.
    bytes: f64,
    /// How often [`AWAY_NS`] was doubled.
    away_doublings: u32,
    /// How often [`RAISE_NS`] was doubled.
    raise_doublings: u32,
    /// The fraction of the next raise, if that comes after [`RETRY_NS`] already.
    retry_by: Option<f64>,
    /// How often the rate was lowered in a row.
    lowered: u32,
    /// How long the device has stayed below the fraction [`IDLE`] of its limit.
    idle_ns: u64,
    limits: RateLimits,
    /// The work of the device at the beginning of the current period.
    begin: Option<DeviceLoad>,
}

impl AutoLimit {
    /// The limits that must be in force now.
    pub fn limits(&self) -> &RateLimits {
        &self.limits
    }

    /// The limit just under the ceiling, if it was found.
    pub fn ceiling(&self) -> Option<RateLimits> {
        matches!(self.phase, Phase::Held { .. } | Phase::Recover | Phase::Raise { .. })
            .then(|| self.limits_of(self.pace))
    }

    /// Processes the work of the device so far. Must be called about 20 times per second. Returns whether the
    /// limits have changed.
    pub fn update(&mut self, load: &DeviceLoad) -> bool {
        let Some(begin) = &self.begin else {
            self.begin = Some(load.clone());
            return false;
        };
        let length_ns = load.now_ns.saturating_sub(begin.now_ns);
        let wanted_ns = self.wanted_ns();
        if length_ns < wanted_ns {
            return false;
        }
        let latency = load.latency.delta(&begin.latency);
        let timed = latency.count();
        let needs_ios = !matches!(self.phase, Phase::Drain { .. } | Phase::Recover | Phase::Away { .. });
        // A low load may have nothing in flight at this moment, and still have been measured.
        let is_measured = matches!(self.phase, Phase::Measure);
        let is_gone = load.in_flight == 0 && (is_measured || timed == 0);
        if needs_ios && timed < IOS_MIN && !is_gone && length_ns < self.longest_ns() {
            return false;
        }
        let per_second = |count: u64| count as f64 * 1e9 / length_ns as f64;
        let bytes = load.bytes.saturating_sub(begin.bytes);
        let seen = Measurement {
            iops: per_second(load.ios.saturating_sub(begin.ios)),
            bps: per_second(bytes),
            bytes: bytes as f64 / timed.max(1) as f64,
            p99_ns: latency.percentile_ns(99.0) as f64,
            is_limited: load.throttled_ns.saturating_sub(begin.throttled_ns) > length_ns / 2,
        };
        self.begin = Some(load.clone());
        let before = self.limits;
        self.decide(load.now_ns, length_ns, (timed >= IOS_MIN).then_some(seen));
        before != self.limits
    }

    /// The length of a period in the current phase, in nanoseconds.
    fn wanted_ns(&self) -> u64 {
        match self.phase {
            Phase::Measure => MEASURE_NS,
            Phase::Drain { .. } | Phase::Recover => DRAIN_NS,
            Phase::Trial { is_settled: false, .. } => SETTLE_NS,
            Phase::Trial { is_settled: true, .. } => TRIAL_NS,
            Phase::Away { .. } | Phase::Held { .. } => JUDGE_NS,
            Phase::Raise { .. } => 2 * JUDGE_NS,
        }
    }

    /// The longest length of a period that has too few I/Os, in nanoseconds.
    fn longest_ns(&self) -> u64 {
        match self.phase {
            Phase::Held { .. } | Phase::Raise { .. } => JUDGE_NS_MAX,
            _ => self.wanted_ns() * EXTENDED,
        }
    }

    /// Decides at the end of a period. `seen` is `None` if the period had too few I/Os to judge.
    fn decide(&mut self, now_ns: u64, length_ns: u64, seen: Option<Measurement>) {
        match self.phase {
            Phase::Measure => self.end_measurement(seen),
            Phase::Drain { trial } => {
                self.set_pace(self.ceiling * TRIALS[trial]);
                self.phase = Phase::Trial { trial, is_settled: false };
            }
            Phase::Trial { trial, is_settled: false } => {
                self.phase = Phase::Trial { trial, is_settled: true }
            }
            Phase::Trial { trial, is_settled: true } => self.end_trial(now_ns, trial, seen),
            Phase::Away { until_ns, slow } => {
                // The device has become slow by the factor that makes a limit useful: a burst may be over,
                // and the device at its ceiling.
                let is_slow = seen.is_some_and(|seen| seen.p99_ns >= WORTH * self.open_p99_ns);
                let slow = if is_slow { slow + 1 } else { 0 };
                self.phase = Phase::Away { until_ns, slow };
                if slow >= SLOW_AWAY || now_ns >= until_ns {
                    self.restart();
                }
            }
            Phase::Recover => {
                self.set_pace(self.pace);
                self.keep_limit();
            }
            Phase::Held { at_limit_ns, slow } => self.judge_held(at_limit_ns, slow, length_ns, seen),
            Phase::Raise { by } => self.end_raise(by, seen),
        }
    }

    fn rate(&self, seen: &Measurement) -> f64 {
        if self.key.is_bytes() { seen.bps } else { seen.iops }
    }

    /// Ends a measurement. Two equal rates in a row may be those of a ceiling, so they start a trial.
    fn end_measurement(&mut self, seen: Option<Measurement>) {
        let before = self.measured.take();
        let Some(seen) = seen else { return };
        let is_small = seen.bytes <= SMALL_BYTES as f64;
        self.key = if is_small { LimitKey::Iops } else { LimitKey::Bps };
        let rate = self.rate(&seen);
        match before {
            Some(before) if (rate / before - 1.0).abs() * 100.0 <= STEADY_PERCENT => {
                self.ceiling = rate.min(before);
                (self.open_p99_ns, self.bytes) = (seen.p99_ns, seen.bytes);
                self.drain(0);
            }
            _ => self.measured = Some(rate),
        }
    }

    fn end_trial(&mut self, now_ns: u64, trial: usize, seen: Option<Measurement>) {
        let Some(seen) = seen.filter(|seen| !self.is_idle(seen)) else {
            // There is too little load to judge. The trial counts as one without success; otherwise a load
            // that repeats this would be in a trial all the time.
            return self.stay_away(now_ns);
        };
        if seen.p99_ns * WORTH <= self.open_p99_ns {
            self.long_ns = (seen.p99_ns * self.open_p99_ns).sqrt();
            (self.away_doublings, self.raise_doublings, self.lowered) = (0, 0, 0);
            (self.retry_by, self.idle_ns) = (None, 0);
            self.keep_limit();
        } else if trial + 1 < TRIALS.len() {
            self.drain(trial + 1);
        } else {
            self.stay_away(now_ns);
        }
    }

    /// Lets the device complete its queued requests before a trial.
    fn drain(&mut self, trial: usize) {
        self.set_limit(self.ceiling * DRAIN);
        self.phase = Phase::Drain { trial };
    }

    /// Removes the limit until the next trial.
    fn stay_away(&mut self, now_ns: u64) {
        self.limits = RateLimits::default();
        let until_ns = now_ns + doubled(AWAY_NS, self.away_doublings, AWAY_NS_MAX);
        self.phase = Phase::Away { until_ns, slow: 0 };
        self.away_doublings += 1;
    }

    /// Whether the load needs less than the limit.
    fn is_idle(&self, seen: &Measurement) -> bool {
        !seen.is_limited && self.rate(seen) < self.pace * IDLE
    }

    fn keep_limit(&mut self) {
        self.phase = Phase::Held { at_limit_ns: 0, slow: 0 };
    }

    fn judge_held(&mut self, at_limit_ns: u64, slow: u32, length_ns: u64, seen: Option<Measurement>) {
        let Some(seen) = seen else {
            // A load with few I/Os does not show whether the limit is good, and does not need it.
            self.count_idle(length_ns);
            return;
        };
        // Another mean size has another ceiling.
        let change = seen.bytes / self.bytes.max(1.0);
        if !(1.0 / SIZE_FACTOR..=SIZE_FACTOR).contains(&change) {
            return self.restart();
        }
        if seen.p99_ns > self.long_ns {
            self.phase = Phase::Held { at_limit_ns, slow: slow + 1 };
            let rate = self.rate(&seen);
            // A raise had found a burst, which is over now.
            let is_over = self.is_far(rate) && rate * TRIALS[0] >= self.ceiling * LOWEST;
            if is_over || slow + 1 >= SLOW {
                self.lower(rate);
            }
            return;
        }
        if !self.is_idle(&seen) {
            self.idle_ns = 0;
        } else if self.count_idle(length_ns) {
            return;
        }
        let at_limit_ns = at_limit_ns + if seen.is_limited { length_ns } else { 0 };
        self.phase = Phase::Held { at_limit_ns, slow: 0 };
        if !seen.is_limited {
            return;
        }
        if at_limit_ns >= SURE_NS {
            self.lowered = 0;
            self.ceiling = self.ceiling.max(self.pace);
        }
        let retry_by = self.retry_by.filter(|_| at_limit_ns >= RETRY_NS);
        if let Some(by) = retry_by
            .or((at_limit_ns >= doubled(RAISE_NS, self.raise_doublings, RAISE_NS_MAX)).then_some(RAISE))
        {
            self.retry_by = None;
            self.raise(by);
        }
    }

    /// Counts a period without need for the limit. Removes it, and returns true, after [`IDLE_NS`].
    fn count_idle(&mut self, length_ns: u64) -> bool {
        self.idle_ns += length_ns;
        let is_long = self.idle_ns >= IDLE_NS;
        if is_long {
            self.restart();
        }
        is_long
    }

    /// Whether the device does much less than the limit allows.
    fn is_far(&self, rate: f64) -> bool {
        rate < self.pace * 0.8
    }

    /// Lowers the limit: the device is slow at `rate`, because its ceiling fell or something disturbs it.
    fn lower(&mut self, rate: f64) {
        let is_far = self.is_far(rate);
        let lower = self.pace * (1.0 - LOWER * f64::from(1 << self.lowered));
        let pace = if is_far { rate * TRIALS[0] } else { lower };
        if pace < self.ceiling * LOWEST {
            return self.restart();
        }
        if self.retry_by.take().is_some() {
            // The last raise was possible only in a burst.
            self.raise_doublings += 1;
        }
        // After a mere disturbance this finds the old rate again soon.
        self.retry_by = is_far.then_some(2.0 * RAISE);
        self.lowered += 1;
        self.pace = pace;
        self.recover();
    }

    fn end_raise(&mut self, by: f64, seen: Option<Measurement>) {
        let pace = self.pace * (1.0 + by);
        match seen {
            Some(seen) if seen.p99_ns > self.long_ns => {
                if by > RAISE {
                    self.retry_by = Some((by / 4.0).max(RAISE));
                } else {
                    self.raise_doublings += 1;
                }
                self.recover();
            }
            Some(seen) if seen.is_limited => {
                self.pace = pace;
                self.raise((2.0 * by).min(RAISE_MAX));
            }
            // The load needs less than the higher rate, which is not known to be good if no load has used it.
            _ => {
                self.set_pace(if seen.is_some() { pace } else { self.pace });
                self.keep_limit();
            }
        }
    }

    fn raise(&mut self, by: f64) {
        self.set_limit(self.pace * (1.0 + by));
        self.phase = Phase::Raise { by };
    }

    /// Lowers the rate for a moment, so that the device completes its queued requests.
    fn recover(&mut self) {
        self.set_limit(self.pace * DRAIN);
        self.phase = Phase::Recover;
    }

    fn restart(&mut self) {
        self.limits = RateLimits::default();
        (self.phase, self.measured) = (Phase::Measure, None);
    }

    fn set_pace(&mut self, pace: f64) {
        self.pace = pace;
        self.set_limit(pace);
    }

    fn set_limit(&mut self, rate: f64) {
        self.limits = self.limits_of(rate);
    }

    fn limits_of(&self, rate: f64) -> RateLimits {
        let (lowest, highest) = self.key.range().into_inner();
        let mut limits = RateLimits::default();
        let rate = (rate.round() as u64).clamp(lowest, highest);
        // Always in range, because the rate was clamped to the range of its key.
        let _ = limits.set(self.key, RateLimit { rate, burst: None });
        limits
    }
}

/// `ns` doubled that number of times, but at most `ns_max`.
fn doubled(ns: u64, doublings: u32, ns_max: u64) -> u64 {
    ns.saturating_mul(1 << doublings.min(63)).min(ns_max)
}
