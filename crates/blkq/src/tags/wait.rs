//! Waiting for tags: eight wait queues, woken in batches, without a lock on the waker's side.
//!
//! A waiter is a bit of its wait queue. Two counters that only grow, of tags put and of
//! wake-ups given for them, show when a batch is due (the kernel's lib/sbitmap.c).

use std::fmt;
use std::sync::{Arc, PoisonError};

use crate::kick::Wake;
use crate::layout::CachePadded;
use crate::sync::atomic::{AtomicU32, Ordering::SeqCst};
use crate::sync::{Mutex, RwLock, lock, seq_cst_for_loom};

/// Wait queues of a set; the checker's exhaustive search affords fewer.
const QUEUES: usize = if cfg!(loom) { 2 } else { 8 };
/// Waiters of one wait queue: the bits of its word.
const QUEUE_WAITERS: usize = if cfg!(loom) { 1 } else { 32 };

/// How many waiters can be registered with one set.
pub const WAITERS_MAX: usize = QUEUES * QUEUE_WAITERS;

/// One registered waiter of a tag set.
#[derive(Debug)]
pub struct WaiterId {
    number: u16,
    /// Between [`Waiters::add`] and [`Waiters::remove`].
    waits: bool,
}

impl WaiterId {
    /// Its wait queue and its bit there: neighbours are in different queues.
    fn place(&self) -> (usize, u32) {
        let number = usize::from(self.number);
        (number % QUEUES, 1 << (number / QUEUES))
    }
}

/// The wake-up of a registered waiter.
type Slot = RwLock<Option<Arc<dyn Wake>>>;

pub(super) struct Waiters {
    /// How many bits of all queues are set, or about to be.
    waiting: CachePadded<AtomicU32>,
    counters: CachePadded<Counters>,
    /// The waiters that sleep or are about to.
    queues: [CachePadded<AtomicU32>; QUEUES],
    slots: Box<[Slot]>,
    /// One registers at a time, so that no slot but a free one is ever locked for writing.
    registering: Mutex<()>,
}

#[derive(Debug)]
struct Counters {
    freed: AtomicU32,
    woken: AtomicU32,
    /// Which queue is woken next.
    turn: AtomicU32,
}

impl Waiters {
    pub fn new() -> Waiters {
        Waiters {
            waiting: CachePadded::new(AtomicU32::new(0)),
            counters: CachePadded::new(Counters {
                freed: AtomicU32::new(0),
                woken: AtomicU32::new(0),
                turn: AtomicU32::new(0),
            }),
            queues: std::array::from_fn(|_| CachePadded::new(AtomicU32::new(0))),
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

    /// The word that says whether anybody waits.
    pub fn waiting(&self) -> &AtomicU32 {
        &self.waiting
    }

    /// Whether anybody waits.
    #[inline]
    pub fn any(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub fn add(&self, waiter: &mut WaiterId) {
        let (queue, bit) = waiter.place();
        waiter.waits = true;
        // Counted first: the count may be too high for a moment, never too low.
        self.waiting.fetch_add(1, SeqCst);
        if self.queues[queue].fetch_or(bit, SeqCst) & bit != 0 {
            self.waiting.fetch_sub(1, SeqCst);
        }
    }

    /// Whether it waits and has not been woken.
    pub fn contains(&self, waiter: &WaiterId) -> bool {
        let (queue, bit) = waiter.place();
        waiter.waits && self.queues[queue].load(SeqCst) & bit != 0
    }

    /// Whether it had been woken.
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

    /// Counts `count` tags that were put. Every full batch of them wakes as many waiters;
    /// if no batch will fill (`drained`), so does the rest.
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
                // At least one, even if others have woken for these tags by now.
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

    /// Wakes all that are registered, whether they wait or not.
    #[cold]
    pub fn wake_registered(&self) {
        for slot in &self.slots {
            // Locked for writing only while it is free, or becomes so.
            if let Ok(slot) = slot.try_read()
                && let Some(wake) = &*slot
            {
                wake.wake();
            }
        }
    }

    /// Wakes up to `count` waiters, queue after queue.
    pub fn wake(&self, mut count: u32) {
        let mut empty = 0;
        while count > 0 && empty < QUEUES {
            // The turn advances before the search, so that wakers at the same time spread.
            let turn = self.counters.turn.fetch_add(1, SeqCst) as usize;
            if self.wake_one(turn % QUEUES, (turn / QUEUES) as u32) {
                count -= 1;
                empty = 0;
            } else {
                empty += 1;
            }
        }
    }

    /// Wakes a waiter of `queue`: the first from bit `from` on, around the end.
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
            // Locked for writing only while it is free; then the wake-up is for another.
            if let Ok(slot) = self.slots[index as usize * QUEUES + queue].try_read()
                && let Some(wake) = &*slot
            {
                wake.wake();
                return true;
            }
        }
    }
}

impl fmt::Debug for Waiters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Waiters { waiting, counters, .. } = self;
        f.debug_struct("Waiters")
            .field("waiting", waiting)
            .field("counters", counters)
            .finish_non_exhaustive()
    }
}
