//! Numbers of the commands that a server sends to its setup process, and that process to the control device.

pub(super) type Command = u32;
pub(super) const ADD: Command = 1;
/// Starts the device: `/dev/ublkbN` appears.
pub(super) const START: Command = 2;
/// Stops the device, even if it is open: `/dev/ublkbN` disappears.
pub(super) const STOP: Command = 3;
/// As [`STOP`], but fails with `EBUSY` if the block device is open.
pub(super) const TRY_STOP: Command = 4;
/// Removes the stopped device, with its character device and its number.
pub(super) const DELETE: Command = 5;
