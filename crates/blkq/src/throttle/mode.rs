use std::fmt;
use std::str::FromStr;

use super::limits::RateLimits;
use crate::error::Error;

const AUTO: &str = "auto";

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
