//! One world per thread, and the verbs of a test on it.

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use blkq::random::Random;
use blkq::simulation::{World as Simulated, install};
use blkq_drivers::fault::take_injections;
use io_uring::squeue;

use crate::file::SimulatedFile;
use crate::kernel::{Cqe, Defect, Faults, Kernel};

thread_local! {
    static WORLD: RefCell<World> = RefCell::new(World::new(0, 0, Faults::default()));
    static MEANWHILE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Chance, time, and the kernel with its file.
struct World {
    chance: Random,
    now_ns: u64,
    kernel: Kernel,
    /// At how many instants more the engine is killed.
    panics_in: Option<u64>,
}

/// With what an engine unwinds that panics ([`panic_after`]).
#[derive(Debug)]
pub struct Panicked;

impl World {
    fn new(seed: u64, file_bytes: u64, faults: Faults) -> World {
        World {
            chance: Random::new(seed),
            now_ns: 1_000_000_000,
            kernel: Kernel::new(file_bytes, faults),
            panics_in: None,
        }
    }
}

fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(f)
}

/// The world of the thread that asks.
struct ThisThread;

impl Simulated for ThisThread {
    fn instant(&self) {
        let now = with(|world| {
            let left = world.panics_in?;
            world.panics_in = left.checked_sub(1);
            (left == 0).then(|| world.kernel.kill(&mut world.chance))
        });
        if now.is_some() {
            // Not by `panic!`, which would print.
            std::panic::resume_unwind(Box::new(Panicked));
        }
    }

    fn now_ns(&self) -> u64 {
        time_ns()
    }

    fn enter(&self, entries: &mut Vec<squeue::Entry>, files: &[i32], want: usize, timeout: Option<Duration>) {
        with(|world| {
            world.kernel.submit(entries.drain(..), files);
            world.kernel.execute_some(&mut world.chance);
            if want > 0 && world.kernel.completed.is_empty() {
                // Nothing else moves while it sleeps; being woken early is allowed.
                let most = timeout.map_or(1_000_000, |timeout| timeout.as_nanos() as u64);
                world.now_ns += world.chance.below(most.min(10_000_000) + 1);
            }
            world.now_ns += world.chance.below(20_000);
        });
    }

    fn reap(&self, reap: &mut dyn FnMut(u64, i32, u32)) {
        let completed = with(|world| std::mem::take(&mut world.kernel.completed));
        for Cqe { user_data, result, flags } in completed {
            reap(user_data, result, flags);
        }
    }

    fn close_ring(&self) {
        with(|world| world.kernel.close());
    }

    fn step(&self) {
        let mut step = MEANWHILE.take().expect("the only thread of the world waits for ever");
        step();
        MEANWHILE.set(Some(step));
    }

    fn sync(&self, fd: i32) -> std::io::Result<()> {
        match with(|world| world.kernel.sync_now(fd, &mut world.chance)) {
            0 => Ok(()),
            error => Err(std::io::Error::from_raw_os_error(-error)),
        }
    }

    fn exists(&self, file: &Path) -> bool {
        file.exists() || with(|world| world.kernel.defect == Some(Defect::GhostFile))
    }
}

/// Begins this thread's world anew: an empty file of `file_bytes`, all zeroes and durable.
pub fn begin(seed: u64, file_bytes: u64, faults: Faults) {
    WORLD.set(World::new(seed, file_bytes, faults));
    take_injections();
    install(&ThisThread);
}

/// Nanoseconds of the world's clock.
pub fn time_ns() -> u64 {
    with(|world| world.now_ns)
}

/// The engine panics at one of the instants to come, after so many of them: what it would do next
/// at its ring or its clock it does not. In production the process aborts there; here the world is
/// what [`kill`] leaves, and the thread unwinds with [`Panicked`].
pub fn panic_after(instants: u64) {
    with(|world| world.panics_in = Some(instants));
}

/// Lets `ns` nanoseconds pass.
pub fn pass(ns: u64) {
    with(|world| world.now_ns += ns);
}

/// The world runs, a step at a time, while its one thread waits for something.
pub fn set_meanwhile(step: Option<Box<dyn FnMut()>>) {
    MEANWHILE.set(step);
}

/// From now on other things go wrong.
pub fn set_faults(faults: Faults) {
    with(|world| world.kernel.faults = faults);
}

/// From now on the kernel has this defect.
pub fn set_defect(defect: Option<Defect>) {
    with(|world| world.kernel.defect = defect);
}

/// How often something went wrong so far.
pub fn faults_seen() -> u64 {
    with(|world| world.kernel.faults_seen)
}

/// How many syncs of the file failed so far.
pub fn syncs_failed() -> u64 {
    with(|world| world.kernel.syncs_failed)
}

/// Operations executed so far, and a digest of them in their order: equal for equal seeds.
pub fn trace() -> (u64, u64) {
    with(|world| (world.kernel.executed, world.kernel.digest))
}

/// The process is killed: what the kernel has of it is executed or not, as chance has it,
/// and nothing it still submits is. It completes with ECANCELED, so that the process' memory can
/// be taken apart.
pub fn kill() {
    with(|world| {
        world.panics_in = None;
        world.kernel.kill(&mut world.chance);
    });
}

/// A new process may submit, through files that it opens.
pub fn restart() {
    with(|world| world.kernel.restart());
}

/// The power fails: of each sector written since the last sync some version is left.
pub fn cut_power() {
    with(|world| world.kernel.file.cut_power(&mut world.chance));
}

/// The size of the file, of `bytes` now, after the power failed: that, or what it was when the file
/// was synced last. Bytes beyond it are lost.
pub fn cut_size(bytes: u64) -> u64 {
    with(|world| world.kernel.file.cut_size(bytes, &mut world.chance))
}

/// The file has this size, for good.
pub fn set_durable_size(bytes: u64) {
    with(|world| world.kernel.file.durable_bytes = bytes);
}

/// Reads the file.
pub fn with_file<R>(f: impl FnOnce(&SimulatedFile) -> R) -> R {
    with(|world| f(&world.kernel.file))
}
