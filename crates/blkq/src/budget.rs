use std::time::Duration;

/// The limits on the work of one source per turn: see [`TURN_BUDGET`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TurnBudget {
    /// The number of items: descriptors of a virtqueue, parts of a bio, options of a handshake.
    pub items: usize,
    /// The time, because clients also determine how long an item takes.
    pub time: Duration,
}

/// The work that one source may do in one turn of an engine (like NAPI's `budget` and `netdev_budget_usecs`).
///
/// Clients determine the number of parts of a bio, of descriptors in a chain, and of options in a handshake.
/// A source stops at the first limit that it reaches and continues in the next turn, so that the other
/// sources of the engine's thread never wait longer than the sum of the budgets. The limits are checked after
/// each item, so each turn processes at least one.
pub const TURN_BUDGET: TurnBudget = TurnBudget { items: 256, time: Duration::from_millis(2) };
