//! A device that this command attached, or found.

use crate::commands::detach;
use crate::failure::{Failure, Outcome};
use crate::info::DeviceInfo;
use crate::state::StateDir;

/// A device that is attached.
#[derive(Debug)]
pub struct Attached {
    /// Its description.
    pub info: DeviceInfo,
    /// It was not there before.
    pub is_new: bool,
}

impl Attached {
    /// Reports it to the user by `print`. A new one that cannot be reported is detached again.
    ///
    /// # Errors
    /// If it cannot be printed.
    pub fn report(&self, print: impl FnOnce(&DeviceInfo) -> Outcome) -> Outcome {
        print(&self.info).map_err(|failure| {
            if !self.is_new {
                return failure;
            }
            match StateDir::locate().and_then(|dir| detach::detach(&dir, &self.info.name, true)) {
                Ok(_) => not_reported(failure),
                Err(stays) => Failure::new(format!("{failure}; and {stays}")),
            }
        })
    }
}

/// The failure of a device that was detached because it could not be reported.
pub(super) fn not_reported(failure: Failure) -> Failure {
    Failure::new(format!("{failure}; the device is detached again"))
}
