//! The synchronisation primitives of this crate and of drivers. Under `--cfg loom` (small models, searched
//! exhaustively) and `--cfg shuttle` (large models, searched at random), the model checkers' replacements are
//! used.
//!
//! Lock-free code must import its atomics, locks and threads from here only. Otherwise the checkers would not
//! see all synchronisation of the code that runs.

#[cfg(loom)]
use loom as primitives;
#[cfg(shuttle)]
use shuttle as primitives;
#[cfg(not(model_check))]
use std as primitives;

mod fence;
#[cfg(model_check)]
mod model;

pub use primitives::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, atomic, mpsc};
pub use primitives::thread;
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use atomic::Ordering::SeqCst;

use crate::clock::monotonic_ns;

pub(crate) use fence::AsymmetricFence;
#[cfg(model_check)]
pub use model::{model, model_within};

/// Locks `mutex`, even if a thread panicked while it held the lock. This is safe because every critical
/// section of the crate leaves its data consistent after each step.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex` unless another thread holds it; see [`lock`] for poisoned locks.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Placed between a sequentially consistent read-modify-write and a sequentially consistent load of another
/// location. The language already orders these two, at no cost on x86. loom treats such accesses as acquire
/// and release only, and needs a fence to see the order.
pub(crate) fn seq_cst_for_loom() {
    #[cfg(loom)]
    atomic::fence(SeqCst);
}

/// Waits for a message from an engine. Fails if the engine has exited.
pub(crate) fn receive<T>(receiver: &mpsc::Receiver<T>) -> Result<T, std::sync::mpsc::RecvError> {
    #[cfg(any(simulation, fuzz_interface))]
    loop {
        match receiver.try_recv() {
            Ok(message) => return Ok(message),
            Err(mpsc::TryRecvError::Empty) if crate::simulation::step() => {}
            Err(_) => break,
        }
    }
    receiver.recv()
}

/// Lets threads sleep until a condition is true (the kernel's `wait_event`). Waking takes no lock, so threads
/// that must not block can do it.
#[derive(Default, Debug)]
pub(crate) struct WaitQueue {
    /// The number of wake-ups. This is the futex on which sleepers wait.
    wakes: atomic::AtomicU32,
    /// Replaces the kernel's side of the futex under the model checkers.
    #[cfg(model_check)]
    sleepers: (Mutex<()>, Condvar),
}

impl WaitQueue {
    /// Sleeps until `condition` is true. The condition is checked first, and after every wake-up.
    pub fn wait_until(&self, condition: impl FnMut() -> bool) {
        self.wait(condition, None);
    }

    /// Sleeps as [`WaitQueue::wait_until`] does, but at most for `timeout`. Returns the last value of
    /// `condition`.
    pub fn wait_until_timeout(&self, timeout: Duration, condition: impl FnMut() -> bool) -> bool {
        // A timeout beyond the range of the clock means no timeout.
        let timeout_ns = u64::try_from(timeout.as_nanos()).ok();
        self.wait(condition, timeout_ns.and_then(|timeout_ns| monotonic_ns().checked_add(timeout_ns)))
    }

    fn wait(&self, mut condition: impl FnMut() -> bool, until_ns: Option<u64>) -> bool {
        loop {
            // There must be no fence here: it could replace a fence that a caller lacks, and the models would
            // not detect the defect.
            let seen = self.wakes.load(SeqCst);
            if condition() {
                return true;
            }
            let left = until_ns.map(|until_ns| Duration::from_nanos(until_ns.saturating_sub(monotonic_ns())));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            self.futex_wait(seen, left);
        }
    }

    /// Lets every sleeper check its condition again. Must follow the stores that make the condition true.
    pub fn wake_all(&self) {
        self.wakes.fetch_add(1, SeqCst);
        self.futex_wake_all();
    }

    /// The simulation has only one thread, so a wait lets the simulated world run.
    #[cfg(simulation)]
    fn futex_wait(&self, _seen: u32, _timeout: Option<Duration>) {
        crate::simulation::world().step();
    }

    /// Sleeps unless the count of wake-ups differs from `seen`.
    #[cfg(not(any(loom, shuttle, simulation)))]
    fn futex_wait(&self, seen: u32, timeout: Option<Duration>) {
        use rustix::thread::futex;
        let timeout = timeout.and_then(|timeout| rustix::time::Timespec::try_from(timeout).ok());
        // The result does not matter: whether woken, interrupted, timed out, or refused because the count
        // changed, the caller checks again.
        let _ = futex::wait(&self.wakes, futex::Flags::PRIVATE, seen, timeout.as_ref());
    }

    #[cfg(not(model_check))]
    fn futex_wake_all(&self) {
        use rustix::thread::futex;
        // Cannot fail, because the word belongs to this process and is mapped.
        let _ = futex::wake(&self.wakes, futex::Flags::PRIVATE, i32::MAX as u32);
    }

    #[cfg(model_check)]
    fn futex_wait(&self, seen: u32, _timeout: Option<Duration>) {
        let mut guard = lock(&self.sleepers.0);
        while self.wakes.load(SeqCst) == seen {
            guard = self.sleepers.1.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    #[cfg(model_check)]
    fn futex_wake_all(&self) {
        drop(lock(&self.sleepers.0));
        self.sleepers.1.notify_all();
    }
}

/// Counts the users that have turned the switch on. The switch is off when the last of them turns it off.
#[derive(Default)]
pub(crate) struct NestedSwitch(atomic::AtomicU32);

impl NestedSwitch {
    /// Adds a user that turns the switch on, or removes one.
    pub fn set(&self, on: bool) {
        let next = |count: u32| if on { Some(count + 1) } else { count.checked_sub(1) };
        let _ = self.0.fetch_update(SeqCst, SeqCst, next);
    }

    pub fn is_on(&self) -> bool {
        self.0.load(SeqCst) > 0
    }
}
