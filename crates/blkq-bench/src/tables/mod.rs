//! The tables, one module each.

use crate::bench::{Bench, Pace};
use crate::result::Table;
use crate::{Result, What};

mod batching;
mod clock;
mod common;
mod direct;
mod dispatch;
mod layout;
mod limit;
mod peak;
mod peers;

pub struct Measure {
    pub name: What,
    /// Estimates the duration of the table, in seconds.
    pub planned_seconds: fn(&Pace) -> f64,
    pub run: fn(&mut Bench) -> Result<Table>,
}

/// All tables, in the order of `bench all`.
pub const TABLES: [Measure; 8] = [
    Measure { name: What::Dispatch, planned_seconds: dispatch::planned_seconds, run: dispatch::run },
    Measure { name: What::Direct, planned_seconds: direct::planned_seconds, run: direct::run },
    Measure { name: What::Batching, planned_seconds: batching::planned_seconds, run: batching::run },
    Measure { name: What::Clock, planned_seconds: clock::planned_seconds, run: clock::run },
    Measure { name: What::Layout, planned_seconds: layout::planned_seconds, run: layout::run },
    Measure { name: What::Limit, planned_seconds: limit::planned_seconds, run: limit::run },
    Measure { name: What::Peak, planned_seconds: peak::planned_seconds, run: peak::run },
    Measure { name: What::Peers, planned_seconds: peers::planned_seconds, run: peers::run },
];
