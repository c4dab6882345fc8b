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
    pub is_cut_short: bool,
}

impl Rounds {
    pub fn begin_turn(&mut self) {
        (self.completed, self.until_ns) = (0, 0);
    }

    /// Must be called before the first round of `dispatch_all`.
    pub fn begin(&mut self) {
        // Most turns have one round and need no clock reading. After a turn that was cut short, this call starts
        // the clock immediately.
        if std::mem::take(&mut self.is_cut_short) {
            self.is_over();
        }
    }

    /// Counts a round that has completed `completed` requests, if there is work for another round. Returns
    /// whether that must wait for the next turn.
    pub fn spend(&mut self, completed: usize) -> bool {
        self.completed += completed;
        let is_over = self.is_over();
        self.is_cut_short = self.completed >= TURN_BUDGET.items || is_over;
        self.is_cut_short
    }

    /// Whether the time of the turn is over. Starts the clock at the first call of a turn.
    pub fn is_over(&mut self) -> bool {
        let now_ns = monotonic_ns();
        if self.until_ns == 0 {
            // A model checker replays the same steps regardless of how long they take.
            let budget_ns = if cfg!(model_check) { u64::MAX } else { TURN_BUDGET.time.as_nanos() as u64 };
            self.until_ns = now_ns.saturating_add(budget_ns);
        }
        now_ns >= self.until_ns
    }

    /// Lets the time of the turn start again. Returns whether the clock had started.
    pub fn restart_clock(&mut self) -> bool {
        std::mem::take(&mut self.until_ns) != 0
    }
}
