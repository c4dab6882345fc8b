//! Free lists of I/O buffers by size, so that the steady state allocates nothing, and how
//! much of them may be handed out.

use std::collections::VecDeque;

use blkq::{IoBuffer, Ring};

use super::proto::PAYLOAD_MAX_BYTES;

/// Smallest buffer, in bytes.
const CLASS_MIN_BYTES: usize = 4096;
/// Buffers of 4 KiB, 8 KiB, ... up to the largest payload.
const CLASSES: usize = (PAYLOAD_MAX_BYTES as usize / CLASS_MIN_BYTES).ilog2() as usize + 1;
/// Most that the free lists hold, in bytes: what one connection may use.
const FREE_MAX_BYTES: usize = 2 * PAYLOAD_MAX_BYTES as usize;
/// Every connection may always have so many bytes: whoever takes all the rest, requests of
/// the usual size go on.
const OWN_BYTES: usize = 256 << 10;

/// Largest buffer that is registered with the ring, which then need not pin its pages for
/// each direct I/O. Larger ones are too few and too short-lived.
const REGISTERED_MAX_BYTES: usize = 64 << 10;

/// The buffers of one engine's connections.
pub(super) struct BufferPool {
    free: [Vec<IoBuffer>; CLASSES],
    free_bytes: usize,
    /// Buffers handed out.
    used: usize,
}

impl BufferPool {
    pub fn new() -> BufferPool {
        BufferPool { free: [const { Vec::new() }; CLASSES], free_bytes: 0, used: 0 }
    }

    /// Size in bytes of the buffer that holds `bytes`, at most [`PAYLOAD_MAX_BYTES`].
    pub fn size(bytes: u32) -> usize {
        (bytes as usize).next_power_of_two().max(CLASS_MIN_BYTES)
    }

    fn class(size: usize) -> usize {
        (size / CLASS_MIN_BYTES).ilog2() as usize
    }

    /// A buffer of at least `bytes` (at most [`PAYLOAD_MAX_BYTES`]), with whatever was in it.
    pub fn take(&mut self, bytes: u32, ring: &mut Ring) -> IoBuffer {
        self.used += 1;
        let size = Self::size(bytes);
        match self.free[Self::class(size)].pop() {
            Some(buffer) => {
                self.free_bytes -= size;
                buffer
            }
            None => {
                let mut buffer = IoBuffer::zeroed(size);
                if size <= REGISTERED_MAX_BYTES {
                    ring.register_buffer(&mut buffer);
                }
                buffer
            }
        }
    }

    /// Gives a buffer of [`BufferPool::take`] back.
    pub fn put(&mut self, buffer: IoBuffer) {
        self.used -= 1;
        // What is registered is kept: it goes when the pool is trimmed.
        if self.free_bytes + buffer.len() <= FREE_MAX_BYTES || buffer.is_registered() {
            self.free_bytes += buffer.len();
            self.free[Self::class(buffer.len())].push(buffer);
        }
    }

    /// Whether there is memory to give back and nobody about to use it.
    pub fn is_idle(&self) -> bool {
        self.used == 0 && self.free_bytes > 0
    }

    /// Gives all free memory back to the system.
    pub fn trim(&mut self, ring: &mut Ring) {
        for mut buffer in self.free.iter_mut().flat_map(|free| free.drain(..)) {
            ring.unregister_buffer(&mut buffer);
        }
        self.free = [const { Vec::new() }; CLASSES];
        self.free_bytes = 0;
        // SAFETY: only gives unused pages of the heap back.
        unsafe { libc::malloc_trim(0) };
    }
}

/// The bytes that one engine's connections may have in buffers together, beyond
/// [`OWN_BYTES`] each. Who finds none left waits in line.
pub(super) struct Budget {
    left: usize,
    /// Connections that wait, oldest first.
    waiting: VecDeque<u32>,
    /// There may be enough for the first of them now.
    changed: bool,
}

impl Budget {
    /// A budget of `bytes`, at least [`PAYLOAD_MAX_BYTES`] so that any request fits.
    pub fn new(bytes: usize) -> Budget {
        Budget { left: bytes.max(PAYLOAD_MAX_BYTES as usize), waiting: VecDeque::new(), changed: false }
    }

    /// Whether `connection`, which has `held` bytes, may have `bytes` more. If not, it waits:
    /// [`Budget::next`] names it when it is to ask again.
    pub fn take(&mut self, connection: u32, held: usize, bytes: usize) -> bool {
        let shared = shared_part(held + bytes) - shared_part(held);
        let first = self.waiting.front().is_none_or(|first| *first == connection);
        if shared > 0 && (!first || shared > self.left) {
            if !self.waiting.contains(&connection) {
                self.waiting.push_back(connection);
            }
            return false;
        }
        self.left -= shared;
        self.forget(connection);
        true
    }

    /// A connection gives `bytes` of the `held` ones back.
    pub fn give(&mut self, held: usize, bytes: usize) {
        let shared = shared_part(held) - shared_part(held - bytes);
        self.left += shared;
        self.changed |= shared > 0;
    }

    /// `connection` waits no longer.
    pub fn forget(&mut self, connection: u32) {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| *waiting != connection);
        self.changed |= self.waiting.len() < before;
    }

    /// The connection that is to ask again, if there is one.
    pub fn next(&mut self) -> Option<u32> {
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
    fn who_waits_is_served_in_turn_and_small_requests_go_on() {
        let mut budget = Budget::new(64 * MIB);
        assert!(budget.take(1, 0, 32 * MIB) && budget.take(2, 0, 32 * MIB));
        assert!(!budget.take(3, 0, 32 * MIB) && !budget.take(4, 0, MIB));
        assert!(budget.take(5, 0, OWN_BYTES), "what is its own it may always have");
        assert_eq!(budget.next(), None);
        assert!(!budget.take(5, OWN_BYTES, 1), "nobody overtakes those who wait");
        budget.forget(5);
        budget.give(32 * MIB, 32 * MIB);
        assert_eq!(budget.next(), Some(3));
        assert!(budget.take(3, 0, 32 * MIB));
        assert_eq!(budget.next(), Some(4));
        assert!(!budget.take(4, 0, MIB));
        assert_eq!(budget.next(), None);
        budget.forget(4);
        assert_eq!(budget.next(), None);
        budget.give(32 * MIB, 32 * MIB);
        budget.give(32 * MIB, 32 * MIB);
        budget.give(OWN_BYTES, OWN_BYTES);
        assert_eq!(budget.left, 64 * MIB);
    }

    #[test]
    fn the_pool_keeps_a_bounded_amount() {
        let mut ring = Ring::new(8).unwrap();
        let mut pool = BufferPool::new();
        for bytes in [PAYLOAD_MAX_BYTES, PAYLOAD_MAX_BYTES / 2, PAYLOAD_MAX_BYTES / 4] {
            let taken: Vec<IoBuffer> = (0..6).map(|_| pool.take(bytes, &mut ring)).collect();
            taken.into_iter().for_each(|buffer| pool.put(buffer));
            assert!(pool.free_bytes <= FREE_MAX_BYTES);
        }
        let kept: usize = pool.free.iter().flatten().map(|buffer| buffer.len()).sum();
        assert_eq!(kept, pool.free_bytes);
        assert!(pool.is_idle());
        pool.trim(&mut ring);
        assert!(!pool.is_idle());
    }
}
