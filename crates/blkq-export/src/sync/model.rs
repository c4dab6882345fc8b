//! Replacements that the model checkers loom and shuttle do not have.

use super::atomic;

/// Replaces `std::sync::OnceLock`, which model checkers cannot see. The flag shows them the order of
/// accesses.
#[derive(Default)]
pub(crate) struct OnceLock<T> {
    cell: std::sync::OnceLock<T>,
    is_set: atomic::AtomicBool,
}

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
