//! The rounds of a turn: sources get what completed, submit more, and the drivers get that.

use super::Engine;

/// Rounds of a turn at most: a source whose bios complete at once shall not keep the engine from all
/// else.
const TURN_ROUNDS: usize = 16;

impl Engine {
    /// Rounds until nothing completes at once.
    pub(super) fn run_rounds(&mut self) {
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            let (sources, parts) = self.split();
            sources.on_turn(parts);
            for queue in &mut self.queues {
                queue.dispatch_all(Some(&mut self.ring));
            }
            if self.queues.iter().all(|queue| queue.completions().is_empty()) {
                break;
            }
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
