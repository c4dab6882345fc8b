//! The rounds of a turn: requests that complete at once make room for others, which complete at once too. The rounds of
//! a turn stop at [`TURN_BUDGET`], so that no bio of many parts keeps the thread from all else.

use crate::budget::TURN_BUDGET;
use crate::clock::monotonic_ns;

/// The part of the budget that the rounds of a turn have spent.
#[derive(Default)]
pub(super) struct Rounds {
    completed: usize,
    /// When the budget of time is spent; 0 as long as the clock was not read.
    until_ns: u64,
    /// The budget was spent before the work was done.
    is_cut_short: bool,
}

impl Rounds {
    /// A turn begins.
    #[inline]
    pub fn begin_turn(&mut self) {
        (self.completed, self.until_ns) = (0, 0);
    }

    /// The first of some rounds begins.
    pub fn begin(&mut self) {
        // Most turns have one round, and read no clock for it.
        if std::mem::take(&mut self.is_cut_short) {
            self.start_clock();
        }
    }

    fn start_clock(&mut self) {
        if self.until_ns == 0 {
            // A model checker repeats the same steps, however long they take.
            let budget_ns = if cfg!(model_check) { u64::MAX } else { TURN_BUDGET.time.as_nanos() as u64 };
            self.until_ns = monotonic_ns().saturating_add(budget_ns);
        }
    }

    /// A round is over that has completed so many requests, and there is work for another one. Whether that has to wait
    /// for the next turn.
    pub fn spend(&mut self, completed: usize) -> bool {
        self.start_clock();
        self.completed += completed;
        self.is_cut_short = self.completed >= TURN_BUDGET.items || monotonic_ns() >= self.until_ns;
        self.is_cut_short
    }

    /// Whether the last turn stopped at its budget.
    #[inline]
    pub fn is_cut_short(&self) -> bool {
        self.is_cut_short
    }
}
