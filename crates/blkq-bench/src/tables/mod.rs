//! The tables, one file each.

use crate::bench::{Bench, Pace};
use crate::result::Table;
use crate::{Result, What};

mod clock;
mod direct;
mod dispatch;
mod peak;

/// How to measure a table.
pub struct Measure {
    /// Which.
    pub name: What,
    /// About how long its runs take.
    pub planned_seconds: fn(&Pace) -> f64,
    /// Measures it.
    pub run: fn(&mut Bench) -> Result<Table>,
}

/// All tables, in the order of `bench all`.
pub const TABLES: [Measure; 4] = [
    Measure { name: What::Dispatch, planned_seconds: dispatch::planned_seconds, run: dispatch::run },
    Measure { name: What::Direct, planned_seconds: direct::planned_seconds, run: direct::run },
    Measure { name: What::Clock, planned_seconds: clock::planned_seconds, run: clock::run },
    Measure { name: What::Peak, planned_seconds: peak::planned_seconds, run: peak::run },
];
