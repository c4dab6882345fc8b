//! The seam to the simulated world, in builds with `--cfg simulation`: the ring, the
//! clock, a sync and waiting are then what a [`World`] makes of them. The world itself is the
//! crate `blkq-simulation`, which is for the tests of this repository. In those with `--cfg fuzzing` only
//! waiting is, on threads that turn their engines themselves. No others have any of it.

#[cfg(simulation)]
mod held;

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

#[cfg(simulation)]
pub use held::{forget_held_writes, held_writes};
#[cfg(simulation)]
pub(crate) use held::{request_completed, write_held};
use io_uring::squeue;

thread_local! {
    static WORLD: Cell<Option<&'static dyn World>> = const { Cell::new(None) };
}

/// The parts of the system that a simulation exchanges. Each thread has a world of its own.
pub trait World {
    /// An instant at which an engine uses its ring, reads its clock, or stores into memory that outlives
    /// the process: it may panic here.
    fn instant(&self);

    /// Nanoseconds of the world's clock. Reading it is no [`World::instant`]: the caller makes that one, if an engine
    /// reads its clock.
    fn now_ns(&self) -> u64;

    /// The ring enters its kernel with `entries`, whose registered files are places in `files`, and
    /// waits for `want` completions, for `timeout` at most.
    fn enter(&self, entries: &mut Vec<squeue::Entry>, files: &[i32], want: usize, timeout: Option<Duration>);

    /// Passes `user_data`, result and flags of what has completed to `reap`.
    fn reap(&self, reap: &mut dyn FnMut(u64, i32, u32));

    /// The ring is closed.
    fn close_ring(&self);

    /// A thread waits for something: the rest of the world takes a step.
    fn step(&self);

    /// fdatasync of a file.
    ///
    /// # Errors
    /// Those of the simulated file.
    fn sync(&self, fd: i32) -> std::io::Result<()>;

    /// Whether the fault driver sees this trigger file.
    fn exists(&self, file: &Path) -> bool;
}

/// From now on this thread lives in `world`.
pub fn install(world: &'static dyn World) {
    WORLD.set(Some(world));
}

/// Whether this thread lives in a world, and is its only one.
pub fn is_one_thread() -> bool {
    WORLD.get().is_some()
}

/// The thread waits for something: the rest of its world takes a step. False without a world.
pub(crate) fn step() -> bool {
    WORLD.get().is_some_and(|world| {
        world.step();
        true
    })
}

/// This process may die here: see [`World::instant`].
///
/// # Panics
/// If this thread has no world; and as the world wants it.
#[cfg(simulation)]
pub fn instant() {
    world().instant();
}

/// The world of this thread.
///
/// # Panics
/// If none was installed.
#[cfg(simulation)]
pub fn world() -> &'static dyn World {
    WORLD.get().expect("this thread has no simulated world")
}
