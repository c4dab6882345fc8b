//! Atomics and locks that threads of an attachment share, swapped for the model checkers' twins as those
//! of `blkq` are.

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(model_check))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
