//! A limit that finds the ceiling of a device, and keeps its rate just under it.
//!
//! Disks of clouds are limited by their provider: what is beyond the rate waits there, for the next
//! refill of a bucket, and one that is always at its ceiling has latencies many times those of one that
//! stays a percent below. No description has the ceiling, and it changes. So it is found by trying: when the
//! load is steady, the rate is lowered by a little. If the device then answers several times as fast, it was at
//! its ceiling, and the limit stays; if not, it is removed, and tried again later and later.
//!
//! [`AutoLimit`] decides from what it is given, and knows neither clock nor device.

use crate::stats::Histogram;
use crate::throttle::{BPS_MAX, BPS_MIN, IOPS_MAX, LimitKey, RateLimit, RateLimits};

const MS: u64 = 1_000_000;
const S: u64 = 1_000 * MS;

/// How long the rate is measured without a limit, and how far two such times may be apart, in percent.
const MEASURE_NS: u64 = S;
const STEADY_PERCENT: f64 = 6.0;
/// Fewer I/Os say nothing about a 99th percentile.
const IOS_MIN: u64 = 32;
/// A time for which there were not enough is extended to this, and in force to that.
const EXTENDED: u64 = 8;
const JUDGE_NS_MAX: u64 = 10 * S;
/// Parts of the measured rate that are tried, one after the other.
const TRIALS: [f64; 2] = [0.985, 0.97];
/// The device gets little first, so that what it has queued completes: so much, for so long.
const DRAIN: f64 = 0.7;
const DRAIN_NS: u64 = 300 * MS;
/// Before the latency at a new rate counts.
const SETTLE_NS: u64 = 200 * MS;
const TRIAL_NS: u64 = 600 * MS;
/// A limit is worth its while if the 99th percentile falls by this factor.
const WORTH: f64 = 3.0;
/// Without success the next trial comes after this, then after twice as long.
const AWAY_NS: u64 = 3 * S;
const AWAY_NS_MAX: u64 = 160 * S;
/// In force, the latency is judged this often.
const JUDGE_NS: u64 = 250 * MS;
/// A latency that is too long counts when it is so this often in a row: once it may be a thread that was late. Without
/// a limit, to search one anew: more often.
const SLOW: u32 = 2;
const SLOW_AWAY: u32 = 4;
/// When the device does less than this part of its rate for so long, and nothing waits for the limit, it is removed:
/// the load needs none now, or its clients are so slow that a limit makes them sleep too often.
const IDLE: f64 = 0.9;
const IDLE_NS: u64 = 30 * S;
/// A higher rate is tried after so long at the limit, then after twice as long.
const RAISE_NS: u64 = 4 * S;
const RAISE_NS_MAX: u64 = 64 * S;
/// By how much, and then by twice as much, as long as the latency stays.
const RAISE: f64 = 0.02;
const RAISE_MAX: f64 = 1.0;
/// One that was found too coarsely is followed by a finer one after this.
const RETRY_NS: u64 = 500 * MS;
/// By how much the rate is lowered when the latency grows, then by twice as much.
const LOWER: f64 = 0.02;
/// A rate that was good for so long, at the limit, is not one that only a burst allowed.
const SURE_NS: u64 = 2 * S;
/// Below this part of the highest such rate the ceiling is searched anew: the device may not be slow for its
/// rate, and then a lower one does not help.
const LOWEST: f64 = 0.85;
/// Requests of more bytes in the mean are limited by their bytes, as providers do.
const SMALL_BYTES: u64 = 32 << 10;
/// If the mean size of requests changes by this factor, the ceiling is another.
const SIZE_FACTOR: f64 = 2.0;

/// The work of the device so far: all numbers only grow, but the time at will.
#[derive(Clone, Debug, Default)]
pub struct DeviceLoad {
    /// The time in nanoseconds, of any clock.
    pub now_ns: u64,
    /// How long the device had each read and write that completed.
    pub latency: Histogram,
    /// Bytes of these.
    pub bytes: u64,
    /// Requests that it has completed, flushes and discards among them, as a limit counts them.
    pub ios: u64,
    /// For how long requests waited for the limit, in nanoseconds.
    pub throttled_ns: u64,
    /// Requests that the device has now.
    pub in_flight: u64,
}

/// Its work in a while.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Requests and bytes per second.
    iops: f64,
    bps: f64,
    /// The mean size of reads and writes.
    bytes: f64,
    p99_ns: f64,
    /// Requests waited for the limit.
    is_limited: bool,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Phase {
    /// Without a limit: the rate of the last measurement, if there was one.
    Measure { before: Option<f64> },
    /// The device completes what it has queued, before trial number so and so.
    Drain { trial: usize },
    /// The latency at the rate is measured, once it has settled.
    Trial { trial: usize, is_settled: bool },
    /// No trial before this time, unless the device is slow: it was so often.
    Away { until_ns: u64, slow: u32 },
    /// In force: at the limit, with a good latency, for so long; and then with a long one so often.
    Held { at_limit_ns: u64, slow: u32 },
    /// In force again, after the device has completed what it had queued.
    Recover,
    /// A rate higher by this part is tried.
    Raise { by: f64 },
}

/// Finds the ceiling of a device from what the device does.
#[derive(Debug)]
pub struct AutoLimit {
    phase: Phase,
    /// The limit: of I/Os or of bytes.
    key: LimitKey,
    /// Per second: measured without a limit, or good for [`SURE_NS`] since; and in force.
    ceiling: f64,
    pace: f64,
    /// The 99th percentile without a limit, and that which is too long with one.
    open_p99_ns: f64,
    long_ns: f64,
    /// The mean size of requests when the ceiling was found.
    bytes: f64,
    away_ns: u64,
    raise_ns: u64,
    /// The next raise, if it is not to wait for that long.
    retry_by: Option<f64>,
    lowered: u32,
    /// For how long the device did less than [`IDLE`].
    idle_ns: u64,
    limits: RateLimits,
    /// Where the time that is looked at began.
    begin: Option<DeviceLoad>,
}

impl Default for AutoLimit {
    fn default() -> AutoLimit {
        AutoLimit::new()
    }
}

impl AutoLimit {
    /// One that knows nothing of its device yet.
    pub fn new() -> AutoLimit {
        AutoLimit {
            phase: Phase::Measure { before: None },
            key: LimitKey::Iops,
            ceiling: 0.0,
            pace: 0.0,
            open_p99_ns: 0.0,
            long_ns: 0.0,
            bytes: 0.0,
            away_ns: AWAY_NS,
            raise_ns: RAISE_NS,
            retry_by: None,
            lowered: 0,
            idle_ns: 0,
            limits: RateLimits::default(),
            begin: None,
        }
    }

    /// The limits that are to be in force.
    pub fn limits(&self) -> &RateLimits {
        &self.limits
    }

    /// The limit that was found to be just under the ceiling, if one was.
    pub fn ceiling(&self) -> Option<RateLimits> {
        matches!(self.phase, Phase::Held { .. } | Phase::Recover | Phase::Raise { .. })
            .then(|| self.limits_of(self.pace))
    }

    /// Takes in what the device did so far; to be called some 20 times a second. Returns whether the limits have
    /// changed.
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
        // A low load may have nothing in flight just now, and was measured all the same.
        let is_measured = matches!(self.phase, Phase::Measure { .. });
        let is_gone = load.in_flight == 0 && (is_measured || timed == 0);
        if needs_ios && timed < IOS_MIN && !is_gone && length_ns < self.longest_ns() {
            return false;
        }
        let per_second = |count: u64| count as f64 * 1e9 / length_ns as f64;
        let bytes = load.bytes.saturating_sub(begin.bytes);
        let seen = Seen {
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

    /// How long the device is looked at before the next decision.
    fn wanted_ns(&self) -> u64 {
        match self.phase {
            Phase::Measure { .. } => MEASURE_NS,
            Phase::Drain { .. } | Phase::Recover => DRAIN_NS,
            Phase::Trial { is_settled: false, .. } => SETTLE_NS,
            Phase::Trial { is_settled: true, .. } => TRIAL_NS,
            Phase::Away { .. } | Phase::Held { .. } => JUDGE_NS,
            Phase::Raise { .. } => 2 * JUDGE_NS,
        }
    }

    /// The same, as long as there is too little to decide on.
    fn longest_ns(&self) -> u64 {
        match self.phase {
            Phase::Held { .. } | Phase::Raise { .. } => JUDGE_NS_MAX,
            _ => self.wanted_ns() * EXTENDED,
        }
    }

    /// `seen` is none if that was too little to say anything.
    fn decide(&mut self, now_ns: u64, length_ns: u64, seen: Option<Seen>) {
        match self.phase {
            Phase::Measure { before } => self.measured(before, seen),
            Phase::Drain { trial } => {
                self.set_pace(self.ceiling * TRIALS[trial]);
                self.phase = Phase::Trial { trial, is_settled: false };
            }
            Phase::Trial { trial, is_settled: false } => {
                self.phase = Phase::Trial { trial, is_settled: true }
            }
            Phase::Trial { trial, is_settled: true } => self.tried(now_ns, trial, seen),
            Phase::Away { until_ns, slow } => {
                // Slower by as much as a limit is to be worth: a burst may be over, and the ceiling there.
                let is_slow = seen.is_some_and(|seen| seen.p99_ns >= WORTH * self.open_p99_ns);
                let slow = if is_slow { slow + 1 } else { 0 };
                self.phase = Phase::Away { until_ns, slow };
                if slow >= SLOW_AWAY || now_ns >= until_ns {
                    self.open();
                }
            }
            Phase::Recover => {
                self.set_pace(self.pace);
                self.hold();
            }
            Phase::Held { at_limit_ns, slow } => self.held(at_limit_ns, slow, length_ns, seen),
            Phase::Raise { by } => self.raised(by, seen),
        }
    }

    /// Of what is limited.
    fn rate(&self, seen: &Seen) -> f64 {
        if self.key.is_bytes() { seen.bps } else { seen.iops }
    }

    /// Two equal rates, one after the other, may be those of a ceiling.
    fn measured(&mut self, before: Option<f64>, seen: Option<Seen>) {
        let Some(seen) = seen else {
            self.phase = Phase::Measure { before: None };
            return;
        };
        let is_small = seen.bytes <= SMALL_BYTES as f64;
        self.key = if is_small { LimitKey::Iops } else { LimitKey::Bps };
        let rate = self.rate(&seen);
        match before {
            Some(before) if (rate / before - 1.0).abs() * 100.0 <= STEADY_PERCENT => {
                self.ceiling = rate.min(before);
                (self.open_p99_ns, self.bytes) = (seen.p99_ns, seen.bytes);
                self.set_limit(self.ceiling * DRAIN);
                self.phase = Phase::Drain { trial: 0 };
            }
            _ => self.phase = Phase::Measure { before: Some(rate) },
        }
    }

    fn tried(&mut self, now_ns: u64, trial: usize, seen: Option<Seen>) {
        match seen {
            // The load is gone, or has become too low to say anything: as without success, or one that does so again
            // and again would always be in a trial.
            None => self.leave(now_ns),
            Some(seen) if self.is_idle(&seen) => self.leave(now_ns),
            Some(seen) if seen.p99_ns * WORTH <= self.open_p99_ns => {
                self.long_ns = (seen.p99_ns * self.open_p99_ns).sqrt();
                (self.away_ns, self.raise_ns, self.lowered) = (AWAY_NS, RAISE_NS, 0);
                (self.retry_by, self.idle_ns) = (None, 0);
                self.hold();
            }
            Some(_) if trial + 1 < TRIALS.len() => {
                self.set_limit(self.ceiling * DRAIN);
                self.phase = Phase::Drain { trial: trial + 1 };
            }
            Some(_) => self.leave(now_ns),
        }
    }

    /// Without a limit, until the next trial.
    fn leave(&mut self, now_ns: u64) {
        self.limits = RateLimits::default();
        self.phase = Phase::Away { until_ns: now_ns + self.away_ns, slow: 0 };
        self.away_ns = (2 * self.away_ns).min(AWAY_NS_MAX);
    }

    /// Whether the load does not need what it may have.
    fn is_idle(&self, seen: &Seen) -> bool {
        !seen.is_limited && self.rate(seen) < self.pace * IDLE
    }

    fn hold(&mut self) {
        self.phase = Phase::Held { at_limit_ns: 0, slow: 0 };
    }

    fn held(&mut self, at_limit_ns: u64, slow: u32, length_ns: u64, seen: Option<Seen>) {
        let Some(seen) = seen else {
            // So few I/Os say nothing about the limit, and need none.
            self.idled(length_ns);
            return;
        };
        let change = seen.bytes / self.bytes.max(1.0);
        if !(1.0 / SIZE_FACTOR..=SIZE_FACTOR).contains(&change) {
            return self.open();
        }
        if seen.p99_ns > self.long_ns {
            self.phase = Phase::Held { at_limit_ns, slow: slow + 1 };
            let rate = self.rate(&seen);
            // A burst is over that a raise had found.
            let is_over = self.is_far(rate) && rate * TRIALS[0] >= self.ceiling * LOWEST;
            if is_over || slow + 1 >= SLOW {
                self.lower(rate);
            }
            return;
        }
        if !self.is_idle(&seen) {
            self.idle_ns = 0;
        } else if self.idled(length_ns) {
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
        if let Some(by) = retry_by.or((at_limit_ns >= self.raise_ns).then_some(RAISE)) {
            self.retry_by = None;
            self.raise(by);
        }
    }

    /// The load did not need its limit, for so long. Returns whether that was long enough to remove it.
    fn idled(&mut self, length_ns: u64) -> bool {
        self.idle_ns += length_ns;
        let is_long = self.idle_ns >= IDLE_NS;
        if is_long {
            self.open();
        }
        is_long
    }

    /// Whether the device does far less than it may.
    fn is_far(&self, rate: f64) -> bool {
        rate < self.pace * 0.8
    }

    /// The device is slow, at `rate`: some other disturbance, or the ceiling is lower than it was.
    fn lower(&mut self, rate: f64) {
        let is_far = self.is_far(rate);
        let lower = self.pace * (1.0 - LOWER * f64::from(1 << self.lowered));
        let pace = if is_far { rate * TRIALS[0] } else { lower };
        if pace < self.ceiling * LOWEST {
            return self.open();
        }
        if self.retry_by.take().is_some() {
            // Only a burst allowed the last raise.
            self.raise_ns = (2 * self.raise_ns).min(RAISE_NS_MAX);
        }
        // Found again soon, if it was a disturbance.
        self.retry_by = is_far.then_some(2.0 * RAISE);
        self.lowered += 1;
        self.pace = pace;
        self.recover();
    }

    fn raised(&mut self, by: f64, seen: Option<Seen>) {
        let pace = self.pace * (1.0 + by);
        match seen {
            Some(seen) if seen.p99_ns > self.long_ns => {
                if by > RAISE {
                    self.retry_by = Some((by / 4.0).max(RAISE));
                } else {
                    self.raise_ns = (2 * self.raise_ns).min(RAISE_NS_MAX);
                }
                self.recover();
            }
            Some(seen) if seen.is_limited => {
                self.pace = pace;
                self.raise((2.0 * by).min(RAISE_MAX));
            }
            // Nobody tried it.
            None => {
                self.set_pace(self.pace);
                self.hold();
            }
            // The load has what it wants.
            Some(_) => {
                self.set_pace(pace);
                self.hold();
            }
        }
    }

    fn raise(&mut self, by: f64) {
        self.set_limit(self.pace * (1.0 + by));
        self.phase = Phase::Raise { by };
    }

    /// Lets the device complete what it has queued.
    fn recover(&mut self) {
        self.set_limit(self.pace * DRAIN);
        self.phase = Phase::Recover;
    }

    /// Without a limit, to be measured anew.
    fn open(&mut self) {
        self.limits = RateLimits::default();
        self.phase = Phase::Measure { before: None };
    }

    fn set_pace(&mut self, pace: f64) {
        self.pace = pace;
        self.set_limit(pace);
    }

    fn set_limit(&mut self, rate: f64) {
        self.limits = self.limits_of(rate);
    }

    fn limits_of(&self, rate: f64) -> RateLimits {
        let range = if self.key.is_bytes() { (BPS_MIN, BPS_MAX) } else { (1, IOPS_MAX) };
        let mut limits = RateLimits::default();
        let rate = (rate.round() as u64).clamp(range.0, range.1);
        // The rate is within the range of its key.
        let _ = limits.set(self.key, RateLimit { rate, burst: None });
        limits
    }
}
