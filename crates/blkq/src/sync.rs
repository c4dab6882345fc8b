//! The synchronisation primitives of the crate, swapped for the model checkers'
//! twins under `--cfg loom` (small, exhaustive) and `--cfg shuttle` (large, random).
//!
//! Lock-free code takes its atomics, locks and threads from here and nowhere else,
//! so that what is checked is what runs.

#[allow(unused_imports, reason = "which ones are used depends on the checker")]
#[cfg(loom)]
pub(crate) use loom::{
    sync::{Arc, Condvar, Mutex, MutexGuard, atomic},
    thread,
};
#[allow(unused_imports, reason = "which ones are used depends on the checker")]
#[cfg(shuttle)]
pub(crate) use shuttle::{
    sync::{Arc, Condvar, Mutex, MutexGuard, atomic},
    thread,
};
#[allow(unused_imports, reason = "which ones are used depends on the checker")]
#[cfg(not(any(loom, shuttle)))]
pub(crate) use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, atomic},
    thread,
};

/// Locks `mutex`, taking over the data of a thread that panicked while holding it:
/// every critical section of the crate leaves its data consistent at each step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    match mutex.lock() {
        Ok(guard) => guard,
        Err(poisoned) => poisoned.into_inner(),
    }
}
