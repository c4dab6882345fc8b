//! Atomics and locks that threads share. The model checkers loom and shuttle replace them.

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
#[cfg(not(model_check))]
pub(crate) use std::sync::{Mutex, MutexGuard, OnceLock, atomic};

/// Replaces `std::sync::OnceLock`, which model checkers cannot see. The flag shows them the order of
/// accesses.
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
