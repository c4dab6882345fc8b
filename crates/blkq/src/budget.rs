//! The limits of the work that one source does in one turn of an engine.

use std::time::Duration;

/// The limits of one source of work per turn: see [`TURN_BUDGET`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TurnBudget {
    /// Items: descriptors of a virtqueue, parts of a bio, options of a handshake.
    pub items: usize,
    /// Time, for items whose cost the client chooses too.
    pub time: Duration,
}

/// The work that one source may do in one turn of an engine (NAPI's `budget`, and `netdev_budget_usecs`).
///
/// A client chooses how many parts a bio has, how long a chain of descriptors is, and how many options a handshake
/// has. A source stops at the first of the two limits that it reaches, and continues in the next turn, so that the
/// other sources of the engine's thread wait no longer than the sum of the budgets. A limit is checked after an item:
/// each turn does at least one.
pub const TURN_BUDGET: TurnBudget = TurnBudget { items: 256, time: Duration::from_millis(2) };
