//! The commands and the daemons of blkq exchange what this crate defines: the options of a device ([`options`]), the
//! requests on its control socket ([`control`]) and its description ([`info`]), and the files in the state directory
//! ([`state`], [`group`]). Programs of different versions read all of these.

// Nothing outside of this workspace uses this library. Its items are documented where that helps a
// maintainer.
#![allow(missing_docs)]

pub mod control;
pub mod daemon;
pub mod failure;
pub mod group;
#[doc(hidden)]
pub mod harness;
pub mod info;
pub mod options;
pub mod state;
pub mod system;
