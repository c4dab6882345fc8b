//! The daemon of a device: [`process`] starts it, executes the requests of commands and handles signals; [`device`]
//! connects the block layer to the image and to the exports; [`sandbox`] drops privileges.

// Nothing outside of this workspace uses this library. Its items are documented where that helps a
// maintainer.
#![allow(missing_docs)]

pub mod device;
mod hangs;
mod log;
pub mod metrics;
mod pid_file;
pub mod process;
pub mod sandbox;
