//! The world of the whole-system test, in builds with `--cfg simulation` (in others this crate is
//! empty): a kernel that executes what is submitted to a ring when chance wants it to, a file that
//! can lose its unflushed writes, and a clock that advances on command. Everything above is what runs in
//! production: the block layer, the loop driver, the engine, the servers.
//!
//! One world per thread; everything in it follows from its seed. For the tests of this repository:
//! `lab/simulate` runs them.

#[cfg(simulation)]
mod file;
#[cfg(simulation)]
mod kernel;
#[cfg(simulation)]
mod world;

#[cfg(simulation)]
pub use file::{SECTOR_BYTES, SimulatedFile};
#[cfg(simulation)]
pub use kernel::{Defect, Faults};
#[cfg(simulation)]
pub use world::*;
