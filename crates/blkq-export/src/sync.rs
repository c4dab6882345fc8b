//! Atomics and locks that threads share. The model checkers loom and shuttle replace them.

#[cfg(model_check)]
mod model;

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, atomic};
#[cfg(model_check)]
pub(crate) use model::OnceLock;
#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Condvar, Mutex, atomic};
#[cfg(not(model_check))]
pub(crate) use std::sync::{OnceLock, atomic};
