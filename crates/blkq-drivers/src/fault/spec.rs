//! Parses fault specs such as `error=EIO,op=write,rate=1%;delay=2ms,p99=20ms`.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

use blkq::units::{parse_bytes, parse_duration_ns};
use blkq::{DriverSetting, Error, Operation, Status};

use crate::errors::invalid;

/// How long a request is stuck by default, in nanoseconds: blk-mq's default timeout, 30 s.
const STUCK_NS: u64 = 30_000_000_000;
/// Largest ratio of the 99th percentile to the mean: a log-normal distribution cannot have a ratio above exp(2.326^2 / 2),
/// which is 14.97.
const P99_BY_MEAN_MAX: u64 = 14;

const NONE: &str = "none";

/// The effect of a fault on a request. [`Effect::concerns`] returns whether it applies to an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Effect {
    /// The request fails with this status and transfers nothing.
    Error(Status),
    /// The first part of the request is transferred, and it fails with this status.
    Short(Status),
    /// Only the first part of the request is transferred, and it succeeds. The rest of a read is zeroes.
    Torn,
    /// The request is executed at another offset, and succeeds.
    Misdirect,
    /// One bit of the data is flipped, and the request succeeds.
    Corrupt,
    /// The request is not executed, and succeeds.
    Lose,
    /// The request begins later: after `mean_ns`, or after a time with a log-normal distribution.
    Delay {
        /// The mean delay, in nanoseconds.
        mean_ns: u64,
        /// The 99th percentile of the delay, in nanoseconds; `None`: each delay is `mean_ns`.
        p99_ns: Option<u64>,
    },
    /// The request stays in the driver for this number of nanoseconds, then fails with [`Status::Timeout`]
    /// without being executed. If the rules change, the request continues without a fault.
    Stuck(u64),
    /// The thread of the queue panics.
    Panic,
}

impl Effect {
    /// Whether the effect applies to this operation.
    pub fn concerns(self, operation: Operation) -> bool {
        match self {
            Effect::Error(_) | Effect::Delay { .. } | Effect::Stuck(_) | Effect::Panic => true,
            Effect::Lose => operation != Operation::Read,
            Effect::Short(_) | Effect::Torn | Effect::Misdirect | Effect::Corrupt => operation.has_data(),
        }
    }
}

/// A fault, and the requests that it hits.
#[derive(Clone, PartialEq, Debug)]
pub struct Rule {
    /// The effect on the requests that the rule hits.
    pub effect: Effect,
    /// The operations that the rule applies to, indexed by [`Operation`].
    pub operations: [bool; Operation::COUNT],
    /// The rule applies to requests that overlap this range, in bytes of the device, and to flushes.
    pub range: Range<u64>,
    /// The probability of a hit, from 0 to 1.
    pub rate: f64,
    /// The number of matching requests at the beginning that are not hit.
    pub after: u64,
    /// The largest number of requests that are hit.
    pub count: u64,
    /// The trigger file, as an absolute path: the rule applies only while this file exists.
    pub file: Option<PathBuf>,
}

/// The faults of a device. The default has no rules and injects nothing.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FaultSpec {
    /// The seed of the random numbers; `None`: the seed is taken from the clock.
    pub seed: Option<u64>,
    /// The rules. If several rules hit a request, their delays add up, and of the other effects the first one applies.
    pub rules: Vec<Rule>,
    text: String,
}

impl DriverSetting for FaultSpec {
    fn name(&self) -> &'static str {
        "fault"
    }
}

impl fmt::Display for FaultSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.text.is_empty() { NONE } else { &self.text })
    }
}

macro_rules! errnos {
    ($($name:ident)*) => { [$((stringify!($name), libc::$name)),*] };
}

/// The names of the errors that a request can fail with, one for each status.
const ERRNOS: [(&str, libc::c_int); Status::COUNT] = errnos! {
    EIO ENOSPC EOPNOTSUPP ETIMEDOUT ENOLINK EREMOTEIO EBADE ENODATA EILSEQ ENOMEM EBUSY EAGAIN ENODEV EINVAL ETIME EROFS
};

fn parse_errno(text: &str) -> Result<Status, Error> {
    let named = ERRNOS.iter().find(|(name, _)| *name == text);
    named.map(|(_, errno)| Status::from_errno(*errno)).ok_or_else(|| {
        let names = ERRNOS.map(|(name, _)| name).join(", ");
        invalid(format!("{text:?} is not the name of an error; use one of {names}"))
    })
}

fn parse_number(what: &str, text: &str) -> Result<u64, Error> {
    let number = if text.starts_with('+') { None } else { text.parse().ok() };
    number.ok_or_else(|| invalid(format!("{what} must be a whole number below 2^64, not {text:?}")))
}

fn parse_time_ns(text: &str) -> Result<u64, Error> {
    Some(parse_duration_ns(text)?)
        .filter(|ns| *ns > 0 && *ns <= 3_600_000_000_000)
        .ok_or_else(|| invalid(format!("a time must be more than 0 and at most 1 hour, not {text}")))
}

/// Parses a probability, such as `0.01`, `1%` or `1/100`.
fn parse_rate(text: &str) -> Result<f64, Error> {
    let number = |text: &str| {
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        if plain { text.parse::<f64>().ok() } else { None }
    };
    let rate = match (text.strip_suffix('%'), text.split_once('/')) {
        (Some(percent), _) => number(percent).map(|percent| percent / 100.0),
        (None, Some((part, whole))) => number(part).zip(number(whole)).map(|(part, whole)| part / whole),
        (None, None) => number(text),
    };
    let rate = rate.filter(|rate| (0.0..=1.0).contains(rate));
    rate.ok_or_else(|| invalid(format!("rate must be 0 to 1, such as 0.01, 1% or 1/100, not {text:?}")))
}

fn parse_operations(text: &str, fault: &str, effect: Effect) -> Result<[bool; Operation::COUNT], Error> {
    let mut operations = [false; Operation::COUNT];
    for name in text.split('+') {
        let operation = Operation::ALL.into_iter().find(|operation| operation.name() == name);
        let operation = operation.ok_or_else(|| {
            let names = Operation::ALL.map(Operation::name).join(", ");
            invalid(format!("{name:?} is not an operation; use one of {names}, or several joined by +"))
        })?;
        if !effect.concerns(operation) {
            let message = format!("the fault {fault} does not apply to the operation {name}");
            return Err(invalid(message));
        }
        operations[operation as usize] = true;
    }
    Ok(operations)
}

fn parse_range(text: &str) -> Result<Range<u64>, Error> {
    let fail = || {
        invalid(format!("range must be FROM-TO in bytes, such as 1M-2M, with FROM below TO, not {text:?}"))
    };
    let (from, to) = text.split_once('-').ok_or_else(fail)?;
    let range = parse_bytes(from)?..parse_bytes(to)?;
    if range.is_empty() { Err(fail()) } else { Ok(range) }
}

impl FromStr for Rule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Rule, Error> {
        let mut words = text.split(',');
        let first = words.next().unwrap_or_default();
        let (name, value) = first.split_once('=').map_or((first, None), |(name, value)| (name, Some(value)));
        let effect = match (name, value) {
            ("error", Some(errno)) => Effect::Error(parse_errno(errno)?),
            ("short", Some(errno)) => Effect::Short(parse_errno(errno)?),
            ("delay", Some(time)) => Effect::Delay { mean_ns: parse_time_ns(time)?, p99_ns: None },
            ("stuck", Some(time)) => Effect::Stuck(parse_time_ns(time)?),
            ("stuck", None) => Effect::Stuck(STUCK_NS),
            ("torn", None) => Effect::Torn,
            ("misdirect", None) => Effect::Misdirect,
            ("corrupt", None) => Effect::Corrupt,
            ("lose", None) => Effect::Lose,
            ("panic", None) => Effect::Panic,
            ("error" | "short" | "delay", None) => {
                let example = "as in error=EIO, short=EIO or delay=2ms";
                return Err(invalid(format!("the fault {name} needs a value, {example}")));
            }
            ("torn" | "misdirect" | "corrupt" | "lose" | "panic", Some(_)) => {
                return Err(invalid(format!("the fault {name} takes no value; write only {name}")));
            }
            _ => {
                let hint = "use one of error, short, torn, misdirect, corrupt, lose, delay, stuck, panic";
                return Err(invalid(format!("{name:?} is not a fault; {hint}")));
            }
        };
        let operations = Operation::ALL.map(|operation| effect.concerns(operation));
        let (range, rate, after, count, file) = (0..u64::MAX, 1.0, 0, u64::MAX, None);
        let mut rule = Rule { effect, operations, range, rate, after, count, file };
        for word in words {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            match key {
                "op" => rule.operations = parse_operations(value, name, effect)?,
                "range" => rule.range = parse_range(value)?,
                "rate" => rule.rate = parse_rate(value)?,
                "after" => rule.after = parse_number(key, value)?,
                "count" => rule.count = parse_number(key, value)?,
                // The working directory of a daemon is not that of the user, so a relative path would not work.
                "file" if value.starts_with('/') => rule.file = Some(value.into()),
                "file" => return Err(invalid(format!("file must be an absolute path, not {value:?}"))),
                "p99" => rule.effect = with_p99(effect, parse_time_ns(value)?)?,
                _ => {
                    let hint = "use one of op, range, rate, after, count and file, and p99 with delay";
                    let message = format!("{word:?} is not a valid condition of the fault {name}; {hint}");
                    return Err(invalid(message));
                }
            }
        }
        Ok(rule)
    }
}

fn with_p99(effect: Effect, p99_ns: u64) -> Result<Effect, Error> {
    let Effect::Delay { mean_ns, .. } = effect else {
        return Err(invalid("p99 applies only to the fault delay, as in delay=2ms,p99=20ms".to_owned()));
    };
    if p99_ns < mean_ns || p99_ns / mean_ns > P99_BY_MEAN_MAX {
        let message = format!("p99 must be 1 to {P99_BY_MEAN_MAX} times the delay, as in delay=2ms,p99=20ms");
        return Err(invalid(message));
    }
    Ok(Effect::Delay { mean_ns, p99_ns: Some(p99_ns) })
}

impl FromStr for FaultSpec {
    type Err = Error;

    /// Parses rules and at most one `seed=N`, separated by `;`. `none` is a spec without rules.
    fn from_str(text: &str) -> Result<FaultSpec, Error> {
        if text == NONE {
            return Ok(FaultSpec::default());
        }
        let mut spec = FaultSpec { text: text.to_owned(), ..FaultSpec::default() };
        for part in text.split(';').map(str::trim) {
            match part.strip_prefix("seed=") {
                Some(seed) if spec.seed.is_none() => spec.seed = Some(parse_number("seed", seed)?),
                Some(_) => return Err(invalid("the seed is given twice; omit one".to_owned())),
                None => spec.rules.push(part.parse()?),
            }
        }
        Ok(spec)
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn a_spec_parses_to_its_rules() {
        let spec: FaultSpec =
            "seed=7; error=ENOSPC,op=write+discard,rate=1/4,range=1M-2M,after=3,count=2,file=/tmp/on; stuck"
                .parse()
                .unwrap();
        assert_eq!(spec.seed, Some(7));
        let [rule, stuck] = &spec.rules[..] else { panic!("{spec:?}") };
        assert_eq!(rule.effect, Effect::Error(Status::NoSpace));
        assert_eq!(rule.operations, [false, true, true, false, false]);
        assert_eq!((rule.range.clone(), rule.rate), (1 << 20..2 << 20, 0.25));
        assert_eq!((rule.after, rule.count, rule.file.clone()), (3, 2, Some("/tmp/on".into())));
        assert_eq!((stuck.effect, stuck.operations), (Effect::Stuck(STUCK_NS), [true; 5]));
        let none: FaultSpec = "none".parse().unwrap();
        assert_eq!((none.rules.len(), none.to_string().as_str()), (0, "none"));
        assert_eq!(none, FaultSpec::default());
        let delay: Rule = "delay=2ms,p99=20ms".parse().unwrap();
        assert_eq!(delay.effect, Effect::Delay { mean_ns: 2_000_000, p99_ns: Some(20_000_000) });
        assert_eq!("lose".parse::<Rule>().unwrap().operations, [false, true, true, true, true]);
        let panic: Rule = "panic,op=flush".parse().unwrap();
        assert_eq!((panic.effect, panic.operations), (Effect::Panic, [false, false, false, false, true]));
        assert_eq!("torn".parse::<Rule>().unwrap().operations, [true, true, false, false, false]);
    }

    #[test]
    fn invalid_specs_are_rejected_in_one_line() {
        for bad in [
            "",
            ";",
            "error",
            "error=",
            "error=EWHAT",
            "errors=EIO",
            "torn=1",
            "panic=1",
            "delay",
            "delay=5",
            "delay=0s",
            "delay=2h",
            "delay=99999999999s",
            "stuck=1",
            "error=EIO,rate=2",
            "error=EIO,rate=",
            "error=EIO,rate=1/0",
            "error=EIO,rate=-1",
            "error=EIO,rate=nan",
            "error=EIO,op=",
            "error=EIO,op=reed",
            "lose,op=read",
            "torn,op=flush",
            "error=EIO,range=5",
            "error=EIO,range=2-1",
            "error=EIO,range=1M-1M",
            "error=EIO,count=x",
            "error=EIO,count=+1",
            "error=EIO,file=",
            "error=EIO,file=trigger",
            "error=EIO,p99=1s",
            "delay=1ms,p99=1us",
            "delay=1ms,p99=1s",
            "seed=x",
            "seed=1;seed=2",
            "error=EIO,,",
            "error=EIO;",
            "none;none",
        ] {
            let error = bad.parse::<FaultSpec>().expect_err(bad).to_string();
            assert!(!error.contains('\n') && error.len() < 300, "{error}");
        }
    }
}
