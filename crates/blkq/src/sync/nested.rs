use super::atomic::{AtomicU32, Ordering::SeqCst};

/// Counts the users that have turned the switch on. The switch is off when the last of them turns it off.
#[derive(Default)]
pub(crate) struct NestedSwitch(AtomicU32);

impl NestedSwitch {
    /// Adds a user that turns the switch on, or removes one.
    pub fn set(&self, on: bool) {
        let _ = self.0.fetch_update(SeqCst, SeqCst, |count| match on {
            true => Some(count + 1),
            false => count.checked_sub(1),
        });
    }

    pub fn is_on(&self) -> bool {
        self.0.load(SeqCst) > 0
    }
}
