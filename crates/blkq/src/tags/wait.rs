//! Waiting for tags (lib/sbitmap.c): eight wait queues whose waiters are woken in batches. A waker never
//! blocks on a lock. A waiter is one bit in the word of its wait queue. Two counters that only grow, of tags
//! that were freed and of wake-ups that were given for them, show when a batch is due.
//!
//! No wake-up is lost: a waiter sets its bit and then tries to get a tag again, and a thread that frees tags
//! puts them back and then looks for bits. All of these accesses are SeqCst, so at least one of the two sees
//! what the other has written.

use std::sync::{Arc, PoisonError};

use crate::kick::Wake;
use crate::layout::CachePadded;
use crate::sync::atomic::{AtomicU32, Ordering::SeqCst};
use crate::sync::{Mutex, RwLock, lock, seq_cst_for_loom};

/// Wait queues of a set. The exhaustive search of the model checker affords fewer.
const QUEUES: usize = if cfg!(loom) { 2 } else { 8 };
/// Waiters of one wait queue: the bits of its word.
const QUEUE_WAITERS: usize = if cfg!(loom) { 1 } else { 32 };

/// The largest number of waiters that can be registered with one set.
pub const WAITERS_MAX: usize = QUEUES * QUEUE_WAITERS;

#[derive(Debug)]
pub struct WaiterId {
    number: u16,
    /// True between [`Waiters::add`] and [`Waiters::remove`].
    waits: bool,
}

impl WaiterId {
    /// The waiter's queue, and its bit there. Consecutive waiters are in different queues.
    fn place(&self) -> (usize, u32) {
        let number = usize::from(self.number);
        (number % QUEUES, 1 << (number / QUEUES))
    }
}

/// How to wake a registered waiter; `None` if the slot is free.
type Slot = RwLock<Option<Arc<dyn Wake>>>;

pub(super) struct Waiters {
    /// The number of set bits in all queues. It may be too high for a moment, but never too low.
    pub waiting: CachePadded<AtomicU32>,
    counters: CachePadded<Counters>,
    /// For each wait queue a bit for each waiter that sleeps or is about to sleep.
    queues: [CachePadded<AtomicU32>; QUEUES],
    slots: Box<[Slot]>,
    /// Locked during a registration, so that only slots that are or become free are locked for writing.
    registering: Mutex<()>,
}

#[derive(Default)]
struct Counters {
    /// Tags that were freed while there were waiters; wraps around.
    freed: AtomicU32,
    /// The part of `freed` for which waiters were woken; wraps around.
    woken: AtomicU32,
    /// Determines the queue, and the bit there, from which the next waiter is taken.
    turn: AtomicU32,
}

impl Waiters {
    pub fn new() -> Waiters {
        Waiters {
            waiting: CachePadded::default(),
            counters: CachePadded::default(),
            queues: Default::default(),
            slots: (0..WAITERS_MAX).map(|_| RwLock::new(None)).collect(),
            registering: Mutex::new(()),
        }
    }

    pub fn register(&self, wake: Arc<dyn Wake>) -> Option<WaiterId> {
        let _one_at_a_time = lock(&self.registering);
        let free = |slot: &Slot| slot.read().unwrap_or_else(PoisonError::into_inner).is_none();
        let number = self.slots.iter().position(free)?;
        *self.slots[number].write().unwrap_or_else(PoisonError::into_inner) = Some(wake);
        Some(WaiterId { number: number as u16, waits: false })
    }

    pub fn unregister(&self, waiter: WaiterId) {
        let slot = &self.slots[usize::from(waiter.number)];
        *slot.write().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub fn any(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub fn add(&self, waiter: &mut WaiterId) {
        let (queue, bit) = waiter.place();
        waiter.waits = true;
        // Counted before the bit is set, so that the count is never too low.
        self.waiting.fetch_add(1, SeqCst);
        if self.queues[queue].fetch_or(bit, SeqCst) & bit != 0 {
            self.waiting.fetch_sub(1, SeqCst);
        }
    }

    pub fn contains(&self, waiter: &WaiterId) -> bool {
        let (queue, bit) = waiter.place();
        waiter.waits && self.queues[queue].load(SeqCst) & bit != 0
    }

    /// Ends the wait. Returns whether the waiter had been woken.
    pub fn remove(&self, waiter: &mut WaiterId) -> bool {
        if !std::mem::take(&mut waiter.waits) {
            return false;
        }
        let (queue, bit) = waiter.place();
        let sleeps = self.queues[queue].fetch_and(!bit, SeqCst) & bit != 0;
        if sleeps {
            self.waiting.fetch_sub(1, SeqCst);
        }
        !sleeps
    }

    /// Counts `count` freed tags. Each full batch of freed tags wakes that number of waiters. If no further
    /// batch can fill (`drained`), the rest of the current one wakes waiters too.
    pub fn freed(&self, count: u32, batch: u32, drained: impl Fn() -> bool) {
        let counters = &*self.counters;
        counters.freed.fetch_add(count, SeqCst);
        seq_cst_for_loom();
        let mut woken = counters.woken.load(SeqCst);
        let due = loop {
            let open = counters.freed.load(SeqCst).wrapping_sub(woken);
            let due = if open >= batch {
                open - open % batch
            } else if drained() {
                // At least one waiter, even if other threads have already woken waiters for these tags: the
                // waiter may have come after them.
                open.clamp(1, batch)
            } else {
                return;
            };
            match counters.woken.compare_exchange(woken, woken.wrapping_add(due.min(open)), SeqCst, SeqCst) {
                Ok(_) => break due,
                Err(now) => woken = now,
            }
        };
        self.wake(due);
    }

    /// Wakes all registered waiters, whether they wait or not.
    #[cold]
    pub fn wake_registered(&self) {
        for slot in &self.slots {
            // `try_read` fails only for a slot that is free or is being freed, and such a waiter needs no
            // wake-up.
            if let Ok(slot) = slot.try_read()
                && let Some(wake) = &*slot
            {
                wake.wake();
            }
        }
    }

    /// Wakes up to `count` waiters, one from each queue in turn.
    pub fn wake(&self, mut count: u32) {
        let mut empty = 0;
        while count > 0 && empty < QUEUES {
            // The turn advances before the search, so that concurrent wakers start at different queues.
            let turn = self.counters.turn.fetch_add(1, SeqCst) as usize;
            if self.wake_one(turn % QUEUES, (turn / QUEUES) as u32) {
                count -= 1;
                empty = 0;
            } else {
                empty += 1;
            }
        }
    }

    /// Wakes one waiter of `queue`: the first one from bit `from` on, around the end of the word.
    fn wake_one(&self, queue: usize, from: u32) -> bool {
        let from = from % QUEUE_WAITERS as u32;
        loop {
            let sleeping = self.queues[queue].load(SeqCst);
            if sleeping == 0 {
                return false;
            }
            let index = (sleeping.rotate_right(from).trailing_zeros() + from) % u32::BITS;
            let bit = 1 << index;
            if self.queues[queue].fetch_and(!bit, SeqCst) & bit == 0 {
                continue;
            }
            self.waiting.fetch_sub(1, SeqCst);
            // `try_read` fails only for a slot that is free or is being freed. Then the next waiter gets the
            // wake-up.
            if let Ok(slot) = self.slots[index as usize * QUEUES + queue].try_read()
                && let Some(wake) = &*slot
            {
                wake.wake();
                return true;
            }
        }
    }
}
