//! The work that a source has done in a turn of its engine, counted in the items of [`TURN_BUDGET`].

use blkq::{SourceContext, TURN_BUDGET};

/// Bytes that are copied in about the time of one item.
const BYTES_PER_ITEM: usize = 32 << 10;

/// The items that a source has done in the present turn. Everything that a client chooses is counted: requests, descriptors,
/// options, bytes that are copied.
#[derive(Default)]
pub struct TurnWork {
    turn: u64,
    items: usize,
}

impl TurnWork {
    /// To be called before anything is counted: in another turn nothing has been done yet. An engine calls
    /// [`Source::on_turn`](blkq::Source::on_turn) several times in a turn when bios complete immediately.
    #[inline]
    pub fn begin(&mut self, cx: &SourceContext<'_>) {
        if self.turn != cx.turn() {
            (self.turn, self.items) = (cx.turn(), 0);
        }
    }

    /// `items` more were done.
    #[inline]
    pub fn spend(&mut self, items: usize) {
        self.items += items;
    }

    /// `bytes` more were copied.
    #[inline]
    pub fn spend_bytes(&mut self, bytes: usize) {
        self.items += bytes / BYTES_PER_ITEM;
    }

    /// Whether the rest waits for the next turn.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.items >= TURN_BUDGET.items
    }
}
