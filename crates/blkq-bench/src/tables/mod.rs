//! The tables, one module each.

use crate::bench::Bench;
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
    /// Approximate duration in seconds of a quick run and of a full run, with the default file size and all peers.
    /// Does not include work in [`Progress::aside`](crate::progress::Progress::aside).
    seconds: [f64; 2],
    pub run: fn(&mut Bench) -> Result<Table>,
}

impl Measure {
    pub fn planned_seconds(&self, quick: bool) -> f64 {
        let is_left_out = self.name == What::Peers && peers::lacks().is_some();
        if is_left_out { 0.0 } else { self.seconds[usize::from(!quick)] }
    }
}

/// All tables, in the order of `bench all`.
pub const TABLES: [Measure; 8] = [
    Measure { name: What::Dispatch, seconds: [9.0, 170.0], run: dispatch::run },
    Measure { name: What::Direct, seconds: [7.0, 120.0], run: direct::run },
    Measure { name: What::Batching, seconds: [14.0, 101.0], run: batching::run },
    Measure { name: What::Clock, seconds: [3.0, 45.0], run: clock::run },
    Measure { name: What::Layout, seconds: [5.0, 80.0], run: layout::run },
    Measure { name: What::Limit, seconds: [6.0, 20.0], run: limit::run },
    Measure { name: What::Peak, seconds: [6.0, 100.0], run: peak::run },
    Measure { name: What::Peers, seconds: [75.0, 496.0], run: peers::run },
];
