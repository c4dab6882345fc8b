//! The limits of a device or a group, and their text form: `read-iops=500,burst=2000x10s,bps=100M`.

use std::fmt;
use std::str::FromStr;

use crate::enumeration::enumeration;
use crate::error::{Error, ErrorKind};
use crate::units::{format_bytes, parse_bytes, parse_duration_ns};

const NONE: &str = "none";
const AUTO: &str = "auto";
/// Largest rate in requests per second.
pub const IOPS_MAX: u64 = 10_000_000;
/// Smallest rate in bytes per second.
pub const BPS_MIN: u64 = 1 << 10;
/// Largest rate in bytes per second.
pub const BPS_MAX: u64 = 1 << 40;
/// The range of [`RateLimits::iops_size_bytes`], in bytes.
const IOPS_SIZE: std::ops::RangeInclusive<u64> = 512..=1 << 30;
/// The range of a burst's length, in nanoseconds.
const BURST_NS: std::ops::RangeInclusive<u64> = 1_000_000..=3_600_000_000_000;
const BURST_RULE: &str = "write a burst as RATExLENGTH, such as 2000x10s or 200Mx500ms";

enumeration! {
    /// The quantity that a limit counts: I/Os or bytes, and of which operations.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[repr(u8)]
    pub enum LimitKey {
        /// I/Os of all operations per second.
        #[default]
        Iops => "iops",
        /// I/Os per second that read.
        ReadIops => "read-iops",
        /// All other I/Os per second: writes, write-zeroes, discards and flushes.
        WriteIops => "write-iops",
        /// Bytes read and written per second.
        Bps => "bps",
        /// Bytes per second that are read.
        ReadBps => "read-bps",
        /// Bytes per second that are written.
        WriteBps => "write-bps",
    }

    /// The name of the key in the text form.
    pub const fn name(self) -> &'static str;
}

impl LimitKey {
    /// Whether the limit counts bytes. Otherwise it counts I/Os.
    pub const fn is_bytes(self) -> bool {
        matches!(self, LimitKey::Bps | LimitKey::ReadBps | LimitKey::WriteBps)
    }

    pub(super) fn range(self) -> std::ops::RangeInclusive<u64> {
        if self.is_bytes() { BPS_MIN..=BPS_MAX } else { 1..=IOPS_MAX }
    }

    fn parse_rate(self, text: &str) -> Result<u64, Error> {
        let rate = if self.is_bytes() { parse_bytes(text).ok() } else { text.parse().ok() };
        rate.filter(|rate| self.range().contains(rate)).ok_or_else(|| {
            invalid(match self.is_bytes() {
                true => format!("{} must be 1K to 1T bytes per second, not {text:?}", self.name()),
                false => format!("{} must be 1 to {IOPS_MAX} I/Os per second, not {text:?}", self.name()),
            })
        })
    }
}

/// A higher rate for a limited time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Burst {
    /// Units per second. Must be more than the rate of the limit.
    pub rate: u64,
    /// Length in nanoseconds, from 1 ms to 1 hour. A burst can be used again when the device has stayed below
    /// the rate of the limit for long enough.
    pub length_ns: u64,
}

/// The limit of one key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateLimit {
    /// Units per second: I/Os from 1 to [`IOPS_MAX`], or bytes from [`BPS_MIN`] to [`BPS_MAX`].
    pub rate: u64,
    /// A higher rate that is allowed for a limited time.
    pub burst: Option<Burst>,
}

/// The limits of a device or a group. A request must conform to all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RateLimits {
    /// By the number of [`LimitKey`].
    limits: [Option<RateLimit>; LimitKey::COUNT],
    iops_size_bytes: u64,
}

pub(super) const LIMIT_WORDS: usize = 3 * LimitKey::COUNT + 1;

impl RateLimits {
    /// The limit of `key`, if one is set.
    pub fn get(&self, key: LimitKey) -> Option<RateLimit> {
        self.limits[key as usize]
    }

    /// An I/O counts once for each started block of this number of bytes. 0: each I/O counts once.
    pub fn iops_size_bytes(&self) -> u64 {
        self.iops_size_bytes
    }

    /// Whether no limit is set.
    pub fn is_none(&self) -> bool {
        self.limits.iter().all(Option::is_none)
    }

    /// Sets the limit of `key`. Fails with [`ErrorKind::Invalid`] if the rate or the burst is out of range.
    pub fn set(&mut self, key: LimitKey, limit: RateLimit) -> Result<(), Error> {
        let (name, RateLimit { rate, burst }) = (key.name(), limit);
        let (lowest, highest) = key.range().into_inner();
        if !(lowest..=highest).contains(&rate) {
            return Err(invalid(format!("{name} must be {lowest} to {highest}, not {rate}")));
        }
        if let Some(burst) = burst.filter(|burst| burst.rate <= rate || burst.rate > highest) {
            return Err(invalid(format!(
                "the burst rate of {name} must be higher than its rate, and at most {highest}, not {}",
                burst.rate
            )));
        }
        if burst.is_some_and(|burst| !BURST_NS.contains(&burst.length_ns)) {
            return Err(invalid(format!("the burst of {name} must last 1ms to 3600s")));
        }
        self.limits[key as usize] = Some(limit);
        Ok(())
    }

    /// Lets an I/O count once for each started block of `bytes`, 512 to 1 GiB; else [`ErrorKind::Invalid`].
    pub fn set_iops_size(&mut self, bytes: u64) -> Result<(), Error> {
        if !IOPS_SIZE.contains(&bytes) {
            return Err(invalid(format!("iops-size must be 512 bytes to 1G, not {bytes}")));
        }
        self.iops_size_bytes = bytes;
        Ok(())
    }

    pub(super) fn to_words(self) -> [u64; LIMIT_WORDS] {
        let mut words = [0; LIMIT_WORDS];
        for (limit, words) in self.limits.iter().zip(words.chunks_exact_mut(3)) {
            if let Some(RateLimit { rate, burst }) = limit {
                let (burst_rate, burst_ns) = burst.map_or((0, 0), |burst| (burst.rate, burst.length_ns));
                words.copy_from_slice(&[*rate, burst_rate, burst_ns]);
            }
        }
        words[LIMIT_WORDS - 1] = self.iops_size_bytes;
        words
    }

    /// Limits from words of shared memory. `None` if the words are not valid limits.
    pub(super) fn from_words(words: &[u64; LIMIT_WORDS]) -> Option<RateLimits> {
        let mut limits = RateLimits::default();
        for (key, words) in LimitKey::ALL.into_iter().zip(words.chunks_exact(3)) {
            let (rate, burst) = (words[0], Burst { rate: words[1], length_ns: words[2] });
            if rate > 0 {
                let burst = (burst.rate > 0).then_some(burst);
                limits.set(key, RateLimit { rate, burst }).ok()?;
            }
        }
        if let bytes @ 1.. = words[LIMIT_WORDS - 1] {
            limits.set_iops_size(bytes).ok()?;
        }
        Some(limits)
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, why)
}

impl FromStr for RateLimits {
    type Err = Error;

    /// Parses `KEY=RATE` separated by commas. `burst=RATExLENGTH` belongs to the key before it,
    /// `iops-size=BYTES` to all keys that count I/Os. `none` means no limits.
    fn from_str(text: &str) -> Result<RateLimits, Error> {
        let mut limits = RateLimits::default();
        if text == NONE {
            return Ok(limits);
        }
        let keys = LimitKey::ALL.map(LimitKey::name).join(", ");
        let mut last: Option<LimitKey> = None;
        for item in text.split(',') {
            let Some((name, value)) = item.split_once('=') else {
                return Err(invalid(format!(
                    "{item:?} is not a limit; write KEY=RATE with one of the keys {keys}, or none"
                )));
            };
            if let Some(key) = LimitKey::ALL.into_iter().find(|key| key.name() == name) {
                if limits.get(key).is_some() {
                    return Err(invalid(format!("{name} is given twice")));
                }
                limits.set(key, RateLimit { rate: key.parse_rate(value)?, burst: None })?;
                last = Some(key);
            } else if name == "burst" {
                let key = last.ok_or_else(|| invalid("burst must follow the limit to which it belongs"))?;
                let limit = limits.get(key).filter(|limit| limit.burst.is_none());
                let limit = limit.ok_or_else(|| invalid(format!("{} has two bursts", key.name())))?;
                let (rate, length) = value.split_once('x').ok_or_else(|| invalid(BURST_RULE))?;
                let length_ns = parse_duration_ns(length).map_err(|_| invalid(BURST_RULE))?;
                let burst = Some(Burst { rate: key.parse_rate(rate)?, length_ns });
                limits.set(key, RateLimit { burst, ..limit })?;
            } else if name == "iops-size" {
                if limits.iops_size_bytes != 0 {
                    return Err(invalid("iops-size is given twice"));
                }
                limits.set_iops_size(parse_bytes(value)?)?;
            } else {
                return Err(invalid(format!(
                    "unknown limit {name:?}; the keys are {keys}, burst, iops-size"
                )));
            }
        }
        let counts_ios = LimitKey::ALL.into_iter().any(|key| !key.is_bytes() && limits.get(key).is_some());
        if limits.iops_size_bytes != 0 && !counts_ios {
            return Err(invalid("iops-size needs a limit of I/Os per second, such as iops"));
        }
        Ok(limits)
    }
}

impl fmt::Display for RateLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut items = Vec::new();
        for key in LimitKey::ALL {
            let rate_text = |rate: u64| if key.is_bytes() { format_bytes(rate) } else { rate.to_string() };
            let Some(RateLimit { rate, burst }) = self.get(key) else { continue };
            items.push(format!("{}={}", key.name(), rate_text(rate)));
            if let Some(Burst { rate, length_ns }) = burst {
                let length = match length_ns {
                    ns if ns % 1_000_000_000 == 0 => format!("{}s", ns / 1_000_000_000),
                    ns => format!("{}ms", ns as f64 / 1e6),
                };
                items.push(format!("burst={}x{length}", rate_text(rate)));
            }
        }
        if self.iops_size_bytes != 0 {
            items.push(format!("iops-size={}", format_bytes(self.iops_size_bytes)));
        }
        f.write_str(if items.is_empty() { NONE } else { "" })?;
        f.write_str(&items.join(","))
    }
}

/// Where the limits of a device come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LimitMode {
    /// Fixed limits, which apply from the beginning.
    Fixed(RateLimits),
    /// The device's ceiling is searched, and its rate is kept just under it
    /// ([`AutoLimiter`](crate::disk::AutoLimiter)).
    Auto,
}

impl Default for LimitMode {
    fn default() -> LimitMode {
        LimitMode::Fixed(RateLimits::default())
    }
}

impl LimitMode {
    /// The limits that apply from the beginning: none, if the ceiling must be searched first.
    pub fn limits(&self) -> RateLimits {
        match self {
            LimitMode::Fixed(limits) => *limits,
            LimitMode::Auto => RateLimits::default(),
        }
    }

    /// Whether there are no limits, and none will be set.
    pub fn is_none(&self) -> bool {
        matches!(self, LimitMode::Fixed(limits) if limits.is_none())
    }
}

impl FromStr for LimitMode {
    type Err = Error;

    /// Parses `auto`, or limits as [`RateLimits`] do.
    fn from_str(text: &str) -> Result<LimitMode, Error> {
        if text == AUTO { Ok(LimitMode::Auto) } else { text.parse().map(LimitMode::Fixed) }
    }
}

impl fmt::Display for LimitMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitMode::Fixed(limits) => limits.fmt(f),
            LimitMode::Auto => f.write_str(AUTO),
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn limits_survive_formatting_and_parsing() {
        for (text, canonical) in [
            ("none", "none"),
            ("iops=1", "iops=1"),
            ("read-iops=500,burst=2000x10s", "read-iops=500,burst=2000x10s"),
            (
                "write-bps=100M,burst=200Mx500ms,iops=10,iops-size=16k",
                "iops=10,write-bps=100M,burst=200Mx500ms,iops-size=16K",
            ),
            ("bps=1000", ""),
            ("iops=10000000,bps=1T", "iops=10000000,bps=1T"),
            ("iops=7,burst=8x0.5s", "iops=7,burst=8x500ms"),
        ] {
            match text.parse::<RateLimits>() {
                Ok(limits) => {
                    assert_eq!(limits.to_string(), canonical);
                    assert_eq!(canonical.parse::<RateLimits>().ok(), Some(limits));
                    assert_eq!(RateLimits::from_words(&limits.to_words()), Some(limits));
                }
                Err(error) => assert_eq!(canonical, "", "{text}: {error}"),
            }
        }
    }

    #[test]
    fn invalid_limits_are_rejected_in_one_short_line() {
        for bad in [
            "",
            "iops",
            "iops=",
            "iops=0",
            "iops=-1",
            "iops=1.5",
            "iops=10000001",
            "iops=1,iops=2",
            "bps=1",
            "bps=2T",
            "burst=2x1s",
            "iops=5,burst=5x1s",
            "iops=5,burst=6",
            "iops=5,burst=6x1",
            "iops=5,burst=6x0s",
            "iops=5,burst=6x1s,burst=7x1s",
            "iops=5,burst=6x2h",
            "iops=5,burst=6x3601s",
            "iops=5,burst=6xinfs",
            "iops-size=4k",
            "iops=1,iops-size=1",
            "iops=1,iops-size=4k,iops-size=4k",
            "total=1",
            "iops=5,",
            "none,iops=1",
            "iops=5,burst=6x1e99s",
        ] {
            let why = bad.parse::<RateLimits>().unwrap_err().to_string();
            assert!(!why.is_empty() && why.len() < 200 && !why.contains('\n'), "{bad}: {why}");
        }
    }

    #[test]
    fn words_that_are_not_valid_limits_are_rejected() {
        let mut words = RateLimits::default().to_words();
        words[0] = u64::MAX;
        assert_eq!(RateLimits::from_words(&words), None);
        words[..3].copy_from_slice(&[5, 4, 1_000_000]);
        assert_eq!(RateLimits::from_words(&words), None);
        words[..3].copy_from_slice(&[5, 6, 1_000_000]);
        words[LIMIT_WORDS - 1] = 1;
        assert_eq!(RateLimits::from_words(&words), None);
    }
}
