//! The text of the values of settings, in `blkq set`, on the control socket and in the state file.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use blkq::disk::DEPTH_MAX;
use blkq::throttle::{LimitMode, WEIGHT_MAX};
use blkq::{ClockMode, ErrorPolicy, SchedulerKind};
use blkq_drivers::fault::FaultSpec;
use blkq_drivers::r#loop::{DirectIo, Dispatch};

use super::json::Json;
use super::mechanisms::Without;
use super::values::{self, Described, NO_GROUP, parse_group_name, parse_hang_warning};
use crate::failure::{Failure, Outcome};

pub(super) struct Syntax<T: 'static> {
    pub(super) values: Values,
    /// Parses the value of the setting with the given name. The error lists the valid values.
    pub(super) parse: fn(&'static str, &str) -> Outcome<T>,
    pub(super) print: fn(&T) -> String,
}

/// Describes the values of a setting for the help text.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    Names(&'static [Described]),
    Text(&'static str),
}

impl Values {
    pub fn text(self) -> String {
        match self {
            Values::Names(names) => names.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", "),
            Values::Text(text) => text.to_owned(),
        }
    }
}

impl<T: FromStr<Err = blkq::Error> + Json<Form = String>> Syntax<T> {
    /// Uses the parser of the block layer.
    const fn new(values: Values) -> Syntax<T> {
        Syntax { values, parse: |_, text| Ok(text.parse()?), print: T::form }
    }
}

pub(super) const CLOCK: Syntax<ClockMode> = Syntax::new(Values::Names(values::CLOCK));
pub(super) const DIRECT_IO: Syntax<DirectIo> = Syntax::new(Values::Names(values::DIRECT_IO));
pub(super) const DISPATCH: Syntax<Dispatch> = Syntax::new(Values::Names(values::DISPATCH));
pub(super) const FAULT: Syntax<FaultSpec> = Syntax::new(Values::Text("RULES, none"));
pub(super) const LIMIT: Syntax<LimitMode> = Syntax::new(Values::Text("LIMITS, auto, none"));
pub(super) const ON_ERROR: Syntax<ErrorPolicy> = Syntax::new(Values::Names(values::ON_ERROR));
pub(super) const SCHEDULER: Syntax<SchedulerKind> = Syntax::new(Values::Names(values::SCHEDULER));

pub(super) const SWITCH: Syntax<bool> = Syntax {
    values: Values::Text("on, off"),
    parse: |name, text| match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Failure::new(format!("{name} must be on or off, not {text:?}"))),
    },
    print: |on| if *on { "on" } else { "off" }.to_owned(),
};

/// The largest depth of a disk may be lower, which the disk itself checks.
pub(super) const DEPTH: Syntax<u16> = Syntax {
    values: Values::Text("1 to the --depth of attach"),
    parse: |name, text| number(name, text, 1..=DEPTH_MAX),
    print: u16::to_string,
};

pub(super) const WEIGHT: Syntax<u32> = Syntax {
    values: Values::Text("1 to 10000"),
    parse: |name, text| number(name, text, 1..=WEIGHT_MAX),
    print: u32::to_string,
};

pub(super) const WITHOUT: Syntax<Without> = Syntax {
    values: Values::Text("MECHANISM,..., none"),
    parse: |_, text| text.parse().map_err(Failure::new),
    print: Without::to_string,
};

pub(super) const GROUP: Syntax<Option<String>> = Syntax {
    values: Values::Text("GROUP, none"),
    parse: |_, text| match text {
        NO_GROUP => Ok(None),
        _ => parse_group_name(text).map(Some).map_err(Failure::new),
    },
    print: |group| group.as_deref().unwrap_or(NO_GROUP).to_owned(),
};

pub(super) const HANG_WARNING: Syntax<Duration> = Syntax {
    values: Values::Text("SECONDS, 0 for never"),
    parse: |_, text| parse_hang_warning(text).map_err(Failure::new),
    print: |limit| limit.as_secs_f64().to_string(),
};

fn number<T>(name: &str, text: &str, range: RangeInclusive<T>) -> Outcome<T>
where
    T: FromStr + PartialOrd + ToString,
{
    let number = text.parse().ok().filter(|number| range.contains(number));
    let [least, most] = [range.start(), range.end()].map(T::to_string);
    number
        .ok_or_else(|| Failure::new(format!("{name} must be a number from {least} to {most}, not {text:?}")))
}
