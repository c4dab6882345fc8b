//! The rounds of a turn. Requests that complete immediately make room for others, which may complete
//! immediately too. [`TURN_BUDGET`] bounds the rounds, and the waiting bios that are admitted in a turn, so
//! that a bio of many parts does not keep the thread from its other queues and clients.

use crate::budget::TURN_BUDGET;
use crate::clock::monotonic_ns;

#[derive(Default)]
pub(super) struct Rounds {
    completed: usize,
    /// When the time budget ends, in nanoseconds of the monotonic clock. 0: the clock was not read yet.
    until_ns: u64,
    /// The budget was used up while there was work left.
    is_cut_short: bool,
}

impl Rounds {
    #[inline]
    pub fn begin_turn(&mut self) {
        (self.completed, self.until_ns) = (0, 0);
    }

    /// Must be called before the first round of `dispatch_all`.
    pub fn begin(&mut self) {
        // Most turns have one round and need no clock reading. After a turn that was cut short, the clock
        // starts immediately.
        if std::mem::take(&mut self.is_cut_short) {
            self.start_clock();
        }
    }

    fn start_clock(&mut self) {
        if self.until_ns == 0 {
            // A model checker replays the same steps regardless of how long they take.
            let budget_ns = if cfg!(model_check) { u64::MAX } else { TURN_BUDGET.time.as_nanos() as u64 };
            self.until_ns = monotonic_ns().saturating_add(budget_ns);
        }
    }

    /// Counts a round that has completed `completed` requests, if there is work for another round. Returns
    /// whether that must wait for the next turn.
    pub fn spend(&mut self, completed: usize) -> bool {
        self.start_clock();
        self.completed += completed;
        self.is_cut_short = self.completed >= TURN_BUDGET.items || monotonic_ns() >= self.until_ns;
        self.is_cut_short
    }

    /// Notes that the driver has had requests, which it may have executed meanwhile. Returns whether the time
    /// of the turn is over.
    pub fn spend_time(&mut self) -> bool {
        self.start_clock();
        monotonic_ns() >= self.until_ns
    }

    #[inline]
    pub fn has_clock(&self) -> bool {
        self.until_ns != 0
    }

    /// Lets the time of the turn start again.
    pub fn restart_clock(&mut self) {
        self.until_ns = 0;
    }

    #[inline]
    pub fn is_cut_short(&self) -> bool {
        self.is_cut_short
    }
}
