//! The rounds of a turn: sources get what completed, submit more, and the drivers get that.

use super::Engine;
use crate::queue::Queue;
use crate::ring::Token;

/// Rounds of a turn at most: a source whose bios complete at once shall not keep the engine from all
/// else.
const TURN_ROUNDS: usize = 16;

impl Engine {
    /// Rounds until nothing completes at once, or a queue has spent the budget of its turn.
    pub(super) fn run_rounds(&mut self) {
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            let (sources, parts) = self.split();
            sources.on_turn(parts);
            for queue in &mut self.queues {
                queue.dispatch_all(Some(&mut self.ring));
            }
            // Last, because a request may fail and be held while it is dispatched. The next round delivers the bios that
            // complete here.
            self.fail_abandoned();
            let is_over = self.queues.iter().all(|queue| queue.completions().is_empty());
            if is_over || self.queues.iter().any(Queue::is_cut_short) {
                break;
            }
        }
    }

    /// Completes held requests for which no client waits any more: resumed, they could overwrite what
    /// it has written since over another connection.
    #[inline]
    fn fail_abandoned(&mut self) {
        let Engine { ring, queues, sources, .. } = self;
        for queue in queues.iter_mut().filter(|queue| queue.has_held()) {
            queue.fail_abandoned(Some(ring), |user_data| sources.is_abandoned(Token(user_data)));
        }
    }

    /// Passes completed bios to the sources that submitted them.
    fn deliver(&mut self) {
        for index in 0..self.queues.len() {
            let mut completed = std::mem::take(self.queues[index].completions_mut());
            for completion in completed.drain(..) {
                let (sources, parts) = self.split();
                sources.on_bio(completion, parts);
            }
            // Keep the room that it has grown to, unless bios completed at once meanwhile.
            if self.queues[index].completions().is_empty() {
                *self.queues[index].completions_mut() = completed;
            }
        }
    }
}
