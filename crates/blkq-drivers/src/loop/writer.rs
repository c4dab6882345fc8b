//! The writer token: only the queue that has it writes to the file.
//!
//! The token is one atomic word. The top bit means that the token is taken, and bit N that queue N waits for it.
//! The holder passes the token to the next waiting queue in round-robin order, so no queue is overtaken twice.
//! Because registering as a waiter, releasing and passing on are each one change of the same word, no wake-up
//! can be lost.

use blkq::sync::atomic::AtomicU64;
use blkq::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// Largest number of queues that can share a token: one bit each, beside [`TAKEN`].
pub(super) const QUEUES_MAX: u16 = 63;
const TAKEN: u64 = 1 << 63;

#[derive(Default)]
pub(super) struct WriterToken {
    word: AtomicU64,
}

impl WriterToken {
    /// Takes the token for `queue` and returns true, or registers the queue as a waiter and returns false. A waiter
    /// polls [`WriterToken::was_handed_to`].
    pub fn acquire(&self, queue: u16) -> bool {
        let before = self.update(|word| if word & TAKEN == 0 { word | TAKEN } else { word | 1 << queue });
        before & TAKEN == 0
    }

    pub fn was_handed_to(&self, queue: u16) -> bool {
        // Acquire: pairs with the release of the queue that passed the token on, whose writes happened before.
        self.word.load(Acquire) & (1 << queue) == 0
    }

    pub fn is_wanted(&self) -> bool {
        // Relaxed: a hint for fairness; a stale value delays the hand-over by one call.
        self.word.load(Relaxed) & !TAKEN != 0
    }

    /// Returns the queue that has the token now, if one was waiting: the caller must wake that queue.
    #[must_use]
    pub fn release(&self, queue: u16) -> Option<u16> {
        let next = |word: u64| {
            let waiting = word & !TAKEN;
            // Round robin: the first waiting queue above this one, else the first of all.
            let above = waiting & (u64::MAX << queue << 1);
            let turn = if above != 0 { above } else { waiting };
            (turn != 0).then(|| turn.trailing_zeros() as u16)
        };
        let before = self.update(|word| match next(word) {
            Some(queue) => word & !(1 << queue),
            None => 0,
        });
        next(before)
    }

    /// Stops the wait of `queue`. Returns false if the queue was handed the token before: it must release it.
    #[must_use]
    pub fn withdraw(&self, queue: u16) -> bool {
        self.update(|word| word & !(1 << queue)) & (1 << queue) != 0
    }

    fn update(&self, change: impl Fn(u64) -> u64) -> u64 {
        // AcqRel: a queue that gets the token sees the state of the one that released it. Relaxed for the first
        // load and for a failed exchange: only a successful exchange counts.
        let mut before = self.word.load(Relaxed);
        loop {
            match self.word.compare_exchange_weak(before, change(before), AcqRel, Relaxed) {
                Ok(_) => return before,
                Err(now) => before = now,
            }
        }
    }
}

#[cfg(all(test, not(model_check)))]
mod tests {
    use super::*;

    #[test]
    fn the_token_goes_round_all_waiters_and_is_free_afterwards() {
        let token = WriterToken::default();
        assert!(token.acquire(5) && !token.is_wanted());
        for queue in [2, 62, 0] {
            assert!(!token.acquire(queue) && !token.was_handed_to(queue));
        }
        assert_eq!(token.release(5), Some(62));
        assert!(token.was_handed_to(62) && !token.was_handed_to(0));
        assert_eq!(token.release(62), Some(0));
        assert!(token.withdraw(2), "it was still waiting");
        assert_eq!(token.release(0), None);
        assert!(token.acquire(2));
    }

    #[test]
    fn a_withdrawal_after_the_hand_over_leaves_the_queue_the_token() {
        let token = WriterToken::default();
        assert!(token.acquire(0) && !token.acquire(1));
        assert_eq!(token.release(0), Some(1));
        assert!(!token.withdraw(1));
        assert_eq!(token.release(1), None);
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::{Arc, Notify};
    use loom::thread;

    struct Shared {
        token: WriterToken,
        kicks: [Notify; 3],
        file: UnsafeCell<u32>,
    }

    impl Shared {
        fn write(&self, queue: u16) {
            if !self.token.acquire(queue) {
                // Loom also wakes spuriously, and fails the model if no wake-up ever comes.
                while !self.token.was_handed_to(queue) {
                    self.kicks[queue as usize].wait();
                }
            }
            // Loom fails the model if two threads are here at the same time, or if a thread does not see the
            // writes of the one before.
            self.file.with_mut(|count| {
                // SAFETY: the token makes the access exclusive; loom checks that it does.
                unsafe { *count += 1 }
            });
            if let Some(next) = self.token.release(queue) {
                self.kicks[next as usize].notify();
            }
        }
    }

    #[test]
    fn loom_one_writer_at_a_time_and_no_waiter_is_forgotten() {
        blkq::sync::model_within(3, "three writers", 0, || {
            let shared = Arc::new(Shared {
                token: WriterToken::default(),
                kicks: std::array::from_fn(|_| Notify::new()),
                file: UnsafeCell::new(0),
            });
            let threads: Vec<_> = (1..3)
                .map(|queue| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || shared.write(queue))
                })
                .collect();
            shared.write(0);
            threads.into_iter().for_each(|t| t.join().unwrap());
            // SAFETY: the other threads have exited.
            assert_eq!(shared.file.with(|count| unsafe { *count }), 3);
            assert!(shared.token.acquire(0), "the token is free at the end");
        });
    }
}
