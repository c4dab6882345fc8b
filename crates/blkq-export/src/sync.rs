//! Atomics and locks that threads of an attachment share, swapped for the model checkers' twins as those
//! of `blkq` are.

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(model_check))]
pub(crate) use std::sync::{Mutex, MutexGuard, OnceLock, atomic};

/// The twin of a cell that is set once: the checkers see whether it is.
#[cfg(model_check)]
#[derive(Default)]
pub(crate) struct OnceLock<T> {
    cell: std::sync::OnceLock<T>,
    is_set: atomic::AtomicBool,
}

#[cfg(model_check)]
impl<T> OnceLock<T> {
    pub fn get(&self) -> Option<&T> {
        let is_set = self.is_set.load(atomic::Ordering::Acquire);
        self.cell.get().filter(|_| is_set)
    }

    pub fn set(&self, value: T) -> Result<(), T> {
        let set = self.cell.set(value);
        self.is_set.store(true, atomic::Ordering::Release);
        set
    }
}
