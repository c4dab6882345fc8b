//! Limits the memory that all connections of one engine have in buffers together.

use std::collections::VecDeque;

use crate::buffers::{BUFFER_MAX_BYTES, UNALIGNED_MAX_BYTES};

use super::proto::PAYLOAD_MAX_BYTES;

const _: () = assert!(PAYLOAD_MAX_BYTES <= BUFFER_MAX_BYTES);
/// Bytes of the largest request: an unaligned request, and buffers for the two 64 KiB blocks at its ends.
const REQUEST_MAX_BYTES: usize = UNALIGNED_MAX_BYTES + 2 * (64 << 10);

/// Bytes that each connection may always use: usual requests proceed when the shared memory is used up.
const OWN_BYTES: usize = 256 << 10;

/// The shared memory of one engine's connections: what they use beyond [`OWN_BYTES`] each. If there is not
/// enough for a connection, it waits; waiting connections are served in order.
///
/// Writes that are held after an error keep their memory until the operator resumes them. So that reads of other
/// connections continue, one connection that uses no memory may exceed the budget by one read.
#[derive(Default)]
pub(super) struct Budget {
    left: usize,
    /// The connection that exceeds the budget, and by how many bytes.
    excess: Option<(u32, usize)>,
    /// Connections that wait for memory, oldest first.
    waiting: VecDeque<u32>,
    /// Memory was released, or the first waiting connection has changed: the first one should try again.
    changed: bool,
    /// Waiting connections that should try again because none exceeds the budget now, and that [`Budget::next`] has
    /// not returned yet.
    retrying: VecDeque<u32>,
}

impl Budget {
    /// A budget of `bytes`, but at least [`REQUEST_MAX_BYTES`], so that any single request fits.
    pub fn new(bytes: usize) -> Budget {
        Budget { left: bytes.max(REQUEST_MAX_BYTES), ..Budget::default() }
    }

    /// Whether `connection`, which already has `held` bytes, may have `bytes` more, for a read if `is_read`.
    /// If not, the connection waits, and [`Budget::next`] returns it when it should try again.
    pub fn take(&mut self, connection: u32, held: usize, bytes: usize, is_read: bool) -> bool {
        let shared = shared_part(held + bytes) - shared_part(held);
        let first = self.waiting.front().is_none_or(|first| *first == connection);
        if shared == 0 || first && shared <= self.left {
            self.left -= shared;
        } else if is_read && held == 0 && self.may_exceed(connection) {
            self.excess = Some((connection, shared));
        } else {
            if !self.waiting.contains(&connection) {
                self.waiting.push_back(connection);
                if !self.retrying.is_empty() {
                    self.retrying.push_back(connection);
                }
            }
            return false;
        }
        self.forget(connection);
        true
    }

    /// Whether `connection` may exceed the budget now: no waiting connection is to try before it.
    fn may_exceed(&self, connection: u32) -> bool {
        let was_returned = || self.waiting.contains(&connection) && !self.retrying.contains(&connection);
        let is_turn = |first: &u32| *first == connection || was_returned();
        self.excess.is_none() && self.retrying.front().is_none_or(is_turn)
    }

    pub fn free(&mut self, connection: u32, held: usize, bytes: usize) {
        let mut shared = shared_part(held) - shared_part(held - bytes);
        if let Some((_, excess)) = self.excess.as_mut().filter(|(user, _)| *user == connection) {
            let returned = shared.min(*excess);
            (shared, *excess) = (shared - returned, *excess - returned);
            if *excess == 0 {
                self.excess = None;
                self.retrying.clone_from(&self.waiting);
            }
        }
        self.left += shared;
        self.changed |= shared > 0;
    }

    pub fn forget(&mut self, connection: u32) {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| *waiting != connection);
        self.retrying.retain(|retrying| *retrying != connection);
        self.changed |= self.waiting.len() < before;
    }

    pub fn next(&mut self) -> Option<u32> {
        if let Some(retrying) = self.retrying.pop_front() {
            return Some(retrying);
        }
        if std::mem::take(&mut self.changed) { self.waiting.front().copied() } else { None }
    }
}

fn shared_part(held: usize) -> usize {
    held.saturating_sub(OWN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn waiting_connections_are_served_in_order() {
        let mut budget = Budget::new(64 * MIB);
        assert!(budget.take(1, 0, 32 * MIB, false) && budget.take(2, 0, 32 * MIB, false));
        assert!(!budget.take(3, 0, 32 * MIB, false) && !budget.take(4, 0, MIB, false));
        assert!(budget.take(5, 0, OWN_BYTES, false), "its own share is always available");
        assert_eq!(budget.next(), None);
        assert!(!budget.take(5, OWN_BYTES, 1, false), "a connection must not overtake waiting ones");
        budget.forget(5);
        budget.free(1, 32 * MIB, 32 * MIB);
        assert_eq!(budget.next(), Some(3));
        assert!(budget.take(3, 0, 32 * MIB, false));
        assert_eq!(budget.next(), Some(4));
        assert!(!budget.take(4, 0, MIB, false));
        assert_eq!(budget.next(), None);
        budget.forget(4);
        assert_eq!(budget.next(), None);
        budget.free(2, 32 * MIB, 32 * MIB);
        budget.free(3, 32 * MIB, 32 * MIB);
        budget.free(5, OWN_BYTES, OWN_BYTES);
        assert_eq!(budget.left, 64 * MIB);
    }

    #[test]
    fn reads_that_exceed_the_budget_take_turns() {
        let mut budget = Budget::new(64 * MIB);
        assert!(budget.take(1, 0, 64 * MIB, false), "held writes");
        assert!(budget.take(2, 0, MIB, true));
        assert!(!budget.take(3, 0, MIB, true) && !budget.take(2, MIB, MIB, true));
        for (sender, other, late) in [(2, 3, 4), (3, 2, 5), (2, 4, 6)] {
            budget.free(sender, MIB, MIB);
            // A connection whose reply was sent runs before the engine calls `next`, as does a new one.
            assert!(!budget.take(sender, 0, MIB, true) && !budget.take(late, 0, MIB, true), "{sender}");
            assert_eq!(budget.next(), Some(other));
            assert!(budget.take(other, 0, MIB, true));
            assert!(!budget.take(other, MIB, MIB, true));
            while budget.next().is_some() {}
        }
        // Connections that want to write do not keep others from reading.
        budget.free(4, MIB, MIB);
        while let Some(next) = budget.next() {
            if next != 6 {
                assert!(!budget.take(next, 0, MIB, false));
            }
        }
        assert!(budget.take(6, 0, MIB, true));
    }

    #[test]
    fn one_read_at_a_time_exceeds_the_budget() {
        let mut budget = Budget::new(64 * MIB);
        assert!(budget.take(1, 0, 64 * MIB, false), "held writes");
        assert!(!budget.take(2, 0, MIB, false) && budget.take(3, 0, MIB, true));
        assert!(
            !budget.take(3, MIB, MIB, true) && !budget.take(4, 0, MIB, true) && !budget.take(5, 0, MIB, true)
        );
        budget.forget(4);
        assert_eq!(budget.next(), Some(2));
        budget.free(3, MIB, MIB / 2);
        assert_eq!(budget.next(), None);
        budget.free(3, MIB / 2, MIB / 2);
        let retrying = std::iter::from_fn(|| budget.next());
        assert_eq!(retrying.collect::<Vec<_>>(), [2, 3, 5]);
        assert!(!budget.take(2, 0, MIB, false) && budget.take(5, 0, 32 * MIB, true));
        budget.free(5, 32 * MIB, 32 * MIB);
        budget.free(1, 64 * MIB, 64 * MIB);
        assert_eq!((budget.left, budget.excess), (64 * MIB, None));
    }
}
