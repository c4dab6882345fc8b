//! Counts the work that a source does in one turn of its engine, in items of [`TURN_BUDGET`], so that the
//! clients of one source cannot delay the other sources and queues of the engine.

use blkq::{SourceContext, TURN_BUDGET};

/// Bytes that a thread copies in about the time of one item.
const BYTES_PER_ITEM: usize = 32 << 10;

/// The items that a source has spent in the current turn. Everything whose amount a client chooses is
/// counted: requests, descriptors, options, and bytes that are copied.
#[derive(Default)]
pub struct TurnWork {
    turn: u64,
    items: usize,
}

impl TurnWork {
    /// Must be called before items are spent: resets the count if a new turn has begun. The engine calls
    /// [`Source::on_turn`](blkq::Source::on_turn) several times in one turn when bios complete immediately,
    /// and these calls share one budget.
    pub fn begin(&mut self, cx: &SourceContext<'_>) {
        if self.turn != cx.turn() {
            (self.turn, self.items) = (cx.turn(), 0);
        }
    }

    pub fn spend(&mut self, items: usize) {
        self.items += items;
    }

    pub fn spend_bytes(&mut self, bytes: usize) {
        self.items += bytes / BYTES_PER_ITEM;
    }

    pub fn is_over(&self) -> bool {
        self.items >= TURN_BUDGET.items
    }
}
