//! The simulated world of the whole-system test. It exists in builds with `--cfg simulation`; in others this
//! crate is empty. The world consists of a kernel that executes submitted operations in random order, a file
//! that can lose unsynced writes, and a clock that the test advances. The block layer, the loop driver, the
//! engine and the servers are those of production.
//!
//! Each thread has one world, which is determined by its seed. `lab/simulate` runs the tests.

// Nothing outside of this workspace uses this library. Its items are documented where that helps a
// maintainer.
#![allow(missing_docs)]

#[cfg(simulation)]
mod file;
#[cfg(simulation)]
mod injections;
#[cfg(simulation)]
mod kernel;
#[cfg(simulation)]
mod observations;
#[cfg(simulation)]
mod world;

#[cfg(simulation)]
pub use file::{SECTOR_BYTES, SimulatedFile};
#[cfg(simulation)]
pub use injections::{Hit, Injection, take_injections};
#[cfg(simulation)]
pub use kernel::{Defect, Faults};
#[cfg(simulation)]
pub use observations::{Admission, forget_held_writes, held_writes, take_admissions};
#[cfg(simulation)]
pub use world::*;
