//! A switch that several have on at once.

use super::atomic::{AtomicU32, Ordering::SeqCst};

/// Counts who has it on: it is off again when the last one is done.
pub(crate) struct NestedSwitch(AtomicU32);

impl NestedSwitch {
    /// One that is off.
    pub fn new() -> NestedSwitch {
        NestedSwitch(AtomicU32::new(0))
    }

    /// Adds one that has it on, or removes one.
    pub fn set(&self, on: bool) {
        let _ = self.0.fetch_update(SeqCst, SeqCst, |count| match on {
            true => Some(count + 1),
            false => count.checked_sub(1),
        });
    }

    /// Whether anyone has it on.
    pub fn is_on(&self) -> bool {
        self.0.load(SeqCst) > 0
    }
}
