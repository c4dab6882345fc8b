//! The interface to the simulation. In builds with `--cfg simulation`, a [`World`] replaces the ring, the
//! clock, syncs and waiting. The worlds are implemented by the crate `blkq-simulation`, for the tests of this
//! repository. In the builds of fuzz targets (`fuzz_interface`), a world replaces only waiting, on threads that
//! run the turns of their engines themselves. Other builds do not contain this module.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use io_uring::squeue;

thread_local! {
    static WORLD: Cell<Option<&'static dyn World>> = const { Cell::new(None) };
}

/// The parts of the system that a simulation replaces. Each thread has its own world.
pub trait World {
    /// Called when an engine uses its ring, reads its clock, or stores into memory that outlives the process.
    /// The world may panic to simulate that the process is killed here.
    fn instant(&self);

    /// The time of the world's clock in nanoseconds. Does not call [`World::instant`]: the caller does, if an
    /// engine reads its clock.
    fn now_ns(&self) -> u64;

    /// Submits `entries`, which name registered files by their indices in `files`, and waits for `want`
    /// completions, at most for `timeout`.
    fn enter(&self, entries: &mut Vec<squeue::Entry>, files: &[i32], want: usize, timeout: Option<Duration>);

    /// Passes `user_data`, result and flags of each completed operation to `reap`.
    fn reap(&self, reap: &mut dyn FnMut(u64, i32, u32));

    /// Cancels the operations of the ring, which is being closed.
    fn close_ring(&self);

    /// Lets the rest of the world make progress while a thread waits.
    fn step(&self);

    /// Synchronises a file as fdatasync(2) does, or fails with the errors of the simulated file.
    fn sync(&self, fd: i32) -> std::io::Result<()>;

    /// Whether the trigger file of the fault driver exists.
    fn exists(&self, file: &Path) -> bool;

    /// Notes that a request was admitted and charged. `operation` is a number of [`Operation`](crate::Operation).
    fn admitted(&self, operation: u8, bytes: u64);

    /// Notes that the write with this tag of this queue is held after an error, possibly again.
    fn write_held(&self, queue: usize, tag: u16);

    /// Notes that the request with this tag of this queue has completed.
    fn request_completed(&self, queue: usize, tag: u16);
}

/// Makes `world` the world of this thread.
pub fn install(world: &'static dyn World) {
    WORLD.set(Some(world));
}

/// Whether this thread has a world. The world contains no other thread.
pub fn is_one_thread() -> bool {
    WORLD.get().is_some()
}

/// Lets the world make progress while this thread waits. Returns false if the thread has no world.
pub(crate) fn step() -> bool {
    WORLD.get().map(|world| world.step()).is_some()
}

/// The world of this thread. Panics if no world was installed.
#[cfg(simulation)]
pub fn world() -> &'static dyn World {
    WORLD.get().expect("this thread has no simulated world")
}
