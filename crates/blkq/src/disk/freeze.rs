//! Freeze and quiesce: how control threads stop the queues of a disk, which their owners
//! drive without a lock (the kernel's `blk_mq_freeze_queue` and `blk_mq_quiesce_queue`).
//!
//! An owner marks its queue before it checks whether it may continue; a control thread sets
//! the stop before it checks the marks. So one of the two always sees the other, and as owners
//! do it in each turn, the control thread pays for the order ([`AsymmetricFence`]).

#[cfg(all(test, model_check))]
mod model;
#[cfg(all(test, not(model_check)))]
mod tests;

use std::time::Duration;

use crate::layout::{CachePadded, HotField, Writer};
use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, Release, SeqCst},
};
use crate::sync::{AsymmetricFence, WaitQueue};

/// Mark of a queue that has requests.
const ACTIVE: u32 = 1 << 0;
/// Mark of a queue that is giving requests to its driver.
const DISPATCHING: u32 = 1 << 1;

/// The state by which the queues of a disk and its control threads notify each other.
///
/// The methods that take a queue's number first, [`enter`](Self::enter) to
/// [`leave_dispatch`](Self::leave_dispatch), are for the one thread that owns that queue and
/// never block; the others are for control threads.
#[derive(Debug)]
pub struct DiskControl {
    /// How many freezes and quiesces last: read by every owner, written by few.
    frozen: AtomicU32,
    quiesced: AtomicU32,
    generation: AtomicU64,
    /// Between marks and stops: the owners' side is the light one.
    fence: AsymmetricFence,
    /// The marks of each queue, written by its owner alone.
    queues: Box<[CachePadded<AtomicU32>]>,
    /// Control threads that wait for marks to go.
    drained: WaitQueue,
}

impl DiskControl {
    /// The control of a disk with that many queues, numbered from 0: not frozen.
    pub fn new(queues: usize) -> DiskControl {
        DiskControl {
            frozen: AtomicU32::new(0),
            quiesced: AtomicU32::new(0),
            generation: AtomicU64::new(0),
            fence: AsymmetricFence::new(),
            queues: (0..queues).map(|_| CachePadded::new(AtomicU32::new(0))).collect(),
            drained: WaitQueue::default(),
        }
    }

    /// The words that owners and control threads use, with their addresses.
    pub(crate) fn hot_fields(&self, fields: &mut Vec<HotField>) {
        let DiskControl { frozen, quiesced, generation, fence: _, queues, drained: _ } = self;
        fields.push(HotField::of("frozen", Writer::Nobody, frozen));
        fields.push(HotField::of("quiesced", Writer::Nobody, quiesced));
        fields.push(HotField::of("generation", Writer::Nobody, generation));
        fields.push(HotField::of("marks of queues", Writer::Nobody, queues));
        for (index, mark) in queues.iter().enumerate() {
            fields.push(HotField::of("mark", Writer::Owner(index), &**mark));
        }
    }

    /// The queue, which has no requests, is to get some. If `false`, the disk is frozen:
    /// what is to be submitted waits until the kick of [`DiskControl::unfreeze`]. If `true`,
    /// compare [`DiskControl::generation`].
    #[inline]
    pub fn enter(&self, queue: usize) -> bool {
        self.mark(queue, ACTIVE, &self.frozen)
    }

    /// The queue has no requests any more.
    #[inline]
    pub fn leave(&self, queue: usize) {
        self.unmark(queue, ACTIVE, &self.frozen);
    }

    /// The queue is to give requests to its driver. If `false`, the disk is quiesced: they
    /// stay where they are until the kick of [`DiskControl::unquiesce`].
    #[inline]
    pub fn begin_dispatch(&self, queue: usize) -> bool {
        self.mark(queue, DISPATCHING, &self.quiesced)
    }

    /// The queue has given what it had to its driver.
    #[inline]
    pub fn leave_dispatch(&self, queue: usize) {
        self.unmark(queue, DISPATCHING, &self.quiesced);
    }

    #[inline]
    fn mark(&self, queue: usize, mark: u32, stopped: &AtomicU32) -> bool {
        let marks = &self.queues[queue];
        marks.store(marks.load(Relaxed) | mark, Release);
        self.fence.light();
        if stopped.load(SeqCst) == 0 {
            return true;
        }
        self.unmark(queue, mark, stopped);
        false
    }

    #[inline]
    fn unmark(&self, queue: usize, mark: u32, stopped: &AtomicU32) {
        let marks = &self.queues[queue];
        marks.store(marks.load(Relaxed) & !mark, Release);
        self.fence.light();
        if stopped.load(SeqCst) != 0 {
            self.wake_drained();
        }
    }

    /// Has those that freeze the disk check whether that has become futile.
    pub fn wake_waiters(&self) {
        self.wake_drained();
    }

    #[cold]
    fn wake_drained(&self) {
        self.drained.wake_all();
    }

    fn is_clear(&self, mark: u32) -> bool {
        self.queues.iter().all(|queue| queue.load(SeqCst) & mark == 0)
    }

    /// Lets no request begin and waits until none is left in any queue. Freezes nest: each
    /// needs its [`DiskControl::unfreeze`]. `kick` is called for every queue, to have its
    /// owner finish what waits for company, in the plug for instance.
    pub fn freeze(&self, kick: impl FnMut(usize)) {
        self.begin_freeze(kick);
        self.drained.wait_until(|| self.is_clear(ACTIVE));
    }

    /// The same, but gives up after `timeout`, or as soon as `is_futile`, which [`DiskControl::wake_waiters`]
    /// has checked: then `false`, and the disk is as it was.
    pub fn freeze_timeout(
        &self,
        timeout: Duration,
        is_futile: impl Fn() -> bool,
        mut kick: impl FnMut(usize),
    ) -> bool {
        self.begin_freeze(&mut kick);
        // Once clear, it stays so: a queue may enter for a moment, and leaves as it sees the freeze.
        let mut frozen = false;
        self.drained.wait_until_timeout(timeout, || {
            frozen = self.is_clear(ACTIVE);
            frozen || is_futile()
        });
        if !frozen {
            self.resume(&self.frozen, kick);
        }
        frozen
    }

    fn begin_freeze(&self, kick: impl FnMut(usize)) {
        self.stop(&self.frozen);
        (0..self.queues.len()).for_each(kick);
    }

    /// Lifts a freeze. The generation goes up, and after the last of nested freezes `kick` is
    /// called for every queue, to have its owner submit what waited.
    pub fn unfreeze(&self, kick: impl FnMut(usize)) {
        self.generation.fetch_add(1, SeqCst);
        self.resume(&self.frozen, kick);
    }

    /// Lets no request go to a driver and waits until no owner is about to give it one; what
    /// the drivers have continues. Nests like [`DiskControl::freeze`].
    pub fn quiesce(&self) {
        self.stop(&self.quiesced);
        self.drained.wait_until(|| self.is_clear(DISPATCHING));
    }

    /// Lifts a quiesce; after the last of nested ones `kick` is called for every queue, to
    /// have its owner dispatch what stayed.
    pub fn unquiesce(&self, kick: impl FnMut(usize)) {
        self.resume(&self.quiesced, kick);
    }

    fn stop(&self, stopped: &AtomicU32) {
        // Where the fence is refused, this panics while nothing is stopped.
        self.fence.heavy();
        stopped.fetch_add(1, SeqCst);
        self.fence.heavy();
    }

    fn resume(&self, stopped: &AtomicU32, kick: impl FnMut(usize)) {
        // A count of none stays so: a panic here must not stop the disk for good.
        let before = stopped.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
        if before.expect("resumed more often than stopped") == 1 {
            (0..self.queues.len()).for_each(kick);
        }
    }

    /// Whether the queue has requests.
    pub fn is_active(&self, queue: usize) -> bool {
        self.queues[queue].load(SeqCst) & ACTIVE != 0
    }

    /// Whether a freeze lasts or begins.
    #[inline]
    pub fn is_frozen(&self) -> bool {
        self.frozen.load(SeqCst) != 0
    }

    /// Whether a quiesce lasts or begins.
    #[inline]
    pub fn is_quiesced(&self) -> bool {
        self.quiesced.load(SeqCst) != 0
    }

    /// How many freezes were lifted. An owner that has entered and finds another number than
    /// at its last check reads the limits and the configuration anew.
    #[inline]
    pub fn generation(&self) -> u64 {
        self.generation.load(SeqCst)
    }
}
