//! The commands of a device's life, as a server, its setup process and the control device name them.

/// A command.
pub(super) type Command = u32;
/// Makes a device.
pub(super) const ADD: Command = 1;
/// Makes the block device appear.
pub(super) const START: Command = 2;
/// Stops the block device.
pub(super) const STOP: Command = 3;
/// Stops it unless it is in use.
pub(super) const TRY_STOP: Command = 4;
/// Removes the device.
pub(super) const DELETE: Command = 5;
