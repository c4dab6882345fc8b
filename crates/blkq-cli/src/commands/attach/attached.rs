//! A device that `attach` has attached, or has found with --nooverlap.

use blkq_protocol::failure::{Failure, Outcome};
use blkq_protocol::info::DeviceInfo;
use blkq_protocol::state::StateDir;

use crate::commands::detach;

#[derive(Debug)]
pub struct Attached {
    pub info: DeviceInfo,
    /// This command has attached the device; otherwise it was attached before.
    pub is_new: bool,
}

impl Attached {
    /// Reports the device to the user with `print`. If that fails, a new device is detached again, because
    /// the user does not know where it is.
    pub fn report(&self, print: impl FnOnce(&DeviceInfo) -> Outcome) -> Outcome {
        print(&self.info).map_err(|failure| {
            if !self.is_new {
                return failure;
            }
            match StateDir::locate().and_then(|dir| detach::detach(&dir, &self.info.name, true)) {
                Ok(_) => not_reported(failure),
                Err(not_detached) => Failure::new(format!("{failure}; {not_detached}")),
            }
        })
    }
}

pub(super) fn not_reported(failure: Failure) -> Failure {
    Failure::new(format!("{failure}; the device was detached again"))
}
