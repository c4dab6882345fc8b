//! The seam to the simulated world, in builds with `--cfg simulation` and no others: the ring, the
//! clock, a sync and waiting are then what a [`World`] makes of them. The world itself is the
//! crate `blkq-simulation`, which is for the tests of this repository.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use io_uring::squeue;

thread_local! {
    static WORLD: Cell<Option<&'static dyn World>> = const { Cell::new(None) };
}

/// The parts of the system that a simulation exchanges. Each thread has a world of its own.
pub trait World {
    /// An instant at which an engine uses its ring or reads its clock: it may panic here.
    fn instant(&self);

    /// Nanoseconds of the world's clock.
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

/// The world of this thread.
///
/// # Panics
/// If none was installed.
pub(crate) fn world() -> &'static dyn World {
    WORLD.get().expect("this thread has no simulated world")
}
