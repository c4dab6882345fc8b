//! The rounds of a turn: sources receive their completed bios and submit more, which the queues dispatch.

use super::Engine;
use crate::queue::Queue;
use crate::ring::Token;

/// The maximum number of rounds of a turn, so that a source whose bios complete immediately does not keep the
/// engine from its other work.
const TURN_ROUNDS: usize = 16;

impl Engine {
    /// Runs rounds until no bio completes immediately, or a queue has used up the budget of its turn.
    pub(super) fn run_rounds(&mut self) {
        for _ in 0..TURN_ROUNDS {
            self.deliver();
            let (sources, parts) = self.split();
            sources.on_turn(parts);
            for queue in &mut self.queues {
                queue.dispatch_all(Some(&mut self.ring));
            }
            // This is the last step, because dispatching a request may make it fail and be held. The next
            // round delivers the bios that complete here.
            self.fail_abandoned();
            let is_over = self.queues.iter().all(|queue| queue.completions().is_empty());
            if is_over || self.queues.iter().any(Queue::is_cut_short) {
                break;
            }
        }
    }

    /// Completes held requests for which no client waits. If such requests were resumed later, they could
    /// overwrite what the same client has meanwhile written over another connection.
    #[inline]
    fn fail_abandoned(&mut self) {
        let Engine { ring, queues, sources, .. } = self;
        for queue in queues.iter_mut().filter(|queue| queue.has_held()) {
            queue.fail_abandoned(Some(ring), |user_data| sources.is_abandoned(Token(user_data)));
        }
    }

    fn deliver(&mut self) {
        for index in 0..self.queues.len() {
            let Engine { queues, sources, .. } = self;
            queues[index].name_failed(|user_data, text| sources.write_client(Token(user_data), text));
            let mut completed = std::mem::take(queues[index].completions_mut());
            for completion in completed.drain(..) {
                let (sources, parts) = self.split();
                sources.on_bio(completion, parts);
            }
            // Keeps the capacity that the list has grown to, unless more bios have completed meanwhile.
            if self.queues[index].completions().is_empty() {
                *self.queues[index].completions_mut() = completed;
            }
        }
    }
}
