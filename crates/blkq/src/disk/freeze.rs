//! Freeze and quiesce (`blk_mq_freeze_queue`, `blk_mq_quiesce_queue`): how control threads stop the queues of
//! a disk, which their owners drive without a lock. After a freeze no request exists; after a quiesce nothing
//! is dispatched to the driver, while requests of the driver complete.
//!
//! An owner stores its mark, and then loads the stop word. A control thread stores the stop word, and then
//! loads the marks. At least one of the two therefore sees the other's store, if each side has a full fence
//! between store and load. Owners run in every turn and control threads seldom, so the fence is asymmetric: a
//! compiler barrier for the owner, and membarrier(2) for the control thread, if the kernel supports that
//! ([`AsymmetricFence`]).

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
/// Mark of a queue that is passing requests to its driver.
const DISPATCHING: u32 = 1 << 1;

/// The words through which the owners of the queues and the control threads of a disk communicate.
///
/// The methods that take a queue's number, [`enter`](Self::enter) to
/// [`leave_dispatch`](Self::leave_dispatch), are for the thread that owns this queue, and never block. All
/// others are for control threads.
#[derive(Debug)]
pub struct DiskControl {
    /// The number of freezes in force or starting. Read by every owner, and rarely written.
    frozen: AtomicU32,
    quiesced: AtomicU32,
    generation: AtomicU64,
    /// Orders marks and stop words. The owner's side is the cheap one.
    fence: AsymmetricFence,
    /// The marks of each queue. Only its owner writes them.
    queues: Box<[CachePadded<AtomicU32>]>,
    /// Control threads that wait until no queue has a certain mark.
    drained: WaitQueue,
}

impl DiskControl {
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

    /// Marks the queue as active, because it is about to have requests. Returns false if the disk is frozen:
    /// then bios must wait for the kick of [`DiskControl::unfreeze`]. After true, the caller must compare
    /// [`DiskControl::generation`].
    pub fn enter(&self, queue: usize) -> bool {
        self.mark(queue, ACTIVE, &self.frozen)
    }

    pub fn leave(&self, queue: usize) {
        self.unmark(queue, ACTIVE, &self.frozen);
    }

    /// Marks the queue as dispatching, because it is about to pass requests to its driver. Returns false if
    /// the disk is quiesced: then requests stay where they are until the kick of [`DiskControl::unquiesce`].
    pub fn begin_dispatch(&self, queue: usize) -> bool {
        self.mark(queue, DISPATCHING, &self.quiesced)
    }

    pub fn leave_dispatch(&self, queue: usize) {
        self.unmark(queue, DISPATCHING, &self.quiesced);
    }

    fn mark(&self, queue: usize, mark: u32, stopped: &AtomicU32) -> bool {
        // Only the owner writes the marks, so its own load may be relaxed. The store is a release, so that a
        // control thread that sees a mark removed also sees what the owner did before.
        let marks = &self.queues[queue];
        marks.store(marks.load(Relaxed) | mark, Release);
        self.fence.light();
        if stopped.load(SeqCst) == 0 {
            return true;
        }
        self.unmark(queue, mark, stopped);
        false
    }

    fn unmark(&self, queue: usize, mark: u32, stopped: &AtomicU32) {
        let marks = &self.queues[queue];
        // The control thread may be waiting for this. If it has not set the stop word yet, it will see the
        // mark removed.
        marks.store(marks.load(Relaxed) & !mark, Release);
        self.fence.light();
        if stopped.load(SeqCst) != 0 {
            self.wake_waiters();
        }
    }

    /// Wakes threads that wait for a freeze, so that they check whether waiting has become futile.
    #[cold]
    pub fn wake_waiters(&self) {
        self.drained.wake_all();
    }

    fn is_clear(&self, mark: u32) -> bool {
        self.queues.iter().all(|queue| queue.load(SeqCst) & mark == 0)
    }

    /// Freezes the disk: no request starts, and all requests in all queues complete. Freezes nest, and each
    /// needs its own [`DiskControl::unfreeze`]. `kick` is called for every queue, so that the owner finishes
    /// requests that wait in the plug.
    pub fn freeze(&self, kick: impl FnMut(usize)) {
        self.freeze_timeout(Duration::MAX, || false, kick);
    }

    /// Freezes the disk as [`DiskControl::freeze`] does. Returns false, and leaves the disk unfrozen, after
    /// `timeout`, or as soon as `is_futile` returns true; [`DiskControl::wake_waiters`] lets the thread call
    /// it.
    pub fn freeze_timeout(
        &self,
        timeout: Duration,
        is_futile: impl Fn() -> bool,
        mut kick: impl FnMut(usize),
    ) -> bool {
        self.stop(&self.frozen);
        (0..self.queues.len()).for_each(&mut kick);
        // The marks stay clear once they are: a queue may enter for a moment, but leaves when it sees the
        // freeze.
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

    /// Lifts a freeze and increments the generation. After the last of nested freezes, `kick` is called for
    /// every queue, so that the owner submits what has waited.
    pub fn unfreeze(&self, kick: impl FnMut(usize)) {
        self.generation.fetch_add(1, SeqCst);
        self.resume(&self.frozen, kick);
    }

    /// Quiesces the disk: no request is passed to a driver, and all calls of drivers have returned. Requests
    /// that the drivers have still complete. Quiesces nest as freezes do.
    pub fn quiesce(&self) {
        self.stop(&self.quiesced);
        self.drained.wait_until(|| self.is_clear(DISPATCHING));
    }

    /// Lifts a quiesce, and calls `kick` as [`DiskControl::unfreeze`] does.
    pub fn unquiesce(&self, kick: impl FnMut(usize)) {
        self.resume(&self.quiesced, kick);
    }

    fn stop(&self, stopped: &AtomicU32) {
        // If the system refuses the fence, this panics before anything is stopped.
        self.fence.heavy();
        // Pairs with the light fence in `mark` and `unmark`.
        stopped.fetch_add(1, SeqCst);
        self.fence.heavy();
    }

    fn resume(&self, stopped: &AtomicU32, kick: impl FnMut(usize)) {
        // The count must not wrap below zero: a panic here must not leave the disk stopped for good.
        let before = stopped.fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1));
        if before.expect("resumed more often than stopped") == 1 {
            (0..self.queues.len()).for_each(kick);
        }
    }

    pub fn is_active(&self, queue: usize) -> bool {
        self.queues[queue].load(SeqCst) & ACTIVE != 0
    }

    pub fn is_frozen(&self) -> bool {
        self.frozen.load(SeqCst) != 0
    }

    pub fn is_quiesced(&self) -> bool {
        self.quiesced.load(SeqCst) != 0
    }

    /// The number of freezes that were lifted. An owner that has entered, and finds another number than
    /// before, must read limits and settings again.
    pub fn generation(&self) -> u64 {
        self.generation.load(SeqCst)
    }
}
